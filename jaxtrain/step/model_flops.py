"""The FLOPs per token of a run's model, for MFU and HFU: by formula, stated by the family, or counted in its forward pass.

The formulas of models/flops.py are those of jaxtrain's own families. A family from outside the package may have other layers.
If it has no `flops`, its forward pass is traced for one sequence on one device, and the matmuls of the trace are counted:

    matmul       2 x rows x columns x contracted width, times 1 for the forward pass, and 1 for each operand that depends on
                 trained weights, since the backward pass has a matmul for the gradient of each
    attention    calls of the kernel that the model receives, by the formula of models/flops.py, and as much as a matmul of
                 two operands in the backward pass
    head         by the formula

So recomputation is not counted, nor the padding of a capacity, nor matmuls of the loss other than the head's. Attention that
the family computes by matmuls of its own counts all pairs of tokens in both conventions.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxtrain.config import own_parts, schema
from jaxtrain.config.schema import RunConfig
from jaxtrain.models import family, flops
from jaxtrain.models.attention import Kernel, kind_shares
from jaxtrain.models.flops import Flops
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import make_placement
from jaxtrain.step.attention_specs import attention_specs
from jaxtrain.step.definition import make_definition, trained_parameters

TOLERANCE = 0.03  # a count within this part of the formula is of the same model, and the formula stands
NO_FLOPS = Flops(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """FLOPs per token of a run.

    training: forward and backward, for MFU. recomputed: those that a run computes in addition, for HFU; None if unknown.
    by_formula: whether both follow from the config's keys. note: what the figures come from, if not from the formula.
    """

    training: Flops
    recomputed: Flops | None
    by_formula: bool = True
    note: str = ""


@functools.lru_cache(maxsize=8)
def model_flops(run: RunConfig) -> ModelFlops:
    """Return the FLOPs per token of a run's model. For a family from outside the package, a count may take seconds."""
    formula = ModelFlops(flops.training(run.model, run.data.seq_len, run.lora, run.train), flops.hfu_extra(run))
    name, m = run.model.family, run.model
    if not m.outside:
        return formula
    if stated := getattr(family(name), "flops", None):
        with own_parts.calling("model.family", name, "flops(model, seq_len)"):
            forward = stated(m, run.data.seq_len)
        if not isinstance(forward, Flops) or not forward.causal > 0:
            rule = f"its flops returns {forward!r}, not the FLOPs of a forward pass"
            raise own_parts.WrongPart("model.family", name, rule, "Return jaxtrain.models.flops.Flops(causal, full).")
        return ModelFlops(forward * 3, None, by_formula=False, note=f"FLOPs are those that {name} states")
    try:
        counted, unknown = count_flops(run)
    # The module is the user's, and may raise anything. The run builds the same module, and reports its errors.
    except Exception as error:
        why = str(error).partition("\n")[0]
        note = f"FLOPs are by the formula for these keys: {name} cannot be traced on one device ({type(error).__name__}: {why})"
        return dataclasses.replace(formula, recomputed=None, note=note)
    difference = counted.causal / formula.training.causal - 1
    if abs(difference) <= TOLERANCE and not unknown:
        return formula
    note = (
        f"FLOPs are counted in the matmuls of {name}: {counted.causal / 1e9:.3g} GFLOP a token (causal), {abs(difference):.1%} "
        f"{'more' if difference > 0 else 'fewer'} than by the formula for these keys"
    )
    if unknown:
        note += f". Not counted: {', '.join(unknown)}. A function flops(model, seq_len) of the family states them"
    return ModelFlops(counted, None, by_formula=False, note=note)


def count_flops(run: RunConfig) -> tuple[Flops, tuple[str, ...]]:
    """Return the training FLOPs per token, counted in the trace of the forward pass, and the operations that cannot be counted.

    Raises what the family raises.
    """
    axes = dict.fromkeys(schema.MESH_AXES, 1)
    sharding = dataclasses.replace(run.sharding, gather="layer")
    run = dataclasses.replace(
        run,
        precision=run.compute,
        mesh=schema.Mesh(**axes),
        pipeline=schema.Pipeline(),
        remat=schema.Remat("none"),
        sharding=sharding,
        moe=dataclasses.replace(run.moe, impl="ragged", capacity_factor=0.0),
    )
    placement = make_placement(run, jax.local_devices()[:1])
    zero, specs = make_zero(run.sharding, placement), attention_specs(run.model, run.data, run.compute)
    definition = make_definition(run, zero, CountedKernel("reference", specs, model=run.model))
    trained = trained_parameters(run.lora, run.train, definition)
    rows = (jax.ShapeDtypeStruct((1, run.data.seq_len), jnp.int32),) * 3

    def forward(params: Any, tokens_BT: Any, segments_BT: Any, positions_BT: Any) -> Any:
        base, copies = zero.step_weights(params, definition, jax.tree.map(lambda _: False, trained))
        return definition.bind(zero.microbatch_weights(base, copies, {}))(tokens_BT, segments_BT, positions_BT)

    specs = definition.specs(placement), *(placement.spec(("batch", "sequence")),) * 3
    traced = jax.make_jaxpr(placement.shard_map(forward, specs, placement.spec(("batch", "residual", None))))(
        definition.abstract, *rows
    )
    tally = Tally()
    active = [*jax.tree.leaves(trained), *(False for _ in rows)]
    (hidden,), total = tally.count_jaxpr(traced, active)
    head_trained = flops.is_trained(run.lora, run.train, "embed.embedding" if run.model.tied_head else "head")
    head = flops.head_forward(run.model) * (1 + hidden + head_trained)
    return total * (1 / run.data.seq_len) + Flops(head, head), tuple(sorted(tally.unknown))


