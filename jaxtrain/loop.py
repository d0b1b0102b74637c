"""The loop over steps: data in, the compiled step, metrics one step late, and what is due between steps.

The device never waits for the loop: metrics of a step are read once the next one is on its way. A step that was not taken
(jaxtrain/guard.py) therefore shows when its successor has been dispatched; that one the guard has held, and it is taken again.
"""

import dataclasses
import json
import time
from typing import Any

import jax

from jaxtrain import compiler, guard, position, profiling, replay, state, step, throughput
from jaxtrain.corruption import Verifier
from jaxtrain.divergence import Bad, Bads, Diverged, described
from jaxtrain.feed import Feed
from jaxtrain.pauses import Collector, Pauses
from jaxtrain.replay import ReplayError
from jaxtrain.shapes import EXPERT_METRICS

ROLLBACKS = 3  # to one checkpoint: more would only find the same again
AGREE_S = 5400.0  # processes wait for each other so long, seconds: one may compile what the others found in their caches


class Loop:
    """Steps until the last one, or until asked to stop. `current` is the newest state, `done` the steps taken.

    session: the session.Session that it belongs to; compiled: its session.Compiled.
    """

    def __init__(self, session: Any, current: state.TrainState, compiled: Any):
        self.session, self.compiled = session, compiled
        self.current: Any = current
        self.done = session.start.step
        self.rates = session.throughput()
        self.late = Late(self)
        self.pauses = Pauses()
        self.tracer = profiling.Tracer(
            session.run.profile,
            session.workdir,
            session.console.say,
            process_index=session.peers.process_index,
            asked=lambda: session.stop.traces,
            program=compiled.train,
            graphs=jax.local_devices()[0].platform == "gpu" and session.chosen.options.get(compiler.GRAPHS) != "",
        )
        program = session.program
        self.verifier = Verifier(program.state, program.placement.mesh, session.console.say)
        self._bundled = self._save_due = False
        self._began: float | None = None  # when the step under way began
        self._saving: int | None = None  # what was being saved then
        self._collected = self._waited = self._between = 0.0  # seconds of the step under way
        self._begin()

    def _begin(self) -> None:
        """Data and counts from `done` on."""
        session = self.session
        self.feed = Feed(session.train_data, session.start.position, session.program, session.run.data.prefetch)
        counts = {name: int(self.current.guard[name]) for name in ("in_a_row", "skipped")}
        self.bads = Bads(**counts, most=session.run.train.max_skips)
        if int(self.current.guard["held"]):
            self._release()

    def run(self) -> None:
        """All of it. Raises Diverged, Corrupted, and whatever data and devices raise."""
        session, steps = self.session, self.session.run.train.steps
        try:
            with Collector() as collector, session.watchdog.phase("step"):
                session.peers.gather("settled", "", AGREE_S)  # nobody leaves at once when another has begun to step
                session.ledger.base("step")  # not before: processes wait for each other, one of which may compile
                session.settled()
                if session.start.resumed:
                    self._due_before()
                while self.done < steps and session.may_start(self.done + 1):
                    self._step()
                    self._collected = collector.step(self.done)
                    session.watchdog.beat()
                self._settle()
                if self.done > 0:  # asked to stop between two checkpoints
                    session.save(self.current, self.done)
        finally:
            # The newest metrics, and not the state: where a step failed, that is given away already.
            self.tracer.close(self.late.values)
            self.feed.close()

    # ---- A step

    def _step(self) -> None:
        session, rates = self.session, self.rates
        self._note_pause()
        rates.start_step()
        began = time.perf_counter()
        with rates.waiting_for_data(), session.watchdog.phase("data"), session.ledger.during("data"):
            batch = self.feed.next(lambda: session.asked and not session.may_start(self.done + 1))
        if batch is None:
            return
        self._waited = time.perf_counter() - began
        session.passed("data")
        host, placed = batch
        self.tracer.before_step(self.done)
        values = self._take(placed)
        if values is not None and (bad := self.late.report()):
            if self._rolled_back(bad):
                return
            values = self._take(placed)  # the guard held it
        if values is None:
            return
        if self.tracer.tracing or not session.snapshots.ready:
            rates.exclude()
        self.tracer.after_step(self.done, values)
        self.done += 1
        session.done = self.done
        session.ledger.stepped(self.done)
        self.late.put(self.done, values, host)
        self._between_steps()

    def _take(self, batch: Any) -> step.Metrics | None:
        """Dispatch a step. None where the run has gone back to a checkpoint instead."""
        every = self.session.run.train.verify_every
        if every and (self.done + 1) % every == 0:
            self.rates.exclude()
            if self._settle():
                return None
            self.current, values = self.verifier.twice(self.compiled.train, self.current, batch, self.done + 1)
        else:
            self.current, values = self.compiled.train(self.current, batch)
        return values

    def _between_steps(self) -> None:
        """Evaluation, samples and checkpoints that are due after this step."""
        session, run, done = self.session, self.session.run, self.done
        began = time.perf_counter()
        if session.held_out.due(done):
            self.rates.exclude()
            if self._settle():
                return
            last = done == run.train.steps
            session.evaluate(self.compiled.eval, state.weights(self.current), done, finish=last)
        if session.samples.due(done):  # before the checkpoint, or a kill between the two would lose them
            self.rates.exclude()
            if self._settle():
                return
            with session.ledger.during("eval"):
                session.samples.write(state.weights(self.current), done)
        self._between = time.perf_counter() - began if session.held_out.due(done) or session.samples.due(done) else 0.0
        every = run.checkpoint.every_steps
        if done == run.train.steps or self._save_due or (every and done % every == 0):
            self.rates.exclude(more=1)  # the step after the one that is only queued waits for the copies
            if self._settle():
                return
            # While steps are skipped the state is that before them: it is saved once one is taken.
            self._save_due = bool(self.bads.in_a_row) and done < run.train.steps
            if not self._save_due:
                self.session.save(self.current, done)
        session.poll()

    def _due_before(self) -> None:
        """What an attempt that was asked to stop left out at the step that this one resumes from."""
        session, done = self.session, self.done
        missing = [session.held_out.due(done) and done not in session.writers.evaluated()]
        missing.append(session.samples.due(done) and not session.samples.written(done))
        # Process 0 knows: the others need not see its files.
        evaluate, write = json.loads(session.peers.gather("due", json.dumps(missing), AGREE_S)[0])
        if evaluate:
            session.evaluate(self.compiled.eval, state.weights(self.current), done, finish=False)
        if write:
            with session.ledger.during("eval"):
                session.samples.write(state.weights(self.current), done)

    def _note_pause(self) -> None:
        """A word on the step that ends here, where it took far longer than others."""
        now = time.perf_counter()
        began, self._began = self._began, now
        if began is None:
            return
        session = self.session
        parts = {"data_s": self._waited, "save_s": session.blocked_s, "gc_s": self._collected, "eval_s": self._between}
        saving, self._saving = self._saving, session.checkpoints.pending
        said = self.pauses.note(self.done, now - began, saving=self._saving or saving, **parts)
        self._waited = self._between = session.blocked_s = 0.0
        if said:
            session.console.say(said)

    # ---- Steps that were not taken

    def _settle(self) -> bool:
        """Read the metrics of the newest step now. Whether the run has gone back to a checkpoint for what they say."""
        bad = self.late.report()
        return bool(bad) and self._rolled_back(bad)

    def _rolled_back(self, bad: Bad) -> bool:
        """After a step that was not taken: tell, keep, and go on. Whether that is from a checkpoint. Raises Diverged."""
        session, train = self.session, self.session.run.train
        session.console.warn(bad.words)
        if not self._bundled:
            self._bundled = True
            self._keep(bad)
        if not self.bads.add(bad):
            self._release()
            return False
        newest = session.saved_at if session.saved_at >= 0 else "none"
        said = f"{self.bads.in_a_row} steps in a row were skipped, the last one step {bad.step} with loss {bad.loss:.6g}"
        if train.on_divergence == "stop":
            raise Diverged(
                f"{said}. Nothing is saved from here; the newest checkpoint is {newest}. Lower optimizer.lr, look at the data "
                "of these steps, or set train.on_divergence=rollback to pass over it."
            )
        self._roll_back(said)
        return True

    def _release(self) -> None:
        self.current = dataclasses.replace(self.current, guard=guard.released(self.current.guard))

    def _keep(self, bad: Bad) -> None:
        """The bundle for a replay of the first bad step of this attempt."""
        session = self.session
        folder = session.workdir / "replay" / f"step-{bad.step}"
        if session.peers.gather("bundle", "there" if (folder / replay.BUNDLE).exists() else "", AGREE_S)[0]:
            return
        host = self.late.host
        if session.peers.count > 1:  # each process has its own rows
            host = session.train_data.batch(bad.batch)
        session.finish_saves()
        with session.watchdog.phase("checkpoint"), session.ledger.during("save"):
            try:
                how = (session.chosen.options, session.argv, session.peers)
                said = replay.write(folder, session.run, self.current, bad, host, *how)
                session.console.say(said)
            except ReplayError as error:
                session.console.warn(str(error))

    def _roll_back(self, said: str) -> None:
        """To the newest good checkpoint, and from there past the data of the skipped steps."""
        session, row = self.session, self.bads.row
        session.finish_saves()
        directory = session.checkpoints.directory
        tokens = (row[0].tokens[0], row[-1].tokens[1])
        if session.checkpoints.latest({}) is None:
            raise Diverged(f"{said}, and there is no checkpoint to go back to. Lower optimizer.lr, or save more often.")
        self.feed.close()
        self.current = None  # its memory is needed
        session.snapshots.forget()
        self.current = session.go_back()
        back = session.start.step
        times = sum(item["back_to"] == back for item in position.read(directory))
        if times >= ROLLBACKS:
            raise Diverged(f"{said}, after {times} rollbacks to step {back}: it is not the data alone. Lower optimizer.lr.")
        known = position.read(directory) if session.peers.process_index == 0 else []
        if session.peers.process_index == 0:
            known = position.skip(directory, tokens, (row[0].step, row[-1].step), said, back)
        # From process 0's mouth: a network file system may show the others the list as it was.
        mine = json.dumps([known, session.peers.stop_reason])
        known, asked = json.loads(session.peers.gather("rolled back", mine, AGREE_S)[0])
        session.pass_over(known)
        if asked:  # the step that was agreed on lies ahead again
            session.peers.stop_here(asked)
        session.console.warn(
            f"{said}: back to step {back}, and past {row[0].data}" + (f" to {row[-1].data}" if len(row) > 1 else "")
        )
        session.rewind()
        self.done = session.done = back
        self.late.forget()
        self.rates.exclude()
        self._begin()


