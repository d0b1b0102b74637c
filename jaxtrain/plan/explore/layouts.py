"""The named arrays of a train step, read from the traced program: what a device holds of each, and its logical axes.

The gradients are computed inside one shard_map, where every array is a device's shard. The trace gives its shape and dtype. The
axes are those of jaxtrain/activations.py, or the parameter's own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal, jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.activations import AXES
from jaxtrain.context import Context
from jaxtrain.sharding import Axes, Placement

Dims = tuple[tuple[str, ...], ...]  # mesh axes that shard each dimension
WEIGHT = "weight"  # what the model calls a gathered weight
GATHER = "gather"  # the scope in which weights are gathered that a step holds whole


@dataclasses.dataclass(frozen=True)
class Origin:
    """The parameter of which a value is a copy."""

    parameter: str
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Named:
    """An array of the program that has a name."""

    name: str
    origin: Origin | None  # of gathered weights
    shape: tuple[int, ...]  # on one device
    dtype: Any


def read(jaxpr: Jaxpr, origins: Sequence[Origin | None]) -> list[Named]:
    """Return the named arrays of a train step, in the order of the program. Of equal ones there is one.

    Args:
      origins: for each argument of the jaxpr, which parameter it is.
    """
    found: dict[Any, Named] = {}
    _walk(jaxpr, origins, found)
    return list(found.values())


def _walk(jaxpr: Jaxpr, origins: Sequence[Origin | None], found: dict[Any, Named]) -> list[Origin | None]:
    """Add the named arrays to `found`, and return the origins of the results."""
    known: dict[Any, Origin | None] = dict(zip(jaxpr.invars, origins, strict=False))
    for eqn in jaxpr.eqns:
        kind, made = eqn.primitive.name, [_aval(v) for v in eqn.outvars]
        given = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        several = {origin for origin in given if origin is not None}
        origin = several.pop() if len(several) == 1 else None
        if origin is not None and any(len(aval.shape) > len(origin.axes) for aval in made):
            origin = None  # an activation that was computed with it
        if kind == "transpose" and origin is not None:
            axes = _last(origin.axes, len(eqn.params["permutation"]))
            origin = dataclasses.replace(origin, axes=tuple(axes[i] for i in eqn.params["permutation"]))
        results = given if len(given) == len(eqn.outvars) > 1 else [origin] * len(eqn.outvars)
        for body in jaxprs_in_params(eqn.params):
            # Before the arguments of a branch or of a loop's body stand those that only choose the branch, or end the loop.
            inside = _walk(body, given[len(given) - len(body.invars) :], found)
            results = inside if len(inside) == len(results) else results
        known.update(zip(eqn.outvars, results, strict=True))
        once = str(eqn.source_info.name_stack) == GATHER and kind in ("scan", "custom_vjp_call")
        if kind == "name" or once:
            name, aval = WEIGHT if once else eqn.params["name"], made[0]
            if name != WEIGHT:
                found.setdefault((name, aval.shape), Named(name, None, aval.shape, aval.dtype))
            elif results[0] is not None:
                of = dataclasses.replace(results[0], axes=_last(results[0].axes, len(aval.shape)))
                found.setdefault((name, of.parameter), Named(name, of, aval.shape, aval.dtype))
    return [None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars]


def _aval(v: Any) -> Any:
    return v.aval


def _last(axes: Axes, count: int) -> Axes:
    """Return the axes of one layer's array, where `axes` are those of a stack."""
    return axes[len(axes) - count :]


def activation_axes(name: str, ndim: int, context: Context) -> Axes | None:
    """Return the logical axes of an activation, or None where rules do not say how the shards of all devices fit together.

    They say nothing of the rows that arrived at a device's experts, and of arrays without a name. Nor do they inside attention
    with Ulysses, where the ranks of a group exchange tokens for heads.
    """
    axes = AXES.get(name, ())
    inside = context.ulysses > 1 and name in ("attention_out", "attention_lse")
    return axes if len(axes) == ndim and not inside else None


def in_use(axes: Axes, placement: Placement) -> NamedSharding:
    """Return the sharding of a weight with these logical axes while it is used."""
    return NamedSharding(placement.mesh, P(*(placement.compute_axes(axis) or None for axis in axes)))


def dims_of(sharding: NamedSharding, ndim: int) -> Dims:
    """Return the mesh axes that shard each dimension. Those of size 1 shard nothing and are left out."""
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in sharding.spec]
    parts += [()] * (ndim - len(parts))
    return tuple(tuple(a for a in part if sharding.mesh.shape[a] > 1) for part in parts)
