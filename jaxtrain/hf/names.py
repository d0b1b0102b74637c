"""The tensors of jaxtrain and of a Hugging Face checkpoint: names, shapes, and the order of axes. Imports no jax."""

import dataclasses
import itertools
import math
import re
import string
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.schema import DELTA, Model
from jaxtrain.config.shapes import DENSE, MTP, STACK
from jaxtrain.models.hf_tensors import AXES, EXPERTS_TOGETHER, SUM, HfTensor
from jaxtrain.models.hugging_face import HuggingFaceError, format_of

COLUMNS = 64  # columns that a transposed copy copies at a time: several times faster, because both sides fit the cache
PREFIX = "params."  # prefix of parameters among the tensors of a train state
# Buffers that old versions of transformers wrote; config.json determines their values.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq)")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
BEYOND = "mtp."  # prefix of Qwen's tensors of multi-token prediction
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = "the head is the embedding"
# Prefix of the text part's tensors in the folder of a model that also sees or hears -> their prefix in a folder of their own.
TEXT_PREFIXES = {
    **{f"{part}.": "" for part in ("language_model", "text_model")},
    **{f"model.{part}": "model." for part in ("language_model.", "text_model.", "")},
}
SHOWN = 12  # problems named one by one


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of jaxtrain, and the Hugging Face tensors with its values: one tensor and its copies, or a tensor per expert."""

    name: str  # the name in jaxtrain's checkpoints
    sources: tuple[str, ...]  # the names in the Hugging Face checkpoint, without those of copies
    spec: HfTensor
    sizes: Mapping[str, int]  # size of each axis by its letter
    copies: tuple[str, ...] = ()

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return the names in the Hugging Face checkpoint."""
        return self.sources + self.copies

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of jaxtrain's tensor."""
        return self._shape(self.spec.jax_axes)

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Return the shape of each Hugging Face tensor in `hf_names`."""
        return self._shape(SUM.sub("+", self.spec.hf_axes))

    def to_jax(self, stored: Sequence[np.ndarray], dtype: np.dtype[Any], index: Any) -> np.ndarray:
        """Return a shard of jaxtrain's array, contiguous.

        Args:
            stored: the array of each tensor in `sources`. Experts outside of `index` are not used.
            dtype: dtype of the result.
            index: the shard, as a slice of each axis of jaxtrain's array.
        """
        if not self.spec.each_expert:
            return contiguous_copy(self._to_jax_layout(stored[0])[index]).astype(dtype, copy=False)
        experts, *slices = index
        return np.stack(
            [contiguous_copy(self._to_jax_layout(x)[tuple(slices)]).astype(dtype, copy=False) for x in stored[experts]]
        )

    def to_hf(self, x: np.ndarray, index: int = 0, out: np.ndarray | None = None) -> np.ndarray:
        """Return the contiguous array of tensor `hf_names[index]` from jaxtrain's global array: the inverse of `to_jax`.

        out: the result with the tensor's other parts, into which this part is written; None: the other parts are zero.
        """
        hf_axes, jax_axes = axis_letters(self.spec.unmerged), axis_letters(self.spec.per_tensor)
        array = self._reorder_rotary(
            (x[index] if self.spec.each_expert else x).reshape([self.sizes[a] for a in jax_axes]), jax_axes, inverse=True
        )
        array = array.transpose([jax_axes.index(a) for a in hf_axes])
        if not self.spec.sections:
            return contiguous_copy(array).reshape(self.hf_shape)
        merged = np.zeros(self.hf_shape, x.dtype) if out is None else out
        as_integers(self._section_view(merged))[...] = as_integers(array)
        return merged

    def _shape(self, axes: str) -> tuple[int, ...]:
        """Return the size of each axis. "+": the axis of the parts."""
        sizes = {**self.sizes, "+": sum(self._widths)}
        return tuple(math.prod(sizes[a] for a in group) for group in axis_groups(axes))

    @property
    def _widths(self) -> list[int]:
        """Return the size of each part along their axis."""
        return [math.prod(self.sizes[a] for a in axis_letters(axes)) for axes in self.spec.sections]

    def _section_view(self, x: np.ndarray) -> np.ndarray:
        """Return a view of a Hugging Face tensor: the part that is jaxtrain's array, with each axis by itself."""
        if self.spec.sections:
            before, after = (axis_letters(axes) for axes in SUM.sub("+", self.spec.hf_axes).split("+"))
            start = sum(self._widths[: self.spec.section])
            within = slice(start, start + self._widths[self.spec.section])
            x = x.reshape([*(self.sizes[a] for a in before), -1, *(self.sizes[a] for a in after)])
            x = x[(*(slice(None) for _ in before), within)]
        return x.reshape([self.sizes[a] for a in axis_letters(self.spec.unmerged)])

    def _to_jax_layout(self, x: np.ndarray) -> np.ndarray:
        """Return the array of a Hugging Face tensor, reshaped and transposed to jaxtrain's axes."""
        hf_axes, jax_axes = axis_letters(self.spec.unmerged), axis_letters(self.spec.per_tensor)
        return self._reorder_rotary(self._section_view(x).transpose([hf_axes.index(a) for a in jax_axes]), jax_axes).reshape(
            self._shape(self.spec.per_tensor)
        )

    def _reorder_rotary(self, x: np.ndarray, axes: list[str], inverse: bool = False) -> np.ndarray:
        """Return an array with rotary pairs as two halves, if the Hugging Face tensor interleaves them. inverse: undo it."""
        if not self.spec.interleaved:
            return x
        width, rotary = self.sizes[self.spec.interleaved], self.sizes["rotary"]
        order = halves_of_pairs(width, rotary, width - rotary if self.sizes["L"] else 0)
        return np.take(as_integers(x), np.argsort(order) if inverse else order, axes.index(self.spec.interleaved)).view(x.dtype)

    def element_name(self, index: int) -> str:
        """Return jaxtrain's name of tensor `hf_names[index]`: layers.0.mlp_norm.scale, or layers.0.mlp.gate[3] for expert 3."""
        return self.name.removeprefix(PREFIX) + (f"[{index}]" if self.spec.each_expert else "")


