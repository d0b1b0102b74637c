"""Adapters as Hugging Face's library PEFT has them: adapter_config.json and adapter_model.safetensors, out and in.

PEFT calls the two matrices of a linear layer `base_model.model.{layer}.lora_A.weight`, (rank, inputs), and `.lora_B.weight`,
(outputs, rank). What the layers are called, and which axes of a weight are its inputs, follows from a family's own map of names
(`models.hugging_face`): its NAMES.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxtrain.hf.names import grouped
from jaxtrain.metrics import write_atomic

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, WEIGHT = "base_model.model.", ".weight"
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Keys whose value says nothing of what the adapters compute, and which are not looked at.
_FREE = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"),
    *("revision", "target_modules", "exclude_modules", "task_type", "ensure_weight_tying", "eva_config"),
)
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "init_lora_weights")
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # others change the base too
# Values of all other keys with which they do nothing; anything else is refused.
_NOTHING = (None, False, "none", {}, [])


class PeftError(ValueError):
    """An adapter cannot be read or written. Says what to do."""


class Named(Protocol):
    """How a weight is called and ordered in Hugging Face's checkpoints: an entry of a family's NAMES."""

    @property
    def name(self) -> str: ...
    @property
    def ours(self) -> str: ...
    @property
    def theirs(self) -> str: ...
    @property
    def each_expert(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """What adapter_config.json says."""

    rank: int
    alpha: float  # outputs are multiplied by alpha / rank
    targets: tuple[str, ...]  # our names of the weights, as lora.targets has them
    base: str  # what the adapters' maker called the base; "" if nothing
    notes: tuple[str, ...]  # what was read otherwise than it stands there, or not at all


@dataclasses.dataclass(frozen=True)
class _Place:
    """One of our weights, as PEFT has its adapter."""

    layer: str  # base_model.model.model.layers.0.self_attn.q_proj
    ours: list[str]  # letters of its axes
    outputs: list[str]  # of those, merged in this order
    inputs: list[str]

    def of(self, wanted: list[str]) -> list[str]:
        """Some of the axes, as our adapter has them."""
        return [c for c in self.ours if c in wanted]


def _place(weight: str, names: Mapping[str, Named]) -> _Place:
    """Raises KeyError for a weight that the family has no name for."""
    number = re.search(r"\.(\d+)\.", weight)
    entry = names[re.sub(r"\.\d+\.", ".{i}.", weight, count=1)]
    called = entry.name.replace("{i}", number[1] if number else "")
    outputs, inputs = grouped(entry.theirs)
    return _Place(PREFIX + called.removesuffix(WEIGHT), entry.ours.split(), outputs, inputs)


def _weight_of(adapter: str) -> tuple[str, str]:
    """layers.0.mlp.lora.up_a -> (layers.0.mlp.up, a)."""
    weight, _, half = adapter.replace(".lora.", ".").rpartition("_")
    return weight, half


def to_peft(adapters: Mapping[str, np.ndarray], names: Mapping[str, Named]) -> dict[str, np.ndarray]:
    """PEFT's tensors, float32, of ours by their canonical names without prefix (layers.0.attention.lora.wq_a)."""
    out = {}
    for name, x in adapters.items():
        weight, half = _weight_of(name)
        place = _place(weight, names)
        merged, have = (
            (place.inputs, [*place.of(place.inputs), "R"]) if half == "a" else (place.outputs, ["R", *place.of(place.outputs)])
        )
        rank = x.shape[have.index("R")]
        flat = np.asarray(x, np.float32).transpose([have.index(c) for c in [*merged, "R"]]).reshape(-1, rank)
        out[place.layer + (_A if half == "a" else _B)] = np.ascontiguousarray(flat.T if half == "a" else flat)
    return out


