"""The same few steps on several layouts: devices for all of them, and the comparison with the first."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rich.console

from jaxtrain.config import environment, hardware, own_parts
from jaxtrain.config.durations import duration
from jaxtrain.config.schema import RunConfig
from jaxtrain.runtime.startup import set_environment, start_jax
from jaxtrain.runtime.words import first_line
from jaxtrain.train import parity_layouts
from jaxtrain.train.parity_layouts import ParityLayout

if TYPE_CHECKING:
    from jaxtrain.train.parity_report import ParityResult

Runs = list[tuple[ParityLayout, RunConfig]]


def start_devices(runs: Runs) -> None:
    """Set the environment that JAX reads when it starts, and start JAX."""
    most = max(layout.devices for layout, _ in runs)
    devices = parity_layouts.find_devices(most)
    if devices.kind == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        if hardware.probe().count < most:
            os.environ["JAX_NUM_CPU_DEVICES"] = str(most)
        # This halves the compile time. The speed of the compiled code does not matter here.
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_backend_optimization_level" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    else:
        set_environment(environment.overlay(runs[0][1], devices, os.environ)[0])
    start_jax(devices)


class FirstLayoutFailed(ValueError):
    """The layout that the others are compared with could not be run."""


def compare_layouts(
    runs: Runs, steps: int, console: rich.console.Console, config: str, overrides: Sequence[str]
) -> "ParityResult":
    """Train `steps` steps on every layout, and compare them with the first. JAX must be started.

    Args:
      config, overrides: the config file and overrides, for the result.

    Raises:
      FirstLayoutFailed: the first layout could not be run.
    """
    import jax

    from jaxtrain.train import parity, parity_report

    exact = yardstick = None
    (reference, first), *later_runs = runs
    in_float32 = all(parity.is_float32(run.precision, run.dtypes) for _, run in runs)
    types = "float32" if in_float32 else first.precision
    total, done = len(runs) + (not in_float32), 0

    def attempt(name: str, layout: ParityLayout, run: RunConfig) -> tuple[Any, str, float]:
        """Return (steps of a layout, or None after an error; the error, or ""; the time in seconds)."""
        nonlocal done
        done += 1
        began = time.perf_counter()
        busy = console.status(f"{done} of {total}: {name}: compiling, then {steps} steps ...")
        try:
            with busy if console.is_terminal else contextlib.nullcontext():
                trained = parity.first_steps(run, jax.devices()[: layout.devices], steps)
        except Exception as error:
            own_problem = own_parts.problem_of(error)
            if own_problem and layout is reference:  # it would be the same on all layouts
                raise
            if not own_problem and not isinstance(
                error, (ValueError, NotImplementedError, jax.errors.JaxRuntimeError, MemoryError)
            ):
                raise
            return None, str(own_problem or f"{type(error).__name__}: {first_line(error)}"), time.perf_counter() - began
        seconds = time.perf_counter() - began
        if not console.is_terminal:
            console.print(f"{done} of {total}: {name}: {duration(seconds)}", markup=False, highlight=False)
        return trained, "", seconds

    base, failed, seconds = attempt(reference.name, reference, first)
    if base and not in_float32:
        exact, failed, _ = attempt(f"{reference.name} in float32", reference, parity_layouts.to_float32(first))
    if failed or not base:
        raise FirstLayoutFailed(f"the first layout, {reference.name}, could not be run: {failed}")
    tokens = first.train.global_batch * first.data.seq_len
    if exact:
        yardstick = parity.compare_runs(exact, base, parity.bounds(base, exact, 1, tokens))
    rows = [parity_report.ParityRow(reference, base, seconds=seconds)]
    for layout, run in later_runs:
        trained, failed, seconds = attempt(layout.name, layout, run)
        if not trained:
            rows.append(parity_report.ParityRow(layout, failed=failed, seconds=seconds))
            continue
        allowed = parity.bounds(base, exact, layout.devices * run.train.grad_accum, tokens)
        comparison = parity.compare_runs(trained, base, allowed)
        curves = dataclasses.replace(trained, start={}, gradients={}, weights={})  # the other fields are large
        rows.append(parity_report.ParityRow(layout, curves, comparison, allowed, seconds=seconds))
    devices = f"{max(layout.devices for layout, _ in runs)} {jax.devices()[0].device_kind} devices"
    return parity_report.ParityResult(config, tuple(overrides), steps, types, devices, tuple(rows), yardstick)
