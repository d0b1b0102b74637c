"""An attempt at a run while it trains, chapter by chapter: the compiled step, the first state, the loop, saves."""

import dataclasses
import functools
import math
import os
import time
from pathlib import Path
from typing import Any

import jax

from jaxtrain import compiler, config, flops, hardware, installed, lora, metrics, position, profiling, state, step, throughput
from jaxtrain.announce import announce
from jaxtrain.between import HeldOut, Samples
from jaxtrain.checkpoint import CheckpointError, Checkpoints, Damaged, Failed, Saved
from jaxtrain.config import RunConfig
from jaxtrain.distributed import Peers
from jaxtrain.ledger import Ledger
from jaxtrain.loop import Loop
from jaxtrain.memory import (
    OutOfMemory,
    check_free_memory,
    check_host_memory,
    compile_to_fit,
    explain_memory,
    memory_by_class,
    out_of_memory_explained,
    size,
    taken_gib,
)
from jaxtrain.monitor import MfuAlert, Monitor
from jaxtrain.plan.expect import Watch, expect
from jaxtrain.progress import Console
from jaxtrain.receipt import Receipt, of_checkpoint, of_weights
from jaxtrain.sharding import node_of
from jaxtrain.signals import Stop
from jaxtrain.snapshot import Snapshots
from jaxtrain.start import Start, base_of, decide_start, initial_state
from jaxtrain.timelimit import tell_launcher
from jaxtrain.timeline import Timeline
from jaxtrain.watchdog import Watchdog

DONE, FAILED = 0, 1
FAILED_SAVES = 3  # in a row end a run: what it learns would be lost
STORED_BY = ("jax", "flax", "optax", "orbax-checkpoint")  # decide what a checkpoint holds
AGAIN_S = 5.0  # after which the save of a last step is tried again


@dataclasses.dataclass
class Compiled:
    """The compiled steps and what they cost."""

    train: Any
    eval: Any
    seconds: float
    memory: dict[str, float]  # GiB per device, by class