def halves_of_pairs(width: int, rotary: int, start: int) -> np.ndarray:
    """For each of `width` channels, return its index in a tensor whose `rotary` channels from `start` on are pairs."""
    pairs = np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2)]) + start
    return np.concatenate([np.arange(start), pairs, np.arange(start + rotary, width)])


def axis_letters(axes: str) -> list[str]:
    """Return the letters of all axes in order: [N, H, D] for "(N H) D". An axis 1 is left out."""
    return [a for a in re.findall(r"[^()\s]+", axes) if a != "1"]


def axis_groups(axes: str) -> list[list[str]]:
    """Return the letters of each axis, merged axes in one list: [[N, H], [D]] for "(N H) D"."""
    return [axis_letters(group) for group in re.findall(r"\([^)]*\)|\S+", axes)]


def model_entries(model: Model, stored: Mapping[str, Any] | None = None) -> dict[str, Entry]:
    """Return every tensor of a model by its name in jaxtrain's checkpoints, in the order of layers.

    Args:
        model: the model whose tensors are returned.
        stored: the names of a folder's tensors. They decide whether a layer has one tensor for all experts, or one for each.
            None: the family's format decides.

    Raises:
        HuggingFaceError: the model's family has no FORMAT, or its FORMAT has an axis of unknown size.
        ConfigError: the model's family cannot be imported.
    """
    specs: dict[str, HfTensor] = dict(format_of(model.family).tensors)
    sizes = {axis: sum(getattr(model, key) for key in keys) for axis, keys in AXES.items()}
    for name, spec in specs.items():
        if unknown := [
            a for a in (*axis_letters(spec.jax_axes), *axis_letters(spec.hf_axes.replace("+", " "))) if a not in sizes
        ]:
            rule = f"{name} has an axis {unknown[0]}. Known: {', '.join(sorted(sizes))}"
            raise HuggingFaceError(f"model.family = {model.family!r}: its FORMAT: {rule}.")
        present = {sibling.section for sibling in specs.values() if sibling.name == spec.name}
        if lacking := [section for i, section in enumerate(spec.sections) if i not in present]:
            rule = f"{spec.name} has a part ({lacking[0]}) that is no array of jaxtrain"
            raise HuggingFaceError(f"model.family = {model.family!r}: its FORMAT: {rule}.")
    sizes["rotary"] = model.rotary_dim
    if stored is not None:
        gate = "layers.{i}.mlp.gate"
        together = EXPERTS_TOGETHER[gate].name.replace("{i}", str(model.dense_layers))
        if gate in specs and specs[gate].each_expert and together in stored:
            specs |= EXPERTS_TOGETHER
        first = {name: spec.parameter.replace("{i}", "0") for name, spec in specs.items() if spec.parameter}
        specs |= {k: dataclasses.replace(specs[k], name=specs[k].parameter) for k, name in first.items() if name in stored}
        # safetensors' save_model writes a tied head and embedding once, under either name.
        if model.tied_head and EMBEDDING not in stored and HEAD in stored:
            specs = {k: dataclasses.replace(spec, name=HEAD) if spec.name == EMBEDDING else spec for k, spec in specs.items()}
    absent = ("head",) * model.tied_head + (".bq", ".bk", ".bv") * (not model.qkv_bias)
    absent += (".bo",) * (not model.attention_out_bias)
    absent += (".gate_bias", ".up_bias", ".down_bias") * (not model.mlp_bias and not model.expert_bias)
    absent += (".shared.gate", ".shared.up", ".shared.down") * (not model.shared_d_ff)
    absent += ("_post_norm.scale",) * (model.norm_placement == "pre")
    if model.kv_lora_rank:
        absent += (".wq",) if model.q_lora_rank else (".wq_down", ".wq_up", "attention.q_norm.scale")
    elif not model.qk_norm:
        absent += ("attention.q_norm.scale", "attention.k_norm.scale")
    # Name in the table up to its first dot -> the layers' numbers in the checkpoint; in jaxtrain each stack begins with 0.
    modules = range(model.num_layers, model.step_layers)
    stacks = {"embed": range(1), DENSE: range(model.dense_layers), STACK: range(model.dense_layers, model.num_layers)}
    stacks |= {MTP: modules, "": range(1)}
    in_stack: dict[str, list[str]] = {stack: [] for stack in stacks}
    for name in specs:
        stack = name.partition(".")[0]
        in_stack[stack if stack in stacks else ""].append(name)
    out: dict[str, Entry] = {}
    for stack, layers in stacks.items():
        for layer, name in itertools.product(layers, in_stack[stack]):
            without = ".attention." if model.kinds[layer : layer + 1] == DELTA else ".delta."
            if name.endswith(absent) or (stack == STACK and without in name):
                continue
            spec, jax_name = specs[name], PREFIX + name.replace("{i}", str(layer - layers.start))
            hf_name = spec.name.replace("{i}", str(layer))
            hf_names = tuple(hf_name.replace("{e}", str(e)) for e in range(model.num_experts if spec.each_expert else 1))
            copies = tuple(spec.copy.replace("{i}", str(module)) for module in modules if spec.copy)
            if stored is not None:  # a tensor that several places of the model share may be written once
                copies = tuple(copy for copy in copies if copy in stored)
            out[jax_name] = Entry(jax_name, hf_names, spec, sizes, copies)
    return out


