"""What a researcher brings: a model family, a loss, an optimizer and a data source with settings of their own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.data.batches import open_source
from jaxtrain.kernels.dot import dot
from jaxtrain.models.attention import Attention
from jaxtrain.models.layers import RMSNorm
from jaxtrain.models.module import normal, param, stack
from jaxtrain.models.transformer import Transformer
from jaxtrain.optim.optimizer import adamw
from jaxtrain.sharding import to_block, to_residual


class SquaredReLU(nnx.Module):
    """down(gain relu(up(x))^2), the feed-forward block of Primer (So et al. 2021, arXiv:2109.08668)."""

    def __init__(self, model, std, out_std, ctx, rngs):
        shape, axes, dtype = (model.d_model, model.d_ff), ("embed", "mlp"), ctx.numerics.params
        self.up = param(rngs, shape, axes, normal(std), dtype, dot=True)
        self.down = param(rngs, shape, axes, normal(out_std), dtype, dot=True)
        self.ctx = ctx

    def __call__(self, x_BTD):
        n = self.ctx.numerics
        up_BTF = checkpoint_name(dot("BTD,DF->BTF", x_BTD, self.up.get_value(), n), "mlp_up")
        return dot("BTF,DF->BTD", self.ctx.own.gain * jax.nn.relu(up_BTF) ** 2, self.down.get_value(), n)


class Block(nnx.Module):
    """A pre-norm block with a `SquaredReLU`."""

    def __init__(self, model, kernel, ctx, rngs):
        std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.num_layers)
        self.attention_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        self.attention = Attention(model, kernel, std, out_std, ctx, rngs)
        self.mlp_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        self.mlp = SquaredReLU(model, std, out_std, ctx, rngs)
        self.ctx = ctx

    def __call__(self, carry, shared, kind, cache):
        p, (x_BTD, statistics) = self.ctx.placement, carry
        h_BTD = to_block(checkpoint_name(self.attention_norm(x_BTD), "attention_norm"), p)
        y_BTD, cache = self.attention(h_BTD, shared, kind, cache)
        x_BTD = checkpoint_name(x_BTD + to_residual(y_BTD, p.mesh_axes("heads"), p), "residual")
        h_BTD = to_block(checkpoint_name(self.mlp_norm(x_BTD), "mlp_norm"), p)
        y_BTD = checkpoint_name(to_residual(self.mlp(h_BTD), p.mesh_axes("mlp"), p), "mlp_down")
        return (x_BTD + y_BTD, statistics), cache


class Model(Transformer):
    """Embedding, final norm, head and decoding are the Transformer's."""

    def __init__(self, model, kernel, remat, ctx, rngs):
        super().__init__(model, kernel, remat, ctx, rngs)
        self.layers = stack(lambda r: Block(model, kernel, ctx, r), model.num_layers, rngs)


class Family:
    build = staticmethod(Model)


def focal(hidden_BTD, head_VD, batch, spec):
    """Return the focal loss (Lin et al. 2017, arXiv:1708.02002)."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, spec.whole_head(head_VD)).astype(jnp.float32)
    log_p_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch["targets"][..., None], -1)[..., 0]
    return -jnp.sum(batch["weights"] * (1 - jnp.exp(log_p_BT)) ** spec.own.gamma * log_p_BT)


def slow_adamw(optimizer, dtypes, axes, own):
    """Return AdamW with updates times own.slow."""
    return optax.chain(adamw(optimizer, dtypes, axes), optax.scale(own.slow))


class Shifted:
    """Synthetic tokens, each one larger by own.shift."""

    def __init__(self, data, split, global_batch, own):
        self.inner = open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")
        self.shift = own.shift

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batch(self, step, rows=None):
        batch = self.inner.batch(step, rows)
        moved = {name: np.where(batch[name] > 0, batch[name] + self.shift, 0) for name in ("tokens", "targets")}
        return batch | moved
