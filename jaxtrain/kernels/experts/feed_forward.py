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
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import fp8
from jaxtrain.kernels.attention import Unsupported
from jaxtrain.kernels.dot import Numerics, use
from jaxtrain.kernels.experts import eight, grouped
from jaxtrain.kernels.experts.eight import Eight
from jaxtrain.kernels.experts.exchange import Exchange, Plan, Route
from jaxtrain.sharding import Axes, Placement, Weight, cotangent, frozen, in_eight, late, summed, ticket

AXES: Axes = ("experts", "expert_embed", "mlp")  # of each weight, (E, D, F)
InUse = jax.Array | Eight  # a gathered weight, in the compute dtype or in 8 bits
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
        """Mesh axes that split the experts."""
        return self.placement.in_use("experts")

    @property
    def everyone(self) -> tuple[str, ...]:
        """Mesh axes over which devices have tokens of their own."""
        return self.placement.mesh_axes("batch") + self.placement.mesh_axes("sequence")

    @property
    def devices(self) -> tuple[str, ...]:
        """Mesh axes over which devices have rows of their own: those, and of experts' owners any that have the same tokens."""
        return self.everyone + tuple(a for a in self.split if a not in self.everyone)

    @property
    def tokens(self) -> P:
        """Of arrays (B, T, ...), with the tokens of a device whole."""
        return P(self.placement.mesh_axes("batch") or None, self.placement.mesh_axes("sequence") or None)

    @property
    def x(self) -> P:
        return P(*self.tokens, self.placement.in_use("expert_embed") or None)

    @property
    def each(self) -> P:
        """Of what each device has for itself, one after another."""
        return P(self.devices or None)

    @property
    def rows(self) -> P:
        return P(self.devices or None, self.placement.in_use("mlp") or None)

    @property
    def scattered(self) -> tuple[str, ...]:
        """Mesh axes of the feed-forward width that also split tokens of the residual stream: sums over them are scattered."""
        p = self.placement
        sequence, residual = p.mesh_axes("sequence"), p.mesh_axes("residual")
        more = residual[len(sequence) :]
        fits = residual[: len(sequence)] == sequence and all(a in p.in_use("mlp") for a in more)
        return more if fits else ()

    @property
    def result(self) -> P:
        """Of (B, T, D) after such a sum."""
        batch, _, embed = self.x
        return P(batch, self.placement.mesh_axes("sequence") + self.scattered or None, embed)

    def total(self, y_BTD: jax.Array) -> jax.Array:
        """The sum over the parts of the feed-forward width."""
        if self.scattered:
            y_BTD = jax.lax.psum_scatter(y_BTD, self.scattered, scatter_dimension=1, tiled=True)
        others = tuple(a for a in self.placement.in_use("mlp") if a not in self.scattered)
        return jax.lax.psum(y_BTD, others) if others else y_BTD

    def whole(self, partial: jax.Array) -> jax.Array:
        """The sum over the parts of D, where that is split in use."""
        over = self.placement.in_use("expert_embed")
        return jax.lax.psum(partial, over) if over else partial

    def exchange(self, chosen_Tk: jax.Array) -> Exchange:
        (T, k), p = chosen_Tk.shape, self.placement
        return Exchange(self.experts, T, k, self.split, p.size(self.split), self.devices, self.capacity, self.buffer)

    def use(self, w: Weight) -> InUse:
        """A weight, gathered."""
        if not in_eight(w):
            return use(w, AXES, self.placement, self.numerics)
        if self._by != "even":
            raise Unsupported(
                "precision = 'fp8': experts have uneven numbers of rows here, of which there is no product in 8 bits. "
                "Set mesh.expert to model.num_experts, or experts.capacity, or leave their weights out with fp8.exclude."
            )
        held: Any = w
        return Eight(*fp8.use(held, AXES, self.placement))

    def weights(self, weights: Sequence[InUse]) -> list[P | Eight]:
        """Layouts of gathered weights."""
        whole: Any = self.placement.whole(AXES).spec
        scale: Any = P()
        return [Eight(whole, scale) if isinstance(w, Eight) else whole for w in weights]

    def times(self, rows: jax.Array, w_EDF: InUse, route: Route, contract: str, gradient: bool = False) -> jax.Array:
        """gradient: the rows are one, of the backward pass."""
        if isinstance(w_EDF, Eight):
            return eight.times(rows, w_EDF, contract, gradient)
        return grouped.times(self._by, rows, w_EDF, route.sizes_E, contract, self.numerics.precision)

    def outer(self, rows_RD: jax.Array, rows_RF: jax.Array, route: Route, w_EDF: InUse, gradient: str) -> jax.Array:
        """The gradient of a weight. gradient: which of the rows are one, "D" or "F"."""
        out = self.numerics.reduce
        if isinstance(w_EDF, Eight):
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

    def map(self, f: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """f on each device, manual over the whole mesh."""
        # The replication checker cannot follow sums that are reduced by hand over some axes only.
        return jax.shard_map(f, mesh=self.placement.mesh, in_specs=ins, out_specs=outs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def feed_forward(
    x_BTD: jax.Array, share_BTk: jax.Array, chosen_BTk: jax.Array, gate: Weight, up: Weight, down: Weight, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    """What a layer's experts make of its tokens, and how many (token, expert) pairs were dropped.

    Args:
      x_BTD: compute dtype, tokens whole over the tensor axis.
      share_BTk, chosen_BTk: of `routing.route`.
      gate, up, down: (E, D, F), at rest or as the step holds them.

    Returns (y (B, T, D), f32 ()); a token that nobody takes has 0. Over a tensor axis y's tokens are split as in the residual
    stream.
    """
    return _forward(x_BTD, share_BTk, chosen_BTk, gate, up, down, spec)[0]


def _flat(x_BTn: jax.Array) -> jax.Array:
    return x_BTn.reshape(-1, x_BTn.shape[-1])


def _forward(x, share, chosen, gate, up, down, spec: Spec):
    weights = tuple(map(spec.use, (gate, up, down)))
    w_specs = spec.weights(weights)

    def dispatch(x_BTD, chosen_BTk):
        exchange = spec.exchange(_flat(chosen_BTk))
        plan = exchange.plan(_flat(chosen_BTk))
        dropped = plan.dropped.sum().astype(jnp.float32)
        dropped = jax.lax.psum(dropped, spec.everyone) if spec.everyone else dropped
        return plan, exchange.send(_flat(x_BTD), plan.first), dropped

    def widen(rows_RD, plan, gate_EDF, up_EDF):
        return tuple(spec.whole(spec.times(rows_RD, w_EDF, plan.first, "D")) for w_EDF in (gate_EDF, up_EDF))

    def finish(x_BTD, share_BTk, chosen_BTk, plan: Plan, gate_RF, up_RF, gate_EDF, up_EDF, down_EDF):
        share_Tk, chosen_Tk = _flat(share_BTk), _flat(chosen_BTk)
        exchange = spec.exchange(chosen_Tk)

        def rest(route: Route, gate_RF: jax.Array, up_RF: jax.Array) -> jax.Array:
            h_RF = spec.hidden(gate_RF, up_RF, exchange.send_numbers(share_Tk, route))
            return exchange.receive(spec.times(h_RF, down_EDF, route, "F"), route)

        def again(carry):
            r, y_TD = carry
            route = exchange.round(plan, chosen_Tk, r)
            rows_RD = exchange.send(_flat(x_BTD), route)
            gate_RF, up_RF = (spec.whole(spec.times(rows_RD, w_EDF, route, "D")) for w_EDF in (gate_EDF, up_EDF))
            return r + 1, y_TD + rest(route, gate_RF, up_RF)

        y_TD = rest(plan.first, gate_RF, up_RF)
        if exchange.overflows:
            with jax.named_scope(FURTHER_ROUNDS):
                _, y_TD = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds[0], again, (jnp.int32(1), y_TD))
        return spec.total(y_TD.astype(x_BTD.dtype).reshape(x_BTD.shape))

    each, rows = spec.each, P(*spec.each, spec.placement.in_use("expert_embed") or None)
    with jax.named_scope("dispatch"):
        plan, rows_RD, dropped = spec.map(dispatch, (spec.x, spec.tokens), (each, rows, P()))(x, chosen)
    gate_RF, up_RF = spec.map(widen, (rows, each, *w_specs[:2]), spec.rows)(rows_RD, plan, *weights[:2])
    gate_RF, up_RF = checkpoint_name(gate_RF, "mlp_gate"), checkpoint_name(up_RF, "mlp_up")
    ins = spec.x, spec.tokens, spec.tokens, each, spec.rows, spec.rows, *w_specs
    y = spec.map(finish, ins, spec.result)(x, share, chosen, plan, gate_RF, up_RF, *weights)
    to = tuple(map(ticket, (gate, up, down)))
    return (y, dropped), (x, share, chosen, plan, rows_RD, gate_RF, up_RF, weights, to)


def _backward(spec: Spec, residuals, cotangents):
    x, share, chosen, plan, rows_RD, gate_RF, up_RF, weights, to = residuals
    dy, _ = cotangents
    p = spec.placement
    tokens = tuple(a for a in spec.everyone if a not in spec.split)

    def local(x_BTD, share_BTk, chosen_BTk, plan: Plan, rows_RD, gate_RF, up_RF, gate_EDF, up_EDF, down_EDF, dy_BTD):
        x_TD, share_Tk, chosen_Tk, dy_TD = (_flat(a) for a in (x_BTD, share_BTk, chosen_BTk, dy_BTD))
        exchange = spec.exchange(chosen_Tk)

        def gradients(route: Route, rows_RD, gate_RF, up_RF):
            """Of x in f32 (T, D), of share (T, k), and of each weight that is learnt."""
            share_R, dy_RD = exchange.send_numbers(share_Tk, route), exchange.send(dy_TD, route)
            dh_RF = spec.whole(spec.times(dy_RD, down_EDF, route, "D", gradient=True))
            h_RF, pull = jax.vjp(spec.hidden, gate_RF, up_RF, share_R)
            d_gate_RF, d_up_RF, d_share_R = pull(dh_RF)
            back = (d_gate_RF, gate_EDF), (d_up_RF, up_EDF)
            of_gate, of_up = (spec.times(d, w, route, "F", gradient=True) for d, w in back)
            dx_RD = (of_gate.astype(jnp.float32) + of_up.astype(jnp.float32)).astype(x_TD.dtype)
            of_wide = ((rows_RD, d, route, w, "F") for d, w in back)
            of_down = dy_RD, h_RF, route, down_EDF, "D"
            dw = [None if frozen(t) else spec.outer(*of) for of, t in zip((*of_wide, of_down), to, strict=True)]
            return exchange.receive(dx_RD, route), exchange.receive_numbers(d_share_R, route), dw

        def again(carry):
            r, made = carry
            route = exchange.round(plan, chosen_Tk, r)
            rows_RD = exchange.send(x_TD, route)
            gate_RF, up_RF = (spec.whole(spec.times(rows_RD, w_EDF, route, "D")) for w_EDF in (gate_EDF, up_EDF))
            return r + 1, jax.tree.map(jnp.add, made, gradients(route, rows_RD, gate_RF, up_RF))

        made = gradients(plan.first, rows_RD, gate_RF, up_RF)
        if exchange.overflows:
            with jax.named_scope(FURTHER_ROUNDS):
                _, made = jax.lax.while_loop(lambda carry: carry[0] < plan.rounds[0], again, (jnp.int32(1), made))
        # The compiler would hide one sum of dw behind the product of the next, and the last ones behind nothing. What comes
        # before in the model waits for all products: then its own backward pass hides the sums.
        dx_TD, d_share_Tk, dw = jax.lax.optimization_barrier(made)
        dx_BTD = spec.total(dx_TD.astype(x_BTD.dtype).reshape(x_BTD.shape))
        width = p.in_use("mlp")
        d_share_BTk = (jax.lax.psum(d_share_Tk, width) if width else d_share_Tk).reshape(share_BTk.shape)
        home = [None if d is None else summed(d, AXES, tokens, t, p) for d, t in zip(dw, to, strict=True)]
        return dx_BTD, d_share_BTk, home

    each, rows = spec.each, P(*spec.each, p.in_use("expert_embed") or None)
    ins = (spec.x, spec.tokens, spec.tokens, each, rows, spec.rows, spec.rows, *spec.weights(weights), spec.x)
    outs = spec.result, spec.tokens, [None if frozen(t) else p.home(AXES, late(t)).spec for t in to]
    operands = x, share, chosen, plan, rows_RD, gate_RF, up_RF, *weights, dy
    dx, d_share, dw = spec.map(local, ins, outs)(*operands)
    return dx, d_share, None, *(cotangent(t, d) for t, d in zip(to, dw, strict=True))


feed_forward.defvjp(_forward, _backward)
