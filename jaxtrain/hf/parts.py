"""The parts of a model, each compared with transformers: embedding, each layer's attention and feed-forward block, the head.

Each part computes from transformers' own input of the part, and differentiates with transformers' own gradient of the part's
output. So a fault is seen in its own part alone, forward and backward, and another choice of experts, which rounding may cause
where two of them tie, does not spread either. The code is that of training, with its kernels: `Block.attend`,
`Block.feed_forward`, and the loss.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import schema
from jaxtrain.config.schema import RunConfig
from jaxtrain.config.shapes import DENSE, STACK, layer_key
from jaxtrain.hf.importing import Origin
from jaxtrain.hf.model import logits_program, place_model, read_params, segment_positions, with_precision, with_row_length
from jaxtrain.hf.names import HEAD, PREFIX, Entry, model_entries
from jaxtrain.models import family
from jaxtrain.models.attention import Shared, layer_kinds
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.module import Definition, Params, leaf_names, replace_leaves, select_leaves
from jaxtrain.models.moe import no_statistics
from jaxtrain.models.remat import layer_at
from jaxtrain.models.transformer import Block, Period, Transformer
from jaxtrain.sharding import Placement, all_reduce
from jaxtrain.step.loss import LossSpec, cross_entropy
from jaxtrain.step.state import layer_name


@dataclasses.dataclass(frozen=True)
class Difference:
    """The relative differences of one part of a model. 0: equal; NaN: some value is NaN.

    Activations and gradients are compared token by token with the root mean square of what the part adds to the residual
    stream, so that the stream hides nothing: the largest of all tokens counts.

    Attributes:
        part: its name, such as "layer 3, attention".
        activations: of the part's output; of the head, the logits.
        gradients: of the gradient with respect to the part's input; 0 for the embedding, whose input are tokens.
        weights: of the gradient of the part's weight that differs most, in the 2-norm.
        worst: that weight, by jaxtrain's name.
        idle: the number of its experts that no token chose: their weights are not compared.
    """

    part: str
    activations: float
    gradients: float
    weights: float
    worst: str
    idle: int

    def above(self, tolerance: float) -> dict[str, float]:
        """Return the differences above `tolerance`, and those that are NaN, by their names here."""
        values = {"activations": self.activations, "gradients": self.gradients, f"gradient of {self.worst}": self.weights}
        return {name: value for name, value in values.items() if not value <= tolerance}  # NaN is above


LOGITS_FACTOR = 10  # the limit of the whole model's logits, relative to that of a part
Outputs = tuple[jax.Array, jax.Array]  # what is differentiated, and what is compared
Compute = Callable[[Any, Shared, jax.Array, jax.Array], Outputs]


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """A part of a model.

    Attributes:
        name: as in `Difference`.
        weights: prefixes of its weights' names.
        index: the element of the stack of layers with its layer; 0 outside of the stack.
        compute: returns `Outputs` from (model, shared, input, tokens). The model's stack has this element alone. Layers that
            are computed alike have the same function, which is compiled once.
    """

    name: str
    weights: tuple[str, ...]
    index: int
    compute: Compute


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """The differences of a model from transformers.

    Attributes:
        parts: of each part, in the order of the model.
        alone: why there are no parts, and logits alone are compared; "" if there are.
        logits: of the logits of the whole model, relative as `Difference.activations`.
        absolute: the largest difference of the logits.
        range: the largest of transformers' logits.
        likeliest: the share of positions at which the likeliest token is the same.
        unused: what the tokens or transformers do not use, so that no difference there would be seen.
    """

    parts: tuple[Difference, ...]
    alone: str
    logits: float
    absolute: float
    range: float
    likeliest: float
    unused: tuple[str, ...]

    def first(self, tolerance: float) -> str:
        """Return the first part with a difference above `tolerance`, and its differences above it; "" if there is none.

        Rounding adds up over the layers, so the logits of the whole model may differ by LOGITS_FACTOR times as much.
        """
        exceeding = ((difference.part, difference.above(tolerance)) for difference in self.parts)
        first_part = next(((name, above) for name, above in exceeding if above), None)
        if first_part is None:
            return (
                ""
                if self.logits <= LOGITS_FACTOR * tolerance
                else f"no part, but the logits of the whole model, {self.logits:.2g}"
            )
        return f"{first_part[0]}: " + ", ".join(f"{name} {value:.2g}" for name, value in first_part[1].items())


def compare_with_outputs(hf_dir: Path, source: Origin, base: str = "") -> ModelComparison:
    """Return the differences of a model from what torch_reference.py has written to `hf_dir`.

    base: for a run with adapters, the folder of the base model if it was moved.

    Raises:
        HuggingFaceError: the weights cannot be read, or are others than transformers has.
    """
    tokens_BT, hf_BTV = np.load(hf_dir / "tokens.npy"), np.load(hf_dir / "logits.npy")
    run = run_on(source, tokens_BT)
    wanted = (*tokens_BT.shape, run.model.vocab_size)
    if hf_BTV.shape != wanted:
        raise HuggingFaceError(f"{source.name}: logits are {list(wanted)}, those of transformers {list(hf_BTV.shape)}.")
    definition, placement = place_model(run)
    params = read_params(source, run, definition, placement, base)
    if definition.stored:  # gradients are of whole weights
        decode, run = definition.decode, dataclasses.replace(run, lora=dataclasses.replace(run.lora, base="bf16"))
        definition, placement = place_model(run)
        homes = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), definition.specs(placement))
        params = jax.jit(decode, out_shardings=homes)(params)
    alone = not_by_parts(run)
    parts = () if alone else tuple(differences(run, definition, placement, params, hf_dir))
    forward, ones_BT = logits_program(definition, placement), np.ones_like(tokens_BT)
    rows = tokens_BT, ones_BT, segment_positions(ones_BT)
    jax_BTV = np.concatenate([forward(params, *(a[b : b + 1] for a in rows)) for b in range(len(tokens_BT))])
    absolute, same = np.abs(jax_BTV - hf_BTV).max(), (jax_BTV.argmax(-1) == hf_BTV.argmax(-1)).mean()
    logits = largest_difference(jax_BTV, hf_BTV, hf_BTV)
    hf_range, not_used = float(np.abs(hf_BTV).max()), tuple(unused_inputs(run, tokens_BT, parts))
    return ModelComparison(parts, alone, logits, float(absolute), hf_range, float(same), not_used)


def unused_inputs(run: RunConfig, tokens_BT: np.ndarray, parts: Sequence[Difference]) -> Iterator[str]:
    """Yield `ModelComparison.unused`."""
    model, length = run.model, tokens_BT.shape[1]
    if model.sliding_window >= length:
        yield f"the end of the sliding window of {model.sliding_window:,} (rows have {length:,} tokens)"
    ids = len(np.unique(tokens_BT))
    if not model.tied_head and ids < model.vocab_size:
        yield f"{model.vocab_size - ids:,} of {model.vocab_size:,} rows of the embedding"
    if idle := sum(difference.idle for difference in parts):
        yield f"{idle:,} of {model.num_experts * model.stacked_layers:,} experts"
    if model.mtp_layers:
        yield "the modules of multi-token prediction"


def written_bytes(run: RunConfig, tokens_BT: np.ndarray) -> int:
    """Return the bytes that torch_reference.py writes: float32 logits, and with parts states and gradients."""
    model, rows = run.model, tokens_BT.size
    logits = 4 * rows * model.vocab_size
    if not_by_parts(run):
        return logits
    weights = (
        sum(a.size for a in jax.tree.leaves(place_model(run)[0].weights)) + model.vocab_size * model.d_model * model.tied_head
    )
    return logits + 4 * weights + 2 * 4 * rows * model.d_model * (2 * model.num_layers + 1)


def run_on(source: Origin, tokens_BT: np.ndarray) -> RunConfig:
    """Return the config of the weights' run, in float32, with rows as long as these tokens."""
    return with_row_length(with_precision(source.run(), "f32"), tokens_BT.shape[1], 1)


