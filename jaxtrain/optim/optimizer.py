"""Build the optimizers and their learning-rate schedule, with optax.

An optimizer here is an `optax.GradientTransformation` that returns a direction; the step multiplies the direction by -lr(step).
So the optimizer state has no learning rate: the rate is a function of the step, also in a resumed run.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import own_parts, schema
from jaxtrain.config.schema import ConfigError
from jaxtrain.config.shapes import DENSE, STACK, is_vector, without_layer_key
from jaxtrain.kernels.numerics import DTYPES, Numerics
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8, block_axis
from jaxtrain.optim.muon import make_orthogonalizer, matrix_dims, scale_by_muon
from jaxtrain.optim.quantized import SIGNED, Blocks, block_scales, decode, encode, is_blocks
from jaxtrain.sharding import Axes, Placement


def make_schedule(optimizer: schema.Optimizer, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step, counted from 0.

    The rate rises linearly over warmup_steps, from lr / warmup_steps to lr at the last warm-up step. Without warm-up, step 0
    has lr. `cosine` and `linear` then decay over decay_steps steps (0: all steps that are left) to lr_min. `wsd` stays at lr
    until the last decay_steps, which decay to lr_min (Hu et al. 2024, arXiv:2404.06395) in the form of decay_shape: `linear`,
    `cosine`, or `sqrt`, whose rate falls as 1 - sqrt(progress) (Hägele et al. 2024, arXiv:2405.18392). `constant` stays at lr.
    With `cosine` and `linear`, only one step has the peak rate. The last step of a decay has lr_min.
    """
    opt = optimizer
    # Steps up to the peak: step 0 has lr / warmup_steps, since a rate of 0 would change nothing.
    first = max(1, opt.warmup_steps)
    remaining, decay = max(1, steps - first), opt.decay(steps)
    line = optax.linear_schedule(opt.lr, opt.lr_min, decay)

    def linear(step: Any) -> Any:
        return jnp.maximum(line(step), opt.lr_min)  # by rounding, a line to lr_min = 0 ends below 0

    def sqrt(step: Any) -> Any:
        return opt.lr_min + (opt.lr - opt.lr_min) * (1 - jnp.sqrt(jnp.clip(step / decay, 0, 1)))

    cosine = optax.cosine_decay_schedule(opt.lr, decay, alpha=opt.lr_min / opt.lr if opt.lr else 0.0)
    shapes = {"linear": linear, "cosine": cosine, "sqrt": sqrt}
    constant = optax.constant_schedule(opt.lr)
    if opt.schedule == "wsd":
        tail = optax.join_schedules([constant, shapes[opt.decay_shape]], [remaining - decay])
    else:
        tail = constant if opt.schedule == "constant" else shapes[opt.schedule]
    if first == 1:
        return tail
    return optax.join_schedules([optax.linear_schedule(opt.lr / first, opt.lr, first - 1), tail], [first - 1])


def weight_decay_mask(axes: Any) -> Any:
    """Return a tree of bools: whether optimizer.weight_decay applies to each parameter. It applies to matrices only.

    Scales of norms and biases are no matrices, whatever their dimensions. The axis "layers" does not count as a dimension.

    axes: tree of the parameters' logical axes.
    """

    def is_matrix(path: Any, a: tuple[str | None, ...]) -> bool:
        return not is_vector(str(path[-1].key)) and len([x for x in a if x != "layers"]) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, axes, is_leaf=lambda x: isinstance(x, tuple))


@dataclasses.dataclass(frozen=True)
class ParamSettings:
    """The optimizer's settings for one parameter, chosen by the parameter's name, its axes and the config."""

    muon: bool  # by Muon, not by AdamW
    lr: float  # factor of the schedule's learning rate
    weight_decay: float


def param_settings(optimizer: schema.Optimizer, axes: Any) -> Any:
    """Return a tree with the `ParamSettings` of each parameter, from its logical axes and the group that matches its name.

    With optimizer.name=muon, Muon updates the matrices of layers, and AdamW other parameters, unless a group sets `optimizer`.
    """
    param_groups = groups.parse_groups(optimizer.groups)[0]

    def choose_settings(path: Any, param_axes: Axes, is_matrix: bool) -> ParamSettings:
        group = groups.find_group(param_groups, _param_name(path)) or groups.Group("*")
        hidden = is_matrix and matrix_dims(param_axes)[1] > 0 and (STACK in param_axes or path[0].key in (STACK, DENSE))
        decay = group.weight_decay
        return ParamSettings(
            optimizer.name == "muon" and (group.optimizer == "muon" if group.optimizer else hidden),
            group.lr,
            decay if decay is not None else optimizer.weight_decay if is_matrix else 0.0,
        )

    return jax.tree_util.tree_map_with_path(
        choose_settings, axes, weight_decay_mask(axes), is_leaf=lambda x: isinstance(x, tuple)
    )


