"""Low-rank adapters of linear layers (Hu et al. 2021, arXiv:2106.09685): y = x W + scale (x a) b.

The scale is alpha / rank, or alpha / sqrt(rank) with lora.rslora (Kalajdzievski 2023, arXiv:2312.03732).

For each adapted weight W, the submodule `lora` of W's module has two parameters. a is `W_a` with shape (W's input dimensions,
rank), and b is `W_b` with shape (rank, W's output dimensions). W's dimensions are sharded as in W, and the rank is not sharded.
b starts at zero, so training starts with the base model.

The weight of a layer's experts has one more dimension in front, the experts. So do its a and b with lora.experts=each. With
lora.experts=shared, all experts have the same a and b, of the same shapes as for a weight without experts.
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
SHARED = {"expert_embed": "embed"}  # logical axis of an expert's weight -> that of an adapter that all experts share
EQUATIONS = {"wq": QKV, "wk": QKV, "wv": QKV, "wo": "BTNH,DNH->BTD", "gate": IN, "up": IN, "down": "BTF,DF->BTD"}
EQUATIONS |= {"wg": QKV, "wz": QKV, "wq_down": IN, "wkv_down": IN, "wq_up": LATENT, "wkv_up": LATENT}


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """The settings of a model's adapters, static under jit. A model has no adapters if the rank is 0."""

    rank: int = 0
    scale: float = 0.0  # the factor of the adapters' outputs
    targets: tuple[str, ...] = ()  # names of weights
    experts: str = "each"  # each, shared or none
    params: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype("float32"))  # dtype of the adapters' master weights


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by its dotted name, belongs to an adapter."""
    return MODULE in name.split(".")


def adapter_name(weight: str, half: str) -> str:
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
      module: the module.
      weights: names of the module's weights that can be adapted. Names in `lora.targets` get an adapter.
      experts: whether the weights are those of experts, whose first dimension is the experts.
    """

    def __init__(self, module: nnx.Module, weights: Sequence[str], ctx: Any, rngs: nnx.Rngs, experts: bool = False):
        lora: LoraSpec = ctx.lora
        enabled = lora.rank and not (experts and lora.experts == "none")
        self.ctx, self.names = ctx, tuple(name for name in weights if enabled and name in lora.targets)
        for name in self.names:
            w, eqn = getattr(module, name), EQUATIONS[name]
            dims = list(zip(w.get_value().shape, w.get_metadata("axes"), strict=True))
            each = dims[:experts] if lora.experts == "each" else []
            inputs = [c in eqn.split(",")[0] for c in _weight_letters(eqn)]
            into, out = (
                [dim for dim, x in zip(dims[experts:], inputs, strict=True) if x == wanted] for wanted in (True, False)
            )
            if experts and not each:  # stored like the weights outside of experts, over more devices
                into, out = ([(size, SHARED.get(axis, axis)) for size, axis in side] for side in (into, out))
            init_a = uniform(math.prod(size for size, _ in into))
            rank = (lora.rank, None)
            for half, init, shape in ((A, init_a, [*each, *into, rank]), (B, constant(0.0), [*each, rank, *out])):
                sizes, axes = zip(*shape, strict=True)
                setattr(self, name + half, param(rngs, sizes, axes, init, lora.params))

    def __call__(self, name: str, x: jax.Array, y: jax.Array, shard: Callable[[Any], Any] = lambda w: w) -> jax.Array:
        """Return y + scale (x a) b if `name` is adapted, else y.

        Args:
          x, y: input and result of `dot` with the adapted weight.
          shard: a function that is applied to b before the matmul. The caller applied it to the adapted weight, too.
        """
        if name not in self.names:
            return y
        numerics, (down, up) = self.ctx.numerics, equations(EQUATIONS[name])
        with jax.named_scope(MODULE):
            # The factor is applied before b: after b, the backward pass would make a scaled copy of y's whole gradient.
            h_BTR = dot(down, x, getattr(self, name + A)[...], numerics) * self.ctx.lora.scale
            return y + dot(up, h_BTR, shard(getattr(self, name + B)[...]), numerics)

    def pairs(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return (a, b) of each adapted weight, by its name."""
        return {name: (getattr(self, name + A)[...], getattr(self, name + B)[...]) for name in self.names}

    def merge(self, name: str, w: jax.Array) -> jax.Array:
        """Return the gathered weight `w`, with its adapter added if `name` is adapted."""
        if name not in self.names:
            return w
        a, b = (getattr(self, name + half)[...].astype(jnp.float32) for half in (A, B))
        return (w.astype(jnp.float32) + self.ctx.lora.scale * jnp.tensordot(a, b, 1)).astype(w.dtype)


def _weight_letters(eqn: str) -> str:
    return eqn.split("->")[0].split(",")[1]
