"""Every config key: its default, type and meaning. Imports no jax and touches no device or file.

A config file returns a `ConfigDict` that starts as `default_config()`. The command line may override any key. `resolve` then
makes the frozen `RunConfig`, which all other modules read. The dataclasses below are the only declaration of keys: defaults,
types, choices, ranges, `--explain` and `docs/config.md` all come from them.

No key defaults to None, because `ml_collections` cannot override None from the command line. No key is a tuple, because an
override could change its length. "Not set" is "" for strings and 0 for numbers; lists are comma-separated strings.
"""

import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import ml_collections

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.declaration import (
    CONTEXT,
    FUNCTION,
    MICROBATCHES,
    MOMENTS,
    PLACEMENT,
    POSITION,
    RECIPE,
    ROTATION,
    ROUNDING,
    SEQUENCES,
    SKIPPED,
    SOURCES,
    STORAGE,
    TRAINED,
    UNRELATED,
    Key,
    Resume,
    key,
    section,
)
from jaxtrain.config.ramp import Ramp, parse_ramp
from jaxtrain.config.synonyms import nearest_key

# Mesh axes from the outermost, along which neighbours may be on different nodes, to the innermost. Optional axes are part of a
# mesh only if their size is above 1.
MESH_AXES = ("data", "stage", "fsdp", "expert", "tensor", "seq")
OPTIONAL_AXES = ("stage", "expert")
# Kinds of layers: with a sliding window, with full attention, with full attention and no rotary embedding, with a gated delta
# net in place of attention.
LOCAL, GLOBAL, UNROTATED, DELTA = "l", "g", "n", "d"
EXPERT_AXIS = "expert"  # the mesh axis of the experts' all-to-all
MOST_DOCUMENTS = 32  # in a sequence, if `data.max_segments` leaves the number open

