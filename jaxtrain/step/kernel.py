"""Choose a run's attention kernel, and its sharding of attention over the seq axis."""

import dataclasses
from typing import Any

from jaxtrain.config.context import Context, make_context
from jaxtrain.config.schema import RunConfig
from jaxtrain.kernels import attention
from jaxtrain.kernels.context_parallel import window
from jaxtrain.kernels.context_parallel.split import Split
from jaxtrain.models import windows
from jaxtrain.models.attention import Kernel
from jaxtrain.sharding import Placement


def attention_specs(run: RunConfig) -> tuple[attention.Spec, ...]:
    """Return the attention spec of training for each kind of layer (`models.attention.layer_kinds`).

    The specs have the compute dtype for the forward pass. With attention.forward=fp8, `choose_kernel` changes it to e4m3.
    """
    m, packed = run.model, run.data.masks_documents
    segments = run.data.most_documents if packed else 1
    return tuple(
        attention.Spec(
            m.head_dim,
            run.compute,
            packed,
            segments,
            windows.window(m, kind),
            m.attention_softcap,
            deterministic=run.train.deterministic,
            sinks=m.attention_sinks,
            value_dim=m.v_head_dim if m.v_head_dim != m.head_dim else 0,
        )
        for kind in dict.fromkeys(windows.kinds(m))
    )


def context_of(run: RunConfig, placement: Placement) -> Context:
    """Return the sharding of a run's sequences over the seq axis."""
    tensor = placement.size(placement.mesh_axes("heads"))
    kv_heads = max(1, run.model.num_kv_heads // tensor)
    ranks = placement.size(placement.mesh_axes("sequence"))
    return make_context(run.parallel.context, ranks, run.model.num_heads // tensor, kv_heads)


def choose_kernel(run: RunConfig, context: Context, device: Any) -> tuple[Kernel, str]:
    """Return (the attention kernel for training on devices of the type of `device`, the reason for the choice)."""
    split, specs, hardware = Split(context), attention_specs(run), attention.Hardware.of(device)
    if run.attention.forward == "fp8":
        how = attention.KERNEL if hardware.platform == "gpu" else attention.EMULATED
        specs = tuple(dataclasses.replace(spec, fp8=how) for spec in specs)
    places = run.data.seq_len // context.ring

    def asked(spec: attention.Spec) -> tuple[attention.Spec, int]:
        if context.ring == 1:
            return spec, run.data.seq_len
        # A rank of the ring computes attention between one chunk of queries and one chunk of keys at a time.
        if not window.applies(spec, places, split):
            return spec, places // 2
        return window.inner_spec(spec), places // 2 + window.halo_tokens(spec, places // 2, split)

    name, reason = attention.choose(run.attention.impl, [asked(spec) for spec in specs], hardware)
    if run.attention.forward == "fp8":
        reason += f"; forward pass in e4m3{', emulated' * (specs[0].fp8 == attention.EMULATED)}"
    return Kernel(name, specs, split), reason