def from_peft(
    tensors: Mapping[str, np.ndarray], names: Mapping[str, Named], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Our adapters, float32, of PEFT's tensors.

    shapes: of our adapters by their canonical names without prefix: all that the model has.
    Raises PeftError for tensors that are missing, left over, or of another shape; it names them.
    """
    out, used, wrong = {}, set(), []
    for name, shape in shapes.items():
        weight, half = _weight_of(name)
        place = _place(weight, names)
        theirs = place.layer + (_A if half == "a" else _B)
        if theirs not in tensors:
            wrong.append(f"{theirs}: not in the adapter")
            continue
        used.add(theirs)
        x = np.asarray(tensors[theirs], np.float32)
        have = [*place.of(place.inputs), "R"] if half == "a" else ["R", *place.of(place.outputs)]
        sizes, merged = dict(zip(have, shape, strict=True)), place.inputs if half == "a" else place.outputs
        width = math.prod(sizes[c] for c in merged)
        fits = (sizes["R"], width) if half == "a" else (width, sizes["R"])
        if x.shape != fits:
            wrong.append(f"{theirs}: shape {x.shape}, and {fits} fits this model")
            continue
        x = (x.T if half == "a" else x).reshape([*(sizes[c] for c in merged), sizes["R"]])
        out[name] = np.ascontiguousarray(x.transpose([[*merged, "R"].index(c) for c in have]))
    wrong += [f"{name}: no weight of this model has such an adapter" for name in sorted(tensors.keys() - used)]
    if wrong:
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise PeftError(f"the adapter does not fit this model ({len(wrong)} tensors): {shown}. Name the base it was made for.")
    return out


def write(
    folder: Path, adapters: Mapping[str, np.ndarray], names: Mapping[str, Named], *, alpha: float, base: str
) -> list[str]:
    """Writes an adapter for PEFT; returns the names of its tensors.

    adapters: all of a model's, by canonical names without prefix. base: where PEFT's users find the model it stands beside.
    Raises PeftError where the folder has an adapter already.
    """
    from safetensors.numpy import save

    if (folder / CONFIG).exists() or (folder / TENSORS).exists():
        raise PeftError(f"{folder} holds an adapter already. Name another folder.")
    tensors = to_peft(adapters, names)
    weights = {_weight_of(name)[0] for name in adapters}
    modules = sorted({_place(weight, names).layer.rpartition(".")[2] for weight in weights})
    ranks = {x.shape[0] for name, x in tensors.items() if name.endswith(_A)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": ranks.pop(),
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    write_atomic(folder / TENSORS, save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    return sorted(tensors)


def read(folder: Path, names: Mapping[str, Named]) -> tuple[Settings, dict[str, np.ndarray]]:
    """An adapter's settings, and its tensors by PEFT's names, for `from_peft`.

    Raises PeftError for a folder without one, and for settings that change what is computed in a way that jaxtrain's adapters
    do not know, each by its name.
    """
    from safetensors.numpy import load_file

    try:
        found = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError) as error:
        raise PeftError(f"{folder} holds no adapter of PEFT ({CONFIG} and {TENSORS}): {error}") from error
    kind = found.get("peft_type") if isinstance(found, dict) else found
    if kind != "LORA":
        raise PeftError(f"{folder / CONFIG}: peft_type is {kind!r}; LORA can be read, and nothing else.")
    unknown = [f"{key} = {value!r}" for key, value in found.items() if key not in (*_FREE, *_READ) and value not in _NOTHING]
    if found.get("init_lora_weights", True) not in _INITIAL:
        unknown.append(f"init_lora_weights = {found['init_lora_weights']!r}")
    if unknown:
        raise PeftError(f"{folder / CONFIG}: {'; '.join(unknown)}: jaxtrain's adapters have nothing of the kind.")
    try:
        rank, alpha, notes = int(found["r"]), float(found["lora_alpha"]), []
    except (KeyError, TypeError, ValueError) as error:
        raise PeftError(f"{folder / CONFIG}: r and lora_alpha must be numbers ({error!r}).") from error
    if found.get("use_rslora"):
        notes.append(f"use_rslora: alpha / sqrt(rank) is read as alpha = {alpha * math.sqrt(rank):g}")
        alpha *= math.sqrt(rank)
    if found.get("lora_dropout"):
        notes.append(f"lora_dropout = {found['lora_dropout']}: jaxtrain has none, which matters for training only")
    expert = next((name for name in sorted(tensors) if ".experts." in name), None)
    if expert:
        raise PeftError(
            f"{folder / TENSORS}: {expert} adapts experts, which have no adapters in jaxtrain. Train an adapter of attention "
            "alone (target_modules: q_proj, k_proj, v_proj, o_proj)."
        )
    linear = [
        name
        for name, entry in names.items()
        if name.startswith("layers.") and len(grouped(entry.theirs)) == 2 and not entry.each_expert
    ]
    known = {_place(name.replace("{i}", "0"), names).layer.rpartition(".")[2]: name.rpartition(".")[2] for name in linear}
    modules = {name.removesuffix(_A).rpartition(".")[2] for name in tensors if name.endswith(_A)}
    targets = tuple(ours for theirs, ours in known.items() if theirs in modules)
    return Settings(rank, alpha, targets, str(found.get("base_model_name_or_path") or ""), tuple(notes)), tensors
