"""All code that is specific to flax nnx: parameters with logical axes, stacks of layers, and conversion to and from dicts.

Other modules of jaxtrain use only three names of nnx: Module, Param and Rngs. Outside a model's own code, parameters are a
nested dict of arrays.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.shapes import LAYER_KEY
from jaxtrain.models.stored import Encoded, StoredWeight
from jaxtrain.sharding import Axes, Placement

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]
Params = dict[str, Any]  # nested dict of arrays, or of other values in the same structure
Store = Callable[[str, tuple[int, ...], Axes, bool], StoredWeight | None]


def normal(std: float) -> Initializer:
    """Return an initializer: normal with mean 0, drawn in float32 so that every master dtype rounds the same numbers."""
    return lambda key, shape, dtype: (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def constant(value: float) -> Initializer:
    """Return an initializer with all elements equal."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: Axes,
    init: Initializer,
    dtype: jnp.dtype,
    *,
    dot: bool = False,
    exact: bool = False,
) -> nnx.Param:
    """Return a parameter with logical axes. The axes are under jaxtrain's own metadata key, which flax never interprets.

    dot: the parameter is only used by `kernels.dot.dot`, or for experts by `kernels.experts.feed_forward`. So it may be
      multiplied in FP8.
    exact: the parameter is used in its storage dtype, and never rounded to the compute dtype.
    """
    if len(shape) != len(axes):
        raise ValueError(f"a parameter of shape {shape} needs {len(shape)} axis names, not {axes}")
    return nnx.Param(init(rngs.params(), shape, dtype), axes=axes, dot=dot, exact=exact)


def stack[M: nnx.Module](make: Callable[[nnx.Rngs], M], num: int, rngs: nnx.Rngs) -> M:
    """Return `num` copies of a module, stacked on a new first axis of every parameter. Each copy has its own initial values."""
    keys = jax.random.split(rngs.params(), num)
    return jax.vmap(lambda key: make(nnx.Rngs(params=key)))(keys)


