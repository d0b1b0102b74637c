"""The experts of a layer: tokens to where their experts are, three grouped matmuls, and back.

    y_t = sum over the k experts e of token t of  share_te (f(x_t gate_e) * (x_t up_e)) down_e'

The share is multiplied in before the last product. That is linear, so it makes no difference; and the backward pass then needs
nothing that comes after it.

The backward rule is written out, as for all that uses a weight (kernels/dot.py): gradients of weights are added up in float32
over the rows of a round, and are then in the reduce dtype, in which they travel. It also repeats the rounds of an exchange:
what a first round leaves over is computed anew in the backward pass, and of no round but the first is anything kept. So loads
that are uneven cost time, and never memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import Unsupported
from jaxtrain.kernels.dot import Weight
from jaxtrain.kernels.experts import eight, grouped
from jaxtrain.kernels.experts.exchange import Exchange, Route
from jaxtrain.kernels.fp8 import Float8
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.sharding import Axes, Placement

AXES: Axes = ("experts", "expert_embed", "mlp")  # of each weight, (E, D, F)
FURTHER_ROUNDS = "further_rounds"  # the scope of what runs only where loads are uneven: plans price it by --experts-load


@dataclasses.dataclass(frozen=True)
class Spec:
    """What experts are computed with; static."""

    experts: int
    activation: Callable[[jax.Array], jax.Array]
    impl: str  # of grouped.py, or auto
    capacity: float
    buffer: float
    placement: Placement
    numerics: Numerics

    @property
    def split(self) -> tuple[str, ...]:
        """Mesh axes that shard the experts in use."""
        return self.placement.compute_axes("experts")

    def exchange(self, chosen_Tk: jax.Array) -> Exchange:
        """Return the layout of the exchange of this device's tokens."""
        (T, k), p = chosen_Tk.shape, self.placement
        devices = p.token_axes + tuple(a for a in self.split if a not in p.token_axes)
        return Exchange(self.experts, T, k, self.split, p.size(self.split), devices, self.capacity, self.buffer)

    def check(self, weights: Sequence[Weight]) -> None:
        """Raises Unsupported for 8-bit weights of experts with uneven numbers of rows."""
        if self._by != "even" and any(isinstance(w, Float8) for w in weights):
            raise Unsupported(
                "precision = 'fp8': experts have uneven numbers of rows here, of which there is no product in 8 bits. "
                "Set mesh.expert to model.num_experts, or moe.capacity_factor, or leave their weights out with fp8.exclude."
            )

    def times(self, rows: jax.Array, w_EDF: Weight, route: Route, contract: str, gradient: bool = False) -> jax.Array:
        """gradient: the rows are one, of the backward pass."""
        if isinstance(w_EDF, Float8):
            return eight.times(rows, w_EDF, contract, gradient)
        return grouped.times(self._by, rows, w_EDF, route.sizes_E, contract, self.numerics.precision)

    def outer(self, rows_RD: jax.Array, rows_RF: jax.Array, route: Route, w_EDF: Weight, gradient: str) -> jax.Array:
        """The gradient of a weight. gradient: which of the rows are one, "D" or "F"."""
        out = self.numerics.compute
        if isinstance(w_EDF, Float8):
            return eight.outer(rows_RD, rows_RF, w_EDF.bits.shape[0], out, gradient)
        return grouped.outer(self._by, rows_RD, rows_RF, route.sizes_E, out, self.numerics.precision)

    @property
    def _by(self) -> str:
        # Of one expert a device all rows are, those that hold nothing too: a plain matmul, which is faster than a grouped one.
        alone = self.impl == "auto" and self.placement.size(self.split) == self.experts
        return "even" if self.capacity or alone else self.impl

    def hidden(self, gate_RF: jax.Array, up_RF: jax.Array, share_R: jax.Array) -> jax.Array:
        """share f(gate) up, in float32 and rounded once."""
        h_RF = self.activation(gate_RF.astype(jnp.float32)) * up_RF.astype(jnp.float32) * share_R[:, None]
        return h_RF.astype(gate_RF.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def feed_forward(
    x_BTD: jax.Array, share_BTk: jax.Array, chosen_BTk: jax.Array, gate: Weight, up: Weight, down: Weight, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of each token's experts, and the number of (token, expert) pairs of this device that were dropped.

    Args:
      x_BTD: this device's tokens, compute dtype.
      share_BTk, chosen_BTk: of `routing.route`.
      gate, up, down: gathered weights (E, D, F).

    Returns (y (B, T, D), f32 ()). Where devices shard F, y is this device's term of the sum. A dropped token has 0.
    """
    return _forward(x_BTD, share_BTk, chosen_BTk, gate, up, down, spec)[0]


def _flat(x_BTn: jax.Array) -> jax.Array:
    return x_BTn.reshape(-1, x_BTn.shape[-1])


def _forward(x_BTD, share_BTk, chosen_BTk, gate, up, down, spec: Spec):
    weights = gate, up, down
    spec.check(weights)
    x_TD, share_Tk, chosen_Tk = _flat(x_BTD), _flat(share_BTk), _flat(chosen_BTk)
    exchange = spec.exchange(chosen_Tk)
    with jax.named_scope("dispatch"):
        plan = exchange.plan(chosen_Tk)
        rows_RD = exchange.send(x_TD, plan.first)
    gate_RF, up_RF = (spec.times(rows_RD, w_EDF, plan.first, "D") for w_EDF in (gate, up))
    gate_RF, up_RF = checkpoint_name(gate_RF, "mlp_gate"), checkpoint_name(up_RF, "mlp_up")

    def rest(route: Route, gate_RF: jax.Array, up_RF: jax.Array) -> jax.Array:
        h_RF = spec.hidden(gate_RF, up_RF, exchange.send_numbers(share_Tk, route))
        return exchange.receive(spec.times(h_RF, down, route, "F"), route)

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        r, y_TD = carry
        route = exchange.round(plan, chosen_Tk, r)
        rows_RD = exchange.send(x_TD, route)
        return r + 1, y_TD + rest(route, *(spec.times(rows_RD, w_EDF, route, "D") for w_EDF in (gate, up)))

    y_TD = rest(plan.first, gate_RF, up_RF)
    if exchange.overflows:
        with jax.named_scope(FURTHER_ROUNDS):
            _, y_TD = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds[0], again, (jnp.int32(1), y_TD))
    y_BTD = y_TD.astype(x_BTD.dtype).reshape(x_BTD.shape)
    residuals = x_BTD, share_BTk, chosen_BTk, plan, rows_RD, gate_RF, up_RF, weights
    return (y_BTD, plan.dropped.sum().astype(jnp.float32)), residuals


def _backward(spec: Spec, residuals, cotangents):
    x_BTD, share_BTk, chosen_BTk, plan, rows_RD, gate_RF, up_RF, weights = residuals
    gate, up, down = weights
    x_TD, share_Tk, chosen_Tk, dy_TD = (_flat(a) for a in (x_BTD, share_BTk, chosen_BTk, cotangents[0]))
    exchange = spec.exchange(chosen_Tk)

    def gradients(route: Route, rows_RD: jax.Array, gate_RF: jax.Array, up_RF: jax.Array):
        """Of x in f32 (T, D), of share (T, k), and of each weight."""
        share_R, dy_RD = exchange.send_numbers(share_Tk, route), exchange.send(dy_TD, route)
        dh_RF = spec.times(dy_RD, down, route, "D", gradient=True)
        h_RF, pull = jax.vjp(spec.hidden, gate_RF, up_RF, share_R)
        d_gate_RF, d_up_RF, d_share_R = pull(dh_RF)
        of_gate, of_up = (spec.times(d, w, route, "F", gradient=True) for d, w in ((d_gate_RF, gate), (d_up_RF, up)))
        dx_RD = (of_gate.astype(jnp.float32) + of_up.astype(jnp.float32)).astype(x_TD.dtype)
        dw = (
            spec.outer(rows_RD, d_gate_RF, route, gate, "F"),
            spec.outer(rows_RD, d_up_RF, route, up, "F"),
            spec.outer(dy_RD, h_RF, route, down, "D"),
        )
        return exchange.receive(dx_RD, route), exchange.receive_numbers(d_share_R, route), dw

    def again(carry: Any) -> Any:
        r, made = carry
        route = exchange.round(plan, chosen_Tk, r)
        rows_RD = exchange.send(x_TD, route)
        gate_RF, up_RF = (spec.times(rows_RD, w_EDF, route, "D") for w_EDF in (gate, up))
        return r + 1, jax.tree.map(jnp.add, made, gradients(route, rows_RD, gate_RF, up_RF))

    made = gradients(plan.first, rows_RD, gate_RF, up_RF)
    if exchange.overflows:
        with jax.named_scope(FURTHER_ROUNDS):
            _, made = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds[0], again, (jnp.int32(1), made))
    # The compiler would overlap the reduction of one dw with the matmul of the next, and the last ones with nothing. The layers
    # before wait for all matmuls: then their backward passes overlap with the reductions.
    dx_TD, d_share_Tk, dw = jax.lax.optimization_barrier(made)
    d_weights = (
        Float8(None, None, d.astype(w.gradient.dtype)) if isinstance(w, Float8) else d.astype(w.dtype)
        for w, d in zip(weights, dw, strict=True)
    )
    return dx_TD.astype(x_BTD.dtype).reshape(x_BTD.shape), d_share_Tk.reshape(share_BTk.shape), None, *d_weights


feed_forward.defvjp(_forward, _backward)
