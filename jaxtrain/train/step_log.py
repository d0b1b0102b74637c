"""The metrics of each step: read one step late, written to metrics.jsonl, the log and the terminal.

The loop dispatches step k + 1 before it reads the metrics of step k, so the device never waits for the host.
"""

import dataclasses
from typing import Any

import jax

from jaxtrain.config import hardware
from jaxtrain.config.schema import RunConfig
from jaxtrain.metrics import throughput
from jaxtrain.metrics.gpu_monitor import MfuAlert, Monitor
from jaxtrain.metrics.progress import Console
from jaxtrain.metrics.table import METRICS
from jaxtrain.plan.expect import Watch
from jaxtrain.step import guard
from jaxtrain.step import train_step as step
from jaxtrain.step.batch import HostBatch
from jaxtrain.step.model_flops import model_flops
from jaxtrain.step.program import Program
from jaxtrain.train.services import Services


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step, on the host."""

    step: int  # number of the step, from 1
    loss: float
    grad_norm: float
    lr: float
    verdict: int  # guard.TAKEN, or the reason why the step was skipped
    more: dict[str, float]  # the optional METRICS that the step returned
    batch: HostBatch  # the rows of this process

    @property
    def taken(self) -> bool:
        """Return whether the step was applied."""
        return self.verdict == guard.TAKEN


class PendingMetrics:
    """Holds the metrics of the newest step. They are on the devices until `read` is called."""

    def __init__(self):
        self._pending: tuple[int, step.Metrics, HostBatch] | None = None

    @property
    def on_device(self) -> step.Metrics | None:
        """Return the metrics of the last `put`; None if they were read or dropped."""
        return self._pending[1] if self._pending else None

    def put(self, done: int, metrics: step.Metrics, batch: HostBatch) -> None:
        """Hold the metrics and the batch of step `done` until `read` or `drop`."""
        self._pending = done, metrics, batch

    def drop(self) -> None:
        """Drop the metrics of the last `put`, without reading them, after a rollback."""
        self._pending = None

    def read(self) -> StepMetrics | None:
        """Return the metrics of the last `put`, and drop them; None if there are none. Waits until the devices have them."""
        if self._pending is None:
            return None
        (done, metrics, batch), self._pending = self._pending, None
        values = jax.device_get(metrics)
        more = {name: float(values[name]) for name, metric in METRICS.items() if metric.optional and name in values}
        loss, norm, lr = (float(values[name]) for name in ("loss", "grad_norm", "lr"))
        return StepMetrics(done, loss, norm, lr, int(values["verdict"]), more, batch)


class StepLog:
    """Writes the metrics of steps to metrics.jsonl and the log, with warnings about the run's speed and its GPUs."""

    def __init__(self, program: Program, data: Any, services: Services, monitor: Monitor, watch: Watch | None):
        """Args: watch: compares the run with its plan; None without a plan."""
        run = program.run
        self._run, self._data, self._services, self._monitor = run, data, services, monitor
        self._tokens_per_batch = run.ramp.unit * run.data.seq_len
        self.rates = make_throughput(run, services.console)
        self.watch: Watch | None = None
        self._mfu: MfuAlert | None = None
        self.compare(watch)

    def compare(self, watch: Watch | None) -> None:
        """Compare the run with its plan from here on. watch: None: there is no plan."""
        self.watch = watch
        if watch is not None and self._services.peers.process_index == 0:  # one process warns for all
            self._mfu = MfuAlert(watch.expected.longest_s)

    def note(self, metrics: StepMetrics, batches: int, skipped: int) -> None:
        """Show the progress and warnings about GPUs after a step, and write the step's line if it is due (log.every_steps).

        Args:
          metrics: the metrics of the step.
          batches: number of batches of the source that were read up to this step.
          skipped: number of skipped steps since the start of the run.
        """
        console, writers = self._services.console, self._services.writers
        console.tick(metrics.step)
        for line in self._monitor.lines(metrics.step):
            writers.gpu(**line)
        for text in self._monitor.alerts():
            console.warn(text)
        if metrics.step % self._run.log.every_steps and metrics.step != self._run.train.steps:
            return
        in_use, peak = throughput.memory_gib(jax.local_devices())
        line = {
            "step": metrics.step,
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "lr": metrics.lr,
            "tokens": batches * self._tokens_per_batch,
            "epoch": self._data.epoch(batches),
            **self.rates.line(),
            "memory_gib": in_use,
            "peak_memory_gib": peak,
            "skipped_steps": skipped,
            **metrics.more,
        }
        writers.train(**line)
        sources_read = getattr(self._data, "sources_read", None)  # a user's own source may lack it
        for source in sources_read(batches) if sources_read else ():
            writers.source(step=metrics.step, **source)
        console.step(line)
        if max(0, metrics.step - self._run.log.every_steps) < self._run.ramp.end:
            return  # the plan is that of the full batch, and the line has smaller ones
        for warning in self.watch.note(line["step_time_s"], peak) if self.watch else ():
            console.warn(warning)
        if self._mfu and (warning := self._mfu.note(line["step_time_s"])):
            console.warn(warning)


def make_throughput(run: RunConfig, console: Console) -> throughput.Throughput:
    """Return the object that computes tokens/s and MFU from step times. MFU is null if the device's peak rate is unknown."""
    if note := model_flops(run).note:
        console.say(note)
    device = jax.devices()[0]
    peak, gpu = peak_tflops(run, device.device_kind), hardware.lookup(device.device_kind)
    if not run.log.peak_tflops and device.platform == "gpu":
        if gpu is None:
            console.say(f"no peak rate is known for {device.device_kind!r}: mfu is null. Set log.peak_tflops.")
        else:
            console.say(f"MFU counts causal attention, of {peak:g} TFLOP/s a GPU")
            if run.precision == "fp8":
                console.say(f"the FP8 peak is {gpu.fp8:g} TFLOP/s a GPU")
                console.fp8_factor = gpu.peak(run.compute) / gpu.fp8 if gpu.fp8 else None
    return rates_of(run, jax.device_count(), peak)


def peak_tflops(run: RunConfig, device_kind: str) -> float | None:
    """Return the dense peak in TFLOP/s of a device, for MFU; None if it is unknown.

    It is `log.peak_tflops` if set, else the peak in the dtype of activations. In an fp8 run that dtype is bfloat16.
    """
    gpu = hardware.lookup(device_kind)
    return run.log.peak_tflops or (gpu.peak(run.compute) if gpu else None)


def rates_of(run: RunConfig, num_devices: int, peak: float | None) -> throughput.Throughput:
    """Return the object that computes the rates of a run on `num_devices` devices of `peak` TFLOP/s."""
    model = model_flops(run)
    return throughput.Throughput(
        tokens_per_step=run.tokens_per_step,
        num_devices=num_devices,
        flops_causal=model.training.causal,
        flops_full=model.training.full,
        flops_hardware=(model.training + model.recomputed).causal if model.recomputed else None,
        peak_flops=peak * 1e12 if peak else None,
    )
