"""The start of a run: the user's own modules, the checkpoint to resume from, the data, and the first state.

`import_named_parts`, `drop_used_step`, `open_data` and `choose_start` run before any file is written and any array is
allocated. They raise ConfigError or CheckpointError for a run that should not start. A rollback calls `choose_start` again.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import models
from jaxtrain.checkpoint import CheckpointError, Checkpoints, Damaged, arrays
from jaxtrain.config import own_parts, schema, stores
from jaxtrain.config.schema import ConfigError, Optimizer, RunConfig, Train, own_settings
from jaxtrain.config.shapes import MTP
from jaxtrain.data import opening, tokenizer
from jaxtrain.data.batches import open_source
from jaxtrain.hf import lora
from jaxtrain.hf.frozen_base import read_base, restore_base, weights_to_read
from jaxtrain.hf.importing import NotFiniteWeights, Origin, open_origin
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.optim.optimizer import make_schedule
from jaxtrain.runtime.timelimit import launch_time
from jaxtrain.step import resume, state
from jaxtrain.step.program import Program
from jaxtrain.train import position
from jaxtrain.train.position import Position
from jaxtrain.train.services import Services


@dataclasses.dataclass(frozen=True)
class Start:
    """The step, data position and checkpoint that an attempt begins from."""

    step: int  # 0, or the checkpoint to resume from
    resumed: bool
    cast: bool  # stored tensors are converted to this run's dtypes
    position: Position  # the data of each step
    notes: tuple[str, ...]  # changes to the config since the checkpoint
    data: Mapping[str, Any]  # the checkpoint's facts about the data it was trained on; {} for a new run
    base: str = ""  # the checkpoint of the base of this run's adapters; "": the run has no adapters
    adapters: str = ""  # the checkpoint of the adapters that the run began with; "": it began with new ones, or has none
    damaged: Mapping[int, str] = types.MappingProxyType({})  # newer steps that cannot be restored, with the reason


RATE_APART = 0.1  # part of a learning rate: larger changes on resume are told


class BadInit(ValueError):
    """The weights of init.from are damaged or not finite, as another attempt would find. on_all_processes: all find it."""

    def __init__(self, message: str, on_all_processes: bool):
        super().__init__(message)
        self.on_all_processes = on_all_processes


def import_named_parts(run: RunConfig) -> None:
    """Import the modules of all `package.module:name` values. Raise ConfigError if there is no such module or name.

    These checks are not in `validate`: a user's module may import jax, and XLA_CLIENT_MEM_FRACTION must be set before that.
    """
    problems = []
    names = [(key, value) for key, value in run.flat.items() if key != "data.eval_source"]
    names += [("data.eval_source", source) for source in opening.parse_sets(run.data.eval_source)[0].values()]
    for key, value in names:
        if key not in ("model.family", "loss.name", "optimizer.name", "data.source", "data.eval_source"):
            continue
        if key.startswith("data.") and not opening.is_custom(value):
            continue  # the value is a path that contains a colon
        if ":" in value:
            try:
                own_parts.load_part(key, value)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)


def drop_used_step(run: RunConfig, checkpoints: Checkpoints) -> RunConfig:
    """Return the run without `checkpoint.step`, if an earlier attempt of this launch has resumed from that step.

    run.sh repeats the same command after a crash. A later step that was saved since run.sh started is the sign that an attempt
    has resumed from `checkpoint.step`.
    """
    launch, step = launch_time(), run.checkpoint.step
    if launch is None or step < 0:
        return run
    for later in (s for s in checkpoints.steps() if s > step):
        with contextlib.suppress(CheckpointError):
            if checkpoints.meta(later)["time_unix"] >= launch:
                return dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, step=-1))
    return run


def choose_start(
    run: RunConfig, checkpoints: Checkpoints, program: Program, damaged: Mapping[int, str] = types.MappingProxyType({})
) -> Start:
    """Return the `Start` of an attempt: the checkpoint to resume from, or step 0 of a new run.

    The checkpoint is `checkpoint.step` if given, else the newest one that can be read and is not in `damaged`. Raises
    ConfigError if the config has a forbidden change since the checkpoint. Raises CheckpointError if there are checkpoints and
    none can be read: a run never overwrites existing checkpoints.

    damaged: step -> reason why its checkpoint cannot be restored.
    """
    reasons = dict(damaged)
    # If the user names a step, the newest checkpoint is not read: it may be damaged.
    step = checkpoints.latest(reasons) if run.checkpoint.step < 0 else run.checkpoint.step
    if step is None:
        beginning = position.find_position(checkpoints.directory, 0, 0, run.ramp, run.data.seq_len)
        if run.init.from_ and program.adapters:
            return begin_adapters(program, beginning)
        if run.init.from_:
            return Start(0, False, False, beginning, check_init_source(program, run.init.from_), {})
        if program.adapters:
            rule = "adapters need the weights of a trained model, and init.from names none"
            raise ConfigError([schema.Problem("init.from", "", rule, stores.NAME_WEIGHTS)])
        return Start(0, False, False, beginning, (), {})
    meta = checkpoints.meta(step)
    if imported := resume.check_trained(meta, str(checkpoints.directory)):
        raise ConfigError(imported)
    same = tokenizer.tokenizer_hashes(meta, run.data.tokenizer)
    notes, problems = resume.compare_configs(*_with_meshes(meta, run, program), run.checkpoint.allow_change, same)
    if step > run.train.steps:
        problems.append(
            schema.Problem(
                "train.steps", run.train.steps, f"the checkpoint is at step {step} already", "Set more, or another --workdir"
            )
        )
    if problems:
        raise ConfigError(problems)
    old_run = schema.resolve(meta["config"])[0]
    notes += changed_rate((old_run.optimizer, old_run.train.steps), (run.optimizer, run.train.steps), step)
    data_position = position.find_position(checkpoints.directory, step, meta["data"]["tokens"], run.ramp, run.data.seq_len)
    # Scales of norms are float32 with weights in bfloat16; older checkpoints have them in bfloat16 too.
    cast = meta["config"]["dtypes"] != dataclasses.asdict(run.dtypes) or run.dtypes.params == "bf16"
    base = adapters = ""
    if program.adapters:
        _, base = check_base(program, lora.base_on_resume(meta, run.init))
        adapters = meta["base"].get("adapters", "")
    return Start(step, True, cast, data_position, tuple(notes), meta["data"], base, adapters, reasons)


def changed_rate(was: tuple[Optimizer, int], now: tuple[Optimizer, int], done: int) -> list[str]:
    """Return a note if the learning rate after `done` steps is not what it would have been without the changes of the config.

    Differences of up to RATE_APART are left out, and so is a run without a further step. was, now: (section optimizer,
    train.steps).
    """
    if done >= now[1] or was == now:
        return []
    before, after = (float(jnp.asarray(make_schedule(*each)(done))) for each in (was, now))
    if abs(after - before) <= RATE_APART * before:
        return []
    times = f", {after / before:.3g} times" if before and after else ""
    return [f"the learning rate of step {done + 1}: {before:.3g} -> {after:.3g}{times}"]


def begin_adapters(program: Program, beginning: Position) -> Start:
    """Return the `Start` of a new run of adapters: from a base, or from adapters, which are trained further.

    Raises ConfigError if the adapters in init.from have other settings than those of the config.
    """
    run = program.run
    source = open_origin(run.init.from_)
    if not source.adapters:
        if run.init.base:
            rule = f"has no effect: {source.name} is a base itself, and holds no adapters"
            raise ConfigError([schema.Problem("init.base", run.init.base, rule, "Leave it out.")])
        notes, base = check_base(program, run.init.from_)
        return Start(0, False, False, beginning, notes, {}, base)
    if lora.comparable_settings(source.run().lora) != lora.comparable_settings(run.lora):
        rule = f"{source.name} holds adapters with other settings"
        raise ConfigError([schema.Problem("init.from", run.init.from_, rule, f"Set {lora.as_options(source)}.")])
    notes, base = check_base(program, run.init.base or lora.base_path(source.meta))
    if (before := source.run().lora.base) != run.lora.base:
        notes += (f"lora.base: {before!r} in init.from, {run.lora.base!r} here",)
    return Start(0, False, False, beginning, notes, {}, base, source.path)


def check_base(program: Program, path: str) -> tuple[tuple[str, ...], str]:
    """Return (notes of `check_init_source`, path of the weights) of the base of adapters. Raises CheckpointError too."""
    try:
        return check_init_source(program, path), open_origin(path).path
    except (CheckpointError, HuggingFaceError) as error:
        raise lora.missing_base_error(path, error) from error


def _with_meshes(meta: Mapping[str, Any], run: RunConfig, program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (config of a checkpoint, config of this run), to be compared.

    The tokens that a capacity factor drops depend on the sizes of the mesh. So with a capacity factor, the actual mesh sizes
    replace the sizes in the configs, which may be -1 (all remaining devices).
    """
    before, now = dict(meta["config"]), schema.to_dict(run)
    if run.model.num_experts and run.moe.capacity_factor:
        for tree, shape in ((before, meta["mesh"]), (now, program.placement.mesh.shape)):
            tree["mesh"] = {axis: shape.get(axis, 1) for axis in tree["mesh"]}
    return before, now


