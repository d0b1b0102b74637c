"""How fast a GPU is taken to be: fractions of its data sheet, or what a calibration on that GPU measured.

A calibration is one JSON file for each GPU name. Plans say which of the two they used.
"""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

from jaxtrain import hardware
from jaxtrain.plan import result

FOLDER = Path("~/.cache/jaxtrain/rates")
FORMAT = 1

# Parts of the data sheet's figures that a training step is taken to reach. Assumptions, not measurements: round values in
# the range that large kernels are known to reach, chosen once, so that plans can be compared with each other. A calibration
# replaces them.
GEMM_FRACTION = 0.75  # of the dense peak: at full load the clock falls below the one that the data sheet multiplies with
ATTENTION_FRACTION = 0.75  # of the same peak, for FLOPs inside the mask
# Of cuDNN's rate, assumed or calibrated, for the Pallas kernels. Tokamax has timings of its own Triton kernel beside cuDNN's on
# an H100 (data/autotuning/nvidia_h100_80gb_hbm3, forward, causal, 2 x 8,192 tokens, 16 heads of 128): 352 of 613 TFLOP/s.
# The same of cuBLAS's rate for products with experts' weights: there its ragged_dot (131,072 rows of 7,168, 256 experts 1,024
# wide) reaches 422 TFLOP/s, and GEMM_FRACTION of the peak is 742.
PALLAS_FRACTION = 0.57
MEMORY_FRACTION = 0.85  # of HBM bandwidth: refresh, and the turn from reading to writing
NVLINK_FRACTION = 370 / 450  # of one direction: packet headers and NCCL's protocol; 370 GB/s where the sheet has 900
NETWORK_FRACTION = 0.9  # of a network card's line rate
HOST_FRACTION = 0.8  # of PCIe's line rate, one direction

# What a collective takes besides its bytes: its launch and the way through a node, once for each node that it goes through; and
# the way from one node to the next (NCCL counts 14 us for it in its own table of costs, src/graph/tuning.cc: rings, "Simple").
NVLINK_LATENCY_US = 10.0
NETWORK_LATENCY_US = 14.0

# By compute capability times ten. Gb/s of the one network card that the usual 8-GPU boards have for each GPU (DGX and HGX
# A100: ConnectX-6; H100, H200 and B200: ConnectX-7), which cards in PCIe slots are taken to have too; and GB/s of PCIe x16 in
# one direction (generation 4, then 5).
NETWORK_GBIT_S = {80: 200.0, 90: 400.0, 100: 400.0}
PCIE_GB_S = {80: 32.0, 90: 64.0, 100: 64.0}
C2C_GB_S = 450.0  # GH200 and GB200 reach their host over NVLink-C2C, 900 GB/s in both directions


def datasheet(gpu: hardware.Gpu, precision: str) -> result.Rates:
    """Stated fractions of a GPU's data sheet, GEMMs in the type that `precision` computes in (f32 | bf16; bf16 beside fp8).

    Raises ValueError where the GPU has no such GEMMs, or is of a generation whose network and host links are not known here.
    """
    if not gpu.peak(precision):
        raise ValueError(f"precision = {precision!r}: {gpu.name} has no GEMMs of this type. Choose bf16.")
    if gpu.sm not in NETWORK_GBIT_S:
        raise ValueError(
            f"{gpu.name}: no network and host link rates for compute capability {gpu.sm / 10}. "
            f"Known: {', '.join(str(sm / 10) for sm in NETWORK_GBIT_S)}. Add it to NETWORK_GBIT_S and PCIE_GB_S."
        )
    # Attention computes scores in bfloat16 under both low precisions, and in full float32 under f32.
    peak = gpu.peak("f32" if precision == "f32" else "bf16")
    attention = ATTENTION_FRACTION * peak
    return result.Rates(
        gemm_tflops=GEMM_FRACTION * peak,
        attention_forward_tflops=attention,
        attention_backward_tflops=attention,
        memory_tb_s=MEMORY_FRACTION * gpu.hbm_tb_s,
        nvlink_gb_s=NVLINK_FRACTION * gpu.nvlink_gb_s / 2,
        network_gb_s=NETWORK_FRACTION * NETWORK_GBIT_S[gpu.sm] / 8,
        host_gb_s=HOST_FRACTION * (C2C_GB_S if gpu.name.startswith(("GH200", "GB200")) else PCIE_GB_S[gpu.sm]),
        nvlink_latency_us=NVLINK_LATENCY_US,
        network_latency_us=NETWORK_LATENCY_US,
        source="data-sheet rates",
        fp8_tflops=GEMM_FRACTION * gpu.fp8,
    )


def path(gpu_name: str, folder: Path | str = FOLDER) -> Path:
    """The file of a GPU's calibration."""
    return Path(folder).expanduser() / f"{re.sub(r'[^A-Za-z0-9]+', '_', gpu_name).strip('_')}.json"


def save(rates: result.Rates, gpu_name: str, folder: Path | str = FOLDER) -> Path:
    """Writes a calibration and returns its file. An interrupted write leaves the older one whole."""
    file = path(gpu_name, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(f".{os.getpid()}.tmp")
    whole.write_text(json.dumps({"format": FORMAT, "gpu": gpu_name, "rates": dataclasses.asdict(rates)}, indent=1) + "\n")
    whole.replace(file)
    return file


def load(gpu_name: str, folder: Path | str = FOLDER) -> result.Rates | None:
    """The calibration of a GPU, None where there is none. Raises ValueError for a file that is damaged or of another GPU."""
    file = path(gpu_name, folder)
    if not file.exists():
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if tree["gpu"] != gpu_name:
            raise ValueError(f"it holds rates of {tree['gpu']!r}")
        rates = result.Rates(**tree["rates"])
        for field in dataclasses.fields(rates):
            value = getattr(rates, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            number = number and (value > 0 or (field.name == "fp8_tflops" and value == 0))
            if not (isinstance(value, str) if field.name == "source" else number):
                raise ValueError(f"{field.name} = {value!r} is no {'text' if field.name == 'source' else 'positive number'}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: not a calibration of {gpu_name} ({error}). Delete it for data-sheet rates, or measure again on that GPU "
            "with: python -m jaxtrain.plan --calibrate"
        ) from error
    return rates


def rates_for(gpu: hardware.Gpu, precision: str, folder: Path | str = FOLDER) -> result.Rates:
    """What was measured on this GPU for bf16 and fp8, which is what a calibration measures; else fractions of its data sheet.

    Under f32 a calibration's GEMM and attention rates are replaced by the data sheet's fractions, as is a rate of FP8 GEMMs
    that was not measured; the source says so. Raises ValueError as `datasheet` and `load` do.
    """
    sheet = datasheet(gpu, precision)
    measured = load(gpu.name, folder)
    if measured is None:
        return sheet
    if precision == "bf16" or (precision == "fp8" and measured.fp8_tflops):
        return measured
    fields = ("fp8_tflops",) if precision == "fp8" else ("gemm_tflops", "attention_forward_tflops", "attention_backward_tflops")
    source = f"{measured.source}; {precision} arithmetic by the data sheet"
    return dataclasses.replace(measured, source=source, **{name: getattr(sheet, name) for name in fields})
