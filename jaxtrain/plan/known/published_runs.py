"""Runs whose step times others published, as data: where, on what, in which layout, and what is known to differ from ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain import flops
from jaxtrain.config import Model, RunConfig, default_config, resolve
from jaxtrain.plan import topology as machines
from jaxtrain.plan.known.well_known import SHAPES
from jaxtrain.plan.rates import MEMORY_FRACTION, NETWORK_FRACTION, datasheet, kind
from jaxtrain.plan.search.parallel import Request


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that somebody measured."""

    name: str
    by: str  # program and version or date, as far as it is told
    source: str
    model: str  # of SHAPES
    machine: str
    seq_len: int
    sequences: float  # for each GPU in a step; below 1 where GPUs share one
    step_s: float
    mesh: Mapping[str, int]
    remat: str  # as published
    keep: str  # ours, nearest to it: "full", or the activations kept
    why: tuple[str, ...]  # what is known to differ
    figure: str = ""  # as published, where it is not the step time
    same_compiler: bool = True  # an XLA program with cuDNN attention, as ours is
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the machine, where it differs from `machine`
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further keys of the config

    @property
    def config(self) -> RunConfig:
        """The run as a config of ours. Raises ValueError where it cannot be one."""
        shape, devices = SHAPES[self.model], machines.parse(self.machine).total
        config = default_config()
        config.model.update(shape.model)
        config.data.update(source="synthetic", packing="none", seq_len=self.seq_len)
        config.train.update(global_batch=round(devices * self.sequences), grad_accum=1)
        config.mesh.update({"data": 1, "fsdp": 1, **self.mesh})
        config.dtypes.update(self.dtypes)
        config.remat.policy = "full" if self.keep == "full" else "custom"
        if config.remat.policy == "custom":
            config.remat.tensors = ",".join(f"{name}=keep" for name in self.keep.split())
        config.update_from_flattened_dict(self.also)
        run, problems = resolve(config)
        if problems:
            raise ValueError(f"{self.name}: {problems[0]}")
        return run

    @property
    def kind(self) -> str:
        """The kind of run that it is, "" for one of which no range is derived (rates.kind)."""
        machine = machines.parse(self.machine)
        return kind(self.config, machine.gpu, machine.total, "cudnn")

    @property
    def request(self) -> Request:
        """At published kernel rates, even where this machine has a calibration: what is stored must not depend on it."""
        machine = machines.parse(self.machine)
        rates = dataclasses.replace(datasheet(machine.gpu, "bf16"), **self.rates)
        return Request(self.config, machine, self.name, (), rates)


# MaxText's remat policies and torchtitan's per-operation one, in our names (jaxtrain/activations.py). Both keep queries and
# keys before rotary, we after; TransformerEngine names attention's log-sum-exp together with its output.
MINIMAL_WITH_CONTEXT = "q k v attention_out attention_lse attention_proj mlp_gate mlp_up mlp_down"
EXCEPT_MLP = "q k v attention_out attention_lse attention_proj"
QKV = "q k v"
ALL_PRODUCTS = "q k v attention_out attention_lse residual mlp_gate mlp_up"
EVERY_SECOND_GEMM = "q v attention_out attention_lse mlp_gate mlp_down"

NO_SCAN = "Their layers are unrolled (scan_layers=false), ours are a loop: XLA can overlap across layers there."
BIG_COMBINE = "They let XLA combine gathers up to 1 GiB: fewer launches, which start later; ours start layer by layer."
PGLE = "Their schedule is guided by a profile of the same run; ours by XLA's own estimates."
RETUNED = "The measured XLA is of 2024 or early 2025: its kernels and schedules are not those of the XLA behind this plan."
NETWORK = "On the network the plan takes {0:g}% of {1:g} Gb/s for each GPU, undisturbed; a shared fabric gives less."
TORCH = "Another compiler: torch.compile fuses and schedules differently, and FSDP2 copies weights in and out of its buffers."
CAPPED = "The GPUs were held to 500 W: under that cap an H100's clock falls well below the one behind 989 TFLOP/s."
HBM2E = "The GPUs had HBM2e at 2.4 TB/s, which the plan takes; the described card is otherwise an H100 with 80 GB."
F32_REDUCE = "Gradients are reduced in float32, as FSDP2 does by default here."
HERD = (
    "Another program: kernels of PyTorch and their own, a schedule that warms up by as many microbatches as they choose, and a "
    "layer less on the first and the last stage. Where sequences are split, keys and values are gathered, as here."
)
UNTOLD = "How many groups of layers a stage has is not told; ours have four, which 126 layers on 16 stages allow."
REAL_DATA = "They read and tokenise C4 while training; a plan knows of no data."
TENSORWISE = "FP8 with one scale a tensor, the head in bfloat16 as here. Weights are gathered in FP8 there."
BACKEND = "Which kernel computes attention is not told; the plan takes the rate of cuDNN."