def check_init_source(program: Program, path: str) -> tuple[str, ...]:
    """Return a note on each setting of the sections model and own that differs between the weights in `path` and this run.

    Raises ConfigError if the weights do not fit this run: a tensor is missing, has another shape or is not in this model; their
    model family computes another function; they are only adapters; or init.what needs an optimizer state, and there is none.
    """
    run = program.run
    source, key = open_origin(path), "init.base" if path == run.init.base else "init.from"
    source_model, run_model = source.meta["config"]["model"], schema.to_dict(run)["model"]
    settings = source.meta["config"].get(schema.OWN, {})
    problems = []
    source_family, family = source_model.get("family", ""), run.model.family
    # The modules of other families may not be here.
    source_structure = models.family(source_family).STRUCTURE if source_family in models.FAMILIES else None
    if source_structure and getattr(models.family(family), "STRUCTURE", source_structure) != source_structure:
        # Settings of another function with tensors of the same names and shapes.
        rule = f"its weights are those of model.family = {source_family}, which computes another function: {source_structure}"
        problems.append(schema.Problem("model.family", family, rule, f"Set model.family to {source_family}."))
    if run.init.what != "weights" and (source.folder or {"hugging_face", "peft", "averaged"} & source.meta.keys()):
        rule = f"{source.name} holds no optimizer's state"
        problems.append(schema.Problem("init.what", run.init.what, rule, "Set weights."))
    elif run.init.what != "weights":
        was, now = schema.resolve(source.meta["config"])[0].flat, run.flat
        if was["optimizer.name"] != now["optimizer.name"]:
            rule = f"{source.name} has the state of optimizer.name={was['optimizer.name']}"
            problems.append(schema.Problem("init.what", run.init.what, rule, "Set weights."))
        elif blocks := [name for name in ("dtypes.m", "dtypes.v") if (was[name] == "int8") != (now[name] == "int8")]:
            rule = f"moments in 8-bit blocks are not converted, and {source.name} has other {' and '.join(blocks)}"
            remedy = f"Set {' '.join(f'{name}={was[name]}' for name in blocks)}, or init.what=weights."
            problems.append(schema.Problem("init.what", run.init.what, rule, remedy))
    if source.adapters:
        rule = f"{source.name} holds only adapters"
        remedy = (
            f"To train them further, set {lora.as_options(source)}; or merge them into their base (hf export), and name that."
        )
        if program.adapters:
            remedy = "Name the base of the adapters."
        problems.append(schema.Problem(key, path, rule, remedy))
    if problems:
        raise ConfigError(problems)
    stored = source.stored
    wanted = init_tensors(program, source)
    differences = arrays.differences(stored, wanted, subset=True, cast=True)
    unused = sorted(name for name in stored.keys() - wanted.keys() if name.startswith("params."))
    if not run.model.mtp_layers:  # a model may drop its modules of multi-token prediction: its logits do not depend on them
        unused = [name for name in unused if not name.startswith(f"params.{MTP}.")]
    differences += [f"{name}: in the source, not in this model" for name in unused]
    if differences:
        rule = f"{source.name} does not fit this model: {'; '.join(differences[:4])}"
        rule += f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
        label = f"its config.json (python -m jaxtrain hf config {path})" if source.folder else "that run (its config.json)"
        raise ConfigError([schema.Problem(key, path, rule, f"Give the model the sizes of {label}.")])
    return tuple(
        f"model.{name}: {source_model.get(name)!r} in {key}, {value!r} here"
        for name, value in run_model.items()
        if source_model.get(name) != value
    ) + tuple(
        f"own.{name}: {settings[name]!r} in {key}, {value!r} here"
        for name, value in run.own
        if settings.get(name, value) != value
    )


