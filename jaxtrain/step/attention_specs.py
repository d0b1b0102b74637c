"""What a run asks of its attention kernel, and whether the kernel supports it. Imports no jax."""

import dataclasses

from jaxtrain.config.context import Context
from jaxtrain.config.schema import Data, Model, Problem, RunConfig
from jaxtrain.kernels.attention import EMULATED, KERNEL, Hardware, Spec, support
from jaxtrain.models import windows


def attention_specs(model: Model, data: Data, compute: str, deterministic: bool = False) -> tuple[Spec, ...]:
    """Return the attention spec of training for each kind of layer (`models.attention.layer_kinds`).

    compute: dtype of the forward pass, f32 | bf16. With attention.forward=fp8, `training_specs` changes it to e4m3.
    """
    m, packed = model, data.masks_documents
    segments = data.most_documents if packed else 1
    return tuple(
        Spec(
            m.head_dim,
            compute,
            packed,
            segments,
            windows.window(m, kind),
            m.attention_softcap,
            deterministic=deterministic,
            sinks=m.attention_sinks,
            value_dim=m.v_head_dim if m.v_head_dim != m.head_dim else 0,
        )
        for kind, _ in windows.layers_by_kind(m)
    )


def training_specs(specs: tuple[Spec, ...], forward: str, hardware: Hardware) -> tuple[Spec, ...]:
    """Return the attention specs with the forward pass of attention.forward."""
    fp8 = {"gpu": KERNEL, "cpu": EMULATED}[hardware.platform] if forward == "fp8" else ""
    return tuple(dataclasses.replace(spec, fp8=fp8) for spec in specs)


def calls(specs: tuple[Spec, ...], seq_len: int, context: Context) -> list[tuple[Spec, int]]:
    """Return the spec and the number of keys of each kind of layer's calls of the kernel.

    A rank of a ring computes attention between one chunk of queries and one chunk of keys at a time.
    """
    if context.ring == 1:
        return [(spec, seq_len) for spec in specs]
    chunk = seq_len // (2 * context.ring)
    slides = [spec.slides(seq_len) for spec in specs]
    return [
        (spec.with_halo(), chunk + spec.halo(chunk, context.ring)) if windowed else (spec, chunk)
        for spec, windowed in zip(specs, slides, strict=True)
    ]


def attention_problems(run: RunConfig, context: Context, hardware: Hardware) -> list[Problem]:
    """Return the problems of attention.forward and attention.impl on this hardware."""
    specs = attention_specs(run.model, run.data, run.compute, run.train.deterministic)
    kernel_calls = calls(training_specs(specs, run.attention.forward, hardware), run.data.seq_len, context)
    return support.kernel_problems(run.attention.impl, [spec for spec, _ in kernel_calls], hardware)
