"""Rates of a GPU: from a calibration on that GPU if there is one, else published kernel rates.

A calibration is one JSON file per GPU name. `Rates.source` names the origin of a plan's rates.
"""

import bisect
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config import hardware
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import RunConfig
from jaxtrain.metrics.files import write_atomic
from jaxtrain.plan import result

FOLDER = Path("~/.cache/jaxtrain/rates")
FORMAT = 2

# Published measurements of single kernels, each with its source, as fractions of the peak of an H100 or H200 SXM (dense
# TFLOP/s). None is fitted to the training runs of benchmarks/published_runs.toml. Other generations and float32 have no such
# measurement, so the same fractions of their peaks are assumed. A calibration replaces these fractions.
HOPPER, HOPPER_FP8 = 989.4, 1978.9
# Matmuls in the shapes of a Llama 70B's training, random normal inputs, median of 200 ms: "roughly 720 TFLOP/s" in bfloat16 and
# "~1,280 TFLOP/s" in FP8, H100 and H200 alike (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1: Training", December
# 2024). The fastest shapes of a search reach 794.5 on both, and in FP8 1,453 on an H200 (github.com/stas00/ml-engineering,
# compute/accelerator, Maximum Achievable Matmul FLOPS).
GEMM_FRACTION = 720 / HOPPER
FP8_FRACTION = 1280 / HOPPER_FP8
# cuDNN's attention on an H100 SXM, 16-bit, causal, heads of 128, FLOPs inside the mask: keys of a call -> TFLOP/s (forward,
# backward). Read off the figures of the FlashAttention-3 paper, arXiv 2407.08608 (forward: assets/flash3_fp16_fwd.png of
# github.com/Dao-AILab/flash-attention), which does not state whether its backward is causal. Shorter calls, which are slower,
# use the rate at 4,096 keys; longer calls use the rate at 16,384. Calls without a mask, which are faster, use the same rates.
CUDNN_H100 = {4096: (518.0, 499.0), 8192: (529.0, 518.0), 16384: (539.0, 516.0)}
ATTENTION_AT = 8192  # keys of the call for `Rates.attention_*_tflops`, which a calibration measures
# Rate of jaxtrain's Pallas attention kernels as a fraction of cuDNN's (forward, backward). It is assumed, not measured: that
# they are as fast as Tokamax's Pallas Mosaic GPU kernels on an H100. Tokamax takes 7.19 ms forward (cuDNN: 6.72 ms) and
# 60.9 ms backward, which is 181 TFLOP/s (CUDNN_H100: 518) (openxla/tokamax at 783ea95,
# data/autotuning/nvidia_h100_80gb_hbm3, causal, 32 x 4,096 tokens, 32/8 heads of 128). FlashAttention-3 reaches 602 and 561.
PALLAS_ATTENTION = (0.93, 0.35)
# FlashAttention-3's forward pass on an H100 SXM, causal, heads of 128, FLOPs inside the mask: keys of a call -> TFLOP/s in 16
# bits and in FP8. Read off the figures of arXiv 2407.08608. jaxtrain's kernel in e4m3 is assumed to be faster than its kernel
# in bfloat16 by the same factor. Shorter calls use the factor at 4,096 keys; longer calls use the factor at 16,384.
FA3_FORWARD = {4096: (579.0, 716.0), 8192: (602.0, 815.0), 16384: (616.0, 881.0)}
# Rate of the Pallas grouped matmuls of experts as a fraction of cuBLAS's: Tokamax's ragged_dot on an H100 (131,072 rows of
# 7,168, 256 experts 1,024 wide) reaches 422 TFLOP/s, and GEMM_FRACTION of the peak is 720.
PALLAS_FRACTION = 0.57
MEMORY_FRACTION = 0.85  # of HBM bandwidth: refresh, and turnaround between reads and writes
NVLINK_FRACTION = 370 / 450  # of one direction: packet headers and NCCL's protocol; 370 of 450 GB/s (data sheet: 900 both ways)
NETWORK_FRACTION = 0.9  # of a network card's line rate
HOST_FRACTION = 0.8  # of PCIe's line rate, one direction

