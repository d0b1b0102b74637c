"""Where a run begins: what its names refer to, which checkpoint it goes on from, its data and its first state.

All but `initial_state` runs before anything is written or allocated, and raises ConfigError or CheckpointError for a run that
should not start.
"""

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain import config, lora, position, resume, state, stored_form
from jaxtrain.checkpoint import CheckpointError, Checkpoints, arrays
from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data import pipeline
from jaxtrain.hf.origin import HuggingFace, open_origin, structure_problem
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.position import Position
from jaxtrain.step import Program
from jaxtrain.timelimit import launched


@dataclasses.dataclass(frozen=True)
class Start:
    """Where this run begins."""

    step: int  # 0, or the checkpoint to resume from
    resumed: bool
    cast: bool  # stored tensors are converted to this run's dtypes
    position: Position  # which data each of its steps reads
    notes: tuple[str, ...]
    data: Mapping[str, Any]  # what the checkpoint says of the data it was trained on so far; {} for a new run
    base: str = ""  # the checkpoint that this run's adapters stand beside; "": it has none
    passed: Mapping[int, str] = types.MappingProxyType({})  # newer steps that were not taken, with the reason


NAME_ONE = "Name a run's folder, one of its checkpoints/<step>, or a Hugging Face folder."


def check_own_names(run: RunConfig) -> None:
    """Imports what a user gave as package.module:name. Raises ConfigError where there is no such module or name.

    Not part of validate, which must not run a user's code: that may import jax before the memory budget is set.
    """
    problems = []
    names = [(key, value) for key, value in config.flatten(config.to_dict(run)) if key != "data.eval_source"]
    names += [("data.eval_source", source) for source in pipeline.parse_sets(run.data.eval_source)[0].values()]
    for key, value in names:
        if key not in ("model.family", "loss.name", "optimizer.name", "data.source", "data.eval_source"):
            continue
        if key.startswith("data.") and not pipeline.is_custom(value):
            continue  # a path may hold a colon
        name, given, attribute = value.partition(":")
        if not given:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            problems.append(config.Problem(key, value, f"{name} cannot be imported: {error}", "Is its folder on PYTHONPATH?"))
            continue
        if not hasattr(module, attribute):
            problems.append(config.Problem(key, value, f"{module.__file__} defines no {attribute}", "Mend the name."))
    if problems:
        raise ConfigError(problems)


def going_on(run: RunConfig, checkpoints: Checkpoints) -> RunConfig:
    """The run that an attempt goes on with: run.sh repeats the command, and a launch goes back to checkpoint.step only once.

    It has gone back where a later step was saved since then.
    """
    launch, step = launched(), run.checkpoint.step
    if launch is None or step < 0:
        return run
    for later in (s for s in checkpoints.steps() if s > step):
        with contextlib.suppress(CheckpointError):
            if checkpoints.meta(later)["time_unix"] >= launch:
                return dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, step=-1))
    return run


def decide_start(
    run: RunConfig, checkpoints: Checkpoints, program: Program, passed: Mapping[int, str] = types.MappingProxyType({})
) -> Start:
    """Resume what the workdir holds, or begin at 0.

    Order: checkpoint.step if given, else the newest checkpoint that can be read and is not in `passed`, else a new run. Raises
    ConfigError for a change that a resumed run may not make, CheckpointError where there are checkpoints and none is left: a
    run never starts over existing ones.
    """
    reasons = dict(passed)
    per_step = run.train.global_batch * run.data.seq_len
    # A step that was asked for is taken whatever state the newest one is in: it is the way out of a damaged one.
    at = checkpoints.latest(reasons) if run.checkpoint.step < 0 else run.checkpoint.step
    if at is None:
        beginning = position.position(checkpoints.directory, 0, 0, per_step)
        if run.init.from_:
            notes = check_source(run, program)
            base = open_origin(run.init.from_).path if program.adapters else ""
            return Start(0, False, False, beginning, notes, {}, base)
        if program.adapters:
            rule = "adapters stand beside the weights of a model that is trained already, and none is named"
            raise ConfigError([config.Problem("init.from", "", rule, NAME_ONE)])
        return Start(0, False, False, beginning, (), {})
    meta = checkpoints.meta(at)
    notes, problems = resume.compare(*_with_meshes(meta, run, program), run.checkpoint.allow_change)
    if at > run.train.steps:
        problems.append(
            config.Problem(
                "train.steps", run.train.steps, f"the checkpoint is at step {at} already", "Set more, or another --workdir"
            )
        )
    if problems:
        raise ConfigError(problems)
    place = position.position(checkpoints.directory, at, meta["data"]["tokens"], per_step)
    # Scales of norms are float32 beside weights in bfloat16; older checkpoints have them in bfloat16 too.
    cast = meta["config"]["dtypes"] != dataclasses.asdict(run.dtypes) or run.dtypes.params == "bf16"
    base = ""
    if program.adapters:
        named = lora.base_path(meta, run.init.from_)
        try:
            check_source(dataclasses.replace(run, init=config.Init(named)), program)
            base = open_origin(named).path
        except (CheckpointError, HuggingFaceError) as error:
            raise lora.gone(named, error) from error
    return Start(at, True, cast, place, tuple(notes), meta["data"], base, reasons)