# Logical axis -> mesh axes that shard it, joined by "+"; "" replicates the axis. A model may use further names if its config
# adds a rule for each.
RULES = {
    "batch": "data+fsdp+expert",
    "sequence": "seq",
    "residual": "seq+tensor",
    "embed": "fsdp+expert+seq",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "stage+tensor",
    "experts": "expert+fsdp+seq",
    "expert_embed": "fsdp+seq",
}
RULE_DOCS = {
    "batch": "sequences of a batch",
    "sequence": "tokens, inside attention and feed-forward blocks",
    "residual": "tokens, in the residual stream and norms between those blocks",
    "embed": "the model dimension of every weight except experts'",
    "heads": "query heads, and key/value heads with them",
    "mlp": "the feed-forward width",
    "vocab": "rows of the embedding and the head",
    "experts": "the experts of a layer, over axes that divide their number; in use only over expert",
    "expert_embed": "the model dimension of experts' weights, over axes that do not divide their number",
}
# Logical axes without a rule of their own -> what to set instead. `rules_in_use` has their mesh axes.
DERIVED = {
    "kv_heads": "Key/value heads are sharded like query heads: set sharding.rules.heads.",
    "head_dim": "The width of a head is never sharded: leave it out.",
    "layers": "Layers are sharded over mesh.stage alone: leave it out.",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of the transformer."""

    family: str = key(
        "llama",
        "a file of jaxtrain/models/families, or your own module",
        choices=(
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_moe",
            "gpt_oss",
            "deepseek_v3",
            "olmo2",
            "phi3",
            "glm",
            "glm4",
            "glm4_moe",
            "seed_oss",
            "qwen2_moe",
            "ernie4_5",
            "dots1",
            "minimax_m2",
            "olmo3",
            "exaone4",
            "smollm3",
            "granite",
            "granitemoe",
            "granitemoeshared",
            "cwm",
            "olmoe",
            "flex_olmo",
            "gemma",
            "gemma2",
            "gemma3",
            "vaultgemma",
            "ministral",
            "helium",
            "solar_open",
            "hyperclovax",
            "glm4_moe_lite",
            "youtu",
        ),
        importable=True,
    )
    num_layers: int = key(4, "transformer blocks", at_least=1, at_most=10_000)
    d_model: int = key(128, "width of the residual stream", at_least=1)
    num_heads: int = key(4, "query heads", at_least=1)
    num_kv_heads: int = key(4, "key/value heads; num_heads must be a multiple", at_least=1)
    head_dim: int = key(
        0, "width of a head; 0: d_model / num_heads, with kv_lora_rank qk_nope_head_dim + qk_rope_head_dim", at_least=0
    )
    d_ff: int = key(384, "width of the feed-forward block (each of gate and up)", at_least=1)
    vocab_size: int = key(264, "rows of the embedding; at least the tokenizer's vocabulary", at_least=1)
    dense_layers: int = key(0, "in a model with experts: number of first layers without experts", at_least=0, at_most=1000)
    dense_d_ff: int = key(0, "width of the feed-forward block of dense_layers", at_least=0)
    kv_lora_rank: int = key(
        0,
        "latent attention (DeepSeek-V2): width of the latent of keys and values; 0: other attention",
        at_least=0,
    )
    q_lora_rank: int = key(0, "with kv_lora_rank: width of the latent of queries; 0: none", at_least=0)
    qk_nope_head_dim: int = key(0, "with kv_lora_rank: the part of a query's and a key's head that is not rotated", at_least=0)
    qk_rope_head_dim: int = key(0, "with kv_lora_rank: the rotated part; all heads share that of the key", at_least=0)
    v_head_dim: int = key(0, "with kv_lora_rank: width of a value's head", at_least=0)
    norm_eps: float = key(
        1e-5, "added to the mean square in RMSNorm; 1e-6 in the norms of latents", at_least=1e-20, resume=FUNCTION
    )
    tied_head: bool = key(False, "the output head is the embedding, transposed")
    qk_norm: bool = key(False, "RMSNorm on queries and keys, per head, before rotary")
    qk_norm_joint: bool = key(False, "with qk_norm: over all heads of a token together, as in OLMo 2")
    qkv_bias: bool = key(False, "bias on the query, key and value projections")
    attention_out_bias: bool = key(False, "bias on attention's output projection")
    attention_sinks: bool = key(False, "each query head has a learnt logit in the denominator of softmax, without a value")
    attention_gate: bool = key(False, "the output of each query head is multiplied by a sigmoid of a projection, before wo")
    mlp_bias: bool = key(False, "biases on gate, up and down projections of feed-forward blocks without experts")
    norm_placement: str = key(
        "pre",
        "RMSNorm on the inputs of attention and feed-forward (pre), on their outputs (post), or on both (sandwich)",
        choices=("pre", "post", "sandwich"),
    )
    sliding_window: int = key(
        0, "a token attends to this many positions, itself included; 0: all before it", at_least=0, resume=FUNCTION
    )
    attention_pattern: str = key(
        "",
        "layers with sliding_window (l), full attention (g), no rotary (n), gated delta nets (d), repeated; '': all alike",
        resume=FUNCTION,
    )
    linear_key_heads: int = key(0, "with d in attention_pattern: heads of queries and keys of a gated delta net", at_least=0)
    linear_value_heads: int = key(0, "heads of its values, a multiple of linear_key_heads", at_least=0)
    linear_key_dim: int = key(0, "width of its query and key heads", at_least=0)
    linear_value_dim: int = key(0, "width of its value heads", at_least=0)
    linear_conv: int = key(0, "tokens in the window of its convolutions", at_least=0, at_most=1024)
    attn_logit_scale: float = key(0.0, "factor of queries times keys; 0: 1 / sqrt(head_dim)", at_least=0, resume=FUNCTION)
    attention_softcap: float = key(0.0, "attention scores become c tanh(s / c); 0: off", at_least=0, resume=FUNCTION)
    logit_softcap: float = key(0.0, "output logits become c tanh(l / c); 0: off", at_least=0, resume=FUNCTION)
    embedding_multiplier: float = key(1.0, "factor of the embeddings", above=0, resume=FUNCTION)
    residual_multiplier: float = key(
        1.0, "factor of what attention and feed-forward add to the residual stream", above=0, resume=FUNCTION
    )
    logit_multiplier: float = key(1.0, "factor of output logits, before logit_softcap", above=0, resume=FUNCTION)
    rope_base: float = key(10_000.0, "base of the rotary wavelengths", above=0, resume=ROTATION)
    partial_rotary_factor: float = key(
        1.0, "the first part of each head that is rotated, as a fraction of head_dim", above=0, at_most=1, resume=ROTATION
    )
    local_rope_base: float = key(
        0.0, "base in layers with sliding_window, never scaled; 0: as in the others", at_least=0, resume=ROTATION
    )
    rope_scaling: str = key(
        "none",
        "llama3: long wavelengths are stretched, as in Llama 3.1; yarn: as in YaRN; linear: all are",
        choices=("none", "llama3", "linear", "yarn"),
        resume=ROTATION,
    )
    rope_factor: float = key(8.0, "llama3, linear, yarn: how much wavelengths are stretched", at_least=1, resume=ROTATION)
    rope_low_freq: float = key(
        1.0, "llama3: wavelengths above original_len / this are stretched by rope_factor", above=0, resume=ROTATION
    )
    rope_high_freq: float = key(4.0, "llama3: wavelengths below original_len / this are unchanged", resume=ROTATION)
    rope_original_len: int = key(
        8192, "llama3, yarn: sequence length the model was first trained with", at_least=1, at_most=10**12, resume=ROTATION
    )
    rope_beta_fast: float = key(
        32.0, "yarn: pairs with more turns than this in original_len are unchanged", above=0, resume=ROTATION
    )
    rope_beta_slow: float = key(
        1.0, "yarn: pairs with fewer turns than this are stretched by rope_factor", above=0, resume=ROTATION
    )
    rope_truncate: bool = key(
        True, "yarn: the pairs between which frequencies are interpolated are rounded to whole ones", resume=ROTATION
    )
    rope_attention_factor: float = key(
        0.0,
        "yarn: factor of rotated queries and of keys; 0: 0.1 ln(rope_factor) + 1, or by rope_mscale",
        at_least=0,
        resume=ROTATION,
    )
    rope_mscale: float = key(
        0.0,
        "yarn: with rope_mscale_all_dim the factor is the ratio of 0.1 mscale ln(rope_factor) + 1 with either; 0: off",
        at_least=0,
        resume=ROTATION,
    )
    rope_mscale_all_dim: float = key(0.0, "yarn: see rope_mscale; 0: off", at_least=0, resume=ROTATION)
    num_experts: int = key(0, "experts of each feed-forward block, each d_ff wide; 0: one block for all tokens", at_least=0)
    experts_per_token: int = key(2, "experts per token", at_least=1, resume=FUNCTION)
    router: str = key("softmax", "function from the router's logits to scores", choices=("softmax", "sigmoid"), resume=FUNCTION)
    renormalize: bool = key(True, "the scores of the chosen experts are divided by their sum", resume=FUNCTION)
    router_bias: bool = key(False, "a bias for each expert is added to its score for the choice; updated by moe.bias_rate")
    router_logit_bias: bool = key(False, "a learnt bias of each expert's logit, part of its score")
    expert_bias: bool = key(False, "biases on gate, up and down projections of experts")
    routed_scaling: float = key(1.0, "factor of the chosen experts' scores, after renormalize", above=0, resume=FUNCTION)
    router_groups: int = key(
        1, "groups of consecutive experts; a token uses groups_per_token of them", at_least=1, resume=FUNCTION
    )
    groups_per_token: int = key(
        1,
        "groups whose experts a token may choose: those with the largest sum of two biased scores",
        at_least=1,
        resume=FUNCTION,
    )
    shared_d_ff: int = key(0, "width of the shared expert, a feed-forward block for all tokens; 0: none", at_least=0)
    shared_gate: bool = key(False, "with shared_d_ff: its output is multiplied by a sigmoid of a projection to one number")
    mtp_layers: int = key(
        0,
        "multi-token prediction (DeepSeek-V3): modules that each predict one token further, in training alone",
        at_least=0,
        at_most=100,
    )
    init_std: float = key(
        0.02,
        "standard deviation of initial weights (projections into the residual: / sqrt(2 layers))",
        above=0,
        at_most=1000,
        resume=Resume("free", "used only at a run's start"),
    )

    @property
    def outside(self) -> bool:
        """Return whether the family is from outside the package, `package.module:name`."""
        return ":" in self.family

    @property
    def stacked_layers(self) -> int:
        """Return the number of layers that have one shape and run in a loop or on pipeline stages: all but `dense_layers`."""
        return self.num_layers - self.dense_layers

    @property
    def period(self) -> int:
        """Return the number of layers in one element of the stack: those of `attention_pattern` if it has DELTA, else 1.

        Layers with and without delta nets have different parameters, so only whole periods have one shape.
        """
        return len(self.attention_pattern) if DELTA in self.attention_pattern else 1

    @property
    def linear_group(self) -> int:
        """Return the number of value heads that each key head of a gated delta net serves."""
        return self.linear_value_heads // max(1, self.linear_key_heads)

    @property
    def delta_layers(self) -> int:
        """Return the number of layers with gated delta nets."""
        return self.kinds.count(DELTA)

    @property
    def stack_length(self) -> int:
        """Return the number of elements of the stack, which are periods of layers."""
        return self.stacked_layers // self.period

    def adaptable(self, experts: bool) -> tuple[str, ...]:
        """Return the names of the weights that can have an adapter. experts: whether those of experts can."""
        queries = ("wq_down", "wq_up") if self.kv_lora_rank and self.q_lora_rank else ("wq",)
        keys = ("wkv_down", "wkv_up") if self.kv_lora_rank else ("wk", "wv")
        mlp = experts or not self.num_experts or self.shared_d_ff or self.dense_layers
        return (*queries, *keys, *("wg",) * self.attention_gate, "wo", *(FEED_FORWARD if mlp else ()))

    @property
    def kinds(self) -> str:
        """Return a letter for each layer: LOCAL (sliding window), GLOBAL (full attention), UNROTATED (and no rotary), or DELTA.

        The letters are `attention_pattern`, repeated and cut to `num_layers`. Without a pattern all layers are LOCAL, and
        without `sliding_window` all are GLOBAL.
        """
        pattern = self.attention_pattern or (LOCAL if self.sliding_window else GLOBAL)
        return (pattern * -(-self.num_layers // len(pattern)))[: self.num_layers]

    @property
    def rotary_dim(self) -> int:
        """Return the number of dimensions of a head that are rotated: with latent attention all of qk_rope_head_dim."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def step_layers(self) -> int:
        """Return the number of blocks in a train step: `num_layers`, and one in each module of multi-token prediction."""
        return self.num_layers + self.mtp_layers


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices along each axis, over all nodes. One axis may be -1: the devices that are left. data and fsdp may both be -1:
    fsdp then takes the devices that are left within a node, and stages and data span the nodes.
    """

    data: int = key(-1, "replicas of the weights; the batch is sharded over data x fsdp x expert")
    fsdp: int = key(-1, "shards of weights, moments and batch; with mesh.data=1, over all nodes")
    stage: int = key(1, "pipeline stages: shards of the layers; see the pipeline section")
    expert: int = key(1, "shards of the experts, and of the batch with data x fsdp")
    tensor: int = key(1, "shards of heads, feed-forward and vocabulary within a layer")
    seq: int = key(1, "shards of the sequence (context parallelism); see parallel.context")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Schedule of the train.grad_accum microbatches on the stages of mesh.stage."""

    schedule: str = key(
        "1f1b",
        "gpipe: all forward, then all backward; interleaved: 1f1b with several groups a stage",
        choices=("1f1b", "gpipe", "interleaved"),
    )
    groups: int = key(1, "interleaved: groups of consecutive layers on each stage, 2 or more", at_least=1)


@dataclasses.dataclass(frozen=True)
class Moe:
    """Routing of tokens to the experts of model.num_experts, and load balancing."""

    impl: str = key(
        "auto",
        "grouped matmuls by Pallas kernels (pallas: Hopper, bf16), or by XLA (ragged: jax.lax.ragged_dot)",
        choices=("auto", "pallas", "ragged"),
        resume=ROUNDING,
    )
    capacity_factor: float = key(
        0.0, "capacity factor: tokens per expert over an even load; others are dropped; 0: no token is dropped", at_least=0
    )
    balance_loss: float = key(
        0.01, "times the load-balancing loss (Fedus et al. 2021), mean of layers, of each microbatch", at_least=0
    )
    sequence_balance_loss: float = key(
        0.0, "times the load-balancing loss of each sequence by itself (DeepSeek-V3), mean of layers", at_least=0
    )
    z_loss: float = key(
        0.001, "times the squared log of the router's partition function (Zoph et al. 2022), mean of layers", at_least=0
    )
    bias_rate: float = key(
        0.001, "step of model.router_bias toward even loads (Wang et al. 2024), after each optimizer step", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Computation of layers and sequences on the mesh."""

    context: str = key(
        "ring",
        "context parallelism: the way to attend to keys of other devices, with mesh.seq above 1",
        choices=("ring", "ulysses", "gather"),
        resume=CONTEXT,
    )
    scan_layers: bool = key(True, "a loop over layers; false: unrolled layers, with faster steps and a longer compile")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The mesh axes of each logical axis."""

    zero: int = key(
        3,
        "over fsdp and seq: 0 all replicated | 1 moments and master split | 2 gradients too | 3 weights in use too",
        at_least=0,
        at_most=3,
    )
    gather: str = key(
        "layer",
        "zero=3 gathers weights for each layer, each forward pass (kept until its backward), or each step",
        choices=("layer", "forward", "step"),
    )
    rules: tuple[tuple[str, str], ...] = key(tuple(RULES.items()), "logical axis -> mesh axes joined by '+'; '' replicates it")


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention kernel, and the dtype of its matmuls."""

    impl: str = key(
        "auto",
        "attention kernel; auto: the log names the kernel and the reason",
        choices=("auto", "cudnn", "pallas", "chunked", "reference"),
        resume=ROUNDING,
    )
    forward: str = key(
        "compute",
        "type of the matmuls of attention's forward pass: the compute type; or fp8: e4m3, on Hopper, emulated on CPU. The "
        "backward pass is in the compute type, by attention.impl",
        choices=("compute", "fp8"),
        resume=STORAGE,
    )


@dataclasses.dataclass(frozen=True)
class Remat:
    """Activations that the forward pass saves for the backward pass."""

    policy: str = key(
        "none",
        "policy of activation checkpointing; auto: the least recomputation that fits; custom: remat.tensors",
        choices=("none", "full", "dots", "attention", "auto", "custom"),
    )
    tensors: str = key("", "custom: name=keep|offload|recompute, comma-separated; tensors not named are recomputed")
    every: int = key(1, "this many layers share one checkpoint", at_least=1)


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Storage dtypes of weights, moments and gradients. int8: quantized in blocks."""

    params: str = key(
        "auto", "the master weights (auto: f32); norms and biases are f32 in any case", choices=("auto", "f32", "bf16")
    )
    m: str = key("auto", "Adam's first moment, Muon's momentum (auto: f32)", choices=("auto", "f32", "bf16", "int8"))
    v: str = key("auto", "Adam's second moment (auto: f32)", choices=("auto", "f32", "bf16", "int8"))
    grads: str = key("auto", "gradients summed over microbatches (auto: f32)", choices=("auto", "f32", "bf16"))
    reduce: str = key(
        "auto",
        "gradients summed over devices (auto: the compute type)",
        choices=("auto", "f32", "bf16"),
    )


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Matmuls that stay in bfloat16 with `precision=fp8`."""

    exclude: str = key("", "weights or blocks computed in bf16, comma-separated: wo,mlp.down or attention; '': none")


@dataclasses.dataclass(frozen=True)
class Data:
    """Training data, and its packing into sequences."""

    source: str = key(
        "stdlib",
        "stdlib | synthetic | FILE.tok[=WEIGHT],FILE.tok[=WEIGHT],... | package.module:name; without weights, files are mixed "
        "in proportion to their tokens",
        resume=SOURCES,
    )
    eval_source: str = key(
        "",
        "held-out data, same forms, or several sets by name: NAME=SOURCE;NAME=SOURCE;...; '': the validation split of stdlib "
        "and synthetic",
        resume=UNRELATED,
    )
    tokenizer: str = key(
        "byte",
        "byte | path of a tokenizer.json | hf:NAME; must be the tokenizer of the token files",
        resume=Resume("ask", "token ids must mean the same tokens. The same tokenizer in another place needs no permission"),
    )
    seq_len: int = key(256, "tokens in a sequence", at_least=1, resume=POSITION)
    packing: str = key(
        "documents",
        "attention stops at document borders in documents and best_fit, not in none. documents: text is cut at sequence "
        "ends; best_fit: documents shorter than a sequence are not cut, and sequences are padded",
        choices=("documents", "best_fit", "none"),
        resume=SEQUENCES,
    )
    max_segments: int = key(
        0,
        "documents in a sequence at most; further ones are masked and counted. 0: as many as the data has in one, up to 32. "
        "cuDNN's backward pass has (4 head_dim + 4) bytes x heads x tokens of workspace for each, with fewer key/value heads "
        "(8 head_dim + 4)",
        at_least=0,
        resume=SEQUENCES,
    )
    seed: int = key(0, "order of the sequences", at_least=0, resume=SEQUENCES)

    @property
    def masks_documents(self) -> bool:
        """Return whether attention stops at document borders."""
        return self.packing != "none"

    @property
    def most_documents(self) -> int:
        """Return the largest number of documents in a sequence, for code that has not read the data."""
        return self.max_segments or MOST_DOCUMENTS


@dataclasses.dataclass(frozen=True)
class Train:
    """The training loop."""

    steps: int = key(
        1000,
        "optimizer steps in all, resumed ones included",
        at_least=1,
        resume=Resume("free", "with optimizer.decay_steps=0 the schedule then ends at the new last step"),
    )
    epochs: float = key(
        0.0, "passes over the training data; replaces train.steps; 0: train.steps decides", at_least=0, at_most=1_000_000
    )
    global_batch: int = key(32, "sequences per optimizer step, over all devices and microbatches", at_least=1, resume=POSITION)
    batch_ramp: str = key(
        "",
        "fewer sequences at first: SEQUENCES:STEP,..., as 64:1000,128:3000: 64 until step 1000, 128 until step 3000, then "
        "train.global_batch; '': no ramp",
        resume=POSITION,
    )
    grad_accum: int = key(1, "microbatches per step; gradients are summed over them", at_least=1, resume=MICROBATCHES)
    accumulate: str = key(
        "auto",
        "layer: each layer's gradient is added to the sum in its backward pass; microbatch: after the whole backward pass; "
        "auto: microbatch with parallel.scan_layers, else layer",
        choices=("auto", "layer", "microbatch"),
        resume=ROUNDING,
    )
    freeze: str = key("", "frozen parameters, comma-separated patterns of names: embed.*,layers.mlp.*,head", resume=TRAINED)
    ema_decay: float = key(
        0.0,
        "decay per step of an average of the trained weights, d x average + (1 - d) x weights, that evaluations and samples "
        "use; 0: no average",
        at_least=0,
        below=1,
    )
    seed: int = key(
        0,
        "initial weights; with dtypes.params=bf16 also how their updates are rounded",
        at_least=0,
        resume=Resume("free", "used only at a run's start; with dtypes.params=bf16 also to round updates"),
    )
    memory_fraction: float = key(
        0.0,
        "part of GPU memory for JAX; 0: all but the reserve for NCCL and the context",
        at_least=0,
        at_most=1,
        resume=ROUNDING,
    )
    max_minutes: str = key("", "save and exit with 75 after this many minutes | auto: before Slurm's end of the job")
    loss_spike_sigma: float = key(
        0.0,
        "a step is skipped if loss or gradient norm is this many robust standard deviations above the last 128; 0: only "
        "if one is not finite",
        at_least=0,
        resume=Resume("free", "applies to later steps; checkpoints have the earlier losses in any case"),
    )
    on_divergence: str = key(
        "stop",
        "after max_skipped_steps; stop: exit code 76; rollback: to the last good checkpoint, skipping the data of these steps",
        choices=("stop", "rollback"),
        resume=SKIPPED,
    )
    max_skipped_steps: int = key(8, "this many skipped steps in a row are a divergence", at_least=1, resume=SKIPPED)
    timeouts: str = key(
        "", "seconds until a hang is ended, as step=900,data=300: startup, compile, step, checkpoint, data; 0: never"
    )
    sdc_check_every: int = key(
        0, "every this many steps, repeat the step and compare all bits, to find faulty hardware; 0: never", at_least=0
    )
    deterministic: bool = key(
        False,
        "the same bits from every run on the same GPUs: slower kernels, and XLA's autotuning results stored with the run",
        resume=ROUNDING,
    )


@dataclasses.dataclass(frozen=True)
class Loss:
    """The training loss."""

    name: str = key(
        "cross_entropy",
        "the loss function; dpo: direct preference optimisation, on token files of pairs; your own: evaluations "
        "add the plain cross entropy, from which perplexity and bits per byte follow",
        choices=("cross_entropy", "dpo"),
        importable=True,
    )
    beta: float = key(
        0.1, "dpo: weight of the divergence from the reference model; a higher value keeps the model nearer to it", above=0
    )
    label_smoothing: float = key(0.0, "dpo: the probability that a pair has its preference reversed", at_least=0, below=0.5)
    z_loss: float = key(
        0.0, "this x log(sum exp(logits))^2 is part of the training loss, also in the log; PaLM has 1e-4; 0: off", at_least=0
    )
    mtp_weight: float = key(
        0.3,
        "with model.mtp_layers: factor of the mean of their losses; DeepSeek-V3 had 0.3, and 0.1 at the end",
        above=0,
        resume=RECIPE,
    )
    chunk: int = key(2048, "tokens per device whose logits exist at one time", at_least=1, resume=ROUNDING)

    @property
    def is_pairwise(self) -> bool:
        """Return whether the loss compares the chosen and the rejected member of pairs."""
        return self.name == "dpo"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW or Muon, and the schedule of the learning rate."""

    name: str = key(
        "adamw",
        "muon: matrices of layers by Muon, other parameters by AdamW",
        choices=(
            "adamw",
            "muon",
        ),
        importable=True,
        resume=Resume("never", "another optimizer stores other tensors"),
    )
    lr: float = key(3e-4, "peak learning rate", at_least=0, at_most=1)
    lr_min: float = key(3e-5, "learning rate of the last step of the decay", at_least=0)
    schedule: str = key(
        "cosine", "learning rate over the steps; wsd: warmup, stable, decay", choices=("constant", "cosine", "linear", "wsd")
    )
    warmup_steps: int = key(100, "linear from lr / warmup_steps to lr at the last of these steps", at_least=0)
    decay_steps: int = key(
        0, "steps from the peak to lr_min; 0: cosine and linear all that are left, wsd a fifth of all", at_least=0
    )
    decay_shape: str = key(
        "linear",
        "wsd: the decay's form over its part p from 0 to 1; sqrt: 1 - sqrt(p), fast at first",
        choices=("linear", "sqrt", "cosine"),
    )
    weight_decay: float = key(0.1, "on matrices only (not norms, not biases)", at_least=0, resume=RECIPE)
    momentum: float = key(0.95, "muon: decay of the momentum of matrices", at_least=0, below=1, resume=MOMENTS)
    beta1: float = key(0.9, "decay of the first moment", at_least=0, below=1, resume=MOMENTS)
    beta2: float = key(0.95, "decay of the second moment", at_least=0, below=1, resume=MOMENTS)
    eps: float = key(1e-8, "added to the root of the second moment", above=0, resume=MOMENTS)
    clip_norm: float = key(1.0, "gradients are scaled down to this global norm; 0: off", at_least=0, resume=RECIPE)
    groups: str = key(
        "", "by name, PATTERN:SETTING=VALUE,...;...: lr (a factor), weight_decay, optimizer (adamw | muon)", resume=RECIPE
    )
    offload: str = key(
        "none",
        "moments: stored in pinned host memory, updated on the device a layer at a time",
        choices=("none", "moments"),
        resume=ROUNDING,
    )

    def decay(self, steps: int) -> int:
        """Return the number of decay steps in a run of `steps` steps: decay_steps; if it is 0, the default of the schedule.

        The result is at most the number of steps after the warm-up.
        """
        after = max(1, steps - max(1, self.warmup_steps))
        derived = max(1, steps // 5) if self.schedule == "wsd" else after
        return min(self.decay_steps or derived, after)


@dataclasses.dataclass(frozen=True)
class Init:
    """The weights that a new run starts from: of another run, or of a Hugging Face model."""

    from_: str = key("", "a run's folder, one of its checkpoints/<step>, or a Hugging Face folder; the step starts at 0")
    base: str = key("", "where the base of adapters is now, if it moved since their training; '': where it was")
    what: str = key("weights", "restored from init.from", choices=("weights", "weights+optimizer"))


LOW_BITS = ("fp8", "nf4", "mxfp4")  # formats of frozen matrices (kernels/low_bits.py)
FEED_FORWARD = ("gate", "up", "down")  # the weights of a feed-forward block and of each expert, as lora.targets names them


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters for the frozen weights of init.from (docs/finetuning.md)."""

    rank: int = key(0, "columns of each adapter's first matrix; 0: no adapters, all weights are trained", at_least=0)
    alpha: float = key(32.0, "adapters' outputs are multiplied by alpha / rank", above=0, resume=FUNCTION)
    rslora: bool = key(False, "multiply by alpha / sqrt(rank) instead", resume=FUNCTION)
    targets: str = key(
        "", "weights that have an adapter, as wq,wv; '': all matrices of attention (not of delta nets), and gate, up and down"
    )
    experts: str = key(
        "each",
        "adapters of the experts' gate, up and down: a pair for each expert, one that a layer's experts share, or none",
        choices=("each", "shared", "none"),
    )
    base: str = key(
        "bf16",
        "storage of the frozen matrices of layers: the compute dtype (bf16), fp8 (e4m3, a scale for each output), nf4 (QLoRA's "
        "4 bits), or mxfp4 for the experts alone",
        choices=("bf16", *LOW_BITS),
        resume=FUNCTION,
    )

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' outputs, alpha / rank or alpha / sqrt(rank); 0 without adapters."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank) if self.rank else 0.0


@dataclasses.dataclass(frozen=True)
class Eval:
    """Loss on held-out data."""

    every_steps: int = key(200, "and before the first and after the last step; 0: never", at_least=0)
    sequences: int = key(128, "sequences per evaluation, each once, the same ones for every batch size and layout", at_least=1)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Saving, and the changes that a resumed run may make."""

    dir: str = key("", "folder of the checkpoints, or gs://BUCKET/PATH, or s3://BUCKET/PATH; '': WORKDIR/checkpoints")
    every_steps: int = key(500, "and after the last step; 0: only then", at_least=0)
    keep: int = key(2, "newest checkpoints kept", at_least=1)
    keep_every: int = key(0, "also keep every step that is a multiple of this; 0: none", at_least=0)
    keep_best: bool = key(
        False, "also keep the one with the lowest held-out loss, the mean over the sets; commands that name this run use it"
    )
    step: int = key(-1, "resume from this step; later ones are set aside; -1: the newest", at_least=-1)
    allow_change: str = key("", "keys that may differ from the checkpoint's, comma-separated (docs/checkpoints.md)")


@dataclasses.dataclass(frozen=True)
class Log:
    """Output during training."""

    every_steps: int = key(10, "a line in the log and in metrics.jsonl", at_least=1)
    tensorboard: bool = key(True, "write tb/")
    wandb: str = key("", "Weights & Biases: PROJECT or ENTITY/PROJECT; '': off. WANDB_MODE and other variables of wandb apply")
    trackio: str = key("", "Trackio: PROJECT; '': off. TRACKIO_SPACE_ID and other variables of trackio apply")
    mlflow: str = key("", "MLflow: EXPERIMENT; '': off. MLFLOW_TRACKING_URI and other variables of mlflow apply")
    peak_tflops: float = key(
        0.0, "dense peak of one device for MFU, for a device that is not in hardware.py; 0: from the table", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class Sample:
    """Texts that the model generates during and after training."""

    every_steps: int = key(0, "and after the last step; 0: only then", at_least=0)
    prompt: str = key(
        "",
        "continued by the model; several are separated by ||; '': two held-out conversations, or else a document's beginning",
    )
    max_tokens: int = key(256, "tokens to write; 0: no sample", at_least=0)
    temperature: float = key(0.8, "0: always the likeliest token", at_least=0)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Traces and compiler output, written to WORKDIR/profile."""

    start: int = key(0, "first step to trace; 0: none until the run gets SIGUSR2", at_least=0)
    steps: int = key(3, "steps to trace, each time", at_least=1)
    dump_hlo: bool = key(False, "write the compiled step's HLO")


@dataclasses.dataclass(frozen=True)
class Compiler:
    """XLA options of the step. jaxtrain/step/compiler.py has the defaults, each with its reason."""

    options: str = key("", "XLA options of the train step, NAME=VALUE, comma-separated; they override jaxtrain's own")


def split_items(text: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list."""
    return tuple(filter(None, map(str.strip, text.split(","))))


LONGEST = 4096  # characters of a path on Linux


def split_paths(text: str, separator: str, exists: Callable[[str], bool]) -> list[str]:
    """Return the items of a list whose items contain paths. A path that exists may contain the separator.

    exists: whether an item names files that exist. Of several ways to join parts of `text`, the longest such item counts.
    """
    pieces, items = text.split(separator), []
    while pieces:
        most = itertools.takewhile(lambda number: len(separator.join(pieces[:number])) < LONGEST, range(2, len(pieces) + 1))
        joined = (number for number in reversed([*most]) if exists(separator.join(pieces[:number])))
        number = next(joined, 1)
        items.append(separator.join(pieces[:number]).strip())
        del pieces[:number]
    return [item for item in items if item]


def parse_options(text: str) -> tuple[dict[str, str | bool], list["Problem"]]:
    """Return `compiler.options` ("xla_gpu_autotune_level=3,optimization_level=O0") as name -> value, and its problems.

    A comma within a value is written "+": xla_disable_hlo_passes=one+other. A value may be empty:
    xla_gpu_enable_command_buffer=.
    """
    options: dict[str, str | bool] = {}
    problems = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not (equals and name):
            problems.append(Problem("compiler.options", item, "must be NAME=VALUE", f"For example {name or 'NAME'}=true."))
        elif name in options:
            problems.append(Problem("compiler.options", item, f"{name!r} is named twice", "Keep one of them."))
        else:
            options[name] = {"true": True, "false": False}.get(value.lower(), value.replace("+", ","))
    return options, problems


@dataclasses.dataclass(frozen=True)
class Paths:
    """Folders that several runs share."""

    data: str = key("~/.cache/jaxtrain/data", "token files that jaxtrain makes itself (the stdlib corpus)")
    cache: str = key("~/.cache/jaxtrain/compile", "XLA's compile cache; '': none")


@dataclasses.dataclass(frozen=True)
class Env:
    """The environment variables of a run. jaxtrain/config/environment.py has the tables."""

    set: str = key("", "NAME=VALUE, comma-separated (a comma within a value: +); they override the table and the shell")


OWN = "own"  # the section whose keys the user makes
Value = bool | int | float | str


class Own:
    """The settings of the section `own` as attributes, for a user's own model family, loss, optimizer or data source.

    `own.gamma` is the value of `config.own.gamma`, and raises AttributeError if the config does not set it. For a setting with
    a default, `getattr(own, "gamma", 2.0)`. Two objects with equal settings are equal.

    unread: the names of the settings that nobody has read yet.
    """

    def __init__(self, settings: tuple[tuple[str, Value], ...] = ()):
        self._settings = dict(settings)
        self._read: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """Return the names of settings that nobody has read yet."""
        return [name for name in self._settings if name not in self._read]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle before there are settings
            raise AttributeError(name)
        if name not in self._settings:
            raise AttributeError(f"own.{name} is not set: config.{OWN}.{name} = VALUE in the config file sets it")
        self._read.add(name)
        return self._settings[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and repr(self) == repr(other)  # 1, 1.0 and True are equal, and other settings

    def __hash__(self) -> int:
        return hash(tuple(self._settings.items()))

    def __repr__(self) -> str:
        return f"Own({self._settings})"


NO_SETTINGS = Own()


def own_settings(settings: tuple[tuple[str, Value], ...]) -> Own:
    """Return the `Own` of RunConfig.own. All parts of a run share one object, which knows what each of them has read."""
    return shared_settings(settings, tuple(type(value) for _, value in settings))


@functools.lru_cache(maxsize=16)
def shared_settings(settings: tuple[tuple[str, Value], ...], types: tuple[type, ...]) -> Own:
    """Return one object for settings of these types: 1, 1.0 and True are equal. A run begins by `cache_clear`."""
    return Own(settings)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The resolved config of a run. Made by `resolve`; frozen."""

    precision: str = key(
        "bf16",
        "type of activations, matmuls and gathered weights; fp8: bf16, and matmuls of layers in 8 bits",
        choices=("f32", "bf16", "fp8"),
        resume=STORAGE,
    )
    model: Model = section(
        Model(), Resume("never", "adds or removes tensors, changes their shapes, or gives them another meaning")
    )
    mesh: Mesh = section(Mesh(), PLACEMENT)
    pipeline: Pipeline = section(Pipeline(), ROUNDING)
    moe: Moe = section(Moe(), RECIPE)
    parallel: Parallel = section(Parallel(), ROUNDING)
    sharding: Sharding = section(Sharding(), PLACEMENT)
    attention: Attention = section(Attention())
    remat: Remat = section(Remat(), ROUNDING)
    dtypes: Dtypes = section(Dtypes(), STORAGE)
    fp8: Fp8 = section(Fp8(), STORAGE)
    data: Data = section(Data())
    train: Train = section(Train(), UNRELATED)
    loss: Loss = section(Loss(), Resume("ask", "losses before and after do not compare"))
    optimizer: Optimizer = section(Optimizer(), Resume("free", "the learning rate is a function of the step alone"))
    init: Init = section(
        Init(),
        Resume("free", "used only at a run's start; with adapters, the path of their base, whose weights must be the same"),
    )
    lora: Lora = section(Lora(), TRAINED)
    eval: Eval = section(Eval(), UNRELATED)
    checkpoint: Checkpoint = section(Checkpoint(), UNRELATED)
    log: Log = section(Log(), UNRELATED)
    sample: Sample = section(Sample(), UNRELATED)
    profile: Profile = section(Profile(), UNRELATED)
    compiler: Compiler = section(Compiler(), ROUNDING)
    paths: Paths = section(Paths(), UNRELATED)
    env: Env = section(Env(), Resume("free", "NCCL's algorithms add in different orders: values differ by rounding"))
    own: tuple[tuple[str, Value], ...] = key(
        (),
        "settings of your own family, loss, optimizer or data source",
        resume=Resume("ask", "your own model family, loss, optimizer or data source reads it"),
    )

    @property
    def compute(self) -> str:
        """Return the dtype of activations, and of matmuls and gathered weights that are not in 8 bits: f32 | bf16."""
        return "bf16" if self.precision == "fp8" else self.precision

    @functools.cached_property
    def flat(self) -> dict[str, Any]:
        """Return dotted key -> value, in declaration order."""
        return dict(flatten(to_dict(self)))

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step of train.global_batch sequences, padding included."""
        return self.train.global_batch * self.data.seq_len

    @functools.cached_property
    def ramp(self) -> Ramp:
        """Return the sequences of each step, by train.batch_ramp. With a wrong text, no step has fewer."""
        return parse_ramp(self.train.batch_ramp, self.train.global_batch)[0]

    def tokens_before(self, step: int) -> int:
        """Return the tokens of the first `step` steps, padding included."""
        return self.ramp.before(step) * self.data.seq_len

    def with_batch_size(self, sequences: int) -> "RunConfig":
        """Return the config of a step of this many sequences: in microbatches of the same size, or in a smaller one."""
        if sequences == self.train.global_batch:
            return self
        rows = self.train.global_batch // self.train.grad_accum
        accum = max(1, sequences // rows)
        train = dataclasses.replace(self.train, global_batch=sequences, grad_accum=accum, batch_ramp="")
        return dataclasses.replace(self, train=train)


NO_KEY = "no such key"  # the rule of an unknown key
FIT = "{fit}"  # at the beginning of a Problem's remedy: `with_fits` writes numbers there that keep all rules of the key
# They and their multiples next to a number are tried, nearest first.
UNITS = (*range(1, 65), *(factor << power for power in range(5, 12) for factor in (2, 3, 5, 7)))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of a config or a command line: the key, its value, the rule that it breaks, and the remedy."""

    key: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        shown = f" = {self.value!r}" if self.value is not None else ""
        return to_run_sh(f"{self.key}{shown}: {self.rule}. {self.remedy}".rstrip())


def with_fits(problems: list[Problem], check: Callable[[str, int], set[str]] | None = None) -> list[Problem]:
    """Return the problems, with numbers in the place of FIT: the nearest ones with which no problem of the key is left.

    Numbers that bring no problem of another key are preferred. Of several such problems of a key, the first is returned.

    check: returns the keys that have a problem if a key has another value; None: no numbers are named.
    """
    keys = {problem.key for problem in problems}
    fits: dict[str, list[int]] = {}

    def nearest_fits(problem: Problem, check: Callable[[str, int], set[str]]) -> list[int]:
        value, least = cast(int, problem.value), all_keys()[problem.key].at_least or 0
        usual = dict(flatten(default_config()))[problem.key]
        if all_keys()[problem.key].out_of_range(value) and problem.key not in check(problem.key, usual):
            return [usual]
        multiples = {*UNITS, *(unit * (value // unit + more) for unit in UNITS for more in (0, 1))}
        clean_fits: dict[bool, int] = {}  # whether it is larger -> the nearest number
        other_fits: dict[bool, int] = {}  # the same, with a problem of another key
        for number in sorted(multiples - {value}, key=lambda n: abs(n - value)):
            more = number > value
            if number >= least and more not in clean_fits and problem.key not in (bad_keys := check(problem.key, number)):
                (other_fits if bad_keys - keys else clean_fits).setdefault(more, number)
        return sorted((clean_fits or other_fits).values())

    out: list[Problem] = []
    for problem in problems:
        if not problem.remedy.startswith(FIT):
            out.append(problem)
        elif problem.key not in fits:  # otherwise the number of the first problem of this key keeps this rule too
            fits[problem.key] = nearest_fits(problem, check) if check else []
            number, hint = " or ".join(map(str, fits[problem.key])), problem.remedy.removeprefix(FIT)
            remedy = (
                f"Set {number}, or {hint}" if number and hint else f"Set {number}." if number else hint[:1].upper() + hint[1:]
            )
            out.append(dataclasses.replace(problem, remedy=remedy or "Change the other settings of this rule."))
    return out


class ConfigError(ValueError):
    """All problems of a config at once."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))


def format_value(value: Any) -> str:
    """Return a value as it is written on the command line; '' for an empty string."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"


def public_name(field_name: str) -> str:
    """Return the name of a field in config files: `from` for `from_`, because Python reserves the word."""
    return field_name.rstrip("_")


def default_config() -> Any:
    """Return a fresh ConfigDict with every key at its default. Config files start here.

    Typed Any, because no type checker knows the keys of a ConfigDict.
    """
    return ml_collections.ConfigDict(to_dict(RunConfig()))


def to_dict(run: Any) -> dict[str, Any]:
    """Return a RunConfig, or one of its sections, as a nested plain dict, as in config.json. `from_dict` reads it."""

    def plain(section: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                value = plain(value)
            elif field.name in ("rules", OWN):
                value = dict(value)
            out[public_name(field.name)] = value
        return out

    return plain(run)


def config_sha256(resolved: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a resolved config (`to_dict`), which does not depend on the order of the keys."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


def flatten(tree: Mapping[str, Any] | ml_collections.ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('model.d_model', 128), ... in declaration order."""
    for name, value in tree.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """Return dotted key -> its declaration. The declaration of a sharding rule has its line of RULE_DOCS."""
    out: dict[str, Key] = {}

    def walk(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            name = prefix + public_name(field.name)
            if dataclasses.is_dataclass(value):
                walk(value, name + ".")
            elif field.name == "rules":
                out.update({f"{name}.{axis}": Key(line) for axis, line in RULE_DOCS.items()})
            elif field.name != OWN:
                out[name] = field.metadata["key"]

    walk(RunConfig(), "")
    return out


def resume_of(name: str) -> Resume:
    """Return whether a dotted key may change on resume: as its declaration says, or else that of its section."""
    metadata = {public_name(f.name): f.metadata for f in dataclasses.fields(RunConfig)}[name.partition(".")[0]]
    entry = all_keys()[name] if name in all_keys() else metadata.get("key")  # an own setting, or a rule of an own axis
    return (entry.resume if entry else None) or metadata["resume"]


def choices(name: str) -> tuple[str, ...]:
    """Return the choices that a dotted key declares."""
    return all_keys()[name].choices


def suggest(name: str, known_names: list[str]) -> str:
    """Return a remedy for a misspelt name: the nearest known name, or all known names if none is near."""
    close = difflib.get_close_matches(name, known_names, n=1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known_names)}."


def from_dict(tree: Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """Return the RunConfig of a nested dict, and the dict's problems. A value of a wrong type is replaced by the default."""
    problems: list[Problem] = []

    def build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
        fields = {public_name(field.name): field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                problems.append(Problem(prefix + name, None, NO_KEY, nearest_key(prefix + name, list(all_keys()))))
        kwargs: dict[str, Any] = {}
        for name, field in fields.items():
            default = field.default
            value = values.get(name, default)
            if dataclasses.is_dataclass(default):
                if isinstance(value, Mapping):
                    value = build(type(default), value, f"{prefix}{name}.")
                elif not dataclasses.is_dataclass(value):
                    problems.append(Problem(prefix + name, value, "is a section", f"Set its keys, as {prefix}{name}.KEY."))
                    value = default
            elif field.name == "rules":
                value = build_rules(value, f"{prefix}{name}.")
            elif field.name == OWN:
                value = tuple(sorted(build_own(value)))
            else:
                value = check(prefix + name, value, default)
            kwargs[field.name] = value
        return cls(**kwargs)

    def build_rules(value: Any, prefix: str) -> tuple[tuple[str, str], ...]:
        rules = dict(RULES)
        for axis, onto in dict(value).items():
            if axis in DERIVED:
                problems.append(Problem(prefix + axis, onto, NO_KEY, DERIVED[axis]))
            else:
                rules[axis] = check(prefix + axis, onto, "")
        return tuple(rules.items())

    def build_own(value: Any) -> Iterator[tuple[str, Value]]:
        if not isinstance(value, Mapping | tuple):
            problems.append(Problem(OWN, value, "is a section", f"Set its keys, as {OWN}.KEY."))
            return
        for name, setting in dict(value).items():
            key = f"{OWN}.{name}"
            if not str(name).isidentifier() or name.startswith("_") or hasattr(Own, name):
                rule = "cannot be an attribute of the object that your own parts receive"
                problems.append(Problem(key, setting, rule, f"Use letters, digits and _, as {OWN}.gamma, and not {name}."))
            elif not isinstance(setting, Value):
                rule = f"must be true or false, a number or text, not {type(setting).__name__}"
                problems.append(Problem(key, None, rule, "Set one key for each value."))
            elif isinstance(setting, float) and not math.isfinite(setting):
                problems.append(Problem(key, setting, "must be a finite number", "Set one."))
            else:
                yield name, setting

    def check(name: str, value: Any, default: Any) -> Any:
        kind = type(default)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            problems.append(
                Problem(name, value, f"must be {kind.__name__}, not {type(value).__name__}", f"The default is {default!r}.")
            )
            return default
        if value == "None":
            problems.append(Problem(name, value, "'None' is a string here", "Write '' for not set."))
            return default
        return value

    return build(RunConfig, tree, ""), problems


def resolve(config: ml_collections.ConfigDict | Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """Return the RunConfig of a ConfigDict with every derived value filled in, and the problems found.

    Derived: `model.head_dim` is d_model / num_heads, or qk_nope_head_dim + qk_rope_head_dim with latent attention. In `dtypes`,
    auto becomes f32, except that `dtypes.reduce` becomes the compute dtype. With lora.rank, an empty `lora.targets` becomes
    `Model.adaptable`.
    """
    tree = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    run, problems = from_dict(tree)
    model = run.model
    if model.head_dim == 0 and model.num_heads > 0:
        latent = model.qk_nope_head_dim + model.qk_rope_head_dim
        model = dataclasses.replace(model, head_dim=latent if model.kv_lora_rank else model.d_model // model.num_heads)
    preset = {"params": "f32", "m": "f32", "v": "f32", "grads": "f32"}
    preset["reduce"] = run.compute if run.compute in ("f32", "bf16") else "f32"
    chosen = {k: (preset[k] if v == "auto" else v) for k, v in dataclasses.asdict(run.dtypes).items()}
    lora = run.lora
    if lora.rank > 0 and not lora.targets:
        lora = dataclasses.replace(lora, targets=",".join(model.adaptable(lora.experts != "none")))
    return dataclasses.replace(run, model=model, dtypes=Dtypes(**chosen), lora=lora), problems


def parse_arg(arg: str | None, **defaults: Any) -> Any:
    """Return the `:variant` of `--config=FILE:variant`, with the types of `defaults`.

    `parse_arg("half,seq=4096", half=False, seq=8192)` gives an object with `.half` True and `.seq` 4096. A bare name
    switches a bool on. A path that exists may contain commas. Unknown names and values of the wrong type raise ConfigError.
    """
    chosen = dict(defaults)
    problems: list[Problem] = []
    texts = [name for name, value in defaults.items() if isinstance(value, str)]
    cut = ""  # the variant before, if it is a path that does not exist: it may have been cut at a comma

    def exists(item: str) -> bool:
        name, _, text = item.partition("=")
        return name in texts and os.path.exists(os.path.expanduser(text))

    for item in split_paths(arg or "", ",", exists):
        name, equals, text = item.partition("=")
        if name not in defaults:
            remedy = suggest(name, list(defaults)) if defaults else f"This file has no variants: leave out ':{item}'."
            rule = "no such variant"
            if cut:
                rule = f"there is no such path, and a comma separates variants, of which {item!r} is none"
                problems = [p for p in problems if p.key != f"--config=FILE:{cut}"]
                cut = item = f"{cut},{item}"
            problems.append(Problem(f"--config=FILE:{item}", None, rule, remedy))
            continue
        is_path = name in texts and os.sep in text and not text.startswith("hf:")
        cut = item if is_path and not exists(item) else ""
        kind = type(defaults[name])
        try:
            if kind is bool:
                chosen[name] = {"": True, "true": True, "false": False}[text.lower() if equals else ""]
            else:
                chosen[name] = kind(text)
                if kind is int and chosen[name] < 1:
                    raise ValueError("must be at least 1")
        except (ValueError, KeyError):
            expected = "a whole number, 1 or more" if kind is int else "true or false" if kind is bool else "text"
            example = defaults[name] or ("true" if kind is bool else 1)
            problems.append(Problem(f"--config=FILE:{item}", None, f"must be {expected}", f"For example {name}={example}."))
    if problems:
        raise ConfigError(problems)
    return ml_collections.FrozenConfigDict(chosen)
