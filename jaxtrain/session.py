"""An attempt at a run while it trains, chapter by chapter: what it is, the compiled step, the first state, the loop, saves."""

import dataclasses
import importlib.metadata
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxtrain import checkpoint, compiler, config, flops, hardware, metrics, profiling, state, step, throughput
from jaxtrain.between import HeldOut, Samples
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import RunConfig
from jaxtrain.data import pipeline
from jaxtrain.memory import (
    OutOfMemory,
    check_host_memory,
    compile_to_fit,
    explain_memory,
    memory_by_class,
    out_of_memory_explained,
    size,
    taken_gib,
)
from jaxtrain.models.module import part
from jaxtrain.plan.expect import Watch, expect
from jaxtrain.progress import Console
from jaxtrain.receipt import Receipt
from jaxtrain.sharding import left_whole
from jaxtrain.signals import Stop
from jaxtrain.start import Start, base_of, initial_state

DONE, FAILED = 0, 1


class Diverged(RuntimeError):
    """The loss or the gradient is no number any more."""


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
    ):
        self.run, self.workdir, self.console, self.stop = run, workdir, console, stop
        self.receipt, self.checkpoints, self.program, self.start = receipt, checkpoints, program, start
        self.writers = writers
        self.chosen = chosen  # XLA's options
        self.asked = run  # `run` as configured; compiling may settle what remat.policy=auto keeps
        self.train_data, self.held_out, self.samples = train_data, held_out, samples
        self.tokens_per_step = run.train.global_batch * run.data.seq_len
        self.saved_at = start.step if start.resumed else -1
        self.watch: Watch | None = None  # planned beside measured, on GPUs that the plan knows
        self.base: dict[str, str] = {}  # what checkpoints say of the weights that adapters stand beside
        self.loss: float | None = None  # of the newest step whose metrics have arrived
        self.done = start.step  # optimizer steps taken

    def train(self) -> tuple[int, str]:
        """The chapters of a run. Returns (exit code, reason)."""
        self.announce()
        if self.start.step == self.run.train.steps:
            return self.nothing_left()
        with out_of_memory_explained(self.run, {}):
            compiled = self.compile()
        with out_of_memory_explained(self.run, compiled.memory):
            current = self.begin()
            self.rewind()
            current, done = self.loop(current, compiled)
            self.finish_saves()
            if self.stop:
                saved = f"state saved at step {done}" if done else "before the first step, nothing to save"
                self.console.say(f"{self.stop.name}: {saved}; the same command goes on from there.")
                return self.stop.exit_code or FAILED, f"{self.stop.reason} at step {done}"
            self.samples.write(state.weights(current), done)
        return DONE, f"{done} steps done"

    def nothing_left(self) -> tuple[int, str]:
        """All steps were done before. What may be missing is the sample, if the run was stopped before it."""
        steps = self.run.train.steps
        self.console.say(f"all {steps} steps are done: nothing to train. A larger train.steps goes on from here.")
        current = self.begin()
        self.rewind()
        if not self.samples.written(steps):
            self.samples.write(state.weights(current), steps)
        return DONE, f"{steps} steps were done already"

    def begin(self) -> state.TrainState:
        """The first state of this attempt."""
        current = initial_state(self.run, self.program, self.start, self.checkpoints, self.console.say)
        self.base = base_of(self.program, self.start, current, self.checkpoints)
        return current

    def rewind(self) -> None:
        """Metrics and samples of steps that this attempt takes anew go; those of one that saved no checkpoint are set aside."""
        for moved in () if self.start.resumed else self.writers.set_aside():
            self.console.say(f"no checkpoint in {self.checkpoints.directory}: starting at 0; what was there moved to {moved}")
        self.writers.rewind(self.start.step)
        self.writers.note("config", config.to_dict(self.asked))

    # ---- Before anything is allocated

    def announce(self) -> None:
        """What this run is, in plain numbers."""
        run, program, say = self.run, self.program, self.console.say
        mesh = program.placement.mesh
        shards = program.placement.size("data") * program.placement.size("fsdp")
        devices = counted(mesh.size, "device") if shards == mesh.size else f"{shards} shards of {mesh.size} devices"
        each = run.train.global_batch // run.train.grad_accum // shards
        epochs = self.train_data.epoch(run.train.steps)
        say(
            f"global batch {run.train.global_batch} = {devices} x {each} x {counted(run.train.grad_accum, 'microbatch')}; "
            f"{count(self.tokens_per_step)} tokens a step; this run is {epochs:.2g} epochs"
        )
        parameters = count(flops.parameters(run.model)["total"])
        learnt = sum(math.prod(a.shape) for a in jax.tree.leaves(part(program.state.params, program.trained)))
        if program.adapters:
            parameters = f"{parameters} parameters, and adapters of {count(learnt)}, which alone are trained"
        else:
            everything = all(jax.tree.leaves(program.trained))
            parameters += " parameters" + ("" if everything else f", of which {count(learnt)} are trained")
        shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
        say(
            f"model: {parameters}; mesh: {shape}; attention: {program.attention} ({program.attention_reason})"
            + (f"; each sequence over {program.context.size} devices: {program.context}" if program.context.size > 1 else "")
        )
        if self.train_data.synthetic:
            say("data: synthetic. Its loss says nothing about language.")
        if self.train_data.masked_fraction:
            say(
                f"data: {self.train_data.masked_fraction:.2%} of tokens stand behind more than data.max_segments="
                f"{run.data.max_segments} documents in their sequence and are masked"
            )
        # At stage 0 that is what was asked for.
        for name in left_whole(state.abstract_tensors(program.state)) if run.sharding.zero else ():
            self.console.warn(f"not split over any device, every one holds all of it: {name}. See sharding.rules.")
        if self.start.resumed:
            say(f"resuming from step {self.start.step} in {self.checkpoints.directory}")
        for note in self.start.notes:
            say(f"  changed: {note}")
        if self.start.resumed and self.start.files != self.train_data.fingerprint.get("files"):
            self.console.warn("the data is not what the checkpoint was trained on so far: other files, or other contents")

    def compile(self) -> Compiled:
        """Compile the train step for these shapes, and read from it what it will hold."""
        if self.chosen.why:
            self.console.say(f"XLA options: {self.chosen.why}")
        for warning in self.chosen.warnings():
            self.console.warn(warning)
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
        self.receipt.update(remat=remat, compile_s=seconds, memory_gib=memory, compiler_options=self.chosen.options)
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
            self.watch = Watch(expect(self.program, executable, gpu, jax.local_device_count(), self.run.precision))
        except ValueError as error:
            self.console.say(f"no plan to compare this run with: {error}")
            return
        expected = self.watch.expected
        self.console.say(f"planned: {expected.step_s:.3g} s a step, peak {size(expected.peak_gib)} ({expected.rates})")

    # ---- The loop

    def loop(self, current: state.TrainState, compiled: Compiled) -> tuple[state.TrainState, int]:
        """Steps until the last one, or until asked to stop. Metrics are read one step late: the device never waits for us."""
        run, console = self.run, self.console
        rates = self.throughput()
        tracer = profiling.Tracer(
            run.profile,
            self.workdir,
            console.say,
            process_index=jax.process_index(),
            asked=lambda: self.stop.traces,
            program=compiled.train,
        )
        batches = pipeline.iterate(self.train_data, self.start.step + self.start.data_base, run.data.prefetch)
        late = Late(self, rates)
        done = self.start.step
        try:
            while done < run.train.steps and not self.stop:
                rates.start_step()
                tracer.before_step(done)
                with rates.waiting_for_data():
                    batch = step.place_batch(next(batches), self.program.batch, self.program.context)
                current, values = compiled.train(current, batch)
                if tracer.tracing:
                    rates.exclude()
                tracer.after_step(done, values)
                late.report()
                done += 1
                self.done = done
                late.put(done, values)
                last = done == run.train.steps
                if self.held_out.due(done):
                    rates.exclude()
                    late.report()
                    self.held_out.evaluate(compiled.eval, state.weights(current), done)
                if self.samples.due(done):  # before the checkpoint, or a kill between the two would lose them
                    rates.exclude()
                    late.report()
                    self.samples.write(state.weights(current), done)
                if last or (run.checkpoint.every_steps and done % run.checkpoint.every_steps == 0):
                    rates.exclude()
                    late.report()
                    self.save(current, done)
                for saved in self.checkpoints.poll():
                    self.tell(saved)
            late.report()
            if done > max(self.saved_at, 0):  # asked to stop between two checkpoints
                self.save(current, done)
        finally:
            # The newest metrics, and not the state: where a step failed, that is given away already.
            tracer.close(late.waiting[1] if late.waiting else None)
            close(batches)
        return current, done

    def throughput(self) -> throughput.Throughput:
        """Rates in the terms of this model on these devices; MFU is null where the peak is not known."""
        run = self.run
        per_token, again = flops.training(run), flops.again(run)
        device = jax.devices()[0]
        peak = run.log.peak_tflops
        if not peak and device.platform == "gpu":
            gpu = hardware.lookup(device.device_kind)
            if gpu is None:
                self.console.say(f"no peak rate is known for {device.device_kind!r}: mfu is null. Set log.peak_tflops.")
            else:
                peak = gpu.peak(run.compute)
                if run.precision == "fp8":
                    self.console.say(f"MFU is of the bfloat16 peak, {peak:g} TFLOP/s: a step with FP8 has none of its own")
        return throughput.Throughput(
            tokens_per_step=self.tokens_per_step,
            num_devices=jax.device_count(),
            flops_causal=per_token.causal,
            flops_full=per_token.full,
            flops_hardware=(per_token + again).causal,
            peak_flops=peak * 1e12 if peak else None,
        )

    # ---- Checkpoints

    def save(self, current: state.TrainState, done: int) -> None:
        """Begin to save; the loop goes on while files are written."""
        meta = {
            "config": config.to_dict(self.asked),
            "data": {
                "tokens": (done + self.start.data_base) * self.tokens_per_step,
                "fingerprint": self.train_data.fingerprint,
            },
            "loss": self.loss,
            "receipt": self.receipt.id,
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")},
        }
        if self.base:
            meta["base"] = self.base
        self.checkpoints.save(done, state.to_tensors(self.program.saved(current)), meta)
        self.saved_at = done

    def finish_saves(self) -> None:
        """Wait until everything is on disk."""
        for saved in self.checkpoints.close():
            self.tell(saved)

    def tell(self, saved: checkpoint.Saved) -> None:
        self.console.say(
            f"checkpoint {saved.step}: {saved.bytes / 2**20:,.1f} MiB in {saved.total_s:.1f} s, "
            f"of which the loop waited {saved.blocked_s:.2f} s"
        )


