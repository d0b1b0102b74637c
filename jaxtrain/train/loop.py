"""The loop over steps: a batch, the compiled step, the metrics of the step before, and the hooks that are due between steps.

The metrics of a step are read after the next step is dispatched. So the loop notices a skipped step (step/guard.py) when the
next step is already dispatched. The guard holds that next step, and the loop takes it again.
"""

import dataclasses
import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.checkpoint import HELD_OUT, HELD_OUT_SETS
from jaxtrain.config.durations import duration
from jaxtrain.config.schema import own_settings
from jaxtrain.metrics.profiling import Tracer
from jaxtrain.step import compiler, guard, state, train_step
from jaxtrain.step.batch import HostBatch
from jaxtrain.train import position, skipped
from jaxtrain.train.batch_feed import BatchFeed
from jaxtrain.train.corruption import Verifier
from jaxtrain.train.divergence import Diverged, SkipCounter, explain_divergence
from jaxtrain.train.evaluate import HeldOut, SampleWriter
from jaxtrain.train.initial_state import Restored
from jaxtrain.train.position import Positioned
from jaxtrain.train.saver import Saver
from jaxtrain.train.services import Services
from jaxtrain.train.setup import CompiledSteps, Setup, expected_times, resize_steps
from jaxtrain.train.step_log import PendingMetrics, StepLog, StepMetrics
from jaxtrain.train.summary import slow_start
from jaxtrain.train.timing import SlowSteps, collector_off

AGREE_S = 5400.0  # timeout of processes that wait for each other: one may compile a step that others found in their caches
COLLECT_EVERY = 50  # steps between two collections of garbage. A step leaves none in the old generation.
SLOW_START_S = 60.0


@dataclasses.dataclass(frozen=True)
class Hook:
    """Work between two steps. `due` and `work` take the number of steps done."""

    due: Callable[[int], bool]
    work: Callable[[int], object]
    uses_state: bool = True  # it uses the state, so the metrics of the last step are read first; its time is not that of a step


def every_steps(steps: int, work: Callable[[int], object], *, uses_state: bool) -> Hook:
    """Return the hook that is due after each `steps` steps."""
    return Hook(lambda done: done % steps == 0, work, uses_state)