def text_names(stored: Collection[str], path: Path) -> dict[str, str]:
    """Return name in the folder -> name in a folder of its own, of the tensors of the text part of a model.

    Args:
        stored: names of the tensors of a folder whose model also sees or hears.
        path: the folder, for errors.

    Raises:
        HuggingFaceError: the folder has tensors of a text part at no known place, or at two.
    """
    layers = {root: root + "model.layers.".removeprefix(own_prefix) for root, own_prefix in TEXT_PREFIXES.items()}
    roots = [root for root, prefix in layers.items() if any(name.startswith(prefix) for name in stored)]
    if len(roots) != 1:
        rule = f"layers of its text part must be at one of {', '.join(layers.values())}"
        raise HuggingFaceError(f"{path}: {rule}; it has {' and '.join(layers[x] for x in roots) or 'none'}. Fetch it again.")
    (root,) = roots
    out = {name: TEXT_PREFIXES[root] + name.removeprefix(root) for name in stored if name.startswith(root)}
    if HEAD in stored:
        if HEAD in out.values():
            raise HuggingFaceError(f"{path}: has two heads, {root}{HEAD} and {HEAD}. Remove the wrong one.")
        out[HEAD] = HEAD
    return out


def raw_entries(stored: Mapping[str, Any], exact: Collection[str] = ()) -> dict[str, Entry]:
    """Return the entry of each tensor of a folder with jaxtrain's own names, by its name in jaxtrain's checkpoints.

    Args:
        stored: values with the `shape` of each tensor, by jaxtrain's name without PREFIX.
        exact: names of the tensors with `HfTensor.exact`.
    """
    out = {}
    for name, a in stored.items():
        letters = string.ascii_lowercase[: len(a.shape)]
        spec = HfTensor(name, " ".join(letters), " ".join(letters), exact=name in exact)
        out[PREFIX + name] = Entry(PREFIX + name, (name,), spec, dict(zip(letters, a.shape, strict=True)))
    return out


