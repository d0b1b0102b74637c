"""The loop over steps: a batch, the compiled step, the metrics of the step before, and the work that is due between steps.

The metrics of a step are read after the next step is dispatched. So the loop notices a skipped step (step/guard.py) when the
next step is already dispatched. The guard holds that next step, and the loop takes it again.
"""

import dataclasses
import json
import shlex
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.checkpoint import HELD_OUT, HELD_OUT_SETS, CheckpointError, digests
from jaxtrain.config.commands import spelled
from jaxtrain.config.durations import duration
from jaxtrain.config.schema import own_settings, to_dict
from jaxtrain.metrics.profiling import Tracer
from jaxtrain.step import compiler, guard, state, train_step
from jaxtrain.step.batch import HostBatch
from jaxtrain.train import position, replay
from jaxtrain.train.batch_feed import BatchFeed
from jaxtrain.train.corruption import Verifier
from jaxtrain.train.divergence import Bad, Bads, Diverged, explain
from jaxtrain.train.evaluate import HeldOut, SampleWriter
from jaxtrain.train.initial_state import Restored, continue_sources
from jaxtrain.train.position import Positioned
from jaxtrain.train.replay import ReplayError
from jaxtrain.train.saver import Saver
from jaxtrain.train.services import Services
from jaxtrain.train.setup import Compiled, Setup, expected_times, resized
from jaxtrain.train.step_log import PendingMetrics, StepLog, StepMetrics
from jaxtrain.train.timing import GarbageCollector, Patience, SlowSteps, StartTimes

ROLLBACKS = 3  # most rollbacks to one checkpoint. If steps are skipped after them too, the data is not the cause.
AGREE_S = 5400.0  # timeout of processes that wait for each other: one may compile a step that others found in their caches