def not_by_parts(run: RunConfig) -> str:
    """Return why a model can be compared only as a whole; "" if its parts can be compared."""
    definition, _ = place_model(run)
    built, name = jax.eval_shape(definition.bind, definition.abstract), f"model.family = {run.model.family}"
    if getattr(family(run.model.family), "FORMAT", None) is None:
        return f"{name} has no FORMAT, which has transformers' names of its weights"
    if type(built) is not Transformer or type(built.layers) not in (Block, Period):
        return f"{name} builds a {type(built).__name__}, which may compute in other parts"
    return ""


def norm_modules(run: RunConfig) -> list[str]:
    """Return transformers' names of the modules whose inputs are the residual stream between the parts, in their order.

    [] for a model that can be compared only as a whole.
    """
    if not_by_parts(run):
        return []
    by_name, out = model_entries(run.model), []
    hf_modules = {name.removeprefix(PREFIX): entry.hf_names[0].removesuffix(".weight") for name, entry in by_name.items()}
    for layer in (f"{stack}.{at}." for stack, at in stacks(run.model)):
        if run.model.norm_placement == "post":  # attention and feed-forward see the stream itself
            first = hf_modules.get(f"{layer}mlp.router") or hf_modules[f"{layer}mlp.gate"]
            out += [hf_modules[f"{layer}attention.wq"], first.rpartition(".")[0]]
        else:
            out += [hf_modules[f"{layer}{norm}_norm.scale"] for norm in ("attention", "mlp")]
    return [*out, hf_modules["final_norm.scale"]]


