"""Every number of a train line and of a line on a GPU: its unit, its column in the log, and its chart.

The files, the log, the trackers, the report and the table in docs/observing.md read METRICS. A new metric of the train step is
one entry here.
"""

from typing import NamedTuple


class Chart(NamedTuple):
    """A chart of the report. Metrics with the same chart are its curves.

    section: the section of the page: training, throughput, memory or gpu. log: whether it also has a logarithmic axis. zero:
    whether its axis begins at 0.
    """

    section: str
    title: str
    log: bool = False
    zero: bool = True


class Metric(NamedTuple):
    """One number of a line.

    Attributes:
        unit: of the value in the file; "" for a plain number.
        meaning: in one line, for the docs.
        column: format in the log's line; "": no column. A column of a value that is None is left out.
        chart: the chart of the report with its curve; None: no curve.
        curve: the name of the curve.
        factor: of the values in the chart and in a page's table, as 100 for percent.
        optional: whether only some runs have it; otherwise every train line has it.
        hide_zero: whether a column of the value 0 is left out too.
    """

    unit: str
    meaning: str
    column: str = ""
    chart: Chart | None = None
    curve: str = ""
    factor: float = 1.0
    optional: bool = False
    hide_zero: bool = False


TOKENS = Chart("throughput", "Tokens/s per device")
MFU = Chart("throughput", "MFU and HFU, %")
MEMORY = Chart("memory", "Memory of the fullest device, GiB")
REWARDS = Chart("training", "Rewards of the completions", zero=False)
MTP = Chart("training", "Loss of multi-token prediction, nats per token", log=True, zero=False)
ROUTER = Chart("training", "Router entropy, nats")

# Name in metrics.jsonl -> metric, in the order of a train line and of the columns of the log.
METRICS: dict[str, Metric] = {
    "loss": Metric("nats per token", "mean over tokens that count, or a loss of your own", "loss {:.4f}"),
    "mtp_loss": Metric(
        "nats per token", "of the modules of multi-token prediction", "mtp {:.4f}", MTP, "mtp loss", optional=True
    ),
    "rewards/chosen": Metric("", "dpo: mean reward of chosen completions", "", REWARDS, "chosen", optional=True),
    "rewards/rejected": Metric("", "dpo: of rejected ones", "", REWARDS, "rejected", optional=True),
    "rewards/accuracies": Metric(
        "fraction", "dpo: pairs ranked right", "accuracy {:.0%}",
        Chart("training", "Pairs ranked right, %"), "accuracy", 100, optional=True,
    ),
    "rewards/margins": Metric("", "dpo: mean difference of the two", "margin {:.3f}", REWARDS, "margin", optional=True),
    "grad_norm": Metric(
        "", "before clipping", "grad {:.2f}",
        Chart("training", "Gradient norm", log=True, zero=False), "gradient norm",
    ),
    "lr": Metric("", "learning rate", "lr {:.1e}", Chart("training", "Learning rate"), "learning rate"),
    "tokens": Metric("tokens", "read so far, with padding"),
    "epoch": Metric("", "passes over the data"),
    "step_time_s": Metric(
        "s", "mean since the previous line, with data; without steps of a save, evaluation or trace, and those after",
        chart=Chart("throughput", "Step time, s"), curve="step",
    ),
    "tokens_per_s": Metric("tokens/s", "of all devices, padding included", "{:,.0f} tok/s"),
    "tokens_per_s_per_device": Metric("tokens/s", "of a device", chart=TOKENS, curve="tokens/s/device"),
    "tflops_per_device": Metric("TFLOP/s", "model FLOPs, with half of the attention square"),
    "mfu_causal": Metric(
        "fraction", "`tflops_per_device` over the dense bfloat16 peak", "MFU {:.1%}", MFU, "MFU causal", 100
    ),
    "mfu_full": Metric("fraction", "with the whole square", "", MFU, "MFU full", 100),
    "hfu": Metric("fraction", "as `mfu_causal`, with recomputed operations", "", MFU, "HFU", 100),
    "data_wait_s": Metric(
        "s", "waiting for a batch", "", Chart("throughput", "Waiting for data, s per step"), "waiting for data"
    ),
    "peak_memory_gib": Metric("GiB", "peak of the fullest device of process 0", "{:.1f} GiB", MEMORY, "peak"),
    "memory_gib": Metric("GiB", "in use there", "", MEMORY, "in use"),
    "skipped_steps": Metric("steps", "skipped so far: loss or gradient not finite, or far out"),
    "balance_loss": Metric("", "experts: 1 for even loads", optional=True),
    "sequence_balance_loss": Metric("", "experts: the same of each sequence", optional=True),
    "router_z_loss": Metric("", "experts: squared log of the partition function", optional=True),
    "router_entropy": Metric(
        "nats", "experts: log E for an untrained router of E, 0 for one that is always sure", "", ROUTER, "entropy",
        optional=True,
    ),
    "expert_load_max": Metric(
        "", "experts: the largest load over an even load", "load {:.2f}x",
        Chart("training", "Largest load of an expert over an even load"), "largest load", optional=True,
    ),
    "dropped_tokens": Metric(
        "fraction", "experts: choices dropped by moe.capacity_factor", "dropped {:.2%}",
        Chart("training", "Dropped tokens, %"), "dropped", 100, optional=True, hide_zero=True,
    ),
}  # fmt: skip

