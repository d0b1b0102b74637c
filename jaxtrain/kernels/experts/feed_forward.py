"""The experts of a layer: dispatch of tokens, three grouped matmuls, and combination of the results.

    y_t = sum over the k experts e of token t of  share_te f(x_t gate_e, x_t up_e) down_e'

Experts with biases add a bias to the result of each of the three matmuls.

share_te is the router's weight of expert e for token t. It is applied before the last matmul, which is linear. So the backward
pass does not need the result of that matmul.

The backward rule is explicit, and repeats the rounds of the dispatch (exchange.py). Only the first round saves activations; the
rows of further rounds are recomputed in the backward pass. So uneven loads cost time and no memory: further rounds are small,
and take about the time of their rows.

Gradients of weights are summed in float32. The gradient of the first round is rounded to the compute dtype, so that an even
load writes no float32 gradient. Gradients of further rounds are added to it in float32, and the sum is rounded. Weights that
are not differentiated, such as those beside adapters, have no gradients.

A projection with an adapter is  x w_e + scale (x a_e) b_e. The adapter's matmuls are those of the weights, with the rank as the
small dimension: `pallas` on Hopper, which multiplies each row by its own expert's matrices only. Its kernels have at least 128
columns and contract at least 64 dimensions, so lower ranks take the time of these. An adapter that all experts share is one
plain matmul of all rows. Unused rows are zeros (exchange.py), and add nothing to its gradients. With FP8 weights, adapters stay
in the compute dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, custom_vjp_primal_tree_values

from jaxtrain.config.schema import ConfigError
from jaxtrain.kernels.attention import Hardware
from jaxtrain.kernels.dot import Weight
from jaxtrain.kernels.experts import grouped_matmul, support
from jaxtrain.kernels.experts.exchange import Exchange, Route
from jaxtrain.kernels.fp8 import Float8
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.sharding import Axes, Placement

AXES: Axes = ("experts", "expert_embed", "mlp")  # of each weight, (E, D, F)
WEIGHTS = ("gate", "up", "down")
FURTHER_ROUNDS = "further_rounds"  # scope of operations that run only for uneven loads; --experts-load sets their estimate


class AdapterPair(NamedTuple):
    """The gathered adapter of a weight: a (E, inputs, rank) and b (E, rank, outputs), without E if all experts share it."""

    a: jax.Array
    b: jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TrainedParts:
    """Whether the experts' weights and biases are differentiated."""

    weights: bool
    biases: bool


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The settings of a layer's experts; static under jit."""

    experts: int
    activation: Callable[[jax.Array, jax.Array], jax.Array]  # of the gate and the up projection
    impl: str  # an implementation of grouped_matmul.py, or auto
    capacity: float
    placement: Placement
    numerics: Numerics
    scale: float = 0.0  # factor of the adapters' outputs

    @property
    def split(self) -> tuple[str, ...]:
        """Return the mesh axes that shard the experts of gathered weights."""
        return self.placement.compute_axes("experts")

    def exchange(self, chosen_Tk: jax.Array) -> Exchange:
        """Return the `Exchange` that dispatches this device's tokens."""
        (T, k), placement = chosen_Tk.shape, self.placement
        devices = placement.token_axes + tuple(a for a in self.split if a not in placement.token_axes)
        ranks = placement.size(self.split)
        return Exchange(self.experts, T, k, self.split, ranks, devices, self.capacity, self._single_expert)

    def check(self, weights: Mapping[str, Weight]) -> None:
        """Raise ConfigError for 8-bit weights if `ragged` multiplies uneven numbers of rows (support.matmul_fp8_problems)."""
        eight_bit = [f"mlp.{name}" for name, w in weights.items() if isinstance(w, Float8)]
        problems = support.matmul_fp8_problems(self.impl, self._hardware, eight_bit, self.experts)
        if problems and self._chosen_impl != "even":
            raise ConfigError(problems)

    def times(self, rows: jax.Array, w_EDF: Weight, route: Route, contract: str, gradient: bool = False) -> jax.Array:
        """Return each row times the weight of its expert, contracted over `contract`. gradient: the rows are gradients."""
        return grouped_matmul.times(self._chosen_impl, rows, w_EDF, route.sizes_E, contract, self.numerics.precision, gradient)

    def outer(
        self, rows_RD: jax.Array, rows_RF: jax.Array, route: Route, w_EDF: Weight, gradient: str, out: jnp.dtype
    ) -> jax.Array:
        """Return the gradient of a weight, (E, D, F) in `out`. gradient: "D" if rows_RD are a gradient, "F" if rows_RF are."""
        gradient8 = gradient if isinstance(w_EDF, Float8) else ""
        return grouped_matmul.outer(self._chosen_impl, rows_RD, rows_RF, route.sizes_E, out, self.numerics.precision, gradient8)

    def project(
        self, rows: jax.Array, w_EDF: Weight, pair: AdapterPair | None, route: Route, contract: str
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the projection of rows by a weight with its adapter, and the result of `low_rank`."""
        y, low_Rr = self.times(rows, w_EDF, route, contract), self.low_rank(rows, pair, route)
        if pair is None or low_Rr is None:
            return y, None
        with jax.named_scope("lora"):
            return y + self._low(low_Rr, pair.b, route, "D"), low_Rr

    def low_rank(self, rows: jax.Array, pair: AdapterPair | None, route: Route) -> jax.Array | None:
        """Return scale x a of the rows, (R, rank); None without an adapter."""
        if pair is None:
            return None
        with jax.named_scope("lora"):
            return self._low(rows, pair.a, route, "D") * self.scale

    def project_backward(
        self,
        dy: jax.Array,
        rows: jax.Array,
        low_Rr: jax.Array | None,
        w_EDF: Weight,
        pair: AdapterPair | None,
        route: Route,
        contract: str,
        out: jnp.dtype,
    ) -> tuple[jax.Array, AdapterPair | None]:
        """Return the gradients of the rows of `project`, and of its adapter in `out`. contract: the dimension of dy."""
        d_rows = self.times(dy, w_EDF, route, contract, gradient=True)
        if pair is None or low_Rr is None:
            return d_rows, None
        with jax.named_scope("lora"):
            d_low_Rr = self._low(dy, pair.b, route, "F") * self.scale
            d_pair = AdapterPair(
                self._low_outer(rows, d_low_Rr, pair.a, route, out), self._low_outer(low_Rr, dy, pair.b, route, out)
            )
            return d_rows + self._low(d_low_Rr, pair.a, route, "F"), d_pair

    def _low(self, rows: jax.Array, w: jax.Array, route: Route, contract: str) -> jax.Array:
        impl, w_Eio = ("even", w[None]) if w.ndim == 2 else (self._chosen_impl, w)
        return grouped_matmul.times(impl, rows, w_Eio, route.sizes_E, contract, self.numerics.precision)

    def _low_outer(self, rows: jax.Array, d_rows: jax.Array, w: jax.Array, route: Route, out: jnp.dtype) -> jax.Array:
        if w.ndim == 2:
            return grouped_matmul.outer("even", rows, d_rows, route.sizes_E[:1], out, self.numerics.precision)[0]
        return grouped_matmul.outer(self._chosen_impl, rows, d_rows, route.sizes_E, out, self.numerics.precision)

    @property
    def _chosen_impl(self) -> str:
        if self.capacity or self._single_expert:
            return "even"
        return support.choose_matmul(self.impl, self._hardware, self.numerics.compute == jnp.float32)

    @property
    def _hardware(self) -> Hardware:
        return Hardware.from_device(self.placement.mesh.devices.flat[0])

    @property
    def _single_expert(self) -> bool:
        return support.single_expert(self.impl, self.experts, self.placement.size(self.split))

    def hidden(self, gate_RF: jax.Array, up_RF: jax.Array, share_R: jax.Array) -> jax.Array:
        """Return the router's weight of each row times f(gate, up), computed in float32 and rounded once."""
        h_RF = self.activation(gate_RF.astype(jnp.float32), up_RF.astype(jnp.float32)) * share_R[:, None]
        return h_RF.astype(gate_RF.dtype)


class Biases(NamedTuple):
    """Biases of experts: on the gate and the up projection (E, F), and on the output (E, D).

    If devices shard F, one device holds the output's bias and all other devices hold zeros.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Weights(NamedTuple):
    """The gathered weights of a layer's experts, (E, D, F), their biases if they have some, and their adapters by WEIGHTS."""

    gate: Weight
    up: Weight
    down: Weight
    biases: Biases | None
    adapters: Mapping[str, AdapterPair]


def _row_experts(route: Route, rows: int) -> jax.Array:
    """Return the expert of each row, int32 (R,); for unused rows, whose router's weight is 0, the last expert."""
    experts = jnp.arange(route.sizes_E.shape[0], dtype=jnp.int32)
    return jnp.repeat(experts, route.sizes_E, total_repeat_length=rows)


def _row_biases(bias_En: jax.Array, route: Route, rows: int) -> jax.Array:
    """Return the bias of each row's expert, f32 (R, n)."""
    return jnp.take(bias_En.astype(jnp.float32), _row_experts(route, rows), axis=0, mode="clip")


def _project(
    rows_RD: jax.Array, weights: Weights, route: Route, spec: ExpertsSpec
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array | None, ...]]:
    """Return the gate and the up projection of rows, (R, F) each, and the second results of `ExpertsSpec.project`."""
    pairs = (weights.adapters.get("gate"), weights.adapters.get("up"))
    (gate_RF, low_gate), (up_RF, low_up) = (
        spec.project(rows_RD, w_EDF, pair, route, "D") for w_EDF, pair in zip((weights.gate, weights.up), pairs, strict=True)
    )
    if (biases := weights.biases) is not None:
        biases_RF = (_row_biases(b_EF, route, rows_RD.shape[0]) for b_EF in (biases.gate, biases.up))
        terms = zip((gate_RF, up_RF), biases_RF, strict=True)
        gate_RF, up_RF = ((y.astype(jnp.float32) + b_RF).astype(y.dtype) for y, b_RF in terms)
    return (gate_RF, up_RF), (low_gate, low_up)