def stacks(model: schema.Model) -> list[tuple[str, int]]:
    """Return (name of the stack, index in it) of each layer."""
    return [(DENSE, i) for i in range(model.dense_layers)] + [(STACK, i) for i in range(model.stacked_layers)]


def model_sections(model: schema.Model, chunk: int) -> Iterator[ModelSection]:
    """Yield the parts of a model in order. chunk: tokens whose logits exist at one time in the loss."""
    once, kinds = functools.cache(functools.partial), layer_kinds(model)  # equal arguments give the same function
    yield ModelSection("embedding", ("embed",), 0, embedding)
    for i, (stack, index) in enumerate(stacks(model)):
        dense, kind = (index, 0) if stack == DENSE else (None, kinds[index])
        element, position = divmod(index, model.period)
        prefix, element = (STACK, element) if dense is None else (f"{stack}.{index}", 0)
        prefix += f".{layer_key(position, model.period)}" if model.period > 1 else ""
        mixer = f"{prefix}.attention", f"{prefix}.delta"
        yield ModelSection(f"layer {i}, attention", mixer, element, once(attention, dense, position, kind))
        yield ModelSection(f"layer {i}, mlp", (f"{prefix}.mlp",), element, once(feed_forward, dense, position))
    weights = "final_norm", "embed" if model.tied_head else "head"
    yield ModelSection("final norm and head", weights, 0, once(head, chunk))


def layer_block(model: Transformer, dense: int | None, position: int) -> Block:
    """Return a dense layer, or the layer at a place of the stack's only element, with its weights gathered."""
    if dense is not None:
        return model.ctx.zero.gather_module(model.dense_layers.blocks[dense])
    element: Block | Period = layer_at(model.layers, 0)
    return model.ctx.zero.gather_module(element if isinstance(element, Block) else element.layers[position][0])


def embedding(model: Transformer, shared: Shared, x_BTD: jax.Array, tokens_BT: jax.Array) -> Outputs:
    """Return the embeddings, twice, as `ModelSection.compute` does."""
    y_BTD, _ = model.embed_tokens(tokens_BT)
    return y_BTD, y_BTD