class Definition:
    """A model without values of its parameters.

    abstract: shapes and dtypes of the parameters. axes: their logical axes. dots, exact: the flags of `param`. stored: how
    weights in fewer bits are stored, by name; such a weight has a dict of arrays in these trees, and one array in `weights`.

    uses_plan_run: the model runs its stack of layers by `RematPlan.run`, once, with all layers and unchanged weights. The
    weights of the stack are then `zero.StackWeight`, whose gradients can be added layer by layer (`train.accumulate`).

    staged: the model has the methods that a pipeline calls (models.transformer.Transformer) and computes its result by these
    methods alone. Its method `layer` uses only parameters of `layers`.

    decodes: the model has `decode` and `logits`, which samples need.

    Args:
      make: builds the module.
      store: returns how a parameter is stored, by its name, shape, axes and flag `dot`; None: as one array.
      placement: of the parameters.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        store: Store = lambda *_: None,
        placement: Placement | None = None,
    ):
        self._make = make
        module = nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))
        self._graph, self._state = nnx.split(module, nnx.Param)
        state = self._state
        self.uses_plan_run = bool(getattr(module, "uses_plan_run", False))
        self.staged = bool(getattr(module, "staged", False))
        self.decodes = hasattr(module, "decode") and hasattr(module, "logits")
        self.weights: Params = _map(state, lambda _, p: jax.ShapeDtypeStruct(p.get_value().shape, p.get_value().dtype))
        self.stored: dict[str, StoredWeight] = {}

        def note(name: str, variable: Any) -> None:
            if stored := store(name, variable.get_value().shape, _axes(variable), variable.get_metadata("dot", False)):
                self.stored[name] = stored

        def tree(leaf: Callable[[Any], Any], stored_leaf: Callable[[StoredWeight], Params]) -> Params:
            return _map(state, lambda name, p: stored_leaf(self.stored[name]) if name in self.stored else leaf(p))

        _map(state, note)
        self.abstract: Params = tree(
            lambda p: jax.ShapeDtypeStruct(p.get_value().shape, p.get_value().dtype), lambda stored: stored.abstract
        )
        self.axes: Params = tree(_axes, lambda stored: stored.array_axes(cast(Placement, placement)))
        self.dots: Params = tree(lambda p: p.get_metadata("dot", False), lambda stored: dict.fromkeys(stored.abstract, False))
        self.exact: Params = tree(lambda p: p.get_metadata("exact", False), lambda stored: dict.fromkeys(stored.abstract, True))

    @property
    def period(self) -> int:
        """Return the number of layers in one element of the stack."""
        matches = (LAYER_KEY.search(name) for name in jax.tree.leaves(leaf_names(self.weights)))
        return max((int(match[2]) for match in matches if match), default=1)

    def specs(self, placement: Placement) -> Params:
        """Return the PartitionSpec of each parameter."""
        return jax.tree.map(placement.spec, self.axes, is_leaf=lambda a: isinstance(a, tuple))

    def init(self, key: jax.Array) -> Params:
        """Return initial values of the parameters. Call it under jit with out_shardings: the values are equal on every mesh."""

        def value(name: str, variable: Any) -> Any:
            return self.stored[name].encode(variable.get_value()) if name in self.stored else variable.get_value()

        return _map(nnx.split(self._make(nnx.Rngs(params=key)), nnx.Param)[1], value)

    def decode(self, params: Params) -> Params:
        """Return parameters with each weight in fewer bits as one array, in the dtype of `weights`; for use inside jit."""

        def value(name: str, _: Any) -> Any:
            leaf: Any = functools.reduce(lambda tree, key: tree[key], name.split("."), params)
            weight: Any = functools.reduce(lambda tree, key: tree[key], name.split("."), self.weights)
            return self.stored[name].decode(leaf, weight.dtype) if name in self.stored else leaf

        return _map(self._state, value)

    def bind(self, params: Params) -> Any:
        """Return the model with these parameters."""
        return nnx.merge(self._graph, _fill_state(self._state, params, self.stored))


def select_leaves(tree: Params, chosen: Params) -> Params:
    """Return the leaves of `tree` for which `chosen`, of the same structure, is True. Empty dicts are left out."""
    out: Params = {}
    for name, choice in chosen.items():
        if isinstance(choice, dict):
            if inner := select_leaves(tree.get(name, {}), choice):
                out[name] = inner
        elif choice:
            out[name] = tree[name]
    return out


def replace_leaves(tree: Params, replacements: Params) -> Params:
    """Return `tree` with its leaves replaced by the leaves of `replacements`, where `replacements` has them."""
    return {
        name: replace_leaves(value, replacements.get(name, {})) if isinstance(value, dict) else replacements.get(name, value)
        for name, value in tree.items()
    }


def leaf_names(tree: Params) -> Params:
    """Return the tree with each leaf's dotted name in place of the leaf: layers.attention.wq."""
    path_name = lambda path, _: ".".join(str(key.key) for key in path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(path_name, tree, is_leaf=lambda x: not isinstance(x, dict))


def is_stacked(path: Any) -> bool:
    """Return whether layers are stacked on axis 0 of a leaf, by its path."""
    return any(getattr(k, "key", None) == "layers" for k in path)


def _axes(variable: Any) -> Axes:
    """Return the logical axes of a parameter; the first axis of a parameter in a stack is 'layers'."""
    axes = variable.get_metadata("axes")
    return ("layers", *axes) if len(variable.get_value().shape) > len(axes) else axes


def _map(state: Any, f: Callable[[str, Any], Any], prefix: str = "") -> Params:
    """Return the dict of f(dotted name, variable) of each variable of a state."""
    return {k: f(f"{prefix}{k}", v) if isinstance(v, nnx.Variable) else _map(v, f, f"{prefix}{k}.") for k, v in state.items()}


def _fill_state(state: Any, params: Params, stored: Mapping[str, StoredWeight], prefix: str = "") -> nnx.State:
    """Return `state` with the values of `params`. Parameters keep their metadata: zero.py gathers weights by their axes."""

    def value(name: str, v: Any, x: Any) -> Any:
        return v.replace(Encoded(x, stored[name]) if name in stored else x)

    return nnx.State(
        {
            k: value(prefix + str(k), v, params[k])
            if isinstance(v, nnx.Variable)
            else _fill_state(v, params[k], stored, f"{prefix}{k}.")
            for k, v in state.items()
        }
    )