def init_tensors(program: Program, source: Origin) -> state.Tensors:
    """Return the tensors to read from init.from: weights without adapters, and optimizer state if init.what includes it."""
    if program.adapters:
        weights = weights_to_read(base_tensors(program), source, program.definition, program.placement)
        return {weight.name: weight.plain for weight in weights}
    kinds = ("params.", "optimizer.") if program.run.init.what == "weights+optimizer" else ("params.",)
    return {k: v for k, v in state.abstract_tensors(program.state).items() if k.startswith(kinds)}


def base_tensors(program: Program) -> state.Tensors:
    """Return the tensors of the frozen base of a run with adapters, as the state has them."""
    return {k: v for k, v in state.abstract_tensors(program.base_state(program.state)).items() if k.startswith("params.")}


def open_data(run: RunConfig) -> tuple[Any, dict[str, Any]]:
    """Return (training data, held-out data by name).

    A training batch has A x B rows, or with train.batch_ramp `Ramp.unit`. A held-out batch has B rows. The name of an unnamed
    held-out set is "". Without evaluation (eval.every_steps=0) there are no held-out sets.
    """
    folder = Path(run.paths.data).expanduser()
    options: dict[str, Any] = {"data_dir": folder, "user_settings": own_settings(run.own), "vocab_size": run.model.vocab_size}
    train = open_source(run.data, run.data.source, split="train", global_batch=run.ramp.unit, **options)
    if not run.eval.every_steps:
        return train, {}
    rows = run.train.global_batch // run.train.grad_accum
    return train, {
        name: open_source(run.data, source, split="validation", global_batch=rows, **options)
        for name, source in opening.parse_sets(run.data.eval_source)[0].items()
    }