# ---- Attention, as one operation of the trace

ATTENTION = jex.Primitive("counted_attention")
ATTENTION.def_abstract_eval(lambda q, k, v, **_: q.update(shape=(*q.shape[:3], v.shape[-1])))


@dataclasses.dataclass(frozen=True)
class CountedKernel(Kernel):
    """A kernel whose calls are one operation each, with the FLOPs of the call as its parameters."""

    model: schema.Model = schema.Model()

    def __call__(self, q: Any, k: Any, v: Any, prepared: Any, kind: Any, sinks_N: Any = None) -> Any:
        """Return an array of the shape of the attention output. Shapes are those of `Kernel.__call__`."""
        (B, T, N, H), S = q.shape, k.shape[1]
        shares = {kind: 1.0} if isinstance(kind, int) else dict(enumerate(kind_shares(self.model)))
        mean_keys = 0.0
        for i, share in shares.items():
            window = min(self.specs[i].window or S, S)
            mean_keys += share * (window - window**2 / (2 * S))
        each = 2.0 * B * T * N * (H + v.shape[-1])
        return ATTENTION.bind(q, k, v, causal=each * mean_keys, full=each * S)


# ---- The count

CALLS = ("jaxpr", "call_jaxpr")  # parameters of operations that call another trace
OPAQUE = ("ffi_call", "custom_call", "pure_callback", "io_callback", "triton_kernel_call")
OPAQUE += ("lu", "triangular_solve", "cholesky", "householder_product", "geqrf", "eigh", "eig", "svd", "schur", "fft")


@dataclasses.dataclass
class Tally:
    """Counts the FLOPs of a trace, with a backward pass for what depends on trained weights.

    unknown: operations whose FLOPs are not counted.
    """

    unknown: set[str] = dataclasses.field(default_factory=set)

    def count_jaxpr(self, jaxpr: Any, active: Sequence[bool]) -> tuple[list[bool], Flops]:
        """Return whether each result depends on active arguments, and the FLOPs."""
        depends: dict[Any, bool] = dict(zip(jaxpr.invars, active, strict=True))

        def is_active(v: Any) -> bool:
            return not isinstance(v, jex.Literal) and depends.get(v, False)

        total = NO_FLOPS
        for eqn in jaxpr.eqns:
            outs, cost = self._count_eqn(eqn, [is_active(v) for v in eqn.invars])
            total += cost
            # There are no gradients of integers.
            inexact = (jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.inexact) for v in eqn.outvars)
            depends |= {v: out and is_real for v, out, is_real in zip(eqn.outvars, outs, inexact, strict=True)}
        return [is_active(v) for v in jaxpr.outvars], total

    def _count_eqn(self, eqn: Any, active: list[bool]) -> tuple[list[bool], Flops]:
        name, params = eqn.primitive.name, eqn.params
        outs = [any(active) and name != "stop_gradient"] * len(eqn.outvars)
        if name == ATTENTION.name:
            return outs, Flops(params["causal"], params["full"]) * (3 if any(active) else 1)
        if name in ("dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"):
            return outs, _matmul_flops(eqn) * (1 + sum(active[:2]))
        if name == "scan":
            return self._count_scan(params, active)
        if name == "while":
            self.unknown.add("all but one iteration of a while loop")
            inner = active[params["cond_nconsts"] :]
            return [any(active)] * len(outs), self.count_jaxpr(params["body_jaxpr"], inner)[1]
        if name == "cond":
            branches = [self.count_jaxpr(branch, active[1:]) for branch in params["branches"]]
            return outs, max((cost for _, cost in branches), key=lambda cost: cost.full)
        if name == "pallas_call":
            inner = params["jaxpr"]
            _, cost = self.count_jaxpr(inner, [any(active)] * len(inner.invars))
            return outs, cost * math.prod(int(n) for n in params["grid_mapping"].grid)
        if name in OPAQUE:
            self.unknown.add(name)
        inner = next((params[key] for key in CALLS if key in params), None)
        if inner is None:
            return outs, NO_FLOPS
        same_length = len(inner.invars) == len(active)
        results, cost = self.count_jaxpr(inner, active if same_length else [any(active)] * len(inner.invars))
        return (results if len(results) == len(outs) else outs), cost

    def _count_scan(self, params: Any, active: list[bool]) -> tuple[list[bool], Flops]:
        consts, carried = (len(list(values)) for values in params["ft_in"].unpack()[:2])
        body = params["jaxpr"]
        while True:
            outs, cost = self.count_jaxpr(body, active)
            new_active = [a or out for a, out in zip(active[consts : consts + carried], outs[:carried], strict=True)]
            if new_active == active[consts : consts + carried]:
                return outs, cost * params["length"]
            active = [*active[:consts], *new_active, *active[consts + carried :]]


def _matmul_flops(eqn: Any) -> Flops:
    """Return the FLOPs of one matmul or convolution: 2 for each multiply-add."""
    a, b, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "conv_general_dilated":
        kernel_spec = eqn.params["dimension_numbers"].rhs_spec
        width = math.prod(b.shape) / b.shape[kernel_spec[0]]
    elif eqn.primitive.name == "dot_general":
        width = math.prod(a.shape[i] for i in eqn.params["dimension_numbers"][0][0])
    else:  # each row is multiplied by the matrix of its group
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        width = math.prod(a.shape[i] for i in numbers[0][0])
    total = 2.0 * math.prod(out.shape) * width
    return Flops(total, total)