def check_groups(optimizer: schema.Optimizer, axes: Any) -> None:
    """Raise ConfigError for a group to which no parameter belongs, or which sets optimizer=muon for one that is no matrix."""
    leaves = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))[0]
    matrices = jax.tree.leaves(weight_decay_mask(axes))
    supported = {
        _param_name(path): is_matrix and matrix_dims(a)[1] > 0 for (path, a), is_matrix in zip(leaves, matrices, strict=True)
    }
    problems = groups.find_model_problems(optimizer.groups, supported)
    if problems:
        raise ConfigError(problems)


def _param_name(path: Any) -> str:
    return without_layer_key(".".join(str(k.key) for k in path))


def _leaf_at(tree: Any, path: Any) -> Any:
    return functools.reduce(lambda tree, key: tree[key.key], path, tree)


def adam_with_dtypes(
    m_dtype: str, v_dtype: str, axes: Any, beta1: float, beta2: float, eps: float
) -> optax.GradientTransformation:
    """Return optax's Adam, with the first moment stored in m_dtype and the second in v_dtype (`with_moment_dtypes`)."""
    return with_moment_dtypes(m_dtype, v_dtype, axes, optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps))


def with_moment_dtypes(
    m_dtype: str, v_dtype: str, axes: Any, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return the transformation `adam` with the first moment stored in m_dtype and the second in v_dtype.

    The update itself is computed in float32, from the new moments before they are rounded.

    Args:
      m_dtype, v_dtype: dtypes of the first and the second moment: f32, bf16, or int8 for 8-bit blocks
        (jaxtrain/optim/quantized.py).
      axes: logical axes of the parameters. They decide which tensors have blocks; with int8, all others stay in float32.
      adam: a transformation with an optax.ScaleByAdamState as its state: optax's Adam, or Muon.
    """
    dtypes = {"mu": m_dtype, "nu": v_dtype}

    def block_dim(path: Any, x: jax.Array) -> int | None:
        """Return the dimension along which a moment is cut into blocks; None for a tensor without blocks."""
        return block_axis(_leaf_at(axes, path), x.shape)

    def moment_scales(name: str, moment: Any) -> Any:
        def leaf_scales(path: Any, x: jax.Array) -> jax.Array | None:
            axis = block_dim(path, x)
            return None if axis is None else block_scales(x, axis)

        return jax.tree_util.tree_map_with_path(leaf_scales, moment) if dtypes[name] == INT8 else None

    def encode_moments(name: str, moment: Any, scales: Any) -> Any:
        if dtypes[name] != INT8:
            return jax.tree.map(lambda x: x.astype(DTYPES[dtypes[name]]), moment)

        def encode_leaf(path: Any, x: jax.Array, scales: jax.Array | None) -> jax.Array | Blocks:
            axis = block_dim(path, x)
            return x if axis is None or scales is None else encode(x, scales, axis, SIGNED[name])

        return jax.tree_util.tree_map_with_path(encode_leaf, moment, scales)

    def decode_moments(name: str, moment: Any) -> Any:
        decode_leaf = lambda x: decode(x, SIGNED[name]) if is_blocks(x) else x.astype(jnp.float32)  # noqa: E731
        return jax.tree.map(decode_leaf, moment, is_leaf=is_blocks)

    def init(params: Any) -> optax.ScaleByAdamState:
        adam_state: Any = adam.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return optax.ScaleByAdamState(
            adam_state.count,
            encode_moments("mu", adam_state.mu, moment_scales("mu", adam_state.mu)),
            encode_moments("nu", adam_state.nu, moment_scales("nu", adam_state.nu)),
        )

    def exact_update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        state = optax.ScaleByAdamState(state.count, decode_moments("mu", state.mu), decode_moments("nu", state.nu))
        return adam.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), state, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu_scales = nu_scales = None
        if INT8 in (m_dtype, v_dtype):
            # A block's scale must be known before its codes. To compute it, XLA would keep the new moments in float32, four
            # times the gradients. So the moments are computed twice; the barrier hides from XLA that the results are equal.
            adam_state: Any = exact_update(updates, state, params)[1]
            mu_scales, nu_scales = moment_scales("mu", adam_state.mu), moment_scales("nu", adam_state.nu)
            updates, state = jax.lax.optimization_barrier((updates, state))
        updates, adam_state = exact_update(updates, state, params)
        return updates, optax.ScaleByAdamState(
            adam_state.count, encode_moments("mu", adam_state.mu, mu_scales), encode_moments("nu", adam_state.nu, nu_scales)
        )

    return optax.GradientTransformation(init, update)


def decay_and_scale(optimizer: schema.Optimizer, axes: Any) -> optax.GradientTransformation:
    """Return the transformation that adds weight decay, and then multiplies by a factor of the learning rate.

    Each parameter's weight decay and factor are those of its `ParamSettings`.
    """
    settings = param_settings(optimizer, axes)

    def scale_leaf(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        leaf_settings = _leaf_at(settings, path)
        update = update + leaf_settings.weight_decay * param.astype(jnp.float32) if leaf_settings.weight_decay else update
        return update if leaf_settings.lr == 1 else leaf_settings.lr * update

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree_util.tree_map_with_path(scale_leaf, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def adamw(optimizer: schema.Optimizer, dtypes: schema.Dtypes, axes: Any) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with weight decay by `param_settings`."""
    opt = optimizer
    return optax.chain(adam_with_dtypes(dtypes.m, dtypes.v, axes, opt.beta1, opt.beta2, opt.eps), decay_and_scale(opt, axes))


def muon(
    optimizer: schema.Optimizer, dtypes: schema.Dtypes, axes: Any, placement: Placement | None, numerics: Numerics
) -> optax.GradientTransformation:
    """Return Muon (jaxtrain/optim/muon.py) for the parameters that `param_settings` selects, and AdamW for other parameters."""
    opt, settings, orthogonalize = optimizer, param_settings(optimizer, axes), make_orthogonalizer(placement, numerics)
    muon_or_adam = scale_by_muon(
        optax.scale_by_adam(b1=opt.beta1, b2=opt.beta2, eps=opt.eps),
        opt.momentum,
        lambda path: _leaf_at(settings, path).muon,
        lambda path, x: orthogonalize(x, _leaf_at(axes, path)),
    )
    return optax.chain(with_moment_dtypes(dtypes.m, dtypes.v, axes, muon_or_adam), decay_and_scale(opt, axes))


FLOAT32 = Numerics(jnp.dtype("float32"), jnp.dtype("float32"), jnp.dtype("float32"))


def make_optimizer(
    optimizer: schema.Optimizer,
    dtypes: schema.Dtypes,
    axes: Any,
    placement: Placement | None = None,
    numerics: Numerics = FLOAT32,
    user_settings: schema.Own = schema.NO_SETTINGS,
) -> optax.GradientTransformation:
    """Return the optimizer that `optimizer.name` names: adamw, muon, or the result of a user's own function.

    `package.module:name` names the user's function, which is called with (optimizer, dtypes, axes, own).

    Args:
      axes: logical axes of the parameters.
      placement: the parameters' placement, for an optimizer that needs complete matrices; None: all are on one device.
      numerics: the run's dtypes, for Muon's matmuls.
      user_settings: the settings of the config's section `own`, for the user's function.
    """
    if optimizer.name == "adamw":
        return adamw(optimizer, dtypes, axes)
    if optimizer.name == "muon":
        return muon(optimizer, dtypes, axes, placement, numerics)
    function = own_parts.load_part("optimizer.name", optimizer.name)

    def user_call(form: str = "") -> Any:
        return own_parts.calling("optimizer.name", optimizer.name, form)

    with user_call("name(optimizer, dtypes, axes, own)"):
        transform = function(optimizer, dtypes, axes, user_settings)

    def refuse(rule: str, remedy: str) -> None:
        raise own_parts.WrongPart("optimizer.name", optimizer.name, rule, remedy)

    if not isinstance(transform, optax.GradientTransformation):
        refuse(
            f"returns {type(transform).__name__}, not an optax.GradientTransformation", "Return one, as optax.scale_by_adam()."
        )

    def init(params: Any) -> Any:
        with user_call("init(params)"):
            return transform.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with user_call("update(updates, state, params)"):
            new = transform.update(updates, state, params)
        if not isinstance(new, tuple) or len(new) != 2:
            refuse(f"its update returns {type(new).__name__}, not two trees", "Return (updates, state).")
        if difference := _difference(params, new[0]):
            refuse(
                f"its update returns updates that are not like the parameters: {difference}", "Return one for each parameter."
            )
        if difference := _difference(state, new[1]):
            refuse(f"its update returns another state than it received: {difference}", "Return one of the same form.")
        return new

    return optax.GradientTransformation(init, update)


def _difference(old: Any, new: Any) -> str:
    """Return the first difference of structure or shape between two trees of arrays as text; "" if there is none."""
    if (old_structure := jax.tree.structure(old)) != (new_structure := jax.tree.structure(new)):
        return f"{str(new_structure):.200} instead of {str(old_structure):.200}"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        if jnp.shape(a) != jnp.shape(b):
            return f"{jax.tree_util.keystr(path)} is {list(jnp.shape(b))} instead of {list(jnp.shape(a))}"
    return ""