def initial_state(
    program: Program, start: Start, checkpoints: Checkpoints, say: Callable[[str], None]
) -> tuple[state.TrainState, str]:
    """Return the first state: from the checkpoint of `start`, from init.from, or from the seed.

    Also return the digest of the base of adapters, "" without adapters. Two complete states are never in memory at once. Raises
    BadInit.
    """
    run, abstract, digest = program.run, program.state, ""
    bare_state = dataclasses.replace(abstract, ema=())
    if start.resumed:
        stored = checkpoints.tensor_specs(start.step)
        averaged = any(name.startswith(state.EMA) for name in stored)
        unused = averaged and not abstract.ema
        abstract = abstract if averaged else bare_state
        wanted = state.abstract_tensors(program.saved_state(abstract))
        tensors = checkpoints.restore(start.step, wanted, subset=unused, cast=start.cast)
        if start.base:
            base = restore_base(start.base, base_tensors(program), program.definition, program.placement)
            tensors, digest = tensors | base.tensors, base.digest
        words = "passing over damaged checkpoints, going on from step {step}:" if start.damaged else None
        message = checkpoints.set_aside(start.step, *([words] if words else []))
        if message:
            say(message)
        if unused:
            say(f"average of the weights: not restored from step {start.step}, because train.ema_decay = 0")
        restored = state.from_tensors(abstract, tensors)
        return restored if averaged else begin_average(program, restored, start.step, say), digest
    only = program.trained if program.adapters else None
    fresh = state.create_state(program.definition, program.tx, abstract, run.train.seed, program.trained, only)
    if not run.init.from_:
        return begin_average(program, fresh, 0, say), digest
    source = open_origin(start.base or run.init.from_)
    fresh = dataclasses.replace(fresh, ema=()) if program.adapters else state.without_params(fresh)
    weights_source = source
    try:
        if program.adapters:
            base = read_base(source, base_tensors(program), program.definition, program.placement)
            tensors, digest, report = base.tensors, base.digest, base.report(run.lora.base)
        else:
            tensors, report = source.read(init_tensors(program, source)), ""
        if start.adapters:
            weights_source = open_origin(start.adapters)
            adapters = {
                name: a
                for name, a in state.abstract_tensors(program.saved_state(abstract)).items()
                if name.startswith("params.")
            }
            tensors |= weights_source.read(adapters)
            say(f"adapters of {weights_source.name}, trained further")
    except (Damaged, HuggingFaceError) as error:
        raise BadInit(f"init.from = {run.init.from_!r}: {error}", isinstance(error, Damaged | NotFiniteWeights)) from error
    say(f"initial {run.init.what} from {source.name}; step and learning-rate schedule start at 0")
    if report:
        say(report)
    for note in source.notes:
        say(f"note: {note}")
    if weights_source.averaged:
        command = "hf export-adapter" if start.adapters else "hf export"
        say(f"note: {weights_source.name} has an average of its weights too, which is not used; {command} --ema writes it")
    return begin_average(program, state.from_tensors(bare_state, tensors, fresh), 0, say), digest


def begin_average(program: Program, current: state.TrainState, step: int, say: Callable[[str], None]) -> state.TrainState:
    """Return a state whose average begins at its weights, and report it; without train.ema_decay, the state as it is.

    step: the number of steps done.
    """
    train = program.run.train
    if not train.ema_decay:
        return current
    share = train.ema_decay ** (train.steps - step)
    at = f"begins at the weights of step {step}, which are still {share:.2%} of it after step {train.steps}"
    say(f"average of the weights, train.ema_decay = {train.ema_decay:g}: {at}")
    return current if current.ema else state.begin_average(current, program.state)


