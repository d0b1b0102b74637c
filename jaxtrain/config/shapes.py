"""The dimension key. A name that ends in `_BTD` is an array with these axes, in this order.

    B  sequences in a batch          N  query heads
    T  query positions (tokens)      K  key/value heads
    S  key/value positions           G  query heads per key/value head, N / K
    D  model dimension               H  head dimension
    F  feed-forward dimension        V  vocabulary
    L  layers                        M  packed documents in a row (upper bound)
    A  microbatches of a step        C  tokens in a loss chunk
    E  experts                       R  rows of tokens, sorted by expert
    k  experts of a token            n  tokens x k: the expert choices of a device's tokens

Batches are dicts of arrays of shape (B, T), described by `BATCH_KEYS`:

    tokens       int32    input token ids
    targets      int32    the token that follows each input token in its document
    segments     int32    document number within the row, from 1; 0 is padding, and a row's padding is at its end
    positions    int32    position within the document's part in this row, from 0
    weights      float32  how much each target counts in the loss; 0 without a target

Batches of pairs have one more array (`PAIR_KEYS`). Segments 2p + 1 and 2p + 2 of a row are the chosen and the rejected member
of its pair p:

    reference    float32  log-probability of a completion under the reference model, at its document's first token; 0 elsewhere

Batches of a model with multi-token prediction have two more arrays for each module k (`mtp_keys`):

    targets_k    int32    the token k positions after the target; 0 beyond the end of the row
    weights_k    float32  weight of that token; 0 if it is in another document than the input token
"""

import re

# Sizes of the first round and of each further one in the dispatch of tokens to experts, over an even load. A round has a fixed
# cost in addition to its rows: a smaller size needs more rounds, a larger one has more empty rows.
FIRST_ROUND, FURTHER_ROUND = 1.25, 0.25
DELTA_CHUNK = 64  # tokens of a gated delta net that are computed together

DENSE = "dense_layers"  # the name of the first layers of a model with experts, which have no experts
STACK = "layers"  # the name of a model's stack of layers, and the logical axis of its first dimension
LAYER_KEY = re.compile(r"(?<=\.)(\d+)_of_(\d+)\.")  # in a parameter's name: which layer of an element of the stack, a period


def layer_key(index: int, period: int) -> str:
    """Return the name of a layer in an element of the stack that has `period` layers: 0_of_4 for the first of four."""
    return f"{index}_of_{period}"


def without_layer_key(name: str) -> str:
    """Return a parameter's name as patterns in a config match it: layers.mlp.gate for layers.0_of_4.mlp.gate."""
    return LAYER_KEY.sub("", name, 1)


BATCH_KEYS = {
    "tokens": "int32",
    "targets": "int32",
    "segments": "int32",
    "positions": "int32",
    "weights": "float32",
}

PAIR_KEYS = {"reference": "float32"}

MTP = "mtp"  # the name of a model's modules of multi-token prediction
MTP_METRICS = ("mtp_loss",)  # the mean of the modules' losses, in nats per token
MTP_KEYS = {"targets": "int32", "weights": "float32"}  # arrays of a batch; the module's number is appended: targets_1


def mtp_keys(modules: int) -> dict[str, str]:
    """Return the keys of a batch that the modules of multi-token prediction read, with their dtypes."""
    return {f"{key}_{k}": dtype for k in range(1, modules + 1) for key, dtype in MTP_KEYS.items()}


# Metrics of loss.name=dpo: means over pairs, under TRL's names. A reward is beta times the difference of a completion's
# log-probabilities under the model and under the reference model.
REWARD_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")

# Metrics of experts in a step: means over layers, except expert_load_max.
EXPERT_METRICS = (
    "balance_loss",  # 1 for even loads
    "sequence_balance_loss",  # the same for each sequence; 0 if moe.sequence_balance_loss is 0
    "router_z_loss",
    "router_entropy",  # nats
    "dropped_tokens",  # fraction of all expert choices that a capacity dropped
    "expert_load_max",  # the largest load of any expert of any layer, over an even load
)

# Names of parameters that are no matrices, for any axes.
VECTORS = (
    *("scale", "bq", "bk", "bv", "bo", "sinks"),
    *("log_rate", "shift", "taps_q", "taps_k", "taps_v"),
    *("router_bias", "router_logit_bias", "gate_bias", "up_bias", "down_bias"),
)


def is_vector(name: str) -> bool:
    """Return whether a parameter, by its dotted name, is the scale of a norm, a bias, a sink or a tap of a convolution."""
    return name.rpartition(".")[2] in VECTORS
