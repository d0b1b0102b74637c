"""Export and import of adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names the two matrices of a linear layer `base_model.model.{layer}.lora_A.weight`, (rank, inputs), and `.lora_B.weight`,
(outputs, rank). The names of layers, and which axes of a weight are its inputs, follow from the family's table of tensors.

transformers 5 has all experts of a layer in two parameters of one module, gate_up_proj and down_proj, which PEFT adapts by
`target_parameters` (ParamWrapper in peft/tuners/lora/layer.py). Of E experts, lora_A is (E rank, inputs) with the ranks of an
expert next to each other, and lora_B (outputs, rank E) with the experts of a rank next to each other. The adapter of down_proj
has the name of the module, and that of gate_up_proj `base_layer` in it; one alone has the name of the module.

gate_up_proj has one A. The A of an export has the a of gate, then that of up, so its rank is twice the others'. B is zero where
one's rank meets the other's outputs. rank_pattern and alpha_pattern state this rank, and the alpha with which the scale stays.
PEFT writes the same from the adapters that it made for each expert's modules with transformers 4, which can be imported, too.

A linear layer with several of jaxtrain's weights, as qkv_proj, is exported likewise, with ranks of all its weights. PEFT's own
adapter of such a layer has one A, which an import gives to each of these weights.
"""

import dataclasses
import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import schema
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import FEED_FORWARD, Model, RunConfig, split_items, to_dict
from jaxtrain.data.chat_template import tokenizer_template
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenizer import load_tokenizer, model_eos
from jaxtrain.hf import lora
from jaxtrain.hf.folder import is_folder
from jaxtrain.hf.frozen_base import base_digest
from jaxtrain.hf.importing import check_new, open_origin, write_run_folder
from jaxtrain.hf.model import abstract_state, place_model
from jaxtrain.hf.names import LAYER, PREFIX, Entry, axis_letters, match_tensors, model_entries
from jaxtrain.hf.tensor_files import read_json_object
from jaxtrain.metrics.files import write_atomic
from jaxtrain.models.hf_tensors import EXPERTS_TOGETHER, HfTensor
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import EQUATIONS, MODULE, A, B, adapter_name, is_adapter, uniform
from jaxtrain.models.module import constant
from jaxtrain.step.state import abstract_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer.json"
MODEL, A_NAME, B_NAME = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
GATE_UP, DOWN, INNER = "gate_up_proj", "down_proj", ".base_layer"
PATTERN = r".*\."  # before a module's name: the key of rank_pattern and alpha_pattern
IN_ORDER = ("gate", "up")  # of gate_up_proj and its ranks
# Keys of adapter_config.json without effect on the adapters' output.
WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"),
    *("revision", "target_modules", "exclude_modules", "task_type", "ensure_weight_tying", "eva_config"),
)
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "init_lora_weights", "target_parameters")
READ_OF_MODULES = ("rank_pattern", "alpha_pattern")
MERGE = "Merge the adapter into its base with PEFT (merge_and_unload, save_pretrained), and train adapters of that model."
INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # other values of init_lora_weights change the base, too
OFF = (None, False, "none", {}, [])  # the values of all other keys that are accepted


def adapter_entries(model: Model, rank: int, ranks: Mapping[str, int] = MappingProxyType({})) -> dict[str, Entry]:
    """Return jaxtrain's name -> entry of each adapter matrix but those of experts. `Entry.hf_names` has the name in PEFT.

    The weights of EQUATIONS have adapters (models/lora.py), but none of a delta net. ranks: those of modules with another one
    than `rank`. The rank of jaxtrain's arrays is that of the module, too (`pad_ranks`).
    """
    out: dict[str, Entry] = {}
    for weight in model_entries(model).values():
        if weight.name.rpartition(".")[2] not in EQUATIONS or ".delta." in weight.name or is_of_experts(weight):
            continue
        outputs, inputs = weight.spec.axes
        jax_axes = [" ".join(c for c in axis_letters(weight.spec.jax_axes) if c in axes) for axes in (outputs, inputs)]
        layer = MODEL + weight.hf_names[0].removesuffix(".weight")
        sizes = {**weight.sizes, "R": ranks.get(layer.rpartition(".")[2], rank)}
        a = HfTensor(layer + A_NAME, f"{jax_axes[1]} R", f"R {inputs}")
        b = HfTensor(layer + B_NAME, f"R {jax_axes[0]}", f"{outputs} R", weight.spec.section, weight.spec.interleaved)
        out |= _pair(weight.name, a, b, sizes)
    return out


