"""Check for three bugs that were reported against trainers, by train steps in float32: `parity --known-issues`.

documents    attention crosses packed documents. A packed batch and the same documents in separate sequences must have the same
             loss and gradients. The packed batch runs on one device, and with its documents sharded over devices.
gradients    gradients are wrong in layouts of several mesh axes. Such layouts (COMBINED) must take the steps of one device.
processes    the data depends on the number of processes. One, two and four processes, with the same total number of devices,
             must take the same steps.
"""

import concurrent.futures
import dataclasses
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.train import parity_layouts
from jaxtrain.train.child import jaxtrain_command, last_lines, run_program
from jaxtrain.train.parity_layouts import Layout
from jaxtrain.train.parity_runs import Runs, compare_layouts

COMBINED = (
    "one,fsdp2xtensor2xseq2,data2xfsdp2xtensor2/train.grad_accum=2/sharding.zero=1,"
    "stage2xfsdp2xtensor2/train.grad_accum=2,fsdp2xseq4/parallel.context=ulysses"
)
STRADDLING = "one,fsdp2xtensor2xseq2"
PROCESSES = (1, 2, 4)
DEVICES = 4  # of all processes together
STEPS = 3
LIMIT_S = 300.0  # time limit of a run of check `processes`, in seconds
TRAIN = jaxtrain_command("main")
SHORT = (
    *(f"train.steps={STEPS}", "optimizer.warmup_steps=1", "log.every_steps=1", "log.tensorboard=false", "eval.every_steps=0"),
    *("sample.max_tokens=0", "checkpoint.every_steps=0", "data.eval_source=", "mesh.data=1", f"mesh.fsdp={DEVICES}"),
)


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check: the difference that is largest relative to its bound."""

    name: str
    figure: float  # relative difference
    bound: float  # bound of the relative difference
    where: str  # layout or processes, and the value that differs

    @property
    def ok(self) -> bool:
        """Return whether the figure is a number and within its bound."""
        return self.figure <= self.bound


def separate_documents(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a packed batch, arrays (B, T), with each of its documents in a separate sequence, padded to T."""
    pairs = [
        (row, int(number)) for row, segments in enumerate(batch["segments"]) for number in np.unique(segments[segments > 0])
    ]
    out = {name: np.zeros((len(pairs), a.shape[1]), a.dtype) for name, a in batch.items()}
    for i, (row, number) in enumerate(pairs):
        own = batch["segments"][row] == number
        for name, a in batch.items():
            out[name][i, : own.sum()] = 1 if name == "segments" else a[row, own]
    return out


def check_documents(runs: Sequence[tuple[Layout, RunConfig]]) -> Check:
    """Compare a step on a packed batch in each layout with a step on one device that has each document in its own sequence."""
    import jax

    from jaxtrain.data.batches import with_documents
    from jaxtrain.step.state import create_state
    from jaxtrain.train import parity

    def step(run: RunConfig, batch: Mapping[str, np.ndarray], count: int) -> parity.Trained:
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch=len(batch["tokens"])))
        program, train, _ = parity.compile_step(run, jax.devices()[:count])
        state = create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
        return parity.take_steps(program, train, state, lambda i: dict(batch), 1)[0]

    run = runs[0][1]
    rows = parity.open_rows(run)
    packed = rows.batch(0)
    apart = separate_documents(packed)
    if not (packed["segments"] > 1).any():
        rule = "the first batch has fewer than two documents a sequence"
        packed = "" if run.data.packing == "documents" else "data.packing=documents, or "
        raise ConfigError([Problem("data.source", run.data.source, rule, f"Set {packed}data.source=synthetic.")])
    reference = step(with_documents(run, rows), apart, 1)
    found = []
    for layout, run in runs:
        allowed = parity.bounds(reference, None, 1, 1)
        result = parity.compare(step(with_documents(run, rows), packed, layout.devices), reference, allowed)
        named = {"loss": result.loss, "gradient norm": result.grad_norm, "gradient": result.gradient}
        found += [Check("documents", m.value, m.bound, f"{layout.name}: {name}") for name, m in named.items()]
    return worst(found)


