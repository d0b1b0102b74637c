"""A lower bound of the memory of a training state, from the config alone. Imports no jax."""

from collections.abc import Collection

from jaxtrain.config.schema import RunConfig
from jaxtrain.models import flops, rules
from jaxtrain.optim.moments import INT8

# Bytes of a number; the scales of int8's blocks and those of fp8 are left out.
BYTES = {"f32": 4.0, "bf16": 2.0, INT8: 1.0}
# lora.base: nf4 has an 8-bit scale for each 64 numbers, and a float32 one for each 256 of those; mxfp4 8 bits for each 32.
BYTES |= {"fp8": 1.0, "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8, "mxfp4": (4 + 8 / 32) / 8}


def least_gib(run: RunConfig, components: Collection[str]) -> float:
    """Return GiB of one copy of these components of a state, at least: params, moments, grads.

    With adapters or train.freeze these are the parameters alone: frozen weights have no moments and no gradients. The base
    weights of adapters have the compute dtype, or the format of `lora.base`. The average of the weights (train.ema_decay)
    counts with any components. The second moments of Muon's AdamW part are left out.
    """
    moments = {"adamw": ("m", "v"), "muon": ("m",)}.get(run.optimizer.name, ()) if "moments" in components else ()
    dtypes = [run.dtypes.params, *(getattr(run.dtypes, name) for name in moments)]
    dtypes += [run.dtypes.grads] if "grads" in components else []
    dtypes += ["f32"] if run.train.ema_decay else []
    if run.lora.rank or run.train.freeze.strip():
        dtypes = [run.compute if run.lora.rank else run.dtypes.params]
    total = flops.parameters(run.model)["total"] * sum(BYTES[name] for name in dtypes)
    base = rules.base_matrices(run.model, run.lora.base) if run.lora.rank else {}
    for count, inputs, outputs in base.values():
        total += count * inputs * outputs * (BYTES[run.lora.base] - BYTES[run.compute])
    return total / 2**30