def network(gbit_s: float) -> str:
    return NETWORK.format(100 * NETWORK_FRACTION, gbit_s)


def network_rate(gbit_s: float) -> float:
    """GB/s that a plan takes for a card of so many Gb/s."""
    return NETWORK_FRACTION * gbit_s / 8


def _herd(name: str, nodes: int, tflops: float, rows: int, mesh: dict[str, int], seq_len: int = 8192) -> Run:
    """Of table 4 of The Llama 3 Herd of Models: tensor=8 in a node, 16 stages, and `rows` sequences of each data-parallel rank
    in a step, one at a time."""
    model, gpus = SHAPES["llama3_405b"].model, 8 * nodes
    sequences = rows * mesh["fsdp"] / gpus
    return Run(
        name,
        by="Meta, the pre-training of Llama 3 405B, 2024",
        source="https://arxiv.org/abs/2407.21783",
        model="llama3_405b",
        machine=f"h100:8x{nodes}",
        seq_len=seq_len,
        sequences=sequences,
        step_s=flops.per_token(Model(**model), seq_len).full * sequences * seq_len / (tflops * 1e12),
        figure=f"{tflops:g} TFLOP/s/GPU, of FLOPs as the PaLM paper counts them",
        mesh={"stage": 16, "tensor": 8, **mesh},
        remat="none" if seq_len == 8192 else "not told",
        keep=ALL_PRODUCTS,
        same_compiler=False,
        why=(HERD, UNTOLD, network(400)),
        also={
            "train.grad_accum": rows,
            "sharding.zero": 1,
            "pipeline.schedule": "interleaved",
            "pipeline.groups": 4,
            "parallel.context": "gather",
        },
    )


RECIPES = "https://github.com/AI-Hypercomputer/gpu-recipes/tree/main/training"
TITAN = "https://github.com/pytorch/torchtitan/blob/main"
FP8 = {"precision": "fp8"}


def _titan_long(seq_len: int, tokens_s: float, mesh: dict[str, int]) -> Run:
    """Return a row of table 2 of torchtitan's page: one sequence on each data-parallel rank of 8 GPUs."""
    sequences = mesh["fsdp"] / 8
    return Run(
        f"Llama 3.1 8B, 8 H100 at 500 W, FP8, {seq_len:,} tokens",
        by="torchtitan with torch.compile, December 2024",
        source=f"{TITAN}/benchmarks/llama3_h100_202412_torchtitan.md",
        model="llama3_8b",
        machine="h100:8",
        seq_len=seq_len,
        sequences=sequences,
        step_s=sequences * seq_len / tokens_s,
        figure=f"{tokens_s:,} tokens/s/GPU",
        mesh=mesh,
        remat="full",
        keep="full",
        same_compiler=False,
        why=(CAPPED, HBM2E, BACKEND, TENSORWISE, TORCH, F32_REDUCE, REAL_DATA),
        rates={"memory_tb_s": MEMORY_FRACTION * 2.4},
        dtypes={"reduce": "f32"},
        also=FP8,
    )