# Small messages do not reach NVLink's full rate. Bus bandwidth of all-reduces of 1, 2, 4, ... 16,384 MiB over 8 H200s in GB/s,
# with NCCL 2.27.7, from stas00/ml-engineering (network/benchmarks/results/all-reduce-8xH200.md). Only its shape is used: at
# large sizes NVLink SHARP reduces in the switch, which other collectives do not use, so NVLINK_FRACTION keeps the full rate.
# All GPUs are assumed to have this shape. That sweep launches from Python every 39 us, which hides NCCL's own time below
# 1 MiB.
_MIB = 2.0**20
_SWEEP = (39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15, 450.29, 463.58, 469.17, 473.1, 477.45, 482.26)
# The smallest entry is the time of a launch: at 370 GB/s it makes an all-gather take 10 us and an all-reduce 20 us. On 8 H20s,
# which have the same NVLink, NCCL's all-reduce of 4 KiB takes 16.7 us (deepseek-ai/DeepEP issue 303).
COLLECTIVE_CURVE: result.Curve = (
    (2.0**15, 0.00775),
    *((2**n * _MIB, gb_s / _SWEEP[-1]) for n, gb_s in enumerate(_SWEEP)),
)
# Bytes that a GPU sends to another node -> fraction of its network card's rate, including NETWORK_FRACTION. All-reduces of 2 to
# 16 MiB over one H100 in each of two nodes took 113, 154, 231 and 421 us (NVIDIA/nccl-tests issue 232); two hops of
# NETWORK_LATENCY_US are subtracted here. The smallest entry is a launch of 10 us, as in COLLECTIVE_CURVE.
NETWORK_CURVE: result.Curve = ((2.0**15, 0.073), (2 * _MIB, 0.715), (4 * _MIB, 0.876), (8 * _MIB, 1.0))
# NCCL's own cost table has 14 us from one node to the next (src/graph/tuning.cc: rings, "Simple"). Another 10 us for the hop
# inside a node are assumed. With hundreds of nodes, hops are most of a collective's time: docs/evidence/rates.md compares
# them with measurements.
NETWORK_LATENCY_US = 24.0

# Compute capability times ten -> Gb/s of the network card per GPU of the usual 8-GPU boards (DGX and HGX A100: ConnectX-6;
# H100, H200 and B200: ConnectX-7), also assumed for GPUs in PCIe slots. PCIE_GB_S: GB/s of PCIe x16 in one direction
# (generation 4, then 5).
NETWORK_GBIT_S = {80: 200.0, 90: 400.0, 100: 400.0}
PCIE_GB_S = {80: 32.0, 90: 64.0, 100: 64.0}
C2C_GB_S = 450.0  # GH200 and GB200 reach their host over NVLink-C2C, 900 GB/s in both directions


PUBLISHED = "published kernel rates"

# For each kind of run: the lowest and highest ratio of planned to published step time at these rates, and the compilers of the
# published runs. Written by benchmarks/published.py.
COMPARED = Path(__file__).parent / "published_ranges.json"


# The published runs behind the ranges: their GPUs, their longest sequence in tokens, and for each precision the smallest and
# the largest number of GPUs of a run.
COMPARED_GPUS = ("H100 SXM", "H200 SXM")
LONGEST = 8192
SIZES = {"bf16": (8, 256), "fp8": (8, 64)}