# Name -> metric of a line of kind "gpu": means over the seconds since the previous line, of one GPU.
GPU: dict[str, Metric] = {
    "utilization": Metric(
        "fraction", "time in which any kernel ran, also one that waits in a collective",
        chart=Chart("gpu", "Utilization, %"), curve="used %", factor=100,
    ),
    "power_w": Metric("W", "mean power", chart=Chart("gpu", "Power per GPU, W"), curve="W"),
    "power_limit_w": Metric("W", "the active limit", curve="limit W"),
    "memory_used_gib": Metric("GiB", "of the card, by all processes", curve="used GiB"),
    "pool_gib": Metric("GiB", "JAX's pool"),
    "in_use_gib": Metric(
        "GiB", "used part of the pool", chart=Chart("gpu", "Memory in use per GPU, GiB"), curve="in use GiB"
    ),
    "temperature_c": Metric("°C", "the highest", chart=Chart("gpu", "Temperature, °C", zero=False), curve="°C"),
    "sm_clock_mhz": Metric("MHz", "clock of the SMs", chart=Chart("gpu", "SM clock, MHz"), curve="SM MHz"),
    "memory_clock_mhz": Metric("MHz", "clock of the memory", curve="memory MHz"),
    "throttled": Metric(
        "fraction", "samples with clocks reduced by `throttle_reasons`: not idleness, the power limit, or a user",
        chart=Chart("gpu", "Throttled, % of the time"), curve="throttled %", factor=100,
    ),
    "nvlink_tx_gb_s": Metric("GB/s", "sent over all NVLinks of the GPU", curve="NVLink sent GB/s"),
    "nvlink_rx_gb_s": Metric("GB/s", "received over them", curve="NVLink received GB/s"),
    "ecc_uncorrected": Metric("errors", "in memory, since the driver was loaded", curve="ECC uncorrected"),
}  # fmt: skip


def required_names() -> list[str]:
    """Return the names that every train line has."""
    return [name for name, metric in METRICS.items() if not metric.optional]


def markdown() -> tuple[str, str]:
    """Return the two tables of docs/observing.md: the fields of a train line, and those of a line about a GPU."""

    def row(name: str, metric: Metric) -> str:
        has_unit = any(metric.unit.lower().replace("/", by) in name for by in ("_", "_per_"))  # as GB/s in nvlink_tx_gb_s
        return f"| `{name}` | {metric.meaning}{'' if has_unit else f' ({metric.unit})'} |"

    def lines(kind: str, metrics: dict[str, Metric]) -> str:
        return "\n".join((f"| field of `{kind}` | meaning |", "|---|---|", *(row(*item) for item in metrics.items())))

    return lines("train", METRICS), lines("gpu", GPU)