def fused_modules(model: Model) -> dict[str, list[str]]:
    """Return the name of each module that holds several weights with adapters -> the names of these weights, in order."""
    out: dict[str, dict[str, None]] = {}
    for name, entry in adapter_entries(model, 1).items():
        out.setdefault(module_of(entry.hf_names[0]), {})[weight_of(name)] = None
    return {module: [*names] for module, names in out.items() if len(names) > 1}


def module_of(tensor: str) -> str:
    """Return the last part of the name of a module in PEFT, from the name of one of its two matrices."""
    return tensor.removesuffix(A_NAME).removesuffix(B_NAME).rpartition(".")[2]


def is_of_experts(weight: Entry) -> bool:
    """Return whether a weight is that of a layer's experts."""
    return weight.name.rpartition(".")[2] in FEED_FORWARD and axis_letters(weight.spec.jax_axes)[0] == "E"


def expert_entries(model: Model, targets: Collection[str], ranks: Mapping[str, int]) -> dict[str, Entry]:
    """Return jaxtrain's name -> entry of the adapter matrices of experts, as PEFT has them for parameters of a module.

    Args:
        targets: the names of the adapted weights.
        ranks: the rank of each of PEFT's parameters. The rank of jaxtrain's arrays is that of the parameter, too (`pad_ranks`).
    """
    out: dict[str, Entry] = {}
    for weight in filter(is_of_experts, model_entries(model).values()):
        prefix, _, name = weight.name.rpartition(".")
        spec = EXPERTS_TOGETHER[f"layers.{{i}}.mlp.{name}"] if weight.spec.each_expert else weight.spec
        layer = LAYER.match(weight.hf_names[0])
        if name not in targets or layer is None:
            continue
        module, _, parameter = (spec.parameter or spec.name).replace("{i}", layer[1]).rpartition(".")
        inner = INNER if parameter == GATE_UP and "down" in targets else ""
        into = "F" if name == "down" else "D"
        outputs = next(axis for axis in spec.axes[1:] if into not in axis)
        a = HfTensor(MODEL + module + inner + A_NAME, f"E {into} R", f"(E R) {into}")
        b = HfTensor(MODEL + module + inner + B_NAME, f"E R {'D' if name == 'down' else 'F'}", f"{outputs} (R E)", spec.section)
        out |= _pair(weight.name, a, b, {**weight.sizes, "R": ranks[parameter]})
    return out


def module_entries(model: Model, rank: int) -> dict[str, Entry]:
    """Return jaxtrain's name -> entry of the adapter matrices of experts, as PEFT has them for a module of each expert."""
    out: dict[str, Entry] = {}
    for weight in filter(is_of_experts, model_entries(model).values()):
        if weight.spec.each_expert:
            outputs, inputs = axis_letters(weight.spec.hf_axes)
            a = HfTensor(A_NAME + "{e}", f"E {inputs} R", f"R {inputs}")
            b = HfTensor(B_NAME + "{e}", f"E R {outputs}", f"{outputs} R")
            names = [MODEL + name.removesuffix(".weight") for name in weight.hf_names]
            out |= _pair(weight.name, a, b, {**weight.sizes, "R": rank}, names)
    return out


def _pair(weight: str, a: HfTensor, b: HfTensor, sizes: Mapping[str, int], modules: Sequence[str] = ()) -> dict[str, Entry]:
    """Return the entries of a weight's two matrices. modules: those with the matrices, if each expert has a module."""
    out = {}
    for half, suffix, spec in ((A, A_NAME, a), (B, B_NAME, b)):
        name = adapter_name(weight, half)
        out[name] = Entry(name, tuple(module + suffix for module in modules) or (spec.name,), spec, sizes)
    return out