class Late:
    """Metrics of the step before: fetched after the next one is on its way."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._waiting: tuple[int, step.Metrics] | None = None
        self.host: Any = None  # the batch of the step that was reported last
        self._next_host: Any = None

    @property
    def values(self) -> step.Metrics | None:
        """Of the newest step; None once they were reported."""
        return self._waiting[1] if self._waiting else None

    def put(self, done: int, values: step.Metrics, host: Any) -> None:
        """These are the metrics of the step that made `done` steps done."""
        self._waiting, self._next_host = (done, values), host

    def forget(self) -> None:
        """What waits is of steps that are undone."""
        self._waiting = self.host = self._next_host = None

    def report(self) -> Bad | None:
        """Fetch what waits, and write it down. The step, where it was not taken."""
        if self._waiting is None:
            return None
        (done, values), self._waiting = self._waiting, None
        self.host, self._next_host = self._next_host, None
        loop, session = self._loop, self._loop.session
        found = jax.device_get(values)
        verdict = int(found["verdict"])
        loss, norm = float(found["loss"]), float(found["grad_norm"])
        session.heard(done, loss)
        bad = None
        if verdict == guard.TAKEN:
            loop.bads.took()
            session.loss = loss
        else:
            at = session.start.position.at(done - 1)
            tokens = (at * session.tokens_per_step, (at + 1) * session.tokens_per_step)
            bad = Bad(done, verdict, loss, norm, at, tokens, described(session.train_data, at))
        session.console.tick(done)
        session.look_at_gpus(done)
        if done % session.run.log.every_steps == 0 or done == session.run.train.steps:
            experts = {name: float(found[name]) for name in EXPERT_METRICS if name in found}
            self._write(done, loss, norm, float(found["lr"]), experts, skipped=loop.bads.skipped + (bad is not None))
        return bad

    def _write(self, done: int, loss: float, norm: float, lr: float, experts: dict[str, float], skipped: int) -> None:
        session = self._loop.session
        in_use, peak = throughput.memory(jax.local_devices())
        read = session.start.position.read(done)
        line = {
            "step": done,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": read * session.tokens_per_step,
            "epoch": session.train_data.epoch(read),
            **self._loop.rates.line(),
            "memory_gib": in_use,
            "peak_memory_gib": peak,
            "skipped_steps": skipped,
            **experts,
        }
        session.writers.train(**line)
        session.console.step(line)
        if session.watch is not None:
            for warning in session.watch.note(line["step_time_s"], peak):
                session.console.warn(warning)
        if session.mfu is not None and (warning := session.mfu.note(line["step_time_s"])):
            session.console.warn(warning)