def match_tensors(
    wanted: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]], rule: str, model: Model | None = None
) -> dict[str, str]:
    """Check the tensors of a folder. Return the name of each unused tensor -> reason.

    Args:
        wanted: `model_entries` of the model.
        shapes: shapes of the folder's tensors by name.
        rule: the first line of the error.
        model: the model whose family decides whether tensors of layers after its last layer may be unused (`Format.beyond`).
            None: they may not.

    Raises:
        HuggingFaceError: tensors are missing, or have wrong shapes or unknown names. The error lists these tensors.
    """
    problems, known_names = [], set()
    for entry in wanted.values():
        for index, name in enumerate(entry.hf_names):
            known_names.add(name)
            if name not in shapes:
                problems.append(f"{name}: missing (it is {entry.element_name(index)}, {list(entry.hf_shape)})")
            elif shapes[name] != entry.hf_shape:
                actual, expected = list(shapes[name]), list(entry.hf_shape)
                problems.append(f"{name}: its shape is {actual}, config.json makes it {expected}")
    unused = {}
    beyond = format_of(model.family).beyond if model else ""
    for name in sorted(shapes.keys() - known_names):
        if DERIVED.fullmatch(name):
            unused[name] = "follows from config.json"
        elif name == HEAD and EMBEDDING in known_names:
            unused[name] = TIED
        elif beyond and (name.startswith(BEYOND) or (model and layer_of(name) >= model.num_layers)):
            unused[name] = beyond
        else:
            problems.append(f"{name}: {list(shapes[name])}, not known in models of this family")
    if problems:
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise HuggingFaceError("\n  ".join([rule, *problems[:SHOWN], *more]))
    return unused


def layer_of(name: str) -> int:
    """Return the number of the layer of a tensor in a Hugging Face checkpoint; -1 for others."""
    layer = LAYER.match(name)
    return int(layer[1]) if layer else -1


def contiguous_copy(view: np.ndarray) -> np.ndarray:
    """Return a contiguous copy of a view whose axes may have been transposed."""
    x = as_integers(view)
    if x.flags.c_contiguous or x.ndim < 2:
        return np.array(x).view(view.dtype)
    out = np.empty(x.shape, x.dtype)
    step = max(1, COLUMNS // max(1, math.prod(x.shape[2:])))
    for i in range(0, x.shape[1], step):
        out[:, i : i + step] = x[:, i : i + step]
    return out.view(view.dtype)


def as_integers(x: np.ndarray) -> np.ndarray:
    """Return a view of integers in place of bfloat16, because numpy copies unknown dtypes element by element."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x
