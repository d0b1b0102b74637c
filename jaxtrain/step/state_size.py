"""A lower bound of the memory of a training state, from the config alone. Imports no jax."""

from collections.abc import Collection

from jaxtrain.config.schema import RunConfig
from jaxtrain.models import flops
from jaxtrain.optim.moments import INT8

BYTES = {"f32": 4.0, "bf16": 2.0, INT8: 1.0}  # of a number; the scales of int8's blocks are left out


def least_gib(run: RunConfig, parts: Collection[str]) -> float:
    """Return GiB of one copy of these parts of a state, at least: params, moments, grads.

    With adapters or train.freeze these are the parameters alone: frozen weights have no moments and no gradients. The base
    weights of adapters have the compute dtype. The average of the weights (train.ema_decay) counts with any parts. The second
    moments of Muon's AdamW part are left out.
    """
    moments = {"adamw": ("m", "v"), "muon": ("m",)}.get(run.optimizer.name, ()) if "moments" in parts else ()
    held = [run.dtypes.params, *(getattr(run.dtypes, name) for name in moments)]
    held += [run.dtypes.grads] if "grads" in parts else []
    held += ["f32"] if run.train.ema_decay else []
    if run.lora.rank or run.train.freeze.strip():
        held = [run.compute if run.lora.rank else run.dtypes.params]
    return flops.parameters(run.model)["total"] * sum(BYTES[name] for name in held) / 2**30
