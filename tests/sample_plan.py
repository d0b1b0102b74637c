"""A made-up plan for Llama-3-8B on eight H200s, for tests of the plan's reports."""

import dataclasses
from typing import Any

from jaxtrain.plan.result import Buffer, Collective, KernelSummary, Matmuls, Memory, MemoryClass, Plan, Rates, StepFlops, Time

LAYERS = 32


def timeline() -> tuple[tuple[float, str], ...]:
    """Return memory over a step of 32 layers. It rises in the forward pass, peaks at the start of the backward pass, and then
    falls.
    """
    arguments, layer = 11.22, 0.664
    held = [(arguments + 0.9 + layer * i / 3, "forward") for i in range(3 * LAYERS)]
    top = arguments + 0.9 + layer * LAYERS
    held += [(top + 2.1, "loss"), (top + 3.2, "loss"), (top + 1.4, "loss")]
    for i in range(LAYERS):
        held += [(top - (layer - 0.117) * i + bump, "backward") for bump in (0.4, 2.6, 7.41, 1.1)]
    held += [(arguments + 3.74 + 0.6 * (i % 3), "optimizer") for i in range(30)]
    return tuple((round(gib, 3), phase) for gib, phase in held)


def sample(**changes: Any) -> Plan:
    """Return a made-up plan for Llama-3-8B on eight H200s, with one sequence of 8192 tokens on each GPU."""
    source = "/somewhere/jaxtrain/models/transformer.py:118"
    scope = "jit(train_step)/transpose(jvp(layers))/while/body/checkpoint"
    moves = [
        ("all-gather", "bf16", 64, 13.1 + 13.1, 76.2, 0.4, "models/attention.py:61"),
        ("all-gather", "bf16", 1, 0.86, 2.5, 2.5, "loss.py:88"),
        ("reduce-scatter", "bf16", 32, 13.1, 38.1, 12.3, "models/remat.py:40"),
        ("reduce-scatter", "bf16", 1, 0.86, 2.5, 2.5, "loss.py:97"),
        ("all-reduce", "f32", 3, 2e-9, 0.03, 0.03, "optimizer.py:52"),
    ]
    collectives = tuple(
        Collective(
            kind, dtype, "fsdp", 8, n, gib / 1.0737, 0.0, ms, exposed, f"/somewhere/jaxtrain/{line}", scope, f"{kind}.{i}"
        )
        for i, (kind, dtype, n, gib, ms, exposed, line) in enumerate(moves)
    )
    scopes = ["mlp BTD,DF->BTF", "attention BTD,DNH->BTNH", "mlp BTF,FD->BTD", "loss BTD,VD->BTV"]
    kernels = [
        KernelSummary("gemm", f"{way} {what}", source, LAYERS, 96.0 / (i + 1), 71.2 / (i + 1), 33.1 / (i + 1))
        for i, (way, what) in enumerate((way, what) for way in ("forward", "backward", "recompute") for what in scopes)
    ]
    kernels += [
        KernelSummary("attention", "backward attention cudnn", source, LAYERS, 73.4, 33.8, 21.5),
        KernelSummary("attention", "forward attention cudnn", source, LAYERS, 29.6, 17.6, 12.9),
        KernelSummary("memory", "optimizer mul", source, 1, 28.4, 0.0, 116.2),
        KernelSummary("communication", "forward attention all-gather", source, 64, 76.2, 0.0, 28.1),
    ]
    largest = [
        (7.0, "saved activations", "bf16[32,1,8192,14336]", "mlp_gate"),
        (3.28, "gradients", "f32[32,512,14336]", "mlp/gate"),
        (0.98, "logits and loss", "bf16[2048,128256]", "loss"),
    ]
    buffers = tuple(
        Buffer(gib, kind, shape, source, f"{scope}/{name}", f"fusion.{i}") for i, (gib, kind, shape, name) in enumerate(largest)
    )
    memory = Memory(
        hbm_gib=140.4,
        reserve_gib=6.0,
        usable_gib=134.4,
        peak_gib=40.78,
        arguments_gib=11.22,
        temp_gib=29.56,
        host_gib=0.0,
        by_class=dict.fromkeys(("parameters", "first moment", "second moment", "gradients"), 3.74)
        | {"saved activations": 21.25, "logits and loss": 0.98, "temporaries": 3.59},
        saved=dict.fromkeys(("mlp_gate", "mlp_up"), 7.0)
        | dict.fromkeys(("residual", "q", "attention_out"), 2.0)
        | {"k": 0.5, "v": 0.5, "attention_lse": 0.25},
        peak_at=f"{scope}/mlp/BTF,FD->BTD/dot_general",
        timeline=timeline(),
        largest=buffers,
        workspace_gib=1.04,
        workspace_by="formula",
        over_time=(
            MemoryClass("saved activations", tuple(gib - 11.22 for gib, _ in timeline())),
            MemoryClass("parameters", (3.74,) * len(timeline())),
        ),
        temporaries={"backward mlp": 2.5, "backward attention": 0.9, "collectives": 0.14, "forward embed": 0.05},
    )
    time = Time(
        gemm_ms=461.7,
        attention_ms=103.0,
        memory_ms=126.4,
        compute_ms=691.1,
        communication_ms=119.3,
        exposed_ms=17.7,
        host_exposed_ms=0.0,
        step_ms=708.8,
        tokens_per_s=92_460.0,
        tokens_per_s_per_device=11_557.0,
        mfu_causal=0.601,
        mfu_full=0.676,
        hfu=0.607,
        bound_by="GEMMs",
        mfu_fp8_peak=0.3003,
        expected_step_ms=(708.8 / 0.95, 708.8 / 0.86),
        expected_tokens_per_s_per_device=(11_557.0 * 0.86, 11_557.0 * 0.95),
    )
    curve = ((2.0**20, 0.083), (2.0**26, 0.72))
    rates = Rates(742.0, 594.0, 460.0, 4.08, 370.0, 45.0, 50.0, 20.0, "published kernel rates", 1481.0, curve)
    plan = Plan(
        config="configs/llama3_8b.py",
        overrides=("train.global_batch=8", "train.grad_accum=1"),
        topology="h200:8",
        chip="NVIDIA H200",
        mesh={"data": 1, "fsdp": 8, "tensor": 1, "seq": 1},
        attention="cudnn",
        fits=True,
        memory=memory,
        flops=StepFlops(51.47e9, 57.9e9, 425.7e12, 424.9e12),
        collectives=collectives,
        time=time,
        kernels=tuple(kernels),
        rates=rates,
        matmuls=Matmuls(22.0, 18.0, ("forward mlp BTF,FD->BTD at models/layers.py:92, 128 times",)),
        kept="remat.policy=auto keeps attention_lse, mlp_gate, mlp_up",
        kind="bf16 dense",
        tokens_per_step=65_536,
        compile_s=21.4,
        trip_counts={"jit(train_step)/jvp(layers)/while": 32, "jit(train_step)/transpose(jvp(layers))/while": 32},
        warnings=("all-reduce in f32 over fsdp at optimizer.py:52: set dtypes.reduce=bf16 if it grows",),
        versions={"jax": "0.11.2", "jaxlib": "0.11.2"},
        options={"xla_gpu_enable_latency_hiding_scheduler": "true"},
    )
    return dataclasses.replace(plan, **changes)
