"""Low-rank adapters of linear layers (Hu et al. 2021, arXiv:2106.09685): y = x W + alpha / rank (x a) b.

For each adapted weight W, the submodule `lora` of W's module has two parameters. a is `W_a` with shape (W's input dimensions,
rank), and b is `W_b` with shape (rank, W's output dimensions). W's dimensions are sharded as in W, and the rank is not sharded.
b starts at zero, so training starts with the base model.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.kernels.dot import dot
from jaxtrain.models.module import Initializer, constant, param

MODULE = "lora"  # the submodule of a module's adapters, and a part of each adapter parameter's name
A, B = "_a", "_b"
# The einsum equation of each weight that can be adapted: it shows which dimensions of the weight are inputs.
QKV, IN = "BTD,DNH->BTNH", "BTD,DF->BTF"
LATENT = "BTF,FNH->BTNH"
EQUATIONS = {"wq": QKV, "wk": QKV, "wv": QKV, "wo": "BTNH,DNH->BTD", "gate": IN, "up": IN, "down": "BTF,DF->BTD"}
EQUATIONS |= {"wq_down": IN, "wkv_down": IN, "wq_up": LATENT, "wkv_up": LATENT}


@dataclasses.dataclass(frozen=True)
class Lora:
    """The settings of a model's adapters, static under jit. A model has no adapters if the rank is 0."""

    rank: int = 0
    alpha: float = 0.0
    targets: tuple[str, ...] = ()  # names of weights
    params: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype("float32"))  # dtype of the adapters' master weights

    @property
    def scale(self) -> float:
        """Return alpha / rank, the factor of the adapters' outputs."""
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by its dotted name, belongs to an adapter."""
    return MODULE in name.split(".")


def adapter_of(weight: str, half: str) -> str:
    """Return the name of a weight's adapter parameter: layers.0.mlp.lora.up_a for layers.0.mlp.up. half: A or B."""
    module, dot, name = weight.rpartition(".")
    return f"{module}{dot}{MODULE}.{name}{half}"


def uniform(fan_in: int) -> Initializer:
    """Return an initializer: uniform in +-1 / sqrt(fan_in), drawn in float32. PEFT uses the same distribution."""
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def equations(eqn: str) -> tuple[str, str]:
    """Return the equations of an adapter's two matmuls: ("BTD,DR->BTR", "BTR,RNH->BTNH") for "BTD,DNH->BTNH"."""
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    tokens = xs.removesuffix("".join(c for c in xs if c in ws))
    into, out = ("".join(c for c in ws if c in letters) for letters in (xs, y))
    return f"{xs},{into}R->{tokens}R", f"{tokens}R,R{out}->{y}"


class Adapters(nnx.Module):
    """The adapters of a module's weights; no adapters if the rank is 0.

    Args:
      of: the module.
      weights: names of the module's weights that can be adapted. Names in `lora.targets` get an adapter.
    """

    def __init__(self, of: nnx.Module, weights: Sequence[str], ctx: Any, rngs: nnx.Rngs):
        lora: Lora = ctx.lora
        self.ctx, self.names = ctx, tuple(name for name in weights if lora.rank and name in lora.targets)
        for name in self.names:
            w, eqn = getattr(of, name), EQUATIONS[name]
            shape, axes = w.get_value().shape, w.get_metadata("axes")
            inputs = [c in eqn.split(",")[0] for c in _letters(eqn)]
            into, out = ([i for i, x in enumerate(inputs) if x == wanted] for wanted in (True, False))
            fan_in = math.prod(shape[i] for i in into)
            a_shape, a_axes = (*(shape[i] for i in into), lora.rank), (*(axes[i] for i in into), None)
            b_shape, b_axes = (lora.rank, *(shape[i] for i in out)), (None, *(axes[i] for i in out))
            setattr(self, name + A, param(rngs, a_shape, a_axes, uniform(fan_in), lora.params))
            setattr(self, name + B, param(rngs, b_shape, b_axes, constant(0.0), lora.params))

    def __call__(self, name: str, x: jax.Array, y: jax.Array, prepared: Callable[[Any], Any] = lambda w: w) -> jax.Array:
        """Return y + alpha / rank (x a) b if `name` is adapted, else y.

        Args:
          x, y: input and result of `dot` with the adapted weight.
          prepared: a function that is applied to b before the matmul. The caller applied it to the adapted weight, too.
        """
        if name not in self.names:
            return y
        n, (down, up) = self.ctx.numerics, equations(EQUATIONS[name])
        with jax.named_scope(MODULE):
            # The factor is applied before b: after b, the backward pass would make a scaled copy of y's whole gradient.
            h_BTR = dot(down, x, getattr(self, name + A)[...], n) * self.ctx.lora.scale
            return y + dot(up, h_BTR, prepared(getattr(self, name + B)[...]), n)

    def merged(self, name: str, w: jax.Array) -> jax.Array:
        """Return the gathered weight `w`, with its adapter added if `name` is adapted."""
        if name not in self.names:
            return w
        a, b = (getattr(self, name + half)[...].astype(jnp.float32) for half in (A, B))
        return (w.astype(jnp.float32) + self.ctx.lora.scale * jnp.tensordot(a, b, 1)).astype(w.dtype)


def _letters(eqn: str) -> str:
    """Return the weight's letters in an einsum equation."""
    return eqn.split("->")[0].split(",")[1]
