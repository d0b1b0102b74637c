"""The attention kernel of a run, and how the devices of a sequence share its attention."""

from typing import Any

from jaxtrain import windows
from jaxtrain.config import RunConfig
from jaxtrain.context import Context, make_context
from jaxtrain.kernels import attention
from jaxtrain.kernels.context import window
from jaxtrain.kernels.context.split import Split
from jaxtrain.models.attention import Kernel
from jaxtrain.sharding import Placement


def hardware_of(device: Any) -> attention.Hardware:
    """What attention kernels need to know of a device, present or only described."""
    if device.platform == "cpu":
        return attention.Hardware("cpu")
    major, _, minor = str(device.compute_capability).partition(".")
    return attention.Hardware("gpu", (int(major), int(minor or 0)))


def attention_specs(run: RunConfig) -> tuple[attention.Spec, ...]:
    """What training asks of the attention kernel, for each kind of layer (`models.attention.layer_kinds`)."""
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
        )
        for kind in dict.fromkeys(windows.kinds(m))
    )


def context_of(run: RunConfig, placement: Placement) -> Context:
    """How a run's sequences are divided over the seq axis."""
    tensor = placement.size(placement.mesh_axes("heads"))
    kv_heads = max(1, run.model.num_kv_heads // tensor)
    ranks = placement.size(placement.mesh_axes("sequence"))
    a = run.attention
    return make_context(run.parallel.context, a.ulysses, ranks, run.model.num_heads // tensor, kv_heads)


def choose_kernel(run: RunConfig, context: Context, device: Any) -> tuple[Kernel, str]:
    """The attention kernel for training on devices like this one, and why it was chosen."""
    split, specs = Split(context), attention_specs(run)
    places = run.data.seq_len // context.ring

    def asked(spec: attention.Spec) -> tuple[attention.Spec, int]:
        if context.ring == 1:
            return spec, run.data.seq_len
        # A place of the ring computes a chunk at a time against a chunk.
        if not window.applies(spec, places, split):
            return spec, places // 2
        return window.inner_spec(spec), places // 2 + window.halo_tokens(spec, places // 2, split)

    name, reason = attention.choose(run.attention.impl, [asked(spec) for spec in specs], hardware_of(device))
    return Kernel(name, specs, split), reason
