"""Compare the steps of two runs, with bounds that follow from rounding.

The comparison covers loss and gradient norm of every step, each tensor's gradient at the first step, and each weight's total
change. The gradients are read from the optimizer: after the first step Adam's first moment is 1 - beta1 times the gradient,
and Muon's momentum is 1 - optimizer.momentum times it. The initial weights must be equal bit for bit. The error of a tensor's
gradient is |got - reference| / |reference| in the 2-norm. The bias of keys does not change softmax, so its gradient is mostly
rounding. So the denominator is at least the global gradient norm times sqrt(elements of the tensor / all elements).

float32: the bound is 1e-5 for all values except the weights. This allows 168 roundings of u = 2^-24 with one sign, or 28,000
with random signs.

bfloat16 and FP8: the bound is the measured effect of rounding. The reference's steps are repeated in float32, and d is the
distance of the reference from these steps. A sum that one device rounds once is rounded 1 + log2(n) times on n devices: on each
device and in each of log2(n) additions. (n counts microbatches too.) The sum of k independent errors grows like sqrt(k). So the
run is at most sqrt(1 + log2 n) d from float32. It is at most sqrt(2 + log2 n) d from the reference, whose own error is d. A
tensor's d is at least the d of the whole gradient, which is not small by chance. For the gradient norm, d is the d of the whole
gradient, because |a| - |b| is at most |a - b|. The loss is a mean over the N tokens of the batch. Its d is the d of the whole
gradient divided by sqrt(N), or the error of the reference's own loss if that is larger.

Weights: Adam divides by the root of the second moment, so rounding decides the sign of a whole step if a gradient is nearly
zero. A weight counts if its first gradient is above twice the bound times the root mean square of the tensor's gradient, or is
exactly zero. If the gradient has an error e, a weight whose gradient is x times the root mean square has an error of e / x. All
weights together have an error of about sqrt(e). In float32 e is below 1e-6, and the bound is 1e-3 of the tensor's change. In
bfloat16 the bound is measured.

A measured distance is one sample. The norm of m independent errors has a relative standard deviation of 1 / sqrt(2 m). The
ratio of two such norms has a relative standard deviation of 1 / sqrt(m). So the bound of the change of a tensor of m weights is
multiplied by 1 + 3 / sqrt(m). The factor is 1.4 for the 64 weights of a small norm, 1.001 for a matrix of 4096 x 4096.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.schema import Dtypes, RunConfig, own_settings
from jaxtrain.data.batches import open_source, resolve_max_segments
from jaxtrain.step import compiler
from jaxtrain.step.batch import place_batch
from jaxtrain.step.memory import compile_to_fit
from jaxtrain.step.program import Program, build_program
from jaxtrain.step.state import create_state, to_host

EXACT = 1e-5  # bound of all values except the weights, in float32
WEIGHT_BOUND = 1e-3  # bound of the weights, relative to their change, in float32
PARAMS, MOMENT = "params.", "optimizer.mu."

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The results of a few steps. The names of tensors are a checkpoint's, without `params.` or `optimizer.mu.`."""

    loss: np.ndarray  # of each step
    grad_norm: np.ndarray
    start: Arrays  # weights before the first step
    gradients: Arrays  # of the first step, times 1 - beta1 (Muon: 1 - optimizer.momentum) and the clipping factor
    weights: Arrays  # after the last step


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Tolerated relative differences of a run from the reference, with the reason for them."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    why: str


@dataclasses.dataclass(frozen=True)
class Measure:
    """The relative difference that is largest in relation to its bound, among those of steps or tensors."""

    value: float
    bound: float
    location: str  # "step 2", or a tensor

    @property
    def ok(self) -> bool:
        """Return whether the value is finite and within its bound."""
        return self.value <= self.bound


@dataclasses.dataclass(frozen=True)
class ParityComparison:
    """A run compared with the reference: the worst difference of each kind of value."""

    loss: Measure
    grad_norm: Measure
    gradient: Measure
    parameter: Measure
    start: Measure  # the fraction of a tensor's initial values that differ; must be 0

    @property
    def violations(self) -> list[str]:
        """Return a text for each value beyond its bound."""
        measures = {"the initial state": self.start, "loss": self.loss, "gradient norm": self.grad_norm}
        measures |= {"gradient": self.gradient, "update": self.parameter}
        return [f"{name} off by {m.value:.1e} ({m.location}), bound {m.bound:.1e}" for name, m in measures.items() if not m.ok]