class Loop:
    """Takes steps until the last step, or until a stop is requested. `current` is the newest state, after `done` steps."""

    def __init__(
        self,
        setup: Setup,
        sizes: dict[int, Compiled],
        restored: Restored,
        services: Services,
        saver: Saver,
        log: StepLog,
        start_times: StartTimes,
        restore: Callable[[], Restored],
    ):
        """Make the loop of an attempt.

        Args:
          sizes: the compiled steps, by the sequences of a step.
          restore: returns the state of the newest checkpoint that is not damaged, for a rollback.
        """
        self.setup, self.services, self.saver, self.log = setup, services, saver, log
        self.compiled, self._sizes = sizes[setup.run.ramp.size(restored.start.step)], sizes
        self.run, self.program, self.data = setup.run, setup.program, setup.data
        self.current: Any = restored.state
        self.start, self.base = restored.start, restored.base
        self.done = self.start.step
        self.loss: float | None = None  # of the newest step that was applied and whose metrics were read
        self.held_out = HeldOut(self.program, setup.held_out, services)
        self.samples = SampleWriter(setup, services)
        self.metrics = PendingMetrics()
        self._restore = restore
        self._start_times: StartTimes | None = start_times  # None once the first step is done
        self._tracer = Tracer(
            self.run.profile,
            setup.workdir,
            services.console.say,
            process_index=services.peers.process_index,
            asked=lambda: services.stop.traces,
            program=self.compiled.train,
            graphs=jax.local_devices()[0].platform == "gpu" and setup.options.options.get(compiler.GRAPHS) != "",
        )
        self._verifier = Verifier(self.program.state, self.program.placement.mesh, services.console.say)
        self._slow_steps = SlowSteps()
        self._first_step = Patience(lambda seconds: services.console.say(self._slow_start("step", seconds)))
        self._times = StepTimes()
        self._recent: list[tuple[int, float, float]] = []  # the last steps: number, loss, time read
        self._kept_bundle = self._save_due = False
        self._begin()

    def _begin(self) -> None:
        """Start to read batches after step `done`, and take the counts of skipped steps from the state's guard."""
        self._begin_size()
        counts = {name: int(self.current.guard[name]) for name in ("in_a_row", "skipped")}
        self.skips = Bads(**counts, most=self.run.train.max_skipped_steps)
        if int(self.current.guard["held"]):
            self._release_guard()

    def _begin_size(self) -> None:
        """Begin the steps after step `done` that have the same number of sequences, and start to read their batches.

        After a rollback to before the first step of this attempt, the train step of this size may have to be compiled.
        """
        services, ramp = self.services, self.run.ramp
        size, until = ramp.size(self.done), ramp.until(self.done)
        if ramp.parts:
            services.console.say(
                f"from step {self.done + 1} on: {size} sequences a step" + (f", until step {until}" if until else "")
            )
        if size not in self._sizes:
            with services.phase("compile", "compile"):
                self._sizes[size] = resized(self.setup, self.compiled, size, services)
                services.peers.gather("compiled", "", AGREE_S)  # no process may wait for another one within a step
        if self.log.watch is None:
            self.log.compare(expected_times(self.setup, self._sizes[size], services))
        if size != self.compiled.size:
            self.compiled, self._slow_steps, self._times = self._sizes[size], SlowSteps(), StepTimes()
            self._tracer.use(self.compiled.train)
        if ramp.parts:
            self.log.rates.resize(self.compiled.program.run.tokens_per_step)
        source, program = Positioned(self.data, self.start.position), self.compiled.program
        count = None if until is None else until - self.done
        self.feed = BatchFeed(source, self.done, program.batch, program.context, count)

    def train(self) -> None:
        """Take all steps, and begin to save after the last step, unless no step was applied.

        Raises Diverged, Corrupted, CheckpointError, and exceptions of data and devices.
        """
        services, steps = self.services, self.run.train.steps
        try:
            with GarbageCollector() as collector, services.watchdog.phase("step"):
                # From here on a stop request ends in a save. No process may exit alone after another has begun to step.
                services.peers.gather("settled", "", AGREE_S)
                services.ledger.base("step")
                services.stop.at_once = None
                self._do_missed_work()
                while self.done < steps and services.may_start(self.done + 1):
                    services.watchdog.beat(self.done + 1)
                    self._step()
                    self._times.collect_s = collector.step(self.done)
                self._read_metrics()
                if self.applied:
                    self.save()
        finally:
            self._first_step.end()
            # The newest metrics and not the state: a failed step has consumed the state.
            self._tracer.close(self.metrics.on_device)
            self.feed.close()

    # ---- A step

    def _step(self) -> None:
        services, rates = self.services, self.log.rates
        if self.run.ramp.size(self.done) != self.compiled.size:
            if self._read_metrics():
                return
            self.feed.close()
            self._begin_size()
        self._note_slow_step()
        rates.start_step()
        batch = self._next_batch()
        if batch is None:
            return
        on_host, on_device = batch
        self._tracer.before_step(self.done)
        metrics = self._take(on_device)
        before = self.metrics.read() if metrics is not None else None
        if before is not None and not self._note(before):
            if self._skipped(before):
                return
            metrics = self._take(on_device)  # the guard skipped this step too
        if metrics is None:
            return
        if self._tracer.tracing or not self.saver.snapshots.ready:
            rates.exclude()
        self._tracer.after_step(self.done, metrics)
        self.done += 1
        services.ledger.stepped(self.done)
        self.metrics.put(self.done, metrics, on_host)
        self._work_between_steps()

    def _next_batch(self) -> tuple[HostBatch, Any] | None:
        """Return the next batch on host and devices; None if the run is asked to stop before the batch is read."""
        services = self.services
        began = time.perf_counter()
        with self.log.rates.waiting_for_data(), services.phase("data", "data"):
            rows = self.feed.next(lambda: services.stop_requested and not services.may_start(self.done + 1))
            if rows is None:
                return None
            placed = self.feed.place(rows)
        self._times.data_s = time.perf_counter() - began
        if self._start_times is not None:
            self._start_times.end("data")
        return rows, placed

    def _take(self, batch: Any) -> train_step.Metrics | None:
        """Dispatch a step and return its metrics; None if the metrics of the step before caused a rollback instead.

        The metrics of the step before are read only if this step is computed twice (train.sdc_check_every).
        """
        if self._start_times is not None:
            self._first_step.begin()
        every = self.run.train.sdc_check_every
        if every and (self.done + 1) % every == 0:
            self.log.rates.exclude()
            if self._read_metrics():
                return None
            self.current, metrics = self._verifier.twice(self.compiled.train, self.current, batch, self.done + 1)
        else:
            self.current, metrics = self.compiled.train(self.current, batch)
        return metrics

    def _note_slow_step(self) -> None:
        """Report if the step that ends now was far slower than others, or if steps have become slower than at the start."""
        now, saving = time.perf_counter(), self.saver.checkpoints.pending
        ended, self._times = self._times, StepTimes(now, saving)
        save_s, self.saver.blocked_s = self.saver.blocked_s, 0.0
        parts = {"data_s": ended.data_s, "save_s": save_s, "gc_s": ended.collect_s, "eval_s": ended.between_s}
        if ended.began is None:
            return
        if line := self._slow_steps.note(self.done, now - ended.began, saving=saving or ended.saving, **parts):
            self.services.console.say(line)

    # ---- Between steps

    def _work_between_steps(self) -> None:
        """Evaluate, generate samples and save, each if it is due after step `done`."""
        done, rates = self.done, self.log.rates
        began = time.perf_counter()
        if evaluates := self.held_out.due(done):
            rates.exclude()
            if self._read_metrics():
                return
            self._evaluate(finish=done == self.run.train.steps)
        if samples := self.samples.due(done):  # before the save: a crash between the two would lose the samples
            rates.exclude()
            if self._read_metrics():
                return
            self.samples.write(state.weights(self.current), done)
        if evaluates or samples:
            self._times.between_s = time.perf_counter() - began
        every = self.run.checkpoint.every_steps
        best = evaluates and self._is_best()
        if done == self.run.train.steps or self._save_due or best or (every and done % every == 0):
            rates.exclude(more=1)  # one step is queued, and the step after it waits for the copies
            if self._read_metrics():
                return
            # While steps are skipped, the state is older than its step. It is saved after the next applied step.
            self._save_due = bool(self.skips.in_a_row) and done < self.run.train.steps
            if not self._save_due and self.applied:
                self.save()
        self.saver.poll()

    def _do_missed_work(self) -> None:
        """Evaluate and generate samples before the first step, if they are due and no earlier attempt has written them.

        A new run evaluates the weights that it begins from. A resumed run may have been ended after a save and before both.
        """
        done = self.done
        missing = [self.held_out.due(done) and done not in self.services.writers.evaluated()]
        missing.append(self.samples.due(done) and not self.samples.written(done))
        # Process 0 decides, because other nodes may not see its files.
        evaluates, samples = json.loads(self.services.peers.gather("due", json.dumps(missing), AGREE_S)[0])
        if not (evaluates or samples):
            return
        if self._start_times is not None:
            self._start_times.end("data")  # its reading has begun
        if evaluates:
            with Patience(lambda seconds: self.services.console.say(self._slow_start("evaluation", seconds))):
                self._evaluate(finish=False)
        if samples:
            self.samples.write(state.weights(self.current), done)
        if self._start_times is not None:
            self._start_times.end("evaluation")

    def _is_best(self) -> bool:
        """Return whether step `done` has the lowest held-out loss so far, and is to be saved for it.

        While steps are skipped the answer is no, because the state is older than its step.
        """
        if not self.run.checkpoint.keep_best or self.skips.in_a_row or (loss := self.held_out.loss_of(self.done)) is None:
            return False
        best = True
        if self.services.peers.process_index == 0:  # other processes may list the steps of a network file system late
            try:
                best = loss < self.saver.checkpoints.best(self.held_out.sets)
            except CheckpointError as error:
                self.services.console.warn(f"step {self.done} is saved, because the best one is not known: {error}")
        return json.loads(self.services.peers.gather("best", json.dumps(best), AGREE_S)[0])

    def _evaluate(self, finish: bool) -> None:
        self.held_out.evaluate(self.compiled.eval, state.weights(self.current), self.done, finish)

    def save(self) -> None:
        """Begin to save the newest state. Raises CheckpointError after saver.MOST_FAILURES failed saves in a row."""
        read = self.start.position.read(self.done)
        rows = read * self.run.ramp.unit
        data: dict[str, Any] = {"tokens": rows * self.run.data.seq_len, "fingerprint": self.data.fingerprint}
        if mixture := getattr(self.data, "mixture", None):  # a user's own source may lack it
            data["mixture"] = mixture.state(rows)
        here = position.record(self.start.position, self.run.train, self.setup.asked.data)
        data["positions"] = position.extended(self.start.data.get("positions", ()), here)
        meta = {"data": data, "loss": self.loss} | ({"base": self.base} if self.base else {})
        if (held_out := self.held_out.loss_of(self.done)) is not None:
            meta |= {HELD_OUT: held_out, HELD_OUT_SETS: self.held_out.sets}
        self.saver.save(self.current, self.done, meta)

    # ---- The metrics of the step before

    def _read_metrics(self) -> bool:
        """Read the metrics of the newest step now. Return whether they caused a rollback to a checkpoint."""
        found = self.metrics.read()
        return found is not None and not self._note(found) and self._skipped(found)

    def _note(self, found: StepMetrics) -> bool:
        """Write the metrics of a step. Return whether the step was applied."""
        if self._start_times is not None:
            self._end_start(self._start_times)
        self._recent = [*self._recent[-9:], (found.step, found.loss, time.time())]
        if found.taken:
            self.skips.took()
            self.loss = found.loss
        self.log.note(found, self.start.position.read(found.step), self.skips.skipped + (not found.taken))
        return found.taken

    def _end_start(self, times: StartTimes) -> None:
        """Report the times of the start, and prepare the first save during the next steps."""
        self._first_step.end()
        times.end("step")
        self.services.console.say(times.words)
        for name in own_settings(self.run.own).unread:
            self.services.console.warn(f"own.{name}: the family, loss, optimizer and data source of this run do not read it")
        self.services.receipt.update(start_s=times.parts)
        self._start_times = None
        if self.run.checkpoint.every_steps or self.run.checkpoint.keep_best:  # no step waits for a save at the end
            self.saver.prepare()

    def _slow_start(self, what: str, seconds: float) -> str:
        """Return a line on a first step or evaluation ("step", "evaluation") that has run for so many seconds."""
        run, devices = self.compiled.program.run, jax.devices()
        name, tokens, lower = (
            f"step {self.start.step + 1}",
            run.tokens_per_step,
            f"{'train.global_batch' if run is self.run else 'train.batch_ramp'} ({run.train.global_batch})",
        )
        if what == "evaluation":
            name, tokens = (
                "the evaluation before the first step",
                run.eval.sequences * run.data.seq_len * len(self.setup.held_out),
            )
            lower = f"eval.sequences ({run.eval.sequences})"
        compiling = duration(self._start_times.parts.get("compile")) if self._start_times is not None else "-"
        text = f"{name} has run for {duration(seconds)}: {tokens:,} tokens on {len(devices)} x {devices[0].device_kind}"
        text += f"; compiling took {compiling}"
        if devices[0].platform == "cpu":
            text += f". A lower data.seq_len ({run.data.seq_len}) or {lower} takes less time"
        if limit := self.services.watchdog.budget("step"):
            text += f". After {duration(limit)} the watchdog takes it for a hang, and never with --config.train.timeouts=step=0"
        return text

    def facts(self) -> dict[str, Any]:
        """Return the facts that the watchdog reports at a hang."""
        return {
            "steps_dispatched": self.done,
            "last_steps_heard_of": [{"step": s, "loss": repr(loss), "time_unix": t} for s, loss, t in self._recent],
            "pending_save": self.saver.checkpoints.pending,
            "newest_checkpoint": self.saver.newest,
            "next_batch": self.start.position.at(self.done),
            "device_memory": {str(d): d.memory_stats() for d in jax.local_devices()},
        }

    # ---- Skipped steps

    def _skipped(self, found: StepMetrics) -> bool:
        """Report a skipped step, and release the guard. Return whether the run was rolled back to a checkpoint instead.

        After train.max_skipped_steps skipped steps in a row, or if the weights are not finite, roll back, or raise Diverged if
        train.on_divergence=stop.
        """
        batches = self.start.position.batches(found.step - 1)
        each = self.run.ramp.unit * self.run.data.seq_len
        tokens = batches[0] * each, (batches[-1] + 1) * each
        seen = f"python -m jaxtrain data seen --workdir={shlex.quote(str(self.setup.workdir))} --step={found.step}"
        seen = spelled(seen) if hasattr(self.data, "mixture") and not self.data.synthetic else ""
        bad = Bad(found.step, found.verdict, found.loss, found.grad_norm, tuple(batches), tokens, seen)
        self.services.console.warn(bad.words)
        if not self._kept_bundle:
            self._kept_bundle = True
            self._keep_bundle(bad, found.batch)
        # Skipped steps do not change the weights, so they are read at the first of them.
        wrong = "" if self.skips.row or bad.verdict == guard.SPIKE else self._list_not_finite()
        if not self.skips.add(bad) and not wrong:
            self._release_guard()
            return False
        said = f"{self.skips.in_a_row} steps in a row were skipped, the last one step {bad.step} with loss {bad.loss:.6g}"
        if wrong:
            said = f"weights are infinite or NaN before step {bad.step}, so that all further steps would be skipped: {wrong}"
        if self.run.train.on_divergence == "stop":
            self.saver.finish()
            raise Diverged(explain(said, self.saver.newest, self.applied, bool(wrong), rollback=False))
        self._roll_back(said, bool(wrong))
        return True

    @property
    def applied(self) -> int:
        """Return the number of steps that were applied since the start of the run, earlier attempts included."""
        return int(self.current.guard["taken"])

    def _list_not_finite(self) -> str:
        """Return the weights with values that are infinite or NaN, as text; "" if all are finite."""
        return digests.list_not_finite(state.digests_by_name(state.to_digests(replay.weights_alone(self.current))))

    def _release_guard(self) -> None:
        self.current = dataclasses.replace(self.current, guard=guard.release(self.current.guard))

    def _keep_bundle(self, bad: Bad, batch: HostBatch) -> None:
        """Write the files to replay the first skipped step of this attempt, unless an earlier attempt wrote them."""
        services = self.services
        folder = self.setup.workdir / "replay" / f"step-{bad.step}"
        if services.peers.gather("bundle", "there" if (folder / replay.BUNDLE).exists() else "", AGREE_S)[0]:
            return
        if services.peers.count > 1:  # each process has its own rows
            batch = Positioned(self.data, self.start.position).batch(bad.step - 1)
        self.saver.finish()
        with services.phase("checkpoint", "save"):
            try:
                config = to_dict(self.compiled.program.run)
                how = (self.setup.options_of(self.compiled.size), self.setup.launch.argv, services.peers)
                services.console.say(replay.write(folder, config, self.current, bad, batch, *how))
            except ReplayError as error:
                services.console.warn(str(error))

    def _roll_back(self, said: str, weights: bool) -> None:
        """Restore the newest checkpoint that is not damaged, and continue after the data of the skipped steps.

        Raises Diverged if there is no checkpoint, or after ROLLBACKS rollbacks to the same step.
        """
        services, row = self.services, self.skips.row
        self.saver.finish()
        checkpoints = self.saver.checkpoints
        if checkpoints.latest({}) is None:
            said += ". There is no checkpoint to roll back to"
            raise Diverged(explain(said, -1, self.applied, weights, rollback=True))
        self.feed.close()
        self.current = None  # its memory is needed
        self.saver.snapshots.forget()
        restored = self._restore()
        self.current, self.start, self.base = restored.state, restored.start, restored.base
        back = self.start.step
        self.saver.newest, self.saver.not_finite = back, ""
        directory, tokens = checkpoints.directory, (row[0].tokens[0], row[-1].tokens[1])
        times = sum(item["back_to"] == back for item in position.read(directory))
        if times >= ROLLBACKS:
            raise Diverged(
                f"{said}, after {times} rollbacks to step {back}: the data is not the only cause. Lower optimizer.lr."
            )
        known: list[dict[str, Any]] = []
        if services.peers.process_index == 0:
            known = position.skip(directory, tokens, (row[0].step, row[-1].step), said, back)
        # Process 0 sends the list, because other processes may read an older one from a network file system.
        mine = json.dumps([known, services.peers.stop_reason])
        known, asked = json.loads(services.peers.gather("rolled back", mine, AGREE_S)[0])
        tokens_read = checkpoints.meta(back)["data"]["tokens"]
        place = position.position(directory, back, tokens_read, self.run.ramp, self.run.data.seq_len, known)
        self.start = dataclasses.replace(self.start, position=place)
        if asked:  # a stop was requested. The agreed last step is later than the step of the rollback.
            services.peers.stop_here(asked)
        services.console.warn(
            f"{said}: rolling back to step {back}, and skipping {row[0].data}" + (f" to {row[-1].data}" if len(row) > 1 else "")
        )
        continue_sources(self.run.train, self.start, self.data, services.console.say)  # its position is after the skipped data
        services.writers.rewind(back)
        self.done = back
        self.metrics.drop()
        self.log.rates.exclude()
        self._begin()


@dataclasses.dataclass
class StepTimes:
    """Seconds of one step that the loop can account for."""

    began: float | None = None  # by time.perf_counter()
    saving: int | None = None  # the step whose save ran then
    data_s: float = 0.0
    collect_s: float = 0.0  # Python's garbage collector
    between_s: float = 0.0  # evaluation and samples