def _sum_rows(rows_Rn: jax.Array, route: Route) -> jax.Array:
    """Return the sum of each expert's rows, f32 (E, n), by a matmul, which adds in a fixed order."""
    is_expert_RE = _row_experts(route, rows_Rn.shape[0])[:, None] == jnp.arange(route.sizes_E.shape[0])[None, :]
    return jnp.einsum(
        "RE,Rn->En",
        is_expert_RE.astype(rows_Rn.dtype),
        rows_Rn,
        precision=jax.lax.Precision.HIGHEST if rows_Rn.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def feed_forward(
    x_BTD: jax.Array, share_BTk: jax.Array, chosen_BTk: jax.Array, weights: Weights, spec: ExpertsSpec
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of each token's expert outputs, and the number of dropped (token, expert) pairs of this device.

    Args:
      x_BTD: this device's tokens, compute dtype.
      share_BTk, chosen_BTk: as in `routing.Routed`.

    Returns:
      (y (B, T, D), f32 ()). If devices shard F, y is this device's term of the sum. A dropped pair contributes 0 to y.
    """
    return _run_rounds(x_BTD, share_BTk, chosen_BTk, weights, spec)[0]


def _flatten(x_BTn: jax.Array) -> jax.Array:
    return x_BTn.reshape(-1, x_BTn.shape[-1])


def _forward(x_BTD, share_BTk, chosen_BTk, weights, spec: ExpertsSpec):
    def is_perturbed(subtree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(subtree, is_leaf=lambda x: isinstance(x, CustomVJPPrimal)))

    trained = TrainedParts(is_perturbed(weights[:3]), is_perturbed(weights.biases))
    x_BTD, share_BTk, chosen_BTk, weights = custom_vjp_primal_tree_values((x_BTD, share_BTk, chosen_BTk, weights))
    outputs, residuals = _run_rounds(x_BTD, share_BTk, chosen_BTk, weights, spec)
    return outputs, (trained, *residuals)


def _run_rounds(
    x_BTD: jax.Array, share_BTk: jax.Array, chosen_BTk: jax.Array, weights: Weights, spec: ExpertsSpec
) -> tuple[Any, Any]:
    """Return the results of `feed_forward`, and the residuals."""
    spec.check({name: getattr(weights, name) for name in WEIGHTS})
    x_TD, share_Tk, chosen_Tk = _flatten(x_BTD), _flatten(share_BTk), _flatten(chosen_BTk)
    exchange = spec.exchange(chosen_Tk)
    with jax.named_scope("dispatch"):
        plan = exchange.plan(chosen_Tk)
        rows_RD = exchange.send(x_TD, plan.first)
    (gate_RF, up_RF), low = _project(rows_RD, weights, plan.first, spec)
    gate_RF, up_RF = checkpoint_name(gate_RF, "mlp_gate"), checkpoint_name(up_RF, "mlp_up")

    def finish_round(route: Route, gate_RF: jax.Array, up_RF: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        share_R = exchange.send_numbers(share_Tk, route)
        h_RF = spec.hidden(gate_RF, up_RF, share_R)
        y_RD, low_down = spec.project(h_RF, weights.down, weights.adapters.get("down"), route, "F")
        if weights.biases is not None:
            bias_RD = _row_biases(weights.biases.down, route, y_RD.shape[0]) * share_R[:, None]
            y_RD = (y_RD.astype(jnp.float32) + bias_RD).astype(y_RD.dtype)
        return exchange.receive(y_RD, route), low_down

    def add_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, y_TD = carry
        route = exchange.further_round(plan, chosen_Tk, index)
        rows_RD = exchange.send(x_TD, route)
        return index + 1, y_TD + finish_round(route, *_project(rows_RD, weights, route, spec)[0])[0]

    y_TD, low_down = finish_round(plan.first, gate_RF, up_RF)
    if exchange.overflows:
        with jax.named_scope(FURTHER_ROUNDS):
            _, y_TD = jax.lax.while_loop(lambda carry: carry[0] < plan.further[0], add_round, (jnp.int32(0), y_TD))
    y_BTD = y_TD.astype(x_BTD.dtype).reshape(x_BTD.shape)
    residuals = x_BTD, share_BTk, chosen_BTk, weights, plan, (rows_RD, gate_RF, up_RF), (*low, low_down)
    return (y_BTD, plan.dropped.sum().astype(jnp.float32)), residuals


def _backward(spec: ExpertsSpec, residuals, cotangents):
    trained, x_BTD, share_BTk, chosen_BTk, weights, plan, first, low = residuals
    gate, up, down, biases, adapters = weights
    x_TD, share_Tk, chosen_Tk, dy_TD = (_flatten(a) for a in (x_BTD, share_BTk, chosen_BTk, cotangents[0]))
    exchange = spec.exchange(chosen_Tk)

    def gradients(route: Route, projected: tuple[jax.Array, ...], low: Sequence[jax.Array | None], out: jnp.dtype):
        """Return gradients of x, f32 (T, D), of share, (T, k), of weights and adapters in `out`, and of biases in f32.

        projected: rows, and their gate and up projections. low: the second results of `ExpertsSpec.project`, of down too.
        """
        rows_RD, gate_RF, up_RF = projected
        share_R, dy_RD = exchange.send_numbers(share_Tk, route), exchange.send(dy_TD, route)
        h_RF, hidden_vjp = jax.vjp(spec.hidden, gate_RF, up_RF, share_R)
        dh_RF, d_down = spec.project_backward(dy_RD, h_RF, low[2], down, adapters.get("down"), route, "D", out)
        d_gate_RF, d_up_RF, d_share_R = hidden_vjp(dh_RF)
        dx_gate_RD, d_gate = spec.project_backward(d_gate_RF, rows_RD, low[0], gate, adapters.get("gate"), route, "F", out)
        dx_up_RD, d_up = spec.project_backward(d_up_RF, rows_RD, low[1], up, adapters.get("up"), route, "F", out)
        dx_RD = (dx_gate_RD.astype(jnp.float32) + dx_up_RD.astype(jnp.float32)).astype(x_TD.dtype)
        pairs = {"gate": d_gate, "up": d_up, "down": d_down}
        dw = None
        if trained.weights:
            dw = (
                spec.outer(rows_RD, d_gate_RF, route, gate, "F", out),
                spec.outer(rows_RD, d_up_RF, route, up, "F", out),
                spec.outer(dy_RD, h_RF, route, down, "D", out),
            )
        db = None
        if biases is not None:
            dy_f32 = dy_RD.astype(jnp.float32)
            d_share_R += jnp.sum(dy_f32 * _row_biases(biases.down, route, dy_RD.shape[0]), axis=-1)
            if trained.biases:
                shared_RD = (dy_f32 * share_R[:, None]).astype(dy_RD.dtype)
                db = Biases(*(_sum_rows(rows, route) for rows in (d_gate_RF, d_up_RF, shared_RD)))
        dw_pairs = dw, {name: pairs[name] for name in adapters}
        return exchange.receive(dx_RD, route), exchange.receive_numbers(d_share_R, route), dw_pairs, db

    def add_round(carry: Any) -> Any:
        index, grads = carry
        route = exchange.further_round(plan, chosen_Tk, index)
        rows_RD = exchange.send(x_TD, route)
        gate_up, low = _project(rows_RD, weights, route, spec)
        h_RF = spec.hidden(*gate_up, exchange.send_numbers(share_Tk, route))
        low_down = spec.low_rank(h_RF, adapters.get("down"), route)
        further = gradients(route, (rows_RD, *gate_up), (*low, low_down), jnp.dtype(jnp.float32))
        return index + 1, jax.tree.map(jnp.add, grads, further)

    def add_rounds(carry: Any) -> Any:
        _, (dx_TD, d_share_Tk, dw, db) = carry
        grads = dx_TD, d_share_Tk, jax.tree.map(lambda d: d.astype(jnp.float32), dw), db
        _, grads = jax.lax.while_loop(lambda carry: carry[0] < plan.further[0], add_round, (jnp.int32(0), grads))
        return jnp.bool_(False), (*grads[:2], jax.tree.map(lambda d: d.astype(spec.numerics.compute), grads[2]), grads[3])

    grads = gradients(plan.first, first, low, spec.numerics.compute)
    if exchange.overflows:
        # The outer loop runs at most once, like a conditional: an even load writes no float32 gradient. A loop, unlike a
        # conditional, updates its state in place.
        with jax.named_scope(FURTHER_ROUNDS):
            _, grads = jax.lax.while_loop(lambda carry: carry[0], add_rounds, (plan.further[0] > 0, grads))
    # The compiler would overlap the reduction of one dw with the matmul of the next dw, and expose the last reduction. With
    # this barrier, earlier layers wait for all matmuls, and their backward passes overlap with the reductions.
    dx_TD, d_share_Tk, (dw, d_adapters), db = jax.lax.optimization_barrier(grads)
    d_weights = [
        Float8(None, None, d.astype(w.gradient.dtype)) if isinstance(w, Float8) else d.astype(w.dtype)
        for w, d in zip((gate, up, down), dw or (), strict=bool(dw))
    ]
    d_biases = db and Biases(*(d.astype(b.dtype) for d, b in zip(db, biases, strict=True)))
    d_adapters = jax.tree.map(lambda d, w: d.astype(w.dtype), d_adapters, adapters)
    d_gate, d_up, d_down = d_weights or [None] * 3
    grads: Any = (d_gate, d_up, d_down, d_biases, d_adapters)
    return dx_TD.astype(x_BTD.dtype).reshape(x_BTD.shape), d_share_Tk.reshape(share_BTk.shape), None, Weights(*grads)


feed_forward.defvjp(_forward, _backward, symbolic_zeros=True)