@dataclasses.dataclass(frozen=True)
class Restored:
    """The first state of an attempt, and the `Start` that the state was made from."""

    state: state.TrainState
    start: Start
    base: dict[str, str]  # the entry `base` of meta.json; {} without adapters


def restore_state(
    user_run: RunConfig, program: Program, start: Start, checkpoints: Checkpoints, services: Services
) -> Restored:
    """Make the first state and report it. If the digests of a checkpoint do not match, restore the next older checkpoint.

    Args:
      user_run: the config as the user gave it, to compare with the config of an older checkpoint.

    Raises Damaged if `checkpoint.step` names a damaged checkpoint, and CheckpointError if all checkpoints are damaged.
    """
    console = services.console
    while True:
        began = time.perf_counter()
        try:
            with services.phase(*(("checkpoint", "restore") if start.resumed else ("startup", "startup"))):
                current, digest = initial_state(program, start, checkpoints, console.say)
            break
        except Damaged as error:
            if not start.resumed or user_run.checkpoint.step >= 0:
                raise
            console.warn(str(error))
            start = choose_start(user_run, checkpoints, program, {**start.damaged, start.step: str(error)})
            console.say(f"resuming from step {start.step} in {checkpoints.directory}")
    base = _base_entry(start, digest, checkpoints)
    services.ledger.back(start.step)
    services.receipt.update(
        resumed_from_step=start.step if start.resumed else None,
        passed_over={str(step): reason for step, reason in start.damaged.items()},
    )
    services.receipt.record_start(_origin_entry(user_run.init.from_, start, current, checkpoints))
    if start.resumed:
        with services.ledger.during("restore"):
            jax.block_until_ready(current)
        # A checkpoint whose digests do not match has raised Damaged above.
        seconds = time.perf_counter() - began
        services.receipt.update(restore={"step": start.step, "seconds": seconds, "digests": "matched"})
    return Restored(current, start, base)


def _base_entry(start: Start, digest: str, checkpoints: Checkpoints) -> dict[str, str]:
    """Return the entry `base` of meta.json: path and digest of the adapters' base weights; {} for a run without adapters.

    `adapters` is the path of the adapters that the run began with, if any. Raises CheckpointError if this run's adapters were
    trained with another base.
    """
    if not start.base:
        return {}
    if start.resumed or start.adapters:
        meta = checkpoints.meta(start.step) if start.resumed else open_origin(start.adapters).meta
        lora.check_base_digest(meta, start.base, digest)
    return {"path": start.base, "digest": digest} | ({"adapters": start.adapters} if start.adapters else {})


def continue_sources(train: Train, start: Start, data: Any, say: Callable[[str], None]) -> None:
    """Set the mixture of data sources from `start.step` on, at the start of an attempt or after a rollback.

    Each source of a resumed run continues from its last position.
    """
    start_mixture = getattr(data, "start_mixture", None)  # a user's own source may lack it
    if start_mixture and start_mixture(start.data, start.step, start.position.begin * start.position.ramp.unit):
        say(f"data: mixture changed at step {start.step}: each source continues from its last position")
    if start_mixture:
        _report_mixture(train.steps, start, data, say)


def _report_mixture(steps: int, start: Start, data: Any, say: Callable[[str], None]) -> None:
    """Report the mixture's weights from `start.step` on, and the number of epochs of each source up to the last step."""
    labels, last = data.labels(), start.position.at(steps)
    if len(labels) == 1:
        return
    phase = data.mixture.phases[-1]
    weights = ", ".join(f"{label} {weight:.1%}" for label, weight in zip(labels, phase.weights, strict=True) if weight)
    say(f"data: mixture from step {phase.step}: {weights}")
    read = [f"{line['source']} {line['epoch']:.3g}" for line in data.sources_read(last) if line["epoch"] is not None]
    say(f"data: epochs of each source at step {steps}: {', '.join(read)}")


def _origin_entry(path: str, start: Start, current: state.TrainState, checkpoints: Checkpoints) -> dict[str, Any] | None:
    """Return folder, step and digest of the source of the first state, for the receipt; None if the source is the seed.

    path: init.from.
    """
    if start.resumed:
        meta = checkpoints.meta(start.step)
        digest = hashlib.sha256(json.dumps(meta["tensors"], sort_keys=True).encode()).hexdigest()
        return {"from": str(checkpoints.directory), "step": start.step, "saved_by": meta.get("receipt"), "digest": digest}
    if not path:
        return None
    digest = lora.digest(current.params, current.layers)
    return {"from": path, "step": None, "saved_by": None, "digest": digest}