def run_checks(runs: Runs, argv: Sequence[str], console: Console) -> list[dict[str, Any]]:
    """Run all checks, and print each verdict. Return the results as plain data. JAX must be started.

    Args:
        runs: the layouts of COMBINED.
        argv: config file and overrides of the command line.

    Raises:
        ConfigError: the data has too few documents to show a bug.
        FirstLayoutFailed: the first layout could not be run.
    """
    from jaxtrain.train.parity_report import finite, say

    straddling = [(layout, run) for layout, run in runs if layout.name in STRADDLING.split(",")]
    checks = {
        "attention stays within a packed document": lambda: check_documents(straddling),
        "gradients of combined layouts equal those of one device": lambda: check_gradients(
            compare_layouts(runs, 2, console).rows
        ),
        "training does not depend on the number of processes": lambda: check_processes(argv),
    }
    results = []
    for claim, act in checks.items():
        began = time.perf_counter()
        found = act()
        style = "green" if found.ok else "bold red"
        say(console, f"{'ok' if found.ok else 'WRONG'}: {claim}", style)
        say(console, f"    {found.where}: relative difference {found.figure:.1e}, bound {found.bound:.0e}")
        facts = {"claim": claim, **dataclasses.asdict(found), "ok": found.ok, "seconds": round(time.perf_counter() - began, 1)}
        results.append(facts | {"figure": finite(found.figure)})
    return results


def check_gradients(rows: Sequence[Any]) -> Check:
    """Return the gradient difference from `one` that is largest relative to its bound. rows: a Row per layout, `one` first."""
    found = [
        Check(
            "gradients",
            row.comparison.gradient.value,
            row.comparison.gradient.bound,
            f"{row.layout.name}: {row.comparison.gradient.where}",
        )
        if row.comparison
        else Check("gradients", float("nan"), 0.0, f"{row.layout.name}: {row.failed}")
        for row in rows[1:]
    ]
    return worst(found)


def check_processes(argv: Sequence[str]) -> Check:
    """Train the config `argv` with one, two and four processes, and compare losses and gradient norms of every step."""
    curves = {}
    for count in PROCESSES:
        lines, failed = train_processes(argv, count)
        if failed:
            return Check("processes", float("nan"), 0.0, f"{count} processes: {failed}")
        curves[count] = lines
    from jaxtrain.train.parity import EXACT

    reference, found = curves[PROCESSES[0]], []
    for count in PROCESSES[1:]:
        for name in ("loss", "grad_norm"):
            for i, (a, b) in enumerate(zip(curves[count], reference, strict=True), 1):
                found.append(Check("processes", abs(a[name] / b[name] - 1), EXACT, f"{count} processes: {name} of step {i}"))
    return worst(found)


def train_processes(argv: Sequence[str], count: int) -> tuple[list[dict[str, Any]], str]:
    """Train with `count` processes on this node. Return the train lines of metrics.jsonl, and the reason if there are none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={DEVICES // count} --xla_backend_optimization_level=0"
    environ = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:

        def run(number: int) -> tuple[int | None, str]:
            command = [*TRAIN, *argv, *(f"--config.{o}" for o in (*parity_layouts.FLOAT32, *SHORT)), f"--workdir={folder}/run"]
            if count > 1:
                command += [f"--coordinator={address}", f"--num-processes={count}", f"--process-id={number}"]
            return run_program(command, Path(folder, f"{number}.txt"), environ=environ, limit_s=LIMIT_S)

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            ended = list(pool.map(run, range(count)))
        if failed := [(code, output) for code, output in ended if code != 0]:
            code, output = failed[0]
            return [], "not done in time" if code is None else f"exit code {code}: {last_lines(output)}"
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "train"], ""


def worst(checks: Sequence[Check]) -> Check:
    """Return the check whose difference is largest relative to its bound. NaN counts as the largest."""
    return max(checks, key=lambda c: (not np.isfinite(c.figure), c.figure / c.bound if c.bound else c.figure))