RUNS = (
    Run(
        "Llama 2 7B, 8 H100",
        by="MaxText in NVIDIA's JAX-Toolbox, container 25.10",
        source="https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/README.md",
        model="llama2_7b",
        machine="h100:8",
        seq_len=4096,
        sequences=2,
        step_s=0.721,
        mesh={"fsdp": 8},
        remat="minimal_flash",
        keep=MINIMAL_WITH_CONTEXT,
        why=(
            "The program hardly matters here: MaxText 0.2.5's own step for this run, compiled for 8 described H100s by jaxlib "
            "0.12.0.1 with the flags of that page, and read by the same meter on 2026-11-21, takes 569 ms at the rates of that "
            "day, at which ours took 573. The ratio is the meter's.",
            *(NO_SCAN, BIG_COMBINE),
        ),
    ),
    Run(
        "Llama 2 7B, 8 H100, 4 sequences",
        by="MaxText on Google Cloud A3, 2024",
        source="https://github.com/AI-Hypercomputer/maxtext/tree/d2aa7f25/MaxText/configs/a3/llama_2_7b",
        model="llama2_7b",
        machine="h100:8",
        seq_len=4096,
        sequences=4,
        step_s=4 * 4096 * 46.085e9 / 492e12,
        figure="492 TFLOP/s/GPU, attention's whole square counted",
        mesh={"fsdp": 8},
        remat="minimal_flash",
        keep=MINIMAL_WITH_CONTEXT,
        why=(NO_SCAN, RETUNED, "The step time follows from a TFLOP/s and the formula of that time."),
    ),
    Run(
        "Llama 2 7B, 256 H100",
        by="MaxText on Google Cloud A3 Mega, 2024",
        source=f"{RECIPES}/a3mega/llama-2-7b/maxtext-pretraining-gke",
        model="llama2_7b",
        machine="h100:8x32",
        seq_len=4096,
        sequences=4,
        step_s=1.500,
        mesh={"data": 32, "fsdp": 8},
        remat="minimal_flash",
        keep=MINIMAL_WITH_CONTEXT,
        why=(NO_SCAN, RETUNED, network(200)),
        rates={"network_gb_s": network_rate(200)},  # 1,600 Gb/s a node
    ),
    Run(
        "Llama 2 70B, 64 H100",
        by="MaxText in NVIDIA's DGX Cloud benchmarks, container 2024-12-09",
        source="https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd/maxtext/README_70b.md",
        model="llama2_70b",
        machine="h100:8x8",
        seq_len=4096,
        sequences=2,
        step_s=6.999,
        mesh={"fsdp": 64},
        remat="not told; save_qkv_proj in the sister recipe for Llama 3",
        keep=QKV,
        why=(
            "The same page shows a log with 7.908 s for the same job: runs of one recipe differ by 13%.",
            *(PGLE, RETUNED, network(400)),
        ),
    ),
    Run(
        "Llama 3 70B, 128 H100",
        by="MaxText in NVIDIA's DGX Cloud benchmarks 25.02",
        source="https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/maxtext-llama3-70b-dgxc-benchmarking-d",
        model="llama3_70b",
        machine="h100:8x16",
        seq_len=8192,
        sequences=2,
        step_s=15.570,
        mesh={"fsdp": 128},
        remat="save_qkv_proj",
        keep=QKV,
        why=(PGLE, RETUNED, network(400)),
    ),
    Run(
        "Llama 3.1 70B, 256 H200",
        by="MaxText on Google Cloud A3 Ultra, container 2025-01-10",
        source=f"{RECIPES}/a3ultra/llama3-1-70b/maxtext-pretraining-gke",
        model="llama3_70b",
        machine="h200:8x32",
        seq_len=8192,
        sequences=2,
        step_s=15.516,
        mesh={"data": 2, "fsdp": 128},
        remat="save_dot_with_context_except_mlp",
        keep=EXCEPT_MLP,
        why=(RETUNED, network(400)),
    ),
    Run(
        "Llama 3.1 8B, 8 H100 at 500 W",
        by="torchtitan with torch.compile, December 2024",
        source=f"{TITAN}/benchmarks/llama3_h100_202412_torchtitan.md",
        model="llama3_8b",
        machine="h100:8",
        seq_len=8192,
        sequences=2,
        step_s=2 * 8192 / 6667,
        figure="6,667 tokens/s/GPU",
        mesh={"fsdp": 8},
        remat="selective, every second GEMM",
        keep=EVERY_SECOND_GEMM,
        same_compiler=False,
        why=(CAPPED, HBM2E, TORCH, F32_REDUCE, REAL_DATA),
        rates={"memory_tb_s": MEMORY_FRACTION * 2.4},
        dtypes={"reduce": "f32"},
    ),
    Run(
        "Llama 3 8B, 8 H100",
        by="torchtitan with torch.compile, as torchao's baseline, 2025",
        source="https://github.com/pytorch/ao/blob/main/docs/source/workflows/training.md",
        model="llama3_8b",
        machine="h100:8",
        seq_len=8192,
        sequences=1,
        step_s=8192 / 6150,
        figure="6,150 tokens/s/GPU",
        mesh={"fsdp": 8},
        remat="selective, every second GEMM",
        keep=EVERY_SECOND_GEMM,
        same_compiler=False,
        why=("The power limit is not told.", TORCH, F32_REDUCE, REAL_DATA),
        dtypes={"reduce": "f32"},
    ),
    Run(
        "Llama 3 8B, 8 H100, FP8, 16 microbatches",
        by="NVIDIA's Megatron-Bridge, NeMo container 25.11",
        source="https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary-archive.html",
        model="llama3_8b",
        machine="h100:8",
        seq_len=8192,
        sequences=16,
        step_s=16 * 8192 / 14451,
        figure="14,451 tokens/s/GPU",
        mesh={"fsdp": 8},
        remat="full, of 5 of the 32 layers",
        keep=ALL_PRODUCTS,
        same_compiler=False,
        why=(
            "Another program: Megatron's, with TransformerEngine's fused kernels, chosen by hand and not by a compiler.",
            "Of 5 layers they compute everything again, ours nothing but elementwise parts of all.",
        ),
        also={**FP8, "train.grad_accum": 16},
    ),
    Run(
        "Llama 3 8B, 8 H100, FP8",
        by="torchtitan with torch.compile, as torchao's example, 2025",
        source="https://github.com/pytorch/ao/blob/main/docs/source/workflows/training.md",
        model="llama3_8b",
        machine="h100:8",
        seq_len=8192,
        sequences=1,
        step_s=8192 / 7690,
        figure="7,690 tokens/s/GPU",
        mesh={"fsdp": 8},
        remat="selective, every second GEMM",
        keep=EVERY_SECOND_GEMM,
        same_compiler=False,
        why=("The power limit is not told.", TENSORWISE, TORCH, F32_REDUCE, REAL_DATA),
        dtypes={"reduce": "f32"},
        also=FP8,
    ),
    Run(
        "Llama 3.1 8B, 8 H100 at 500 W, FP8",
        by="torchtitan with torch.compile, December 2024",
        source=f"{TITAN}/benchmarks/llama3_h100_202412_torchtitan.md",
        model="llama3_8b",
        machine="h100:8",
        seq_len=8192,
        sequences=2,
        step_s=2 * 8192 / 8532,
        figure="8,532 tokens/s/GPU",
        mesh={"fsdp": 8},
        remat="selective, every second GEMM",
        keep=EVERY_SECOND_GEMM,
        same_compiler=False,
        why=(CAPPED, HBM2E, TENSORWISE, TORCH, F32_REDUCE, REAL_DATA),
        rates={"memory_tb_s": MEMORY_FRACTION * 2.4},
        dtypes={"reduce": "f32"},
        also=FP8,
    ),
    _titan_long(32_768, 3890, {"fsdp": 8}),
    _titan_long(131_072, 1071, {"fsdp": 2, "seq": 4}),
    Run(
        "Llama 3 8B, 64 A100",
        by="torchtitan, 2024",
        source=f"{TITAN}/docs/performance.md",
        model="llama3_8b",
        machine="a100:8x8",
        seq_len=8192,
        sequences=1,
        step_s=8192 / 2973,
        figure="2,973 tokens/s/GPU",
        mesh={"fsdp": 64},
        remat="selective, every second GEMM",
        keep=EVERY_SECOND_GEMM,
        same_compiler=False,
        why=(TORCH, F32_REDUCE, REAL_DATA, network(200)),
        dtypes={"reduce": "f32"},
    ),
    Run(
        "Llama 3 70B, 64 A100",
        by="torchtitan, 2024",
        source=f"{TITAN}/docs/performance.md",
        model="llama3_70b",
        machine="a100:8x8",
        seq_len=8192,
        sequences=1,
        step_s=8192 / 331,
        figure="331 tokens/s/GPU",
        mesh={"fsdp": 64},
        remat="full",
        keep="full",
        same_compiler=False,
        why=(TORCH, F32_REDUCE, REAL_DATA, network(200)),
        dtypes={"reduce": "f32"},
    ),
    _herd("Llama 3 405B, 8,192 H100", 1024, 430, 32, {"fsdp": 64}),
    _herd("Llama 3 405B, 16,384 H100", 2048, 400, 16, {"fsdp": 128}),
    _herd("Llama 3 405B, 16,384 H100, long", 2048, 380, 16, {"fsdp": 8, "seq": 16}, seq_len=131_072),
)

# (run, where, why there is no plan of it): published figures whose settings are not told far enough to plan the same work.
NOT_COMPARABLE = (
    (
        "Llama 2 70B, 64 H100, FP8, 4.324 s a step",
        "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd/maxtext/README_70b.md",
        "which activations are saved is not told; with the policy of the sister recipe its GEMMs would have to reach "
        "1,501 TFLOP/s, more than the best shape of a search on an H100, 1,403",
    ),
    (
        "Llama 3 8B, 32 H200, FP8, 10,938 tokens/s/GPU",
        f"{TITAN}/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
        "which activations are saved is not known here, and its memory (48 GiB) leaves several policies open",
    ),
    (
        "Llama 3.1 70B, 256 B200, 20.935 s a step",
        f"{RECIPES}/a4/llama3-1-70b",
        "the page names FP8 and divides by the bfloat16 peak: the precision is not clear",
    ),
    (
        "Mixtral 8x22B on H100, 49.3% MFU",
        "https://arxiv.org/abs/2504.14960",
        "the step time would follow from the MFU, whose count of FLOPs is not named; what is recomputed and how many groups of "
        "layers a stage has is not known here; and tokens beyond an even share of an expert are dropped there",
    ),
)
