"""Export and import of adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names the two matrices of a linear layer `base_model.model.{layer}.lora_A.weight`, (rank, inputs), and `.lora_B.weight`,
(outputs, rank). The names of layers, and which axes of a weight are its inputs, follow from the family's table of tensors.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import schema
from jaxtrain.config.commands import spelled
from jaxtrain.config.schema import Model, RunConfig, to_dict
from jaxtrain.data.chat_template import own_template
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenizer import load_tokenizer, model_eos
from jaxtrain.hf import lora
from jaxtrain.hf.folder import is_folder
from jaxtrain.hf.frozen_base import base_digest
from jaxtrain.hf.importing import check_new, open_origin, save
from jaxtrain.hf.model import abstract_of, placed
from jaxtrain.hf.names import PREFIX, Entry, entries, flat, grouped, match
from jaxtrain.hf.tensor_files import read_object
from jaxtrain.metrics.files import write_atomic
from jaxtrain.models.hf_tensors import HfTensor
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import EQUATIONS, A, B, adapter_of
from jaxtrain.step.state import abstract_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer.json"
MODEL, A_NAME, B_NAME = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Keys of adapter_config.json without effect on the adapters' output.
WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size"),
    *("revision", "target_modules", "exclude_modules", "task_type", "ensure_weight_tying", "eva_config"),
)
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "init_lora_weights")
INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # other values of init_lora_weights change the base, too
OFF = (None, False, "none", {}, [])  # the values of all other keys that are accepted


def adapter_entries(model: Model, rank: int) -> dict[str, Entry]:
    """Return jaxtrain's name -> entry of each adapter matrix. `Entry.theirs` has the matrix's name in PEFT.

    The weights of EQUATIONS have adapters (models/lora.py), except the weights of experts.
    """
    out: dict[str, Entry] = {}
    for weight in entries(model).values():
        if weight.ours.rpartition(".")[2] not in EQUATIONS or weight.how.each_expert:
            continue
        outputs, inputs = (" ".join(axes) for axes in grouped(weight.how.theirs))
        ours = [" ".join(c for c in flat(weight.how.ours) if c in axes) for axes in (outputs, inputs)]
        layer, sizes = MODEL + weight.theirs[0].removesuffix(".weight"), {**weight.sizes, "R": rank}
        a = HfTensor(layer + A_NAME, f"{ours[1]} R", f"R ({inputs})")
        b = HfTensor(layer + B_NAME, f"R {ours[0]}", f"({outputs}) R", interleaved=weight.how.interleaved)
        for half, how in ((A, a), (B, b)):
            name = adapter_of(weight.ours, half)
            out[name] = Entry(name, (how.name,), how, sizes)
    return out


def write(folder: Path, adapters: Mapping[str, np.ndarray], model: Model, how: schema.Lora, base: str) -> list[str]:
    """Write an adapter for PEFT and return the names of its tensors.

    Args:
        folder: the folder to write.
        adapters: all adapter matrices of the model, by jaxtrain's names.
        model: the config of the base model.
        how: the settings with rank and alpha.
        base: base_model_name_or_path in adapter_config.json.

    Raises:
        HuggingFaceError: the folder has an adapter already.
    """
    if (folder / CONFIG).exists() or (folder / TENSORS).exists():
        raise HuggingFaceError(f"{folder} holds an adapter already. Name another folder.")
    found = adapter_entries(model, how.rank)
    tensors = {found[name].theirs[0]: found[name].to_theirs(np.asarray(x, np.float32)) for name, x in adapters.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": how.rank,
        "lora_alpha": int(how.alpha) if how.alpha == int(how.alpha) else how.alpha,
        "target_modules": sorted({name.removesuffix(A_NAME).rpartition(".")[2] for name in tensors if name.endswith(A_NAME)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    write_atomic(folder / TENSORS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    return sorted(tensors)


def read(folder: Path, model: Model) -> tuple[schema.Lora, dict[str, np.ndarray], list[str]]:
    """Return (settings, float32 arrays by jaxtrain's names, notes on converted or ignored settings) of PEFT's adapter.

    Raises:
        HuggingFaceError: the folder has no adapter, or the adapter has settings or tensors that jaxtrain does not support.
    """
    if not (folder / CONFIG).is_file():
        raise HuggingFaceError(f"{folder} holds no adapter of PEFT: it has no {CONFIG}. Name the adapter's folder.")
    found = read_object(folder / CONFIG)
    try:
        tensors = safetensors.numpy.load_file(folder / TENSORS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise HuggingFaceError(f"{folder / TENSORS}: cannot be read ({error}). Fetch it again.") from error
    kind = found.get("peft_type")
    if kind != "LORA":
        raise HuggingFaceError(f"{folder / CONFIG}: peft_type is {kind!r}; LORA can be read, and nothing else.")
    unknown = [f"{k} = {value!r}" for k, value in found.items() if k not in (*WITHOUT_EFFECT, *READ) and value not in OFF]
    if found.get("init_lora_weights", True) not in INITIAL:
        unknown.append(f"init_lora_weights = {found['init_lora_weights']!r}")
    if unknown:
        rule = f"{'; '.join(unknown)}: jaxtrain's adapters have nothing of the kind"
        fix = "Merge the adapter into its base with PEFT (merge_and_unload, save_pretrained), and train adapters of that model."
        raise HuggingFaceError(f"{folder / CONFIG}: {rule}. {fix}")
    rank, alpha, notes = found.get("r"), found.get("lora_alpha"), []
    if type(rank) is not int or rank < 1:
        raise HuggingFaceError(f"{folder / CONFIG}: r = {rank!r}: must be a whole number above 0.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise HuggingFaceError(f"{folder / CONFIG}: lora_alpha = {alpha!r}: must be a number above 0.")
    alpha = float(alpha)
    if wrong := schema.declared()["lora.alpha"].out_of_range(alpha):
        raise HuggingFaceError(f"{folder / CONFIG}: lora_alpha = {alpha!r}: {wrong[0]}.")
    if found.get("use_rslora"):
        notes.append(f"use_rslora: alpha / sqrt(rank) is read as alpha = {alpha * math.sqrt(rank):g}")
        alpha *= math.sqrt(rank)
    if found.get("lora_dropout"):
        notes.append(f"lora_dropout = {found['lora_dropout']}: jaxtrain has none, which matters for training only")
    expert = next((name for name in sorted(tensors) if ".experts." in name), None)
    if expert:
        raise HuggingFaceError(
            f"{folder / TENSORS}: {expert} adapts experts, which have no adapters in jaxtrain. Train an adapter of attention "
            "alone (target_modules: q_proj, k_proj, v_proj, o_proj)."
        )
    if wrong := next((name for name, x in sorted(tensors.items()) if not np.isfinite(x.astype(np.float32)).all()), None):
        raise HuggingFaceError(f"{folder / TENSORS}: {wrong} has values that are NaN or infinite. Fetch it again.")
    known = adapter_entries(model, rank)
    adapted = {weight_of(name) for name, e in known.items() if e.theirs[0] in tensors}
    wanted = {name: e for name, e in known.items() if weight_of(name) in adapted}
    shapes = {name: x.shape for name, x in tensors.items()}
    match(wanted, shapes, f"{folder}: the adapter does not fit this model. Name the base that it was made for. Its tensors:")
    every = {name: tuple(slice(None) for _ in e.shape) for name, e in wanted.items()}
    ours = {name: e.to_ours([tensors[e.theirs[0]]], np.dtype("float32"), every[name]) for name, e in wanted.items()}
    targets = ",".join(name for name in EQUATIONS if name in adapted)
    return schema.Lora(rank, alpha, targets), ours, notes


def weight_of(adapter: str) -> str:
    """Return the name of the weight that an adapter matrix changes: wq for layers.0.attention.lora.wq_a."""
    return adapter.rpartition(".")[2].rpartition("_")[0]


# ---- The commands


def export_adapter(path: str, folder: Path, base: str = "", ema: bool = False) -> tuple[int, list[str]]:
    """Write the adapters of a checkpoint for PEFT, and the chat template of their training. Return (step, the tensors' names).

    Args:
        path: a checkpoint, or a run's folder.
        folder: the folder to write.
        base: the base model's name, as in `write`. "" or a run's folder: `base_name` finds the name.
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
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {name: a.update(sharding=here) for name, a in source.stored.items() if name.startswith(PREFIX)}
    adapters = {name: np.asarray(x) for name, x in source.read(wanted).items()}
    written = write(folder, adapters, run.model, run.lora, base)
    if template := source.text().template:
        write_atomic(folder / TEMPLATE, template)
    return source.step, written


def base_name(path: str) -> str:
    """Return the name by which PEFT finds the base of adapters: a name on the hub, or the path of a Hugging Face folder.

    Args:
        path: path of the base: a Hugging Face folder, or a step of a run that was imported from such a folder.

    Raises:
        CheckpointError: `path` does not exist, or has no weights.
        HuggingFaceError: the base is a run that jaxtrain trained, or the folder it was imported from is gone.
    """
    found = Path(path)
    if not is_folder(path):
        try:
            meta = open_origin(path).meta
        except CheckpointError as error:
            raise lora.gone(path, error) from error
        found = Path(meta["hugging_face"]["folder"]) if "hugging_face" in meta else found
    if found.parent.name == "snapshots" and found.parent.parent.name.startswith("models--"):  # a folder of the hub's cache
        return found.parent.parent.name.removeprefix("models--").replace("--", "/")
    if is_folder(found):
        return str(found.absolute())
    raise HuggingFaceError(
        spelled(
            f"--base: is needed, because the base of these adapters, {path}, is no Hugging Face model that PEFT could load. "
            f"Fix: python -m jaxtrain hf export {path} --out=DIR, then --base=DIR; or --base=NAME of a model on the hub."
        )
    )


def text_of(folder: Path, base: TextFormat) -> TextFormat:
    """Return the text format of imported adapters: that of their base, and of the tokenizer's files in the adapters' folder."""
    if (folder / TOKENIZER).is_file():
        eos = model_eos(str(folder), load_tokenizer(str(folder)).id_of)
        base = dataclasses.replace(base, eos=tuple(dict.fromkeys([*base.eos, *eos])))
    name, template = own_template(str(folder))
    return dataclasses.replace(base, template=template, template_name=name) if template else base


def import_adapter(folder: Path, base: str, out: Path) -> tuple[RunConfig, list[str]]:
    """Write a checkpoint of adapters for `base`, like a LoRA run's checkpoint. Return the run's config and the notes of `read`.

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
        own = lora.base_path(source.meta)
        raise HuggingFaceError(f"--base = {base}: holds adapters, and no model. Fix: --base={own}, which is their base.")
    source.announce()
    run = source.run()
    settings, found, notes = read(folder, run.model)
    if not settings.targets:
        raise HuggingFaceError(f"{folder}: adapts none of {', '.join(EQUATIONS)}, which are all that jaxtrain can.")
    text = text_of(folder, source.text())
    path = source.path
    # Adapters are trained without the base's modules of multi-token prediction.
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, mtp_layers=0))
    run = dataclasses.replace(run, lora=settings, init=schema.Init(path), train=dataclasses.replace(run.train, freeze=""))
    definition, placement = placed(run)
    wanted = {n: a for n, a in abstract_tensors(abstract_of(definition, placement)).items() if n.startswith(PREFIX)}
    of_base = {name: a for name, a in wanted.items() if name not in found}
    digest = base_digest(source, of_base, definition, placement)
    tensors = {name: jax.device_put(x, wanted[name].sharding) for name, x in found.items()}
    more = {
        "base": {"path": path, "digest": digest},
        "peft": {"folder": str(folder)},
        "text": text.record(),
        "positions": source.positions,
    }
    save(out, to_dict(run), tensors, more)
    return run, notes
