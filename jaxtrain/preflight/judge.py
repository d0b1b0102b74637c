"""What to think of the measured figures: the GPUs of a node against each other, and collectives against what boards reach.

Thresholds are stated in what is expected. A figure that nobody published for a board has none: then it is only told.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain import hardware
from jaxtrain.preflight.check import Check, Node, Subject, listed

SLOW = 0.10  # below the median of its node, beyond which a GPU is a slow one (as Megatron-LM's own sniff test has it)
LEAST_OF_PEAK = 0.5  # of the data sheet's rate, that large GEMMs and copies reach on every healthy GPU
BUS = 0.8  # of what the board reaches
NETWORK = 0.5  # of what the cards carry together
DISK = {"write_gb_s": 0.05, "read_gb_s": 0.02}  # GB/s, below which a place is of no use

GEMM = Subject(
    "GEMM",
    f"no GPU more than {SLOW:.0%} below the median, none below {LEAST_OF_PEAK:.0%} of its peak",
    "Every step waits for the slowest GPU, in every collective: one that is 15% slower costs all of them 15%.",
    "See whether it is hot, capped or used by others (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE); if none "
    "of these, take it out and report it.",
)
HBM = Subject(
    "HBM",
    f"no GPU more than {SLOW:.0%} below the median, none below {LEAST_OF_PEAK:.0%} of its data sheet",
    "Norms, optimizer and attention's edges go at the pace of the memory.",
    "Look at ECC and row remaps of that GPU; if they are well, take it out and report it.",
)
HOST = Subject(
    "host to device",
    "no GPU at less than half the median",
    "Input, offloaded state and restores go that way; a narrow or far PCIe link makes them slow.",
    "Look at its PCIe width (nvidia-smi -q -d PCIE), and at the NUMA node beside it.",
)
ALL_REDUCE = Subject(
    "all-reduce",
    "bus bandwidth of the board",
    "Gradients are summed by it; below what the links carry, steps wait for it.",
    "Look at topology, NVLink and fabric above; then NCCL_DEBUG=INFO tells which path NCCL took, and whether it uses NVLS.",
)
REDUCE_SCATTER = Subject(
    "reduce-scatter",
    "bus bandwidth of the board",
    "A sharded run gathers weights and scatters gradients all the time, at this rate.",
    "Look at topology, NVLink and fabric above; then NCCL_DEBUG=INFO tells which path NCCL took.",
)
BETWEEN = Subject(
    "between nodes",
    f"bus bandwidth at least {NETWORK:.0%} of the cards' rates together",
    "Each step crosses the network; where one node's cards are slow or unused, all nodes wait.",
    "Look at the nodes' GPU and NIC, InfiniBand and GPUDirect lines; NCCL_DEBUG=INFO tells whether NET/IB or "
    "NET/Socket is used.",
)
DISKS = Subject(
    "disk rates",
    f"checkpoints written at {DISK['write_gb_s']:g} GB/s or more, data read at {DISK['read_gb_s']:g}",
    "A save that takes longer than the steps between two of them holds up training; so does input that comes too late.",
    "Set checkpoint.dir or paths.data to a faster file system, and see who else uses this one.",
)
FIGURES = {"gemm_tflops": GEMM, "hbm_gb_s": HBM, "h2d_gb_s": HOST}


def checks(node: Node, measured: Mapping[str, Any]) -> Iterable[Check]:
    left_out = measured.get("left_out", {})
    gpu = hardware.lookup(node.gpus.names[0]) if node.gpus.names else None
    if node.gpus.count:
        yield spread(GEMM, measured.get("gemm_tflops"), "TFLOP/s", gpu.bf16 if gpu else None, left_out.get("gemm_tflops"))
        yield spread(HBM, measured.get("hbm_gb_s"), "GB/s", 1000 * gpu.hbm_tb_s if gpu else None, left_out.get("hbm_gb_s"))
        yield host(measured.get("h2d_gb_s"), left_out.get("h2d_gb_s"))
    if node.gpus.count > 1:
        board = node.board if node.board and node.board.gpus == node.gpus.count else None
        best, others = (board.all_reduce, board.others) if board else (None, None)
        for subject, name, top in ((ALL_REDUCE, "all_reduce", best), (REDUCE_SCATTER, "reduce_scatter", others)):
            key = f"{name}_bus_gb_s"
            yield bus(subject, measured.get(key), top, others, left_out.get(key))
    if node.several_nodes:
        yield between(node, measured, left_out)
    yield from disks(measured.get("disk") or {}, left_out)


def spread(subject: Subject, figures: list[float] | None, unit: str, peak: float | None, why: str | None) -> Check:
    """A rate of each GPU: against the median of the node, and against the data sheet where it is known."""
    if not figures:
        return subject.unknown(why or "not in what was measured")
    middle = statistics.median(figures)
    text = f"{min(figures):,.0f} to {max(figures):,.0f} {unit}"
    slow = [f"GPU{i} {rate:,.0f} ({rate / middle - 1:+.0%})" for i, rate in enumerate(figures) if rate < (1 - SLOW) * middle]
    if slow:
        return subject.fault(f"{listed(slow)}; median {middle:,.0f} {unit}")
    if peak and min(figures) < LEAST_OF_PEAK * peak:
        return subject.fault(f"{text}, of {peak:,.0f}")
    return subject.ok(f"{text}, of {peak:,.0f}" if peak else text)


def host(figures: list[float] | None, why: str | None) -> Check:
    if not figures:
        return HOST.unknown(why or "not in what was measured")
    middle = statistics.median(figures)
    slow = [f"GPU{i} {rate:.0f} GB/s" for i, rate in enumerate(figures) if rate < 0.5 * middle]
    return (
        HOST.fault(f"{listed(slow)}; median {middle:.0f}")
        if slow
        else HOST.ok(f"{min(figures):.0f} to {max(figures):.0f} GB/s")
    )


def bus(subject: Subject, rate: float | None, best: float | None, others: float | None, why: str | None) -> Check:
    if rate is None:
        return subject.unknown(why or "not in what was measured")
    seen = f"{rate:,.0f} GB/s"
    if not best or not others:
        return subject.ok(f"{seen}; what this board reaches is not known")
    expected = (
        f"{best:,.0f} GB/s" + (f" with NVLS, {others:,.0f} without" if best != others else "") + f"; not {1 - BUS:.0%} below"
    )
    found = Subject(subject.name, expected, subject.why, subject.fix)
    if rate < BUS * others:
        return found.fault(seen)
    return found.note(f"{seen}: sums in the switches (NVLS) are probably not used") if rate < BUS * best else found.ok(seen)


def between(node: Node, measured: Mapping[str, Any], left_out: Mapping[str, str]) -> Check:
    rate = measured.get("inter_node_all_reduce_bus_gb_s")
    if rate is None:
        return BETWEEN.unknown(left_out.get("inter_node_all_reduce_bus_gb_s", "not in what was measured"))
    cards = sum(card_gb_s(node))
    seen = f"all-reduce {rate:,.0f} GB/s"
    if not cards:
        return BETWEEN.ok(f"{seen}; what the cards carry is not known")
    # Within the node NVLink is the limit, whatever the cards could carry.
    limit = min(cards, node.board.others if node.board and node.board.others else cards)
    seen += f", of {limit:,.0f}"
    return BETWEEN.fault(seen) if rate < NETWORK * limit else BETWEEN.ok(seen)


def card_gb_s(node: Node) -> list[float]:
    """GB/s of every InfiniBand port that is up."""
    rates = []
    for card in node.machine.listing("/sys/class/infiniband"):
        port = f"/sys/class/infiniband/{card}/ports/1"
        rate = (node.machine.read(f"{port}/rate") or "").split()
        if rate and "ACTIVE" in (node.machine.read(f"{port}/state") or ""):
            rates.append(float(rate[0]) / 8)
    return rates


def disks(found: Mapping[str, Mapping[str, float | None]], left_out: Mapping[str, str]) -> Iterable[Check]:
    missing = [f"{name.removeprefix('disk.')}: {why}" for name, why in left_out.items() if name.startswith("disk.")]
    if not found:
        if missing:
            yield DISKS.unknown("; ".join(missing))
        return
    needed = {("checkpoints", "write_gb_s"), ("data", "read_gb_s")}
    slow, told = [], []
    for place, rates in found.items():
        for key, rate in rates.items():
            word = key.partition("_")[0]
            if rate is not None:
                told.append(f"{place} {word} {rate:.2g} GB/s")
                slow += [f"{place} {word} {rate:.2g} GB/s"] if (place, key) in needed and rate < DISK[key] else []
    seen = "; ".join([", ".join(told), *missing])
    yield DISKS.fault(listed(slow)) if slow else DISKS.ok(seen)
