"""Adapters out of a run and into a checkpoint, in PEFT's format (peft.py)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config, lora
from jaxtrain.checkpoint import locate
from jaxtrain.config import RunConfig
from jaxtrain.hf.importing import save
from jaxtrain.hf.model import abstract_of, placed, run_at
from jaxtrain.hf.names import PREFIX
from jaxtrain.hf.origin import open_origin
from jaxtrain.hf.peft import PeftError, from_peft, read, write
from jaxtrain.models import FAMILIES, family
from jaxtrain.models.hugging_face import HfTensor
from jaxtrain.models.lora import EQUATIONS, is_adapter
from jaxtrain.models.module import names, part
from jaxtrain.train.state import TrainState, abstract_tensors, from_tensors


def export(path: str, folder: Path, base: str = "") -> tuple[int, list[str]]:
    """Writes the adapters of a run (its newest checkpoint), or of one checkpoint, for PEFT; returns the step and the names.

    base: see `write`; "": the checkpoint that the adapters stand beside. Raises PeftError, CheckpointError, and ConfigError
    where the stored config is not one of this version.
    """
    checkpoints, step = locate(path)
    meta = checkpoints.meta(step)
    run, problems = config.resolve(meta["config"])
    if problems:
        raise config.ConfigError(problems)
    if not run.lora.rank:
        raise PeftError(f"step {step} of {checkpoints.directory} is of a run without adapters: lora.rank is 0.")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    stored = {name: a for name, a in checkpoints.stored(step).items() if name.startswith(PREFIX) and is_adapter(name)}
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for name, a in stored.items()}
    found = checkpoints.restore(step, wanted, subset=True)
    adapters = {name.removeprefix(PREFIX): np.asarray(x) for name, x in found.items()}
    return step, write(folder, adapters, names_of(run), alpha=run.lora.alpha, base=base or lora.base_path(meta))


def names_of(run: RunConfig) -> Mapping[str, HfTensor]:
    """Raises PeftError for a model that is not one of jaxtrain's families."""
    if run.model.family not in FAMILIES:
        raise PeftError(f"model.family = {run.model.family!r}: only jaxtrain's families have Hugging Face names.")
    return family(run.model.family).NAMES


def import_adapter(folder: Path, base: str, out: Path) -> tuple[RunConfig, tuple[str, ...]]:
    """Writes a checkpoint of adapters beside `base`, as a run with lora.rank does; returns its config and what is to be noted.

    base: a run's folder, a checkpoint, or a Hugging Face folder. Raises PeftError, CheckpointError or HuggingFaceError, before
    anything is written.
    """
    if out.exists() and any(out.iterdir()):
        raise PeftError(f"{out}: is there already, and not empty. Name another --out, or remove it.")
    run, _ = run_at(base)
    settings, theirs = read(folder, names_of(run))
    if not settings.targets:
        raise PeftError(f"{folder}: adapts none of {', '.join(EQUATIONS)}, which are all that jaxtrain can.")
    path = open_origin(base).path
    lora_config = config.Lora(settings.rank, settings.alpha, ",".join(settings.targets))
    run = dataclasses.replace(run, lora=lora_config, init=config.Init(path), train=dataclasses.replace(run.train, freeze=""))
    definition, placement = placed(run)
    abstract = abstract_of(definition, placement)
    shapes = {name: a for name, a in abstract_tensors(abstract).items() if name.startswith(PREFIX)}
    adapters = {name: a for name, a in shapes.items() if is_adapter(name)}
    found = from_peft(theirs, names_of(run), {name.removeprefix(PREFIX): a.shape for name, a in adapters.items()})
    beside = lora.restore_base(path, {name: a for name, a in shapes.items() if name not in adapters})
    tensors = {name: jax.device_put(found[name.removeprefix(PREFIX)], a.sharding) for name, a in adapters.items()}
    kept = {name: jnp.copy(x) for name, x in tensors.items()}
    fresh = TrainState(jnp.zeros((), jnp.int32), {}, ())
    params = from_tensors(abstract, tensors | beside, fresh).params
    digest = lora.digest(part(params, jax.tree.map(lambda name: not is_adapter(name), names(params))))
    save(out, run, kept, {"base": {"path": path, "digest": digest}, "peft": {"folder": str(folder)}})
    return run, settings.notes