class Loop:
    """Takes steps until the last step, or until a stop is requested. `current` is the newest state, after `done` steps."""

    def __init__(
        self, setup: Setup, sizes: dict[int, CompiledSteps], restored: Restored, services: Services, saver: Saver, log: StepLog
    ):
        """sizes: the compiled steps, by the sequences of a step."""
        self.setup, self.services, self.saver, self.log = setup, services, saver, log
        self.compiled, self._sizes = next(iter(sizes.values())), sizes
        self.run, self.program, self.data = setup.run, setup.program, setup.data
        self.loss: float | None = None  # of the newest step that was applied and whose metrics were read
        self.held_out = HeldOut(self.program, setup.held_out, services)
        self.samples = SampleWriter(setup, services)
        self.metrics = PendingMetrics()
        self._tracer = Tracer(
            self.run.profile,
            setup.workdir,
            services.console.say,
            process_index=services.peers.process_index,
            requests=lambda: services.stop.traces,
            program=self.compiled.train,
            graphs=jax.local_devices()[0].platform == "gpu" and setup.options.options.get(compiler.GRAPHS) != "",
        )
        self._verifier = Verifier(self.program.state, self.program.placement.mesh, services.console.say)
        self._recent: list[tuple[int, float, float]] = []  # the last steps: number, loss, time read
        self._kept_bundle = self._save_due = self._started = False
        self._slow_start = threading.Timer(SLOW_START_S, self._tell_slow_start)
        self._slow_start.daemon = True
        self._hooks = (  # samples before the save: a crash between the two would lose them
            Hook(self.held_out.due, self._evaluate),
            Hook(self.samples.due, self._write_samples),
            Hook(self._saves_after, self._save_if_applied),
            every_steps(1, lambda _: saver.poll(), uses_state=False),
            every_steps(COLLECT_EVERY, lambda _: gc.collect(1), uses_state=False),
        )
        self._begin(restored)

    def _begin(self, restored: Restored) -> None:
        """Take the state of a checkpoint, or the first one, and start to read the batches after it."""
        self.current: Any = restored.state
        self.start, self.base, self.done = restored.start, restored.base, restored.start.step
        self._begin_size()
        counts = {name: int(self.current.guard[name]) for name in ("in_a_row", "skipped")}
        self.skips = SkipCounter(**counts, most=self.run.train.max_skipped_steps)
        if int(self.current.guard["held"]):
            self._release_guard()

    def _begin_size(self) -> None:
        """Begin the steps after step `done` that have the same number of sequences, and start to read their batches.

        If the state is older than the step that this attempt was to begin with, the train step may have to be compiled.
        """
        services, ramp = self.services, self.run.ramp
        size, until = ramp.size(self.done), ramp.until(self.done)
        if ramp.phases:
            services.console.say(
                f"from step {self.done + 1} on: {size} sequences a step" + (f", until step {until}" if until else "")
            )
        if size not in self._sizes:
            with services.phase("compile", "compile"):
                self._sizes[size] = resize_steps(self.setup, self.compiled, size, services)
                services.peers.gather("compiled", "", AGREE_S)  # no process may wait for another one within a step
        if self.log.watch is None:
            self.log.compare(expected_times(self.setup, self._sizes[size], services))
        self._slow_steps, self._seconds, self._saving = SlowSteps(), {}, None
        if size != self.compiled.size:
            self.compiled = self._sizes[size]
            self._tracer.use(self.compiled.train)
        if ramp.phases:
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
            with collector_off(), services.watchdog.phase("step"):
                # From here on a stop request ends in a save. No process may exit alone after another has begun to step.
                services.peers.gather("settled", "", AGREE_S)
                services.ledger.base("step")
                services.stop.at_once = None
                self._slow_start.start()
                self._do_missed_work()
                while self.done < steps and services.may_start(self.done + 1):
                    services.watchdog.beat(self.done + 1)
                    self._step()
                self._read_metrics()
                if self.num_applied:
                    self.save()
        finally:
            self._slow_start.cancel()
            # The newest metrics and not the state: a failed step has consumed the state.
            self._tracer.close(self.metrics.on_device)
            self.feed.close()

    # ---- A step

    def _step(self) -> None:
        """Take a step and the work after it. After a rollback, or a request to stop while data is read, take none."""
        if self.run.ramp.size(self.done) != self.compiled.size:
            if self._read_metrics():
                return
            self.feed.close()
            self._begin_size()
        self._note_slow_step()
        self.log.rates.start_step()
        batch = self._next_batch()
        if batch is None:
            return
        on_host, on_device = batch
        self._tracer.before_step(self.done)
        metrics = self._dispatch(on_device)
        before = self.metrics.read() if metrics is not None else None
        if before is not None and not self._log_metrics(before):
            if self._handle_skip(before):
                return
            metrics = self._dispatch(on_device)  # the guard skipped this step too
        if metrics is None:
            return
        if self._tracer.tracing or not self.saver.snapshots.ready:
            self.log.rates.exclude()
        self._tracer.after_step(self.done, metrics)
        self.done += 1
        self.services.ledger.record_step(self.done)
        self.metrics.put(self.done, metrics, on_host)
        for hook in self._hooks:
            if not hook.due(self.done):
                continue
            if hook.uses_state:
                self.log.rates.exclude()
                if self._read_metrics():
                    return
            hook.work(self.done)

    def _next_batch(self) -> tuple[HostBatch, Any] | None:
        """Return the next batch on host and devices; None if the run is asked to stop before the batch is read."""
        services = self.services
        with self.log.rates.waiting_for_data(), services.phase("data", "data"):
            rows = self.feed.next(lambda: services.stop_requested and not services.may_start(self.done + 1))
            return None if rows is None else (rows, self.feed.place(rows))

    def _dispatch(self, batch: Any) -> train_step.Metrics | None:
        """Dispatch a step and return its metrics; None if the metrics of the step before caused a rollback instead.

        The metrics of the step before are read only if this step is computed twice (train.sdc_check_every).
        """
        twice_every = self.run.train.sdc_check_every
        if twice_every and (self.done + 1) % twice_every == 0:
            self.log.rates.exclude()
            if self._read_metrics():
                return None
            self.current, metrics = self._verifier.run_twice(self.compiled.train, self.current, batch, self.done + 1)
        else:
            self.current, metrics = self.compiled.train(self.current, batch)
        return metrics

    def _note_slow_step(self) -> None:
        before, self._seconds = self._seconds, self.services.ledger.seconds()
        saving, self._saving = self._saving, self.saver.checkpoints.pending
        if not before:
            return
        spent = {cause: s - before.get(cause, 0.0) for cause, s in self._seconds.items()}
        saving = saving if self._saving is None else self._saving
        if line := self._slow_steps.note(self.done, spent, saving):
            self.services.console.say(line)

    # ---- Between steps

    def _do_missed_work(self) -> None:
        """Evaluate and generate samples before the first step, if they are due and no earlier attempt has written them.

        A new run evaluates the weights that it begins from. A resumed run may have been ended after a save and before both.
        """
        done = self.done
        due = [self.held_out.due(done) and done not in self.services.writers.evaluated_steps()]
        due.append(self.samples.due(done) and not self.samples.has_written(done))
        # Process 0 decides, because other nodes may not see its files.
        evaluates, samples = json.loads(self.services.peers.gather("due", json.dumps(due), AGREE_S)[0])
        if evaluates:
            self.held_out.evaluate(self.compiled.eval, state.eval_weights(self.current), done, finish=False)
        if samples:
            self._write_samples(done)

    def _evaluate(self, done: int) -> None:
        """Compute the held-out losses, and have the step saved if they are the best so far (checkpoint.keep_best).

        While steps are skipped it is not, because the state is older than its step.
        """
        self.held_out.evaluate(self.compiled.eval, state.eval_weights(self.current), done, finish=done == self.run.train.steps)
        if self.run.checkpoint.keep_best and not self.skips.in_a_row:
            self._save_due |= self.held_out.is_best(done, self.saver.checkpoints)

    def _write_samples(self, done: int) -> None:
        self.samples.write(state.eval_weights(self.current), done)

    def _saves_after(self, done: int) -> bool:
        regular = self.run.checkpoint.every_steps
        return done == self.run.train.steps or self._save_due or bool(regular and done % regular == 0)

    def _save_if_applied(self, done: int) -> None:
        """Save. While steps are skipped, the state is older than its step: it is saved after the next applied step."""
        self.log.rates.exclude(more=1)  # one step is queued, and the step after it waits for the copies
        self._save_due = bool(self.skips.in_a_row) and done < self.run.train.steps
        if not self._save_due and self.num_applied:
            self.save()

    def save(self) -> None:
        """Begin to save the newest state. Raises CheckpointError after saver.MOST_FAILURES failed saves in a row."""
        batches_read = self.start.position.read(self.done)
        rows = batches_read * self.run.ramp.unit
        data: dict[str, Any] = {"tokens": rows * self.run.data.seq_len, "fingerprint": self.data.fingerprint}
        if mixture := getattr(self.data, "mixture", None):  # a user's own source may lack it
            data["mixture"] = mixture.state(rows)
        entry = position.position_entry(self.start.position, self.run.train, self.setup.user_run.data)
        data["positions"] = position.extend_entries(self.start.data.get("positions", ()), entry)
        meta = {"data": data, "loss": self.loss} | ({"base": self.base} if self.base else {})
        if (held_out := self.held_out.loss_of(self.done)) is not None:
            meta |= {HELD_OUT: held_out, HELD_OUT_SETS: self.held_out.sets}
        self.saver.save(self.current, self.done, meta)

    # ---- The start

    def _tell_slow_start(self) -> None:
        evaluates, limit_s = self.held_out.due(self.start.step), self.services.watchdog.budget("step")
        self.services.console.say(slow_start(self.run, self.start.step, evaluates, SLOW_START_S, limit_s))

    def _end_start(self) -> None:
        """Report the times of the start, and prepare the first save during the next steps."""
        self._started, services = True, self.services
        self._slow_start.cancel()
        seconds = services.ledger.seconds()
        times = ", ".join(f"{cause} {duration(s)}" for cause, s in seconds.items())
        services.console.say(f"first step {duration(sum(seconds.values()))} after the start: {times}")
        services.receipt.update(start_s=seconds)
        for name in own_settings(self.run.own).unread:
            services.console.warn(f"own.{name}: the family, loss, optimizer and data source of this run do not read it")
        if self.run.checkpoint.every_steps or self.run.checkpoint.keep_best:  # no step waits for a save at the end
            self.saver.prepare()

    # ---- The metrics of the step before

    def _read_metrics(self) -> bool:
        """Read the metrics of the newest step now. Return whether they caused a rollback to a checkpoint."""
        metrics = self.metrics.read()
        return metrics is not None and not self._log_metrics(metrics) and self._handle_skip(metrics)

    def _log_metrics(self, metrics: StepMetrics) -> bool:
        """Write the metrics of a step. Return whether the step was applied."""
        if not self._started:
            self._end_start()
        self._recent = [*self._recent[-9:], (metrics.step, metrics.loss, time.time())]
        if metrics.taken:
            self.skips.note_applied()
            self.loss = metrics.loss
        self.log.note(metrics, self.start.position.read(metrics.step), self.skips.skipped + (not metrics.taken))
        return metrics.taken

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

    def _handle_skip(self, metrics: StepMetrics) -> bool:
        """Report a skipped step, and release the guard. Return whether the run was rolled back to a checkpoint instead.

        After train.max_skipped_steps skipped steps in a row, or if the weights are not finite, roll back, or raise Diverged if
        train.on_divergence=stop.
        """
        skip = skipped.describe_skip(self.setup, metrics, self.start.position)
        self.services.console.warn(skip.words)
        if not self._kept_bundle:
            self._kept_bundle = True
            bundle_args = (self.start.position, self.saver, self.services)
            skipped.keep_bundle(self.setup, self.compiled, self.current, skip, metrics.batch, *bundle_args)
        # Skipped steps do not change the weights, so they are read at the first of them.
        not_finite = "" if self.skips.row or skip.verdict == guard.SPIKE else skipped.list_not_finite(self.current)
        if not self.skips.add(skip) and not not_finite:
            self._release_guard()
            return False
        reason = f"{self.skips.in_a_row} steps in a row were skipped, the last one step {skip.step} with loss {skip.loss:.6g}"
        if not_finite:
            reason = (
                f"weights are infinite or NaN before step {skip.step}, so that all further steps would be skipped: {not_finite}"
            )
        self.saver.finish()
        if self.run.train.on_divergence == "stop":
            raise Diverged(explain_divergence(reason, self.saver.newest, self.num_applied, bool(not_finite), rollback=False))
        skipped.check_rollback(self.saver, reason, self.num_applied, bool(not_finite))
        self.feed.close()
        self.current = None  # its memory is needed
        restored = skipped.roll_back(self.setup, self.saver, self.services, self.skips.row, reason)
        self.metrics.drop()
        self.log.rates.exclude()
        self._begin(restored)
        return True

    @property
    def num_applied(self) -> int:
        """Return the number of steps that were applied since the start of the run, earlier attempts included."""
        return int(self.current.guard["taken"])

    def _release_guard(self) -> None:
        self.current = dataclasses.replace(self.current, guard=guard.release(self.current.guard))