def run_kind(run: RunConfig, gpu: hardware.Gpu, gpus: int, attention: str) -> str:
    """Return the kind of published runs that are comparable with a run: "bf16 dense" or "fp8 dense"; "" if none is.

    A comparable run trains all weights of a dense model of jaxtrain's families with AdamW over data and fsdp axes. Its
    attention is cuDNN's in 16 bits, without sliding windows, and no layer has a delta net in its place. It offloads nothing to
    host memory. Its GPUs, their number and its sequence length are within COMPARED_GPUS, SIZES and LONGEST.

    Args:
        gpus: number of GPUs on all nodes.
        attention: name of the attention kernel.
    """
    least, most = SIZES.get(run.precision, (1, 0))
    on_device = run.optimizer.offload == "none" and "=offload" not in run.remat.tensors
    all_weights = not (run.lora.rank or run.train.freeze) and run.optimizer.name == "adamw"
    model = run.model
    dense = not (model.outside or model.num_experts or model.sliding_window or model.delta_layers)
    data_parallel = all(size == 1 for size in (run.mesh.tensor, run.mesh.seq, run.mesh.stage, run.mesh.expert))
    in_16_bits = attention == "cudnn" and run.attention.forward == "compute"
    comparable = gpu.name in COMPARED_GPUS and in_16_bits and run.data.seq_len <= LONGEST and least <= gpus <= most
    return f"{run.precision} dense" if comparable and dense and all_weights and on_device and data_parallel else ""


def published_ranges() -> dict[str, dict[str, Any]]:
    """Return what COMPARED has under "ranges" and "compilers", each by kind of run (`run_kind`)."""
    return json.loads(COMPARED.read_text(encoding="utf-8"))


def expected_ms(step_ms: float, kind: str, rates: result.Rates) -> tuple[float, float] | None:
    """Return the (shortest, longest) expected step time in ms, by the ratios of published runs of the same kind.

    Return None if the kind has no range, or if any rate is calibrated.

    Args:
        step_ms: step time of the roofline.
        kind: result of `run_kind`.
    """
    ratios = published_ranges()["ranges"].get(kind) if rates.source == PUBLISHED else None
    return (step_ms / ratios[1], step_ms / ratios[0]) if ratios else None


def length_factor(keys: int, backward: bool) -> float:
    """Return attention's rate with `keys` keys over its rate with ATTENTION_AT keys, interpolated in log keys (CUDNN_H100)."""
    table = {length: each[backward] for length, each in CUDNN_H100.items()}
    rate = float(np.interp(math.log(max(keys, 1)), [math.log(length) for length in table], list(table.values())))
    return rate / table[ATTENTION_AT]


def fp8_attention(keys: int) -> float:
    """Return attention's forward rate in FP8 over its rate in 16 bits, interpolated in log keys (FA3_FORWARD)."""
    gains = [eight / sixteen for sixteen, eight in FA3_FORWARD.values()]
    return float(np.interp(math.log(max(keys, 1)), [math.log(length) for length in FA3_FORWARD], gains))


def datasheet(gpu: hardware.Gpu, precision: str) -> result.Rates:
    """Return published kernel rates: a GPU's data sheet times the fractions that published kernels reach.

    Raises ValueError if the GPU has no matmuls in `precision`, or if its generation has no known network and host link rates.
    """
    if not gpu.peak(precision):
        raise ValueError(f"precision = {precision!r}: {gpu.name} has no GEMMs of this type. Choose bf16.")
    if gpu.sm not in NETWORK_GBIT_S:
        raise ValueError(
            f"{gpu.name}: no network and host link rates for compute capability {gpu.sm / 10}. "
            f"Known: {', '.join(str(sm / 10) for sm in NETWORK_GBIT_S)}. Add it to NETWORK_GBIT_S and PCIE_GB_S."
        )
    # Attention computes scores in bfloat16 under bf16 and fp8, and in float32 under f32.
    peak = gpu.peak("f32" if precision == "f32" else "bf16")
    forward, backward = (rate / HOPPER * peak for rate in CUDNN_H100[ATTENTION_AT])
    return result.Rates(
        gemm_tflops=GEMM_FRACTION * peak,
        attention_forward_tflops=forward,
        attention_backward_tflops=backward,
        memory_tb_s=MEMORY_FRACTION * gpu.hbm_tb_s,
        nvlink_gb_s=NVLINK_FRACTION * gpu.nvlink_gb_s / 2,
        network_gb_s=NETWORK_FRACTION * NETWORK_GBIT_S[gpu.sm] / 8,
        host_gb_s=HOST_FRACTION * (C2C_GB_S if gpu.name.startswith(("GH200", "GB200")) else PCIE_GB_S[gpu.sm]),
        network_latency_us=NETWORK_LATENCY_US,
        source=PUBLISHED,
        fp8_tflops=FP8_FRACTION * gpu.fp8,
        collective_curve=COLLECTIVE_CURVE,
        network_curve=NETWORK_CURVE,
    )