def attention(
    dense: int | None, position: int, kind: int, model: Transformer, shared: Shared, x_BTD: jax.Array, tokens_BT: jax.Array
) -> Outputs:
    """Return the residual stream after attention, twice."""
    y_BTD, _ = layer_block(model, dense, position).attend(x_BTD, shared, kind, None)
    return y_BTD, y_BTD


def feed_forward(
    dense: int | None, position: int, model: Transformer, shared: Shared, x_BTD: jax.Array, tokens_BT: jax.Array
) -> Outputs:
    """Return the residual stream after the feed-forward block, twice."""
    y_BTD, _ = layer_block(model, dense, position).feed_forward((x_BTD, no_statistics(model.model, 1)), shared)
    return y_BTD, y_BTD


def head(chunk: int, model: Transformer, shared: Shared, x_BTD: jax.Array, tokens_BT: jax.Array) -> Outputs:
    """Return the loss that torch_reference.py differentiates, but as a sum over tokens, and the logits."""
    ctx = model.ctx
    hidden_BTD, _ = model.final_hidden((x_BTD, ()))
    batch = {"targets": jnp.roll(tokens_BT, -1, 1), "weights": jnp.ones(tokens_BT.shape, jnp.float32)}
    spec = LossSpec(ctx.numerics, ctx.placement, ctx.zero, chunk, model.model.logit_softcap)
    return cross_entropy(hidden_BTD, model.head_VD, batch, spec), model.logits(hidden_BTD)


def section_program(definition: Definition, placement: Placement, compute: Compute, weights: tuple[str, ...]) -> Any:
    """Return the compiled function of a part: its output, and the gradients of its input and of its weights.

    The function's arguments are all weights, the index of the layer in the stack, the part's input, the gradient of what
    `compute` differentiates, tokens, segments and positions.
    """
    chosen = jax.tree.map(lambda name: name.startswith(weights) and not is_adapter(name), leaf_names(definition.abstract))
    axes, specs = select_leaves(definition.axes, chosen), definition.specs(placement)

    def step(params: Params, index: jax.Array, x: jax.Array, dy: jax.Array, *rows: jax.Array) -> tuple[Any, jax.Array, Params]:
        tokens_BT, segments_BT, positions_BT = rows
        params = {**params, STACK: jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, index, 1), params[STACK])}

        def outputs(subtree: Params, x: jax.Array) -> Outputs:
            model = definition.bind(replace_leaves(params, subtree))
            return compute(model, model.share(segments_BT, positions_BT), x, tokens_BT)

        _, vjp, y = jax.vjp(outputs, select_leaves(params, chosen), x, has_aux=True)
        # All devices have the same tokens, and so equal shares of the loss (sharding.py).
        weight_grads, dx = vjp(dy / placement.mesh.size)
        weight_grads = definition.bind(params).ctx.zero.reduce_gradients(weight_grads, axes)
        return y, all_reduce(dx, placement.all_axes), weight_grads

    return jax.jit(placement.shard_map(step, (specs, *(P(),) * 6), (P(), P(), select_leaves(specs, chosen))))


