"""Model families from outside the package: with a FORMAT, without one, and with a FORMAT that does not fit the model."""

import dataclasses
from typing import Any

from flax import nnx

from jaxtrain.models.families import gemma2, llama
from jaxtrain.models.hf_tensors import HfTensor
from jaxtrain.models.module import constant, param, stack
from jaxtrain.models.transformer import Block, Transformer


class More(Transformer):
    """A model with a vector and a scalar that no shipped family has."""

    def __init__(self, model: Any, kernel: Any, remat: Any, ctx: Any, rngs: nnx.Rngs):
        super().__init__(model, kernel, remat, ctx, rngs)
        self.bend = param(rngs, (model.d_model,), (None,), constant(1.0), ctx.numerics.params)
        self.gain = param(rngs, (), (), constant(1.0), ctx.numerics.params)

    def __call__(self, *rows: Any) -> Any:
        return super().__call__(*rows) * self.gain[...] + self.bend[...][None, None]


class Subclass(Transformer):
    """A model of a class of its own."""


class WrappedBlock(nnx.Module):
    """A block that is no subclass of `Block`."""

    def __init__(self, *parts: Any):
        self.block = Block(*parts)

    def __call__(self, *call: Any) -> Any:
        return self.block(*call)


class Wrapped(Transformer):
    """A model whose blocks are of a class of its own."""

    def __init__(self, model: Any, kernel: Any, remat: Any, ctx: Any, rngs: nnx.Rngs):
        super().__init__(model, kernel, remat, ctx, rngs)
        self.layers = stack(lambda r: WrappedBlock(model, kernel, ctx, r), model.num_layers, rngs)


def _family(model: type[Transformer], **more: Any) -> Any:
    return type("Family", (), {"build": staticmethod(model), **more})


DOWN = "layers.{i}.mlp.down"
NAME = llama.FORMAT.tensors[DOWN].name


def _with_down(ours: str, theirs: str) -> Any:
    return dataclasses.replace(llama.FORMAT, tensors={**llama.FORMAT.tensors, DOWN: HfTensor(NAME, ours, theirs)})


like_llama = _family(Transformer, FORMAT=llama.FORMAT)
bare = _family(More)
wrapped = _family(Wrapped)
subclass = _family(Subclass, FORMAT=llama.FORMAT)
gelu = _family(Transformer, STRUCTURE=gemma2.STRUCTURE)
not_all = _family(More, FORMAT=llama.FORMAT)
turned = _family(Transformer, FORMAT=_with_down("F D", "D F"))
unknown_axis = _family(Transformer, FORMAT=_with_down("D J", "D J"))
no_table = _family(Transformer, FORMAT={"head": "lm_head.weight"})