def rate_fraction(curve: result.Curve, size: float) -> float:
    """Return the fraction of the full rate at `size` bytes: linear between the curve's entries, in log size and log fraction.

    A size below the first entry takes the first entry's time, so its fraction is proportional to the size. A size above the
    last entry has the last entry's fraction.
    """
    sizes = [s for s, _ in curve]
    index = bisect.bisect_right(sizes, size)
    if index == 0:
        return curve[0][1] * size / sizes[0]
    if index == len(curve):
        return curve[-1][1]
    (low, below), (high, above) = curve[index - 1], curve[index]
    return below * (above / below) ** (math.log(size / low) / math.log(high / low))


def calibration_path(gpu_name: str, folder: Path | str = FOLDER) -> Path:
    """Return the path of a GPU's calibration file."""
    return Path(folder).expanduser() / f"{re.sub(r'[^A-Za-z0-9]+', '_', gpu_name).strip('_')}.json"


def save_calibration(rates: result.Rates, gpu_name: str, folder: Path | str = FOLDER) -> Path:
    """Write a calibration and return its file. An interrupted write leaves the older file intact."""
    file = calibration_path(gpu_name, folder)
    text = json.dumps({"format": FORMAT, "gpu": gpu_name, "rates": dataclasses.asdict(rates)}, indent=1)
    write_atomic(file, text + "\n")
    return file


def load_calibration(gpu_name: str, folder: Path | str = FOLDER) -> result.Rates | None:
    """Return the calibration of a GPU; None without a file. Raises ValueError for a damaged file or one of another GPU."""
    file = calibration_path(gpu_name, folder)
    if not file.exists():
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if tree["gpu"] != gpu_name:
            raise ValueError(f"it holds rates of {tree['gpu']!r}")
        rates = result.decode_json(result.Rates, tree["rates"])
        for name, value in dataclasses.asdict(rates).items():
            if name.endswith("_curve"):
                _check_curve(name, value)
            elif name != "source" and not (0 < value < math.inf or (name == "fp8_tflops" and value == 0)):
                raise ValueError(f"{name} = {value!r} is no positive number")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: not a calibration of {gpu_name} ({error}). Delete it for published kernel rates, or measure again on "
            f"that GPU with: {to_run_sh('python -m jaxtrain plan --calibrate')}"
        ) from error
    return rates


def _check_curve(name: str, curve: result.Curve) -> None:
    """Raise ValueError unless a curve has entries, increasing sizes, positive values, and fractions of at most 1."""
    increasing = all(a < b for (a, _), (b, _) in itertools.pairwise([(0.0, 0.0), *curve]))
    if not (curve and increasing and all(0 < share <= 1 for _, share in curve)):
        raise ValueError(f"{name} = {curve!r} is no table of increasing sizes in bytes and fractions of a rate")


def rates_for(gpu: hardware.Gpu, precision: str, folder: Path | str = FOLDER) -> result.Rates:
    """Return this GPU's calibrated rates; without a calibration, the rates of `datasheet`.

    A calibration has no rates of float32 matmuls and attention, and may have no rate of FP8 matmuls. If `precision` needs these
    rates, they come from `datasheet`, and `source` names both sources. Raises ValueError as `datasheet` and
    `load_calibration` do.
    """
    sheet = datasheet(gpu, precision)
    measured = load_calibration(gpu.name, folder)
    if measured is None:
        return sheet
    if precision == "bf16" or (precision == "fp8" and measured.fp8_tflops):
        return measured
    fields = ("fp8_tflops",) if precision == "fp8" else ("gemm_tflops", "attention_forward_tflops", "attention_backward_tflops")
    source = f"{measured.source}; {precision} arithmetic at published kernel rates"
    return dataclasses.replace(measured, source=source, **{name: getattr(sheet, name) for name in fields})