class Late:
    """Metrics of the step before: fetched after the next one is on its way."""

    def __init__(self, session: Session, rates: throughput.Throughput):
        self.session, self.rates = session, rates
        self.waiting: tuple[int, step.Metrics] | None = None

    def put(self, done: int, values: step.Metrics) -> None:
        """These are the metrics of the step that made `done` steps done."""
        self.waiting = done, values

    def report(self) -> None:
        """Fetch what waits. Raises Diverged when the loss or the gradient is no number."""
        if self.waiting is None:
            return
        (done, values), self.waiting = self.waiting, None
        session = self.session
        loss, norm, lr = (float(values[k]) for k in ("loss", "grad_norm", "lr"))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(
                f"step {done}: loss {loss}, gradient norm {norm}. Nothing is saved from here; the newest checkpoint is "
                f"{session.saved_at if session.saved_at >= 0 else 'none'}. Lower optimizer.lr or look at the data of this step."
            )
        session.loss = loss
        session.console.tick(done)
        if done % session.run.log.every_steps and done != session.run.train.steps:
            return
        in_use, peak = throughput.memory(jax.local_devices())
        line = {
            "step": done,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": (done + session.start.data_base) * session.tokens_per_step,
            "epoch": session.train_data.epoch(done + session.start.data_base),
            **self.rates.line(),
            "memory_gib": in_use,
            "peak_memory_gib": peak,
            "skipped_steps": 0,
        }
        session.writers.train(**line)
        session.console.step(line)
        if session.watch is not None:
            for warning in session.watch.note(line["step_time_s"], peak):
                session.console.warn(warning)
            session.receipt.update(**session.watch.record())


def close(batches: Iterator[Any]) -> None:
    """End the data thread."""
    getattr(batches, "close", lambda: None)()


def count(number: float) -> str:
    """2097152 -> '2.1 M'."""
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:g}"


def counted(number: int, noun: str) -> str:
    """'1 device', '8 devices', '64 microbatches'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