# ---- training


def take_steps(
    program: Program, step: Callable[..., Any], state: Any, batch: Callable[[int], Arrays], steps: int
) -> tuple[Trained, Any]:
    """Take `steps` steps from `state`, which is donated. Return their results and the state after them.

    Args:
      step: the compiled train step of `program`.
      batch: returns the batch of step i, arrays (global_batch, T).
    """
    start, gradients, metrics = to_host(state, PARAMS), {}, []
    for i in range(steps):
        state, values = step(state, place_batch(batch(i), program.batch, program.context))
        metrics.append(values)
        if i == 0:
            gradients = to_host(state, MOMENT)
    loss, norm = (np.array([float(m[name]) for m in metrics]) for name in ("loss", "grad_norm"))
    return Trained(loss, norm, start, gradients, to_host(state, PARAMS)), state


def open_rows(run: RunConfig) -> Any:
    """Return the source of a run's training batches."""
    options: dict[str, Any] = {"data_dir": Path(run.paths.data).expanduser(), "user_settings": own_settings(run.own)}
    options["vocab_size"] = run.model.vocab_size
    return open_source(run.data, run.data.source, split="train", global_batch=run.train.global_batch, **options)


def compile_step(
    run: RunConfig, devices: Sequence[Any], say: Callable[[str], None] = lambda line: None, traced: bool = False
) -> tuple[Program, Any, dict[str, Any]]:
    """Compile the train step of a run on these devices as training compiles it.

    Args:
      say: prints a line about the choice of `remat.policy=auto`.
      traced: the step will be traced, so it is compiled without CUDA graphs (compiler.GRAPHS).

    Returns:
      The program, with `remat.policy=auto` resolved; the compiled step; XLA's options for it.

    Raises:
      ConfigError: the layout is impossible.
      JaxRuntimeError: memory does not suffice.
    """
    program = build_program(run, devices)
    card = compiler.card_of(devices[0], run.train.memory_fraction)
    chosen = compiler.add_run_options(compiler.choose_options(program, card), card is not None, 0.0, False, Path(), traced)
    return *compile_to_fit(program, chosen.options, card.usable_gib if card else math.inf, say), chosen.options


def first_steps(run: RunConfig, devices: Sequence[Any], steps: int) -> Trained:
    """Take the first steps of a run on these devices. Raises the errors of `compile_step`."""
    rows = open_rows(run)
    program, step, _ = compile_step(resolve_max_segments(run, rows), devices)
    state = create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    return take_steps(program, step, state, rows.batch, steps)[0]


def is_float32(precision: str, dtypes: Dtypes) -> bool:
    """Return whether every dtype of a run is float32."""
    return precision == "f32" and {*dataclasses.asdict(dtypes).values()} == {"f32"}


# ---- comparing


def bounds(reference: Trained, exact: Trained | None, shards: int, tokens: int) -> Bounds:
    """Return the tolerated differences of a run from `reference`.

    Args:
      exact: the reference's steps in float32; None if the reference and the run are in float32.
      shards: devices x microbatches of the run. Each has a part of every sum over the batch.
      tokens: number of tokens of a batch.
    """
    names = reference.gradients
    if exact is None:
        why = "rounding of float32"
        return Bounds(EXACT, EXACT, dict.fromkeys(names, EXACT), dict.fromkeys(names, WEIGHT_BOUND), why)
    factor = math.sqrt(2 + math.log2(shards))
    global_error = _norm(_apart(reference.gradients, exact.gradients)) / _norm(exact.gradients)
    gradients = {n: factor * max(global_error, d) for n, d in gradient_errors(reference, exact).items()}
    errors = weight_errors(reference, exact, gradients)
    typical = math.sqrt(float(np.mean([d * d for d in errors.values()])))
    weights = {n: factor * (1 + 3 / math.sqrt(names[n].size)) * max(typical, d) for n, d in errors.items()}
    loss = factor * max(global_error / math.sqrt(tokens), *relative(reference.loss, exact.loss))
    why = f"sqrt(2 + log2 {shards}) = {factor:.2f} times the first layout's difference from float32"
    return Bounds(loss, factor * global_error, gradients, weights, why)