class Session:
    """One attempt at a run: everything that exists exactly once while it trains."""

    def __init__(
        self,
        run: RunConfig,
        asked: RunConfig,
        workdir: Path,
        console: Console,
        stop: Stop,
        receipt: Receipt,
        writers: metrics.Writers,
        checkpoints: Checkpoints,
        program: step.Program,
        chosen: compiler.Chosen,
        start: Start,
        train_data: Any,
        held_out: HeldOut,
        samples: Samples,
        peers: Peers,
        watchdog: Watchdog,
        argv: tuple[str, ...],
        timeline: Timeline,
        ledger: Ledger,
    ):
        self.run, self.workdir, self.console, self.stop = run, workdir, console, stop
        self.receipt, self.checkpoints, self.program, self.start = receipt, checkpoints, program, start
        self.writers, self.peers, self.watchdog, self.argv = writers, peers, watchdog, argv
        self.timeline: Timeline | None = timeline  # None once the first step is done
        self.ledger = ledger
        self.chosen = chosen  # XLA's options
        # `run` as configured; the data settles data.max_segments = 0, and compiling what remat.policy=auto keeps
        self.asked_run = asked
        self.train_data, self.held_out, self.samples = train_data, held_out, samples
        self.tokens_per_step = run.train.global_batch * run.data.seq_len
        self.saved_at = start.step if start.resumed else -1
        self.blocked_s = 0.0  # that the loop waited for saves, since it last looked
        self.failed_saves = 0  # in a row
        self.watch: Watch | None = None  # planned beside measured, on GPUs that the plan knows
        self.monitor = Monitor({}, 0.0)  # that of the loop, while it runs
        self.mfu: MfuAlert | None = None  # where there is a plan
        self.snapshots = Snapshots(program.saved(program.state))
        self.versions = installed.versions(STORED_BY)
        self.base: dict[str, str] = {}  # what checkpoints say of the weights that adapters stand beside
        self.loss: float | None = None  # of the newest step that was taken and whose metrics have arrived
        self.done = start.step  # optimizer steps taken
        self._heard: list[tuple[int, float, float]] = []  # the last steps: number, loss, when
        self.longest_save_s = 0.0

    @property
    def asked(self) -> bool:
        """Whether this run has been asked to stop."""
        return self.peers.stop_reason is not None

    def may_start(self, step: int) -> bool:
        """Whether a step, by its number, is to be taken. Several processes agree on the last one; one alone just ends."""
        return not self.asked if self.peers.count == 1 else self.peers.may_start(step)

    def train(self) -> tuple[int, str]:
        """The chapters of a run. Returns (exit code, reason)."""
        announce(self.run, self.program, self.start, self.train_data, self.checkpoints.directory, self.console)
        if not self.asked_run.data.max_segments and self.run.data.packing == "documents":
            self.console.say(f"data: up to {self.run.data.max_segments} documents in a sequence")
        current = None
        if self.start.step == self.run.train.steps:
            current = self.begin()
            if self.start.step == self.run.train.steps:
                return self.nothing_left(current)
            # Its last checkpoint was damaged, and the one before is not the end.
        self.passed("open")
        if self.run.checkpoint.every_steps:
            self.snapshots.reserve()  # takes minutes for a large state, beside compiling
        with out_of_memory_explained(self.run, {}), self.watchdog.phase("compile"), self.ledger.during("compile"):
            compiled = self.compile()
        self.passed("compile")
        with out_of_memory_explained(self.run, compiled.memory):
            current = self.begin() if current is None else current
            self.rewind()
            jax.block_until_ready(current)
            self.passed("restore" if self.start.resumed else "initial state")
            check_free_memory(self.program, compiled.train, jax.local_devices())
            loop = Loop(self, current, compiled)
            del current  # the loop gives it away
            pools = {d.local_hardware_id: d.memory_stats for d in jax.local_devices() if d.platform == "gpu"}
            with Monitor(pools, self.run.log.gpu_every_s, process=self.peers.process_index) as self.monitor:
                loop.run()
            self.ledger.base("other")
            self.finish_saves(loop)
            if self.asked and loop.done < self.run.train.steps:
                return self.left(loop.done)
            if self.failed_saves:
                raise CheckpointError(
                    "the last step could not be saved, as the log says. The newest checkpoint stands: start again."
                )
            with self.watchdog.phase("step"), self.ledger.during("eval"):
                self.samples.write(state.weights(loop.current), loop.done)
        return DONE, f"{loop.done} steps done"

    def left(self, done: int) -> tuple[int, str]:
        """Ended because that was asked for."""
        why = self.peers.stop_reason or ""
        tell_launcher(why)
        name = "Ctrl-C" if why == "SIGINT" else why
        if self.saved_at == done and not self.failed_saves:
            saved = f"state saved at step {done}"
        elif self.saved_at >= 0:
            saved = f"the newest checkpoint is step {self.saved_at}"
        else:
            saved = "before the first step, nothing to save"
        self.console.say(f"{name}: {saved}; the same command goes on from there.")
        return self.stop.exit_code_of(why), f"{why} at step {done}"

    def nothing_left(self, current: state.TrainState) -> tuple[int, str]:
        """All steps were done before. What may be missing is the sample, if the run was stopped before it."""
        steps = self.run.train.steps
        self.console.say(f"all {steps} steps are done: nothing to train. A larger train.steps goes on from here.")
        self.rewind()
        if not self.samples.written(steps):
            with self.watchdog.phase("step"), self.ledger.during("eval"):
                self.samples.write(state.weights(current), steps)
        return DONE, f"{steps} steps were done already"

    def begin(self) -> state.TrainState:
        """The first state of this attempt: from the newest good checkpoint, where there are any."""
        while True:
            began = time.perf_counter()
            try:
                phase, cause = ("checkpoint", "restore") if self.start.resumed else ("startup", "startup")
                with self.watchdog.phase(phase), self.ledger.during(cause):
                    current = initial_state(self.run, self.program, self.start, self.checkpoints, self.console.say)
            except Damaged as error:
                if not self.start.resumed or self.run.checkpoint.step >= 0:
                    raise
                self.console.warn(str(error))
                passed = {**self.start.passed, self.start.step: str(error)}
                self.start = decide_start(self.asked_run, self.checkpoints, self.program, passed)
                self.console.say(f"resuming from step {self.start.step} in {self.checkpoints.directory}")
                continue
            self.base = base_of(self.program, self.start, current, self.checkpoints)
            self.continue_data()
            self.done = self.start.step
            self.ledger.back(self.done)
            self.saved_at = self.start.step if self.start.resumed else -1
            self.receipt.update(
                resumed_from_step=self.start.step if self.start.resumed else None,
                passed_over={str(k): v for k, v in self.start.passed.items()},
            )
            self.receipt.began(self.loaded(current))
            if self.start.resumed:
                with self.ledger.during("restore"):
                    jax.block_until_ready(current)
                seconds = time.perf_counter() - began  # one whose digests do not match is Damaged, and never comes here
                self.receipt.update(restore={"step": self.done, "seconds": seconds, "digests": "matched"})
            return current

    def continue_data(self) -> None:
        """Let the sources of a resumed run go on where they stopped, also where their mixture was changed."""
        go_on = getattr(self.train_data, "go_on", None)  # a source of one's own need not know of mixtures
        row = self.start.position.begin * self.run.train.global_batch
        if self.start.resumed and go_on and go_on(self.start.data, self.start.step, row):
            step = self.start.step
            self.console.say(f"data: mixture changed at step {step}: each source continues where it stopped")

    def loaded(self, current: state.TrainState) -> dict[str, Any] | None:
        """What the first state was read from, for the receipt; None: it was made from the seed."""
        if self.start.resumed:
            return of_checkpoint(self.checkpoints.directory, self.checkpoints.meta(self.done))
        return of_weights(self.run.init.from_, lora.digest(current.params, current.layers)) if self.run.init.from_ else None

    def go_back(self) -> state.TrainState:
        """The state of the newest good checkpoint, in the middle of a run."""
        newest = dataclasses.replace(self.run.checkpoint, step=-1)  # from here on, whatever the command asked for
        self.run, self.asked_run = (dataclasses.replace(run, checkpoint=newest) for run in (self.run, self.asked_run))
        self.start = decide_start(self.asked_run, self.checkpoints, self.program)
        return self.begin()

    def pass_over(self, skipped: list[dict[str, Any]]) -> None:
        """From now on this run skips this data (position.read)."""
        step = self.start.step
        tokens = self.checkpoints.meta(step)["data"]["tokens"]
        place = position.position(self.checkpoints.directory, step, tokens, self.tokens_per_step, skipped)
        self.start = dataclasses.replace(self.start, position=place)

    def rewind(self) -> None:
        """Metrics and samples of steps that this attempt takes anew go; those of one that saved no checkpoint are set aside."""
        for moved in () if self.start.resumed else self.writers.set_aside():
            self.console.say(f"no checkpoint in {self.checkpoints.directory}: starting at 0; what was there moved to {moved}")
        self.writers.rewind(self.start.step)
        self.writers.note("config", config.to_dict(self.asked_run))

    # ---- Before anything is allocated

    def compile(self) -> Compiled:
        """Compile the train step for these shapes, and read from it what it will hold."""
        if self.chosen.why:
            self.console.say(f"XLA options: {self.chosen.why}")
        for warning in self.chosen.warnings():
            self.console.warn(warning)
        if self.run.train.deterministic:
            gpu = jax.local_devices()[0].platform == "gpu"
            self.console.say(
                "deterministic: kernels that add up in a fixed order, no sums in switches, XLA's choices kept with the run. "
                "What it costs on this GPU is not measured: compare two runs"
                if gpu
                else "deterministic: nothing to do, programs on CPUs repeat themselves"
            )
        self.console.say("compiling the train step ...")
        began = time.perf_counter()
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        usable = limit / 2**30 if limit else math.inf
        found = compile_to_fit(self.run, self.program, self.chosen.options, usable, self.console.say)
        self.run, self.program, train = found
        program = self.program
        evaluation = None
        if self.run.eval.every_steps:
            evaluation = program.eval_step.lower(program.state.params, program.eval_batch).compile()
        seconds = time.perf_counter() - began
        memory = memory_by_class(program, train)
        self.console.say(
            f"compiled in {seconds:.1f} s; per device: " + ", ".join(f"{name} {size(gib)}" for name, gib in memory.items())
        )
        remat = dataclasses.asdict(self.run.remat)
        options = compiler.of_no_run(self.chosen.options)  # what a run adds, such as places in its folder, explains nothing
        self.receipt.update(remat=remat, compile_s=seconds, memory_gib=memory, compiler_options=options)
        if self.run.profile.dump_hlo:
            profiling.dump_hlo(train, self.workdir, self.console.say)
        if limit and (taken := taken_gib(train)) > limit / 2**30:
            memory |= {"peak and gaps": taken}
            raise OutOfMemory(explain_memory(self.run, memory, f"the budget of {limit / 2**30:.1f} GiB a device"))
        if jax.local_devices()[0].platform == "gpu":
            self.plan(train)
            waiting = train.memory_analysis().host_temp_size_in_bytes
            check_host_memory(program, hardware.pinned_limit_gib(os.environ), waiting)
        return Compiled(train, evaluation, seconds, memory)

    def plan(self, executable: Any) -> None:
        """What this step should take, by its own program: the run is compared with it. No plan stops no run."""
        gpu = hardware.lookup(jax.devices()[0].device_kind)
        if gpu is None:
            return  # `throughput` says that nothing is known of this GPU
        try:
            node = sum(node_of(d) == node_of(jax.local_devices()[0]) for d in jax.devices())
            self.watch = Watch(expect(self.run, self.program, executable, gpu, node))
        except ValueError as error:
            self.console.say(f"no plan to compare this run with: {error}")
            return
        self.receipt.update(**self.watch.record())  # what was measured follows at the end
        expected = self.watch.expected
        if self.peers.process_index == 0:  # the others would say the same
            self.mfu = MfuAlert(expected.longest_s, self.run.log.mfu_alert)
        step = f"{expected.step_s:.3g} s a step"
        if expected.range_s:
            step = "{:.3g} to {:.3g} s a step expected, roofline".format(*expected.range_s) + f" {expected.step_s:.3g} s"
        self.console.say(f"planned: {step}, peak {size(expected.peak_gib)} ({expected.rates})")

    def throughput(self) -> throughput.Throughput:
        """Rates in the terms of this model on these devices; MFU is null where the peak is not known."""
        run = self.run
        per_token, beyond = flops.training(run), flops.beyond(run)
        device = jax.devices()[0]
        peak = run.log.peak_tflops
        if not peak and device.platform == "gpu":
            gpu = hardware.lookup(device.device_kind)
            if gpu is None:
                self.console.say(f"no peak rate is known for {device.device_kind!r}: mfu is null. Set log.peak_tflops.")
            else:
                peak = gpu.peak(run.compute)
                if run.precision == "fp8":
                    self.console.say(f"MFU is of the bfloat16 peak, {peak:g} TFLOP/s; the FP8 peak is {gpu.fp8:g}")
                    self.console.of_fp8 = peak / gpu.fp8 if gpu.fp8 else None
        return throughput.Throughput(
            tokens_per_step=self.tokens_per_step,
            num_devices=jax.device_count(),
            flops_causal=per_token.causal,
            flops_full=per_token.full,
            flops_hardware=(per_token + beyond).causal,
            peak_flops=peak * 1e12 if peak else None,
        )

    # ---- Between steps

    def look_at_gpus(self, done: int) -> None:
        """Lines on the GPUs, where they are due, and what there is to warn of."""
        for line in self.monitor.lines(done):
            self.writers.gpu(**line)
        for text in self.monitor.alerts():
            self.console.warn(text)

    def settled(self) -> None:
        """From here on there is something to save: signals are left to the loop."""
        self.stop.at_once = None

    def evaluate(self, compiled: Any, params: Any, done: int, finish: bool) -> None:
        """Held-out loss; given up for a request to stop, unless `finish`: the next attempt evaluates then."""
        with self.watchdog.phase("step"), self.ledger.during("eval"):
            alone = self.peers.count == 1 and not finish

            def unwanted() -> bool:  # asked for each batch
                self.watchdog.beat()
                return alone and self.asked

            self.held_out.evaluate(compiled, params, done, unwanted)

    def passed(self, part: str) -> None:
        """A part of the start is over."""
        if self.timeline is not None:
            self.timeline.end(part)

    def heard(self, done: int, loss: float) -> None:
        """The metrics of a step have arrived."""
        if self.timeline is not None:
            self.timeline.end("step")
            self.console.say(self.timeline.words)
            self.receipt.update(start_s=self.timeline.parts)
            self.timeline = None
            if self.run.checkpoint.every_steps:  # other saves come at the end, where no step waits for them
                self.snapshots.prepare()
                self.checkpoints.prepare()
        self._heard = [*self._heard[-9:], (done, loss, time.time())]

    def facts(self) -> dict[str, Any]:
        """What the watchdog writes down at a hang."""
        return {
            "steps_dispatched": self.done,
            "last_steps_heard_of": [{"step": s, "loss": repr(loss), "time_unix": t} for s, loss, t in self._heard],
            "pending_save": self.checkpoints.pending,
            "newest_checkpoint": self.saved_at,
            "next_batch": self.start.position.at(self.done),
            "device_memory": {str(d): d.memory_stats() for d in jax.local_devices()},
        }

    # ---- Checkpoints

    def save(self, current: state.TrainState, done: int) -> None:
        """Begin to save; the loop goes on while files are written. Raises CheckpointError after too many failures in a row."""
        began = time.perf_counter()  # copies and digests, an earlier save: the loop waits for all of it
        with self.watchdog.phase("checkpoint"), self.ledger.during("save"):
            self.settle_saves()
            if self.saved_at == done:
                return  # a second copy of the state would be for nothing
            read = self.start.position.read(done)
            data = {"tokens": read * self.tokens_per_step, "fingerprint": self.train_data.fingerprint}
            if mixture := getattr(self.train_data, "mixture", None):
                data["mixture"] = mixture(read * self.run.train.global_batch)
            meta = {
                "config": config.to_dict(self.asked_run),
                "mesh": dict(self.program.placement.mesh.shape),
                "data": data,
                "loss": self.loss,
                "receipt": self.receipt.id,
                "versions": self.versions,
            }
            if self.base:
                meta["base"] = self.base
            taken = self.snapshots.take(self.program.saved(current))
            token = self.watchdog.begin("checkpoint", f"the save of step {done}")
            ended = functools.partial(self.watchdog.end, token)
            if self.checkpoints.save(done, taken.tensors, meta, taken.sums, ended, began, taken.began) is None:
                ended()  # this step is there already
                self.saved_at, self.failed_saves = done, 0
        self.blocked_s += time.perf_counter() - began

    def poll(self) -> None:
        """Tell of saves that have ended."""
        self.tell(self.checkpoints.poll())

    def settle_saves(self) -> None:
        """Wait for the save under way. All processes come here at the same step, so all end here if too many have failed."""
        self.tell(self.checkpoints.wait())
        if self.failed_saves >= FAILED_SAVES:
            raise CheckpointError(
                f"{self.failed_saves} saves in a row have failed, and the run ends before it loses more. The newest checkpoint "
                f"is {self.saved_at if self.saved_at >= 0 else 'none'}."
            )

    def finish_saves(self, loop: Loop | None = None) -> None:
        """Wait until everything is on disk, or has failed. With the loop that has ended, its last step is tried again."""
        with self.watchdog.phase("checkpoint"), self.ledger.during("save"):
            self.tell(self.checkpoints.wait())
            while loop is not None and 0 < self.failed_saves < FAILED_SAVES and self.saved_at < loop.done:
                time.sleep(AGAIN_S)
                self.save(loop.current, loop.done)
                self.tell(self.checkpoints.wait())

    def tell(self, ended: list[Saved | Failed]) -> None:
        """To the log and the receipt."""
        for one in ended:
            if isinstance(one, Failed):
                self.failed_saves += 1
                self.snapshots.forget()
                again = "the next save tries again" if self.failed_saves < FAILED_SAVES else "it is the last that is tried"
                self.console.warn(f"{one.error} ({self.failed_saves} in a row; {again})")
                continue
            self.failed_saves, self.saved_at = 0, one.step
            self.longest_save_s = max(self.longest_save_s, one.total_s)
            rate = one.bytes / max(one.total_s, 1e-9) / 1e9
            self.console.say(
                f"checkpoint {one.step}: {one.bytes / 2**20:,.1f} MiB in {one.total_s:.1f} s ({rate:.2f} GB/s), of which the "
                f"loop waited {one.blocked_s:.2f} s and copies took {one.copied_s:.2f} s; "
                f"host memory at most {one.host_gib:.1f} GiB"
            )
            self.receipt.saved(dataclasses.asdict(one) | {"gb_per_s": rate})