def _with_meshes(meta: Mapping[str, Any], run: RunConfig, program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configs of a checkpoint and of this run, to be compared.

    Which tokens a capacity drops depends on the sizes of the mesh, so with one they stand in place of -1.
    """
    before, now = dict(meta["config"]), config.to_dict(run)
    if run.model.num_experts and run.experts.capacity:
        for tree, shape in ((before, meta["mesh"]), (now, program.placement.mesh.shape)):
            tree["mesh"] = {axis: shape.get(axis, 1) for axis in tree["mesh"]}
    return before, now


def check_source(run: RunConfig, program: Program) -> tuple[str, ...]:
    """Notes on how the model of init.from differs in what its tensors do not show, such as the rotary base.

    Raises ConfigError where its tensors do not fit: one that is missing or of another shape, and one of its weights that this
    model has no place for.
    """
    source = open_origin(run.init.from_)
    there, here = source.model, config.to_dict(run)["model"]
    problems = structure_problem("model.family", there.get("family", ""), run.model.family)
    if isinstance(source, HuggingFace) and run.init.what != "weights":
        rule = f"{source.name} is a Hugging Face folder, which holds no optimizer's state"
        problems.append(config.Problem("init.what", run.init.what, rule, "Set weights."))
    if source.adapters:
        rule = f"{source.name} holds adapters alone"
        remedy = "Name the model they stand beside, or one that they were merged into."
        problems.append(config.Problem("init.from", run.init.from_, rule, remedy))
    if problems:
        raise ConfigError(problems)
    stored = source.stored
    wanted = stored_form.in_stored_form(wanted_of_source(run, program), stored)
    wrong = arrays.differences(stored, wanted, subset=True, cast=True)
    unused = sorted(name for name in stored.keys() - wanted.keys() if name.startswith("params."))
    wrong += [f"{name}: in the source, not in this model" for name in unused]
    if wrong:
        rule = f"{source.name} does not fit this model: {'; '.join(wrong[:4])}"
        rule += f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        of = (
            "its config.json (`python -m jaxtrain.hf config`)"
            if isinstance(source, HuggingFace)
            else "that run (its config.json)"
        )
        raise ConfigError([config.Problem("init.from", run.init.from_, rule, f"Give the model the sizes of {of}.")])
    return tuple(
        f"model.{name}: {there.get(name)!r} in init.from, {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    )


def wanted_of_source(run: RunConfig, program: Program) -> state.Tensors:
    """The tensors that init.from gives: weights, and the optimizer's where init.what says so. No adapters."""
    kinds = ("params.", "optimizer.") if run.init.what == "weights+optimizer" else ("params.",)
    abstract = program.base(program.state) if program.adapters else program.state
    return {k: v for k, v in state.abstract_tensors(abstract).items() if k.startswith(kinds)}


def open_data(run: RunConfig) -> tuple[Any, dict[str, Any]]:
    """Training batches (A x B rows a step), and evaluation batches (B rows) of each held-out set by its name, "" where it has
    none; no sets where nothing is evaluated."""
    folder = Path(run.paths.data).expanduser()
    train = pipeline.open_source(run.data, run.data.source, split="train", global_batch=run.train.global_batch, data_dir=folder)
    if not run.eval.every_steps:
        return train, {}
    rows = run.train.global_batch // run.train.grad_accum
    return train, {
        name: pipeline.open_source(run.data, source, split="validation", global_batch=rows, data_dir=folder)
        for name, source in pipeline.parse_sets(run.data.eval_source)[0].items()
    }


def initial_state(
    run: RunConfig, program: Program, start: Start, checkpoints: Checkpoints, say: Callable[[str], None]
) -> state.TrainState:
    """From the checkpoint, from another run, or fresh. Two whole states are never held at once."""
    abstract = program.state
    if start.resumed:
        wanted = state.abstract_tensors(program.saved(abstract))
        read = stored_form.in_stored_form(wanted, checkpoints.stored(start.step)) if start.cast else wanted
        tensors = stored_form.converted(checkpoints.restore(start.step, read, cast=start.cast), wanted)
        if start.base:
            tensors |= lora.restore_base(start.base, wanted_of_source(run, program))
        words = "passing over damaged checkpoints, going on from step {step}:" if start.passed else None
        moved = checkpoints.set_aside(start.step, *([words] if words else []))
        if moved:
            say(moved)
        return state.from_tensors(abstract, tensors)
    only = program.trained if program.adapters else None
    fresh = state.create_state(program.definition, program.tx, abstract, run.train.seed, program.trained, only)
    if not run.init.from_:
        return fresh
    source = open_origin(start.base or run.init.from_)
    fresh = fresh if program.adapters else state.without_params(fresh)
    wanted = wanted_of_source(run, program)
    read = stored_form.in_stored_form(wanted, source.stored)
    tensors = stored_form.converted(source.read(read), wanted)
    say(f"initial {run.init.what} from {source.name}; step and learning-rate schedule start at 0")
    return state.from_tensors(abstract, tensors, fresh)


def base_of(program: Program, start: Start, current: state.TrainState, checkpoints: Checkpoints) -> dict[str, str]:
    """What the checkpoints of a run with adapters say of their base; {} of any other run.

    Raises CheckpointError where a resumed run's adapters were trained beside other weights.
    """
    if not start.base:
        return {}
    found = lora.digest(program.base(current).params, current.layers)
    if start.resumed:
        lora.check_same(checkpoints.meta(start.step), start.base, found)
    return {"path": start.base, "digest": found}