def differences(
    run: RunConfig, definition: Definition, placement: Placement, params: Params, hf_dir: Path
) -> Iterator[Difference]:
    """Yield the differences of each part, in the order of the model. Rows are computed one by one.

    Args:
        run, definition, placement, params: the model, and its weights in float32.
        hf_dir: the folder that torch_reference.py has written.
    """
    tokens_BT = np.load(hf_dir / "tokens.npy")
    rows = tokens_BT, np.ones_like(tokens_BT), segment_positions(np.ones_like(tokens_BT))
    states, cotangents = (np.load(hf_dir / f"{name}.npy", mmap_mode="r").swapaxes(0, 1) for name in ("states", "cotangents"))
    logits_BTV = np.load(hf_dir / "logits.npy", mmap_mode="r")
    files = {file.stem: file for file in (hf_dir / "weights").glob("*.npy")}
    by_name = model_entries(run.model, files)
    if run.model.tied_head:
        by_name[PREFIX + "head"] = dataclasses.replace(by_name[f"{PREFIX}embed.embedding"], sources=(HEAD,), copies=())
    hf_names = {x for entry in by_name.values() for x in entry.hf_names}
    if unknown := sorted(files.keys() - hf_names):
        rule = f"transformers computes with {unknown[0]}, which is not in this model"
        raise HuggingFaceError(f"{rule}. Fix: compare a folder that was exported from it, or imported as it.")
    compiled = functools.cache(functools.partial(section_program, definition, placement))
    nothing = np.zeros((len(tokens_BT), 1, 1), np.float32)
    loss_cotangent = np.full(len(tokens_BT), 1 / tokens_BT.size, np.float32)
    for i, section in enumerate(model_sections(run.model, run.loss.chunk)):
        last = i == len(states)
        x, dx = (states[i - 1], cotangents[i - 1]) if i else (nothing, nothing)
        y, dy = (logits_BTV, loss_cotangent) if last else (states[i], cotangents[i])
        outputs, inputs, weight_grads = [], [], {}
        for b in range(len(tokens_BT)):
            arguments = x[b : b + 1], dy[b] if last else dy[b : b + 1], *(a[b : b + 1] for a in rows)
            y_b, dx_b, weight_grads_b = compiled(section.compute, section.weights)(params, np.int32(section.index), *arguments)
            outputs.append(np.asarray(y_b))
            inputs.append(np.asarray(dx_b))
            weight_grads = jax.tree.map(jnp.add, weight_grads, weight_grads_b) if weight_grads else weight_grads_b
        activations = largest_difference(np.concatenate(outputs), y, y - x if i and not last else y)
        gradients = largest_difference(np.concatenate(inputs), dx, dx if last else dx - dy) if i else 0.0
        weight_errors, idle = {}, 0
        for name, gradient in zip(jax.tree.leaves(leaf_names(weight_grads)), jax.tree.leaves(weight_grads), strict=True):
            stacked = name.startswith(f"{STACK}.")
            full = layer_name(PREFIX + name, section.index).removeprefix(PREFIX) if stacked else name
            entry = by_name[PREFIX + ("head" if last and name.startswith("embed") else full)]
            expected = hf_gradient(entry, files)
            error = np.linalg.norm(np.asarray(gradient[0] if stacked else gradient) - expected)
            weight_errors[full] = ratio(error, np.linalg.norm(expected))
            if entry.spec.jax_axes.startswith("E ") and name.endswith("down"):
                idle = int((~expected.reshape(len(expected), -1).any(1)).sum())
        # NaN counts as the largest.
        worst = max(weight_errors, key=lambda name: np.nan_to_num(weight_errors[name], nan=np.inf))
        yield Difference(section.name, activations, gradients, weight_errors[worst], worst, idle)


def hf_gradient(entry: Entry, files: Mapping[str, Path]) -> np.ndarray:
    """Return transformers' gradient of a weight, with jaxtrain's axes; 0 where transformers has none."""
    stored = [np.load(files[x]) if x in files else np.zeros(entry.hf_shape, np.float32) for x in entry.sources]
    return entry.to_jax(stored, np.dtype(np.float32), (slice(None),) * len(entry.shape))


def largest_difference(jax_BTX: np.ndarray, hf_BTX: np.ndarray, added_BTX: np.ndarray) -> float:
    """Return the largest difference of a token, relative to the root mean square over the tokens of `added_BTX`."""
    error_BT, added_BT = (np.linalg.norm(a, axis=-1) for a in (jax_BTX - hf_BTX, added_BTX))
    return ratio(error_BT.max(), np.sqrt(np.mean(added_BT**2)))


def ratio(difference: Any, reference: Any) -> float:
    """Return difference / reference; 0 for 0 / 0."""
    return float(difference / reference) if reference else float("inf" if difference else 0)
