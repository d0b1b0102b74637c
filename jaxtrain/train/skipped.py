"""Skipped steps (step/guard.py): their description, the bundle of the first one, and the rollback after several of them."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

from jaxtrain.checkpoint import digests
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import to_dict
from jaxtrain.step import state
from jaxtrain.step.batch import HostBatch
from jaxtrain.step.state import TrainState
from jaxtrain.train import position, replay
from jaxtrain.train.divergence import Diverged, SkippedStep, explain_divergence
from jaxtrain.train.initial_state import Restored, choose_start, continue_sources, restore_state
from jaxtrain.train.position import Position, Positioned
from jaxtrain.train.replay import ReplayError
from jaxtrain.train.saver import Saver
from jaxtrain.train.services import Services
from jaxtrain.train.setup import CompiledSteps, Setup
from jaxtrain.train.step_log import StepMetrics

ROLLBACKS = 3  # most rollbacks to one checkpoint. If steps are skipped after them too, the data is not the cause.
AGREE_S = 5400.0  # timeout of processes that wait for each other: one may read a checkpoint more slowly


def describe_skip(setup: Setup, metrics: StepMetrics, data_position: Position) -> SkippedStep:
    """Return a skipped step with its data. data_position: the position that the step's batch was read from."""
    batches = data_position.batches(metrics.step - 1)
    per_batch = setup.run.ramp.unit * setup.run.data.seq_len
    tokens = batches[0] * per_batch, (batches[-1] + 1) * per_batch
    command = f"python -m jaxtrain data seen --workdir={shlex.quote(str(setup.workdir))} --step={metrics.step}"
    command = to_run_sh(command) if hasattr(setup.data, "mixture") and not setup.data.synthetic else ""
    return SkippedStep(metrics.step, metrics.verdict, metrics.loss, metrics.grad_norm, tuple(batches), tokens, command)


def list_not_finite(current: TrainState) -> str:
    """Return the weights with values that are infinite or NaN, as text; "" if all are finite."""
    return digests.list_not_finite(state.digests_by_name(state.to_digests(replay.weights_alone(current))))


def keep_bundle(
    setup: Setup,
    compiled: CompiledSteps,
    current: TrainState,
    skip: SkippedStep,
    batch: HostBatch,
    data_position: Position,
    saver: Saver,
    services: Services,
) -> None:
    """Write the files to replay a skipped step, unless an earlier attempt wrote them. All processes call it.

    current: the state that the guard holds. batch: the rows of this process. data_position: where they were read.
    """
    folder = setup.workdir / "replay" / f"step-{skip.step}"
    if services.peers.gather("bundle", "there" if (folder / replay.BUNDLE).exists() else "", AGREE_S)[0]:
        return
    if services.peers.count > 1:  # each process has its own rows
        batch = Positioned(setup.data, data_position).batch(skip.step - 1)
    saver.finish()
    with services.phase("checkpoint", "save"):
        try:
            bundle_args = (setup.options_of(compiled.size), setup.launch.argv, services.peers)
            services.console.say(replay.write_bundle(folder, to_dict(compiled.program.run), current, skip, batch, *bundle_args))
        except ReplayError as error:
            services.console.warn(str(error))


def check_rollback(saver: Saver, reason: str, applied: int, weights: bool) -> None:
    """Raise Diverged if there is no checkpoint to roll back to. reason, applied, weights: as in `explain_divergence`."""
    if saver.checkpoints.latest({}) is None:
        reason += ". There is no checkpoint to roll back to"
        raise Diverged(explain_divergence(reason, -1, applied, weights, rollback=True))


def roll_back(setup: Setup, saver: Saver, services: Services, skips: Sequence[SkippedStep], reason: str) -> Restored:
    """Restore the newest checkpoint that is not damaged, even if the command has an older checkpoint.step.

    The position of the result is after the data of the skipped steps. All processes call it, after they have freed the state.

    Args:
      skips: the skipped steps since the last applied one.
      reason: why the run is rolled back, in words.

    Raises Diverged after ROLLBACKS rollbacks to the same step.
    """
    run, checkpoints, peers = setup.run, saver.checkpoints, services.peers
    user_run = dataclasses.replace(setup.user_run, checkpoint=dataclasses.replace(setup.user_run.checkpoint, step=-1))
    saver.snapshots.forget()
    restored = restore_state(user_run, setup.program, choose_start(user_run, checkpoints, setup.program), checkpoints, services)
    back = restored.start.step
    saver.newest, saver.not_finite = back, ""
    directory, tokens = checkpoints.directory, (skips[0].tokens[0], skips[-1].tokens[1])
    times = sum(item["back_to"] == back for item in position.read_skipped(directory))
    if times >= ROLLBACKS:
        raise Diverged(f"{reason}, after {times} rollbacks to step {back}: the data is not the only cause. Lower optimizer.lr.")
    entries: list[dict[str, Any]] = []
    if peers.process_index == 0:
        entries = position.add_skipped(directory, tokens, (skips[0].step, skips[-1].step), reason, back)
    # Process 0 sends the list, because other processes may read an older one from a network file system.
    entries, stop_reason = json.loads(peers.gather("rolled back", json.dumps([entries, peers.stop_reason]), AGREE_S)[0])
    tokens_read = checkpoints.meta(back)["data"]["tokens"]
    data_position = position.find_position(directory, back, tokens_read, run.ramp, run.data.seq_len, entries)
    start = dataclasses.replace(restored.start, position=data_position)
    if stop_reason:  # the agreed last step is later than the step of the rollback
        peers.stop_here(stop_reason)
    data = skips[0].data + (f" to {skips[-1].data}" if len(skips) > 1 else "")
    services.console.warn(f"{reason}: rolling back to step {back}, and skipping {data}")
    continue_sources(run.train, start, setup.data, services.console.say)
    services.writers.rewind(back)
    return dataclasses.replace(restored, start=start)
