"""Compute the function of a `shard_map` on one device, for every rank of a mesh axis.

The function is traced once, exactly as a rank traces it. Each equation is then computed for every rank, and a collective from
the arrays of all ranks. `jax.vmap(axis_name=...)` cannot do this: cuDNN's attention has no batching rule for packed rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

Values = list[Any]  # the arrays of one variable, by rank
Groups = Sequence[Sequence[int]] | None  # ranks that communicate with each other; None: all ranks


def run(function: Callable[..., Any], axis: str, args: Sequence[Sequence[Any]]) -> list[Any]:
    """Compute `function` on every rank of `axis`, and return its results by rank. May be called inside `jax.jit`.

    Args:
        function: takes the arrays of one rank, and may call axis_index, all_gather, all_to_all, ppermute and psum_scatter.
        axis: the one axis name that the function uses.
        args: the arguments of each rank, with the same shapes on all ranks.

    Raises:
        NameError: unbound axis name: the function calls another collective, or a collective inside a loop or a branch.
    """
    traced, shape = jax.make_jaxpr(function, axis_env=[(axis, len(args))], return_shape=True)(*args[0])
    outputs = _equations(traced, _by_variable([jax.tree.leaves(arg) for arg in args]), len(args))
    return [jax.tree.structure(shape).unflatten(values) for values in zip(*outputs, strict=True)]


def _by_variable(by_rank: Sequence[Sequence[Any]]) -> list[Values]:
    return [list(values) for values in zip(*by_rank, strict=True)]


def _equations(closed: core.ClosedJaxpr, inputs: Sequence[Values], ranks: int) -> list[Values]:
    """Return the outputs of a traced function, by rank."""
    jaxpr = closed.jaxpr
    known: dict[Any, Values] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {variable: [value] * ranks for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)}

    def read(atom: Any) -> Values:
        return [atom.val] * ranks if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        given, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
        if name == "axis_index":
            made = [[jnp.int32(rank) for rank in range(ranks)]]
        elif name in COLLECTIVES:
            made = [COLLECTIVES[name](values, **eqn.params) for values in given]
        elif name == "jit":
            made = _equations(eqn.params["jaxpr"], given, ranks)
        else:
            made = _by_variable([_bind(eqn, [values[rank] for values in given]) for rank in range(ranks)])
        known.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: core.JaxprEqn, values: Values) -> Values:
    """Return the results of an equation on one rank."""
    primitive = eqn.primitive
    found = primitive.bind(*values, **primitive.get_bind_params(eqn.params))
    return found if primitive.multiple_results else [found]


# ---- Collectives: from the arrays of all ranks to the results of all ranks, with the parameters of jax.lax.


def _by_group(values: Values, groups: Groups, result: Callable[[Values, int], Any]) -> Values:
    """Return `result(arrays of the rank's group, index in the group)` for each rank."""
    made: Values = [None] * len(values)
    for group in groups or [range(len(values))]:
        members = [values[rank] for rank in group]
        for place, rank in enumerate(group):
            made[rank] = result(members, place)
    return made


def _all_gather(values: Values, *, all_gather_dimension: int, tiled: bool, axis_index_groups: Groups, **_: Any) -> Values:
    put = jnp.concatenate if tiled else jnp.stack
    return _by_group(values, axis_index_groups, lambda members, place: put(members, axis=all_gather_dimension))


def _all_to_all(
    values: Values, *, split_axis: int, concat_axis: int, tiled: bool, axis_index_groups: Groups, **_: Any
) -> Values:
    if not tiled:
        raise NotImplementedError("all_to_all(tiled=False)")

    def received(members: Values, place: int) -> Any:
        return jnp.concatenate([jnp.split(x, len(members), split_axis)[place] for x in members], axis=concat_axis)

    return _by_group(values, axis_index_groups, received)


def _ppermute(values: Values, *, perm: Sequence[tuple[int, int]], **_: Any) -> Values:
    made = [jnp.zeros_like(x) for x in values]  # jax.lax.ppermute gives zeros to a rank without a sender
    for source, target in perm:
        made[target] = values[source]
    return made


def _reduce_scatter(values: Values, *, scatter_dimension: int, tiled: bool, axis_index_groups: Groups, **_: Any) -> Values:
    def part(members: Values, place: int) -> Any:
        mine = jnp.split(sum(members[1:], members[0]), len(members), scatter_dimension)[place]
        return mine if tiled else mine.squeeze(scatter_dimension)

    return _by_group(values, axis_index_groups, part)


COLLECTIVES: dict[str, Callable[..., Values]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "reduce_scatter": _reduce_scatter,
}