def pad_ranks(x: np.ndarray, index: int, multiple: int, axis: int) -> np.ndarray:
    """Return an adapter matrix with `multiple` times its rank: its own ranks are part `index`, and all others are zero.

    axis: that of the ranks.
    """
    return np.concatenate([x if i == index else np.zeros_like(x) for i in range(multiple)], axis)


def _axis_of_ranks(name: str, experts: bool) -> int:
    return -1 if name.endswith(A) else int(experts)


def write_adapter(folder: Path, adapters: Mapping[str, np.ndarray], model: Model, config: schema.Lora, base: str) -> list[str]:
    """Write an adapter for PEFT and return the names of its tensors.

    Args:
        folder: the folder to write.
        adapters: all adapter matrices of the model, by jaxtrain's names.
        model: the config of the base model.
        config: the settings of the adapters.
        base: base_model_name_or_path in adapter_config.json.

    Raises:
        HuggingFaceError: the folder has an adapter already.
    """
    if (folder / CONFIG).exists() or (folder / TENSORS).exists():
        raise HuggingFaceError(f"{folder} holds an adapter already. Name another folder.")
    targets, modules_of = split_items(config.targets), fused_modules(model)
    multiples = {module: len(names) for module, names in modules_of.items()}
    plain = adapter_entries(model, config.rank, {module: n * config.rank for module, n in multiples.items()})
    fused = [name for name in IN_ORDER if name in targets and config.experts != "none" and model.num_experts]
    ranks = {GATE_UP: len(fused) * config.rank, DOWN: config.rank}
    experts = expert_entries(model, targets, ranks)
    tensors: dict[str, np.ndarray] = {}
    modules, parameters = set(), set()
    for name, x in adapters.items():
        x, entry = np.asarray(x, np.float32), plain.get(name) or experts[name]
        hf_name = entry.hf_names[0]
        module = hf_name.removesuffix(A_NAME).removesuffix(B_NAME)
        if name in plain:
            names = modules_of.get(module.rpartition(".")[2])
            # PEFT takes gate_proj among target_modules for that of experts.
            if weight_of(name) in FEED_FORWARD and model.num_experts and not names:
                parameters.add(".".join(module.split(".")[-2:]) + ".weight")
            else:
                modules.add(module.rpartition(".")[2])
            if names:
                x = pad_ranks(x, names.index(weight_of(name)), len(names), _axis_of_ranks(name, False))
        else:
            x = x if x.ndim == 3 else np.broadcast_to(x, (model.num_experts, *x.shape))
            if weight_of(name) in fused:
                x = pad_ranks(x, fused.index(weight_of(name)), len(fused), _axis_of_ranks(name, True))
            block = ".".join(module.removesuffix(INNER).split(".")[-2:])
            parameters.add(f"{block}.{DOWN if weight_of(name) == 'down' else GATE_UP}")
        # Weights in one tensor have ranks and outputs of their own, and zeros in the others'.
        tensors[hf_name] = tensors.get(hf_name, np.float32(0)) + entry.to_hf(x)
    multiples = {module: n for module, n in multiples.items() if module in modules} | (
        {GATE_UP: len(fused)} if len(fused) > 1 else {}
    )
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": sorted(modules),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": config.rslora,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {PATTERN + module: config.rank * n for module, n in multiples.items()},
        "alpha_pattern": {PATTERN + module: wide_alpha(config, n) for module, n in multiples.items()},
    }
    write_atomic(folder / TENSORS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    return sorted(tensors)


def wide_alpha(config: schema.Lora, multiple: int) -> float:
    """Return the alpha with which a rank `multiple` times as large has the same scale."""
    return config.alpha * (math.sqrt(multiple) if config.rslora else multiple)


def read_adapter(folder: Path, model: Model) -> tuple[schema.Lora, dict[str, np.ndarray], list[str]]:
    """Return (settings, float32 arrays by jaxtrain's names, notes on ignored settings) of PEFT's adapter.

    Raises:
        HuggingFaceError: the folder has no adapter, or the adapter has settings or tensors that jaxtrain does not support.
    """
    if not (folder / CONFIG).is_file():
        raise HuggingFaceError(f"{folder} holds no adapter of PEFT: it has no {CONFIG}. Name the adapter's folder.")
    settings = read_json_object(folder / CONFIG)
    try:
        tensors = safetensors.numpy.load_file(folder / TENSORS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise HuggingFaceError(f"{folder / TENSORS}: cannot be read ({error}). Fetch it again.") from error
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise HuggingFaceError(f"{folder / CONFIG}: peft_type is {kind!r}; LORA can be read, and nothing else.")
    fused = fused_modules(model)
    modules = {PATTERN + module for module in (*fused, *[GATE_UP] * bool(model.num_experts))}
    known_keys = (*WITHOUT_EFFECT, *READ, *(key for key in READ_OF_MODULES if {*(settings.get(key) or {})} <= modules))
    unknown = [f"{k} = {value!r}" for k, value in settings.items() if k not in known_keys and value not in OFF]
    if settings.get("init_lora_weights", True) not in INITIAL:
        unknown.append(f"init_lora_weights = {settings['init_lora_weights']!r}")
    if unknown:
        rule = f"{'; '.join(unknown)}: jaxtrain's adapters have nothing of the kind"
        raise HuggingFaceError(f"{folder / CONFIG}: {rule}. {MERGE}")
    rank, alpha, notes = settings.get("r"), settings.get("lora_alpha"), []
    if type(rank) is not int or rank < 1:
        raise HuggingFaceError(f"{folder / CONFIG}: r = {rank!r}: must be a whole number above 0.")
    alpha = _parse_alpha(folder, "lora_alpha", alpha)
    rslora, parameters = settings.get("use_rslora") or False, settings.get("target_parameters") or []
    if type(rslora) is not bool:
        raise HuggingFaceError(f"{folder / CONFIG}: use_rslora = {rslora!r}: must be true or false.")
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise HuggingFaceError(f"{folder / CONFIG}: target_parameters = {parameters!r}: must be a list of names.")
    config = schema.Lora(rank, alpha, rslora=rslora)
    if settings.get("lora_dropout"):
        notes.append(f"lora_dropout = {settings['lora_dropout']}: jaxtrain has none, which matters for training only")
    if bad_name := next((name for name, x in sorted(tensors.items()) if not np.isfinite(x.astype(np.float32)).all()), None):
        raise HuggingFaceError(f"{folder / TENSORS}: {bad_name} has values that are NaN or infinite. Fetch it again.")
    if bad_name := next((name for name in sorted(tensors) if ".linear_attn." in name), None):
        raise HuggingFaceError(f"{folder / TENSORS}: {bad_name}: gated delta nets have no adapters in jaxtrain. {MERGE}")
    multiples = {module: _rank_multiple(folder, config, settings, module, names) for module, names in fused.items()}
    known_entries = adapter_entries(model, rank, {module: n * rank for module, n in multiples.items()})
    adapted = {weight_of(name) for name, entry in known_entries.items() if entry.hf_names[0] in tensors}
    wanted = {name: entry for name, entry in known_entries.items() if weight_of(name) in adapted}
    experts, multiple = _read_expert_entries(folder, model, config, settings, tensors)
    wanted |= experts
    shapes = {name: x.shape for name, x in tensors.items()}
    match_tensors(
        wanted, shapes, f"{folder}: the adapter does not fit this model. Name the base that it was made for. Its tensors:"
    )
    arrays: dict[str, np.ndarray] = {}
    written: dict[str, np.ndarray] = {}
    for name, entry in wanted.items():
        x = entry.to_jax(
            [tensors[hf_name] for hf_name in entry.hf_names], np.dtype("float32"), tuple(slice(None) for _ in entry.shape)
        )
        if entry.spec.sections and len(entry.hf_names) == 1:
            written[entry.hf_names[0]] = entry.to_hf(x, out=written.get(entry.hf_names[0]))
        module = module_of(entry.hf_names[0])
        names, n = (IN_ORDER, multiple) if name in experts else (fused.get(module, ()), multiples.get(module, 1))
        if n > 1 and weight_of(name) in names:
            x = _narrow(folder, entry.hf_names[0], name, x, rank, names, _axis_of_ranks(name, name in experts))
        arrays[name] = x
    if extra := next((name for name, x in written.items() if not np.array_equal(x, tensors[name].astype(np.float32))), None):
        raise HuggingFaceError(f"{folder / TENSORS}: {extra} adapts outputs that have no adapters in jaxtrain. {MERGE}")
    for module in (module for module, n in multiples.items() if n > 1):  # an export has zeros for weights without adapters
        for weight in fused[module]:
            weight_names = [name for name in arrays if name in known_entries and weight_of(name) == weight]
            if not any(arrays[name].any() for name in weight_names if name.endswith(A)):
                adapted.discard(weight)
                arrays = {name: x for name, x in arrays.items() if name not in weight_names}
    if multiple == 1:
        notes += _drop_unused_half(arrays, experts)
    adapted |= {weight_of(name) for name in experts}
    targets = ",".join(name for name in EQUATIONS if name in adapted)
    none = bool(model.num_experts and adapted & {*FEED_FORWARD} and not experts)
    return dataclasses.replace(config, targets=targets, experts="none" if none else "each"), arrays, notes


def _parse_alpha(folder: Path, key: str, value: Any) -> float:
    """Return an alpha of adapter_config.json as a number above 0. Raises HuggingFaceError."""
    try:
        alpha = math.nan if isinstance(value, bool | str) else float(value)
    except (OverflowError, TypeError):
        alpha = math.nan
    if problems := schema.all_keys()["lora.alpha"].out_of_range(alpha):
        raise HuggingFaceError(f"{folder / CONFIG}: {key} = {value!r}: {problems[0]}.")
    return alpha


def _read_expert_entries(
    folder: Path, model: Model, config: schema.Lora, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> tuple[dict[str, Entry], int]:
    """Return the entries of experts' adapters in PEFT's files, and the rank of gate_up_proj as a multiple of the others'.

    Raises HuggingFaceError if rank_pattern or alpha_pattern are others than an export has.
    """
    modules = {name: e for name, e in module_entries(model, config.rank).items() if {*e.hf_names} & tensors.keys()}
    if modules:
        present = {weight_of(name) for name in modules}
        return {name: e for name, e in module_entries(model, config.rank).items() if weight_of(name) in present}, 1
    parameters = {name.rpartition(".")[2] for name in settings.get("target_parameters") or ()}
    names = [*(IN_ORDER if GATE_UP in parameters else ()), *(["down"] if DOWN in parameters else [])]
    if not model.num_experts:
        return {}, 1
    multiple = _rank_multiple(folder, config, settings, GATE_UP, IN_ORDER)
    return expert_entries(model, names, {GATE_UP: multiple * config.rank, DOWN: config.rank}), multiple


def _rank_multiple(folder: Path, config: schema.Lora, settings: Mapping[str, Any], module: str, names: Sequence[str]) -> int:
    """Return the rank of a module with the weights `names` as a multiple of the others': 1, or the number of weights.

    Raises HuggingFaceError if rank_pattern or alpha_pattern are others than an export has.
    """
    rank, alpha = ((settings.get(key) or {}).get(PATTERN + module) for key in READ_OF_MODULES)
    rank = config.rank if rank is None else rank
    alpha = config.alpha if alpha is None else _parse_alpha(folder, f"alpha_pattern of {module}", alpha)
    multiple = len(names) if rank == len(names) * config.rank else 1
    if (rank, alpha) == (multiple * config.rank, wide_alpha(config, multiple)):
        return multiple
    rule = (
        f"rank {rank!r} and alpha {alpha!r} of {module}: must be {config.rank} and {config.alpha:g}, as for the other weights"
    )
    all_of_them = (
        f"{len(names) * config.rank} and {wide_alpha(config, len(names)):g}, of separate adapters of {' and '.join(names)}"
    )
    raise HuggingFaceError(f"{folder / CONFIG}: {rule}, or {all_of_them}. {MERGE}")


def _narrow(folder: Path, tensor: str, name: str, x: np.ndarray, rank: int, names: Sequence[str], axis: int) -> np.ndarray:
    """Return the matrix of one of the weights `names` from PEFT's `tensor` of their module: the inverse of `pad_ranks`."""
    start = names.index(weight_of(name)) * rank
    selected = np.take(x, range(start, start + rank), axis)
    if name.endswith(B) and np.count_nonzero(x) != np.count_nonzero(selected):
        rule = f"in {tensor}, the outputs of {weight_of(name)} depend on ranks of another weight"
        raise HuggingFaceError(f"{folder / TENSORS}: {rule}, so these are no adapters of rank {rank}. {MERGE}")
    return selected


def _drop_unused_half(arrays: dict[str, np.ndarray], experts: dict[str, Entry]) -> list[str]:
    """Leave out the adapters of gate or up of gate_up_proj if their outputs are zero in all layers. Return notes on it.

    PEFT has the zeros of one half if only the other was trained.
    """
    used = {half: any(arrays[name].any() for name in experts if name.endswith(half + B)) for half in IN_ORDER}
    present = {weight_of(name) for name in experts}
    unused = [half for half in IN_ORDER if half in present and not used[half]]
    if len(unused) != 1 or not present >= {*IN_ORDER}:
        return []
    for name in [name for name in experts if weight_of(name) == unused[0]]:
        del arrays[name], experts[name]
    return [f"the experts' {unused[0]}: its half of {GATE_UP} is zero, and has no adapters here"]


def weight_of(adapter: str) -> str:
    """Return the name of the weight that an adapter matrix changes: wq for layers.0.attention.lora.wq_a."""
    return adapter.rpartition(".")[2].rpartition("_")[0]


# ---- The commands


def export_adapter(path: str, folder: Path, base: str = "", ema: bool = False) -> tuple[int, list[str], list[str]]:
    """Write the adapters of a checkpoint for PEFT, and the chat template of their training.

    Return (step, the tensors' names, notes on the adapters' form).

    Args:
        path: a checkpoint, or a run's folder.
        folder: the folder to write.
        base: the base model's name, as in `write_adapter`. "" or a run's folder: `base_name` finds the name.
        ema: write the averages of the adapters (train.ema_decay).

    Raises:
        CheckpointError, HuggingFaceError: the adapters cannot be exported, and nothing is written.
        ConfigError: there are no averages.
    """
    source = open_origin(path).choose(ema)
    source.announce()
    run = source.run()
    if not run.lora.rank:
        raise HuggingFaceError(f"{source.name} is of a run without adapters: lora.rank is 0.")
    if not base or (Path(base).is_dir() and not is_folder(base)):
        base = base_name(base or lora.base_path(source.meta))
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {name: a.update(sharding=sharding) for name, a in source.stored.items() if name.startswith(PREFIX)}
    adapters = {name: np.asarray(x) for name, x in source.read(wanted).items()}
    written = write_adapter(folder, adapters, run.model, run.lora, base)
    if template := source.text().template:
        write_atomic(folder / TEMPLATE, template)
    copied = run.lora.experts == "shared" and run.model.num_experts
    notes = [f"PEFT has no adapter that experts share: written {copied} times, once for each expert"] if copied else []
    if run.lora.base != "bf16":
        notes.append(f"in training the base was in {run.lora.base}: beside another one, their outputs differ by its rounding")
    return source.step, written, notes


def base_name(path: str) -> str:
    """Return the name by which PEFT finds the base of adapters: a name on the hub, or the path of a Hugging Face folder.

    Args:
        path: path of the base: a Hugging Face folder, or a step of a run that was imported from such a folder.

    Raises:
        CheckpointError: `path` does not exist, or has no weights.
        HuggingFaceError: the base is a run that jaxtrain trained, or the folder it was imported from is gone.
    """
    folder = Path(path)
    if not is_folder(path):
        try:
            meta = open_origin(path).meta
        except CheckpointError as error:
            raise lora.missing_base_error(path, error) from error
        folder = Path(meta["hugging_face"]["folder"]) if "hugging_face" in meta else folder
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):  # a folder of the hub's cache
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    if is_folder(folder):
        return str(folder.absolute())
    raise HuggingFaceError(
        to_run_sh(
            f"--base: is needed, because the base of these adapters, {path}, is no Hugging Face model that PEFT could load. "
            f"Fix: python -m jaxtrain hf export {path} --out=DIR, then --base=DIR; or --base=NAME of a model on the hub."
        )
    )


def adapter_text_format(folder: Path, base: TextFormat) -> TextFormat:
    """Return the text format of imported adapters: that of their base, and of the tokenizer's files in the adapters' folder."""
    if (folder / TOKENIZER).is_file():
        eos = model_eos(str(folder), load_tokenizer(str(folder)).id_of)
        base = dataclasses.replace(base, eos=tuple(dict.fromkeys([*base.eos, *eos])))
    name, template = tokenizer_template(str(folder))
    return dataclasses.replace(base, template=template, template_name=name) if template else base


def import_adapter(folder: Path, base: str, out: Path) -> tuple[RunConfig, list[str]]:
    """Write a checkpoint of adapters for `base`, like a LoRA run's checkpoint.

    Return the run's config and the notes of `read_adapter`.

    Args:
        folder: the folder with PEFT's adapter.
        base: a run's folder, a checkpoint, or a Hugging Face folder.
        out: the run's folder to make.

    Raises:
        CheckpointError, HuggingFaceError: the adapters cannot be imported, and nothing is written.
    """
    check_new(out)
    source = open_origin(base)
    if source.adapters:
        base_path = lora.base_path(source.meta)
        raise HuggingFaceError(f"--base = {base}: holds adapters, and no model. Fix: --base={base_path}, which is their base.")
    source.announce()
    run = source.run()
    settings, adapters, notes = read_adapter(folder, run.model)
    if not settings.targets:
        raise HuggingFaceError(
            f"{folder}: adapts none of {', '.join(run.model.adaptable(experts=True))}, which are all that jaxtrain can."
        )
    text = adapter_text_format(folder, source.text())
    path = source.path
    # Adapters are trained without the base's modules of multi-token prediction.
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, mtp_layers=0))
    run = dataclasses.replace(run, lora=settings, init=schema.Init(path), train=dataclasses.replace(run.train, freeze=""))
    definition, placement = place_model(run)
    wanted = {n: a for n, a in abstract_tensors(abstract_state(definition, placement)).items() if n.startswith(PREFIX)}
    base_tensors = {name: a for name, a in wanted.items() if not is_adapter(name)}
    new_adapters = {name: a for name, a in wanted.items() if is_adapter(name) and name not in adapters}
    if new_adapters:
        halves = sorted(name.removeprefix(PREFIX).replace(f".{MODULE}.", ".") for name in new_adapters if name.endswith(A))
        weights = [name.removesuffix(A) for name in halves]
        notes.append(f"no adapters in {folder.name}: {', '.join(weights)}; they begin with outputs of zero")
    for name, a in new_adapters.items():  # of feed-forward blocks, whose weights have one dimension of inputs
        init = uniform(a.shape[-2]) if name.endswith(A) else constant(0.0)
        adapters[name] = np.asarray(init(jax.random.key(zlib.crc32(name.encode())), a.shape, a.dtype))
    digest = base_digest(source, base_tensors, definition, placement)
    tensors = {name: jax.device_put(x, wanted[name].sharding) for name, x in adapters.items()}
    more = {
        "base": {"path": path, "digest": digest},
        "peft": {"folder": str(folder)},
        "text": text.record(),
        "positions": source.positions,
    }
    write_run_folder(out, to_dict(run), tensors, more)
    return run, notes
