"""Plans made up by formula, for tests of the layout search: configs to search, plans, and fakes of the planning function.

A pool of child processes finds the fakes as made_plans:NAME, with this folder on PYTHONPATH.
"""

import os
import pkgutil
import signal
import time
from typing import Any

from jaxtrain.config import launch, schema
from jaxtrain.data import loading
from jaxtrain.plan import fit, search_parallel, topology
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Buffer, Memory, Plan, Rates, StepFlops, Time
from jaxtrain.plan.search_cache import PlanOutcome, Request

H200 = topology.parse_topology("h200:8")
RATES = rates_for(H200.gpu, "bf16")


def load(*overrides: str, file: str = "configs/llama3_8b.py") -> schema.RunConfig:
    """Return the run of a config file with overrides KEY=VALUE."""
    loaded = loading.load_config([f"--config={launch.REPO / file}", *(f"--config.{o}" for o in overrides)])
    assert not loaded.problems, loaded.problems
    return loaded.run


def tiny(*overrides: str) -> schema.RunConfig:
    """Return a run that compiles in seconds, and for which the search has few layouts."""
    sizes = ("num_layers=2", "d_model=256", "num_heads=4", "num_kv_heads=2", "head_dim=64", "d_ff=512", "vocab_size=1024")
    batch = ("data.seq_len=256", "train.global_batch=8", "train.grad_accum=1", "loss.chunk=256", "mesh.fsdp=-1")
    return load(*(f"model.{s}" for s in sizes), *batch, "remat.policy=full", "remat.tensors=", *overrides)


def flat(run: schema.RunConfig) -> dict[str, Any]:
    """Return {dotted key: value} of a run's config."""
    return run.flat


def made(run: schema.RunConfig, machine: topology.Topology, step_s: float, peak_gib: float, rates: Rates | None = None) -> Plan:
    """Return a plan with this step time and this peak memory."""
    usable = machine.usable_gib(run.train.memory_fraction)
    held, buffer = {"parameters": peak_gib}, Buffer(peak_gib, "state", "f32[1]", "", "", "p")
    return Plan(
        config="made",
        overrides=(),
        topology=machine.name,
        chip=machine.device_kind,
        mesh=dict(topology.layout_of(run, machine).mesh),
        attention="cudnn",
        fits=peak_gib <= usable,
        memory=Memory(
            machine.memory_gib, 6.0, usable, peak_gib, peak_gib, 0.0, 0.0, held, {}, "", ((0.0, ""),), (buffer,), 0.0, "formula"
        ),
        flops=StepFlops(0.0, 0.0, 0.0, 0.0),
        collectives=(),
        time=Time(0, 0, 0, 0, 0, 0, 0, step_s * 1e3, 1 / step_s, 1 / step_s, 0.5, 0.5, 0.5, "GEMMs"),
        kernels=(),
        rates=rates or rates_for(machine.gpu, run.precision),
        tokens_per_step=run.train.global_batch * run.data.seq_len,
        compile_s=1.0,
        trip_counts={},
        warnings=(),
        versions={},
        options={},
    )


# ---- Fakes of the planning function


def above(run: schema.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """Return a plan with 10 GiB more than the run's least memory (plan/fit.py).

    Its step takes a second, more for what the layout repeats, for tensor groups and for small microbatches.
    """
    least, layout = fit.least_memory(run, machine), topology.layout_of(run, machine)
    step_s = (1 + least.repeated) * (1 + 0.1 * (layout.size("tensor") - 1)) + 0.01 * run.train.grad_accum
    return made(run, machine, step_s, least.gib + 10, rates)


def by_accum(run: schema.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """Raise an error for 2 microbatches, crash for 4, hang for 8; else return a plan."""
    accum = run.train.grad_accum
    if accum == 2:
        raise ValueError("no plan\nof two microbatches")
    if accum == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    if accum == 8:
        time.sleep(600)
    return made(run, machine, 1.0 / accum, 10.0, rates)


def killed(run: schema.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """Kill this process, as the out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return made(run, machine, 1.0, 1.0)


def sleeps(run: schema.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """Sleep for 10 minutes."""
    time.sleep(600)
    return made(run, machine, 1.0, 1.0)


class Inline:
    """A fake of parallel.Child, which plans in this process. `started` collects the runs of all instances."""

    started: list[schema.RunConfig] = []

    def __init__(self, request: Request, plan_one: str, timeout_s: float) -> None:
        self.started.append(request.run)
        self._request, self._plan_one = request, plan_one

    def outcome(self) -> PlanOutcome:
        request = self._request
        try:
            plan = pkgutil.resolve_name(self._plan_one)(request.run, request.topology, rates=request.rates)
            return PlanOutcome(request.label(plan), "planned")
        except RuntimeError as error:
            return PlanOutcome(None, "failed", str(error))

    def end(self) -> None:
        """Do nothing: no process runs."""


def plan_inline(monkeypatch: Any) -> list[schema.RunConfig]:
    """Let the search plan in this process, one run after the other. Returns the list to which each planned run is appended."""
    monkeypatch.setattr(search_parallel, "Child", Inline)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(search_parallel, "POLL_S", 0.0)
    monkeypatch.setattr(Inline, "started", [])
    return Inline.started