def compare_runs(got: Trained, reference: Trained, allowed: Bounds) -> ParityComparison:
    """Return, for each kind of value, the difference from the reference that is largest relative to its bound.

    Raises ValueError for runs of different models or lengths.
    """
    shapes = [{n: a.shape for n, a in run.weights.items()} for run in (got, reference)]
    if shapes[0] != shapes[1] or len(got.loss) != len(reference.loss):
        raise ValueError("runs of different models or lengths cannot be compared")

    def steps(values: np.ndarray, expected: np.ndarray, bound: float) -> Measure:
        return worst({f"step {i + 1}": d for i, d in enumerate(relative(values, expected))}, bound)

    unequal = {n: float(np.mean(a != got.start[n])) for n, a in reference.start.items()}
    return ParityComparison(
        steps(got.loss, reference.loss, allowed.loss),
        steps(got.grad_norm, reference.grad_norm, allowed.grad_norm),
        worst(gradient_errors(got, reference), allowed.gradients),
        worst(weight_errors(got, reference, allowed.gradients), allowed.weights),
        worst(unequal, 0.0),
    )


def worst(values: Mapping[str, float], allowed: Mapping[str, float] | float) -> Measure:
    """Return the value that is largest relative to its bound. A value that is not finite is larger than all others."""
    bound = allowed if isinstance(allowed, Mapping) else dict.fromkeys(values, allowed)

    def sort_key(name: str) -> tuple[bool, float]:
        value = values[name]
        return not math.isfinite(value), value / bound[name] if bound[name] else value

    name = max(values, key=sort_key)
    return Measure(values[name], bound[name], name)


def relative(got: np.ndarray, reference: np.ndarray) -> list[float]:
    """Return |got - reference| / |reference|, entry by entry."""
    return (np.abs(got - reference) / np.abs(reference)).tolist()


def gradient_errors(got: Trained, reference: Trained) -> dict[str, float]:
    """Return the error of each tensor's gradient at the first step, relative to the norm that `_lengths` returns."""
    lengths = _lengths(reference.gradients)
    return {n: _norm(d) / lengths[n] for n, d in _apart(got.gradients, reference.gradients).items()}


def weight_errors(got: Trained, reference: Trained, resolved: Mapping[str, float]) -> dict[str, float]:
    """Return the error of each tensor's weights, relative to their change. resolved: bound of each tensor's gradient error.

    A weight counts if its first gradient is clearly above rounding (see the module), or exactly zero in both runs. Frozen
    tensors have no gradient and are left out. So are the biases of routers, whose step is the sign of a small difference.
    """
    errors, lengths = {}, _lengths(reference.gradients)
    for name, gradient in reference.gradients.items():
        deviation = got.weights[name].astype(np.float64) - reference.weights[name].astype(np.float64)
        clear = np.abs(gradient) > 2 * resolved[name] * lengths[name] / math.sqrt(gradient.size)
        clear |= (gradient == 0) & (got.gradients[name] == 0)
        error = _norm(deviation[clear])
        change = _norm(reference.weights[name][clear].astype(np.float64) - reference.start[name][clear])
        errors[name] = error / change if change else (math.inf if error else 0.0)
    return errors


def _apart(got: Arrays, reference: Arrays) -> Arrays:
    return {n: got[n].astype(np.float64) - a.astype(np.float64) for n, a in reference.items()}


def _norm(a: np.ndarray | Arrays) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in (a.values() if isinstance(a, dict) else [a])))


def _lengths(gradients: Arrays) -> dict[str, float]:
    """Return for each tensor its norm, or (global norm) * sqrt(its elements / all elements) if that is larger."""
    global_norm, size = _norm(gradients), sum(a.size for a in gradients.values())
    return {n: max(_norm(a), global_norm * math.sqrt(a.size / size)) for n, a in gradients.items()}
