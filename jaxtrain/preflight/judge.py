"""What to think of the measured figures: the GPUs of a node against each other, and collectives against what boards reach.

Thresholds are stated in what is expected. A figure that nobody published for a board has none: then it is only told.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain import hardware
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed
from jaxtrain.preflight.measure import GPU_LISTS
from jaxtrain.preflight.network import active_cards, port
from jaxtrain.preflight.pace import SLOW as SLOWED
from jaxtrain.preflight.places import NETWORK as NETWORK_DISKS
from jaxtrain.preflight.smi import number

SLOW = 0.10  # below the median of the others, beyond which a GPU is a slow one
LEAST_OF_PEAK = 0.5  # of the data sheet's rate, that large GEMMs and copies reach on every healthy GPU
BUS = 0.8  # of what the board reaches
NETWORK = 0.5  # of what the cards carry together
OFTEN = 0.5  # of the samples under load
LOW_CLOCK, LOW_POWER = 0.75, 0.8  # of the highest clock and of the limit: at full power a GEMM may well run at such a clock
DISK = {"write_gb_s": 0.05, "read_gb_s": 0.02}  # GB/s, below which a place is of no use

GEMM = Subject(
    "GEMM",
    f"no GPU more than {SLOW:.0%} below the median of the others, none below {LEAST_OF_PEAK:.0%} of its peak",
    "Every step waits for the slowest GPU, in every collective: one that is 15% slower costs all of them 15%.",
    "See whether it is hot, capped or used by others (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE); if none "
    "of these, take it out and report it.",
)
HBM = Subject(
    "HBM",
    f"no GPU more than {SLOW:.0%} below the median of the others, none below {LEAST_OF_PEAK:.0%} of its data sheet",
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
    f"bus bandwidth at least {NETWORK:.0%} of what the cards beside the GPUs carry, or of the node's own if that is less",
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
WORK = Subject(
    "GPU work",
    "GEMMs, copies and collectives run to their end",
    "What crashes or hangs in a small program does so in a run's first step, or in its thousandth.",
    "Look for Xid in dmesg, at the checks above, and with NCCL_DEBUG=INFO at what NCCL says; then reset the GPUs or take the "
    "node out.",
)
LOAD = Subject(
    "under load",
    "no GPU slowed down by heat, the board or its power supply while all compute",
    "Heat and weak power supplies show only when all GPUs work, and then all wait for the one that slows down.",
    "Look at fans, coolant and inlet temperature, power supplies and cables; nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE tells more.",
)


def checks(node: Node, measured: Mapping[str, Any]) -> Iterable[Check]:
    left_out, failed = measured.get("left_out", {}), measured.get("failed", {})
    gpu = hardware.lookup(node.gpus.names[0]) if node.gpus.names else None
    broken = [words for key, words in failed.items() if not key.startswith("disk.")]
    if broken:
        yield WORK.fault(listed(broken, 2))
    if node.gpus.count:
        numbers = measured.get("gpus") or node.gpus.indices
        figures = {name: dict(zip(numbers, measured.get(name) or (), strict=False)) for name in GPU_LISTS}
        yield spread(GEMM, figures["gemm_tflops"], "TFLOP/s", gpu.bf16 if gpu else None, left_out.get("gemm_tflops"))
        yield under_load(node, measured, left_out)
        yield spread(HBM, figures["hbm_gb_s"], "GB/s", 1000 * gpu.hbm_tb_s if gpu else None, left_out.get("hbm_gb_s"))
        yield host(figures["h2d_gb_s"], left_out.get("h2d_gb_s"))
    if node.gpus.count > 1:
        board = node.board if node.board and node.board.gpus == node.gpus.count else None
        best, others = (board.all_reduce, board.others) if board else (None, None)
        for subject, name, top in ((ALL_REDUCE, "all_reduce", best), (REDUCE_SCATTER, "reduce_scatter", others)):
            key = f"{name}_bus_gb_s"
            yield bus(subject, measured.get(key), top, others, left_out.get(key))
    if node.several_nodes:
        yield between(node, measured, left_out)
    yield from disks(node, measured.get("disk") or {}, left_out, failed)


def spread(subject: Subject, figures: Mapping[int, float], unit: str, peak: float | None, why: str | None) -> Check:
    """A rate of each GPU: against the median of the others, and against the data sheet where it is known."""
    if not figures:
        return subject.unknown(why or "not in what was measured")
    text = f"{min(figures.values()):,.0f} to {max(figures.values()):,.0f} {unit}"
    slow = []
    for gpu, rate in figures.items():
        middle = statistics.median([other for at, other in figures.items() if at != gpu] or [rate])
        slow += [f"GPU{gpu} {rate:,.0f} ({rate / middle - 1:+.0%})"] if rate < (1 - SLOW) * middle else []
    if slow:
        return subject.fault(f"{listed(slow)}; all {text}")
    if peak and min(figures.values()) < LEAST_OF_PEAK * peak:
        return subject.fault(f"{text}, of {peak:,.0f}")
    return subject.ok(f"{text}, of {peak:,.0f}" if peak else text)


def under_load(node: Node, measured: Mapping[str, Any], left_out: Mapping[str, str]) -> Check:
    """What the GPUs told while the GEMMs ran."""
    found = measured.get("under_load") or []
    if not found:
        return LOAD.unknown(left_out.get("under_load") or left_out.get("gemm_tflops") or "not in what was measured")
    highest = {int(row["index"] or 0): number(row, "clocks.max.sm") for row in node.gpus.rows}
    often, seldom, low, seen = [], [], [], []
    for gpu in found:
        name, mhz, watt, limit = (gpu[key] for key in ("gpu", "sm_mhz", "power_w", "power_limit_w"))
        for reason, share in gpu["reasons"].items():
            # Laptops and cards in desktops are built to reach their highest temperature.
            worst = share >= OFTEN and (node.board or reason != "sw_thermal")
            if reason in SLOWED.values():
                (often if worst else seldom).append((f"GPU{name}", f"{reason} in {share:.0%} of the samples"))
        if mhz and watt and limit and (top := highest.get(name)) and mhz < LOW_CLOCK * top and watt < LOW_POWER * limit:
            low.append((f"GPU{name}", f"{mhz:,.0f} of {top:,.0f} MHz at {watt:.0f} of {limit:.0f} W"))
        seen += [mhz] if mhz else []
    if often:
        return LOAD.fault(grouped(often))
    if low:
        locked = "Its clocks may be locked, which nvidia-smi does not show: sudo nvidia-smi -rgc resets them."
        return LOAD.note(f"slow, and not for want of power: {grouped(low)}", locked)
    if seldom:
        return LOAD.note(grouped(seldom))
    return LOAD.ok(f"{min(seen):,.0f} to {max(seen):,.0f} MHz" if seen else "none")


def host(figures: Mapping[int, float], why: str | None) -> Check:
    if not figures:
        return HOST.unknown(why or "not in what was measured")
    middle = statistics.median(figures.values())
    slow = [f"GPU{gpu} {rate:.0f} GB/s" for gpu, rate in figures.items() if rate < 0.5 * middle]
    if slow:
        return HOST.fault(f"{listed(slow)}; median {middle:.0f}")
    return HOST.ok(f"{min(figures.values()):.0f} to {max(figures.values()):.0f} GB/s")


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
    seen = f"all-reduce {rate:,.0f} GB/s"
    rates = [port(node, card, "rate").split() for card in active_cards(node)]
    cards = sum(float(words[0]) / 8 for words in rates if words)
    if not cards:
        return BETWEEN.ok(f"{seen}; what the cards beside the GPUs carry is not known")
    # What does not go faster within the node does not between nodes, whatever the cards could carry.
    limit = min(cards, measured.get("all_reduce_bus_gb_s") or cards)
    seen += f", of {limit:,.0f}"
    return BETWEEN.fault(seen) if rate < NETWORK * limit else BETWEEN.ok(seen)


def disks(
    node: Node, found: Mapping[str, Mapping[str, float | None]], left_out: Mapping[str, str], failed: Mapping[str, str]
) -> Iterable[Check]:
    missing = [f"{name.removeprefix('disk.')}: {why}" for name, why in left_out.items() if name.startswith("disk.")]
    refused = {name: f"{name.removeprefix('disk.')}: {why}" for name, why in failed.items() if name.startswith("disk.")}
    if refused:
        say = DISKS.fault if "disk.checkpoints" in refused else DISKS.note  # data is there already, it may be
        yield say("; ".join(refused.values()), "Look at quota, permissions and errors of that file system, or name another.")
        return
    if not found:
        if missing:
            yield DISKS.unknown("; ".join(missing))
        return
    needed = {("checkpoints", "write_gb_s"), ("data", "read_gb_s")}
    kinds = {name: disk.kind for name, disk in node.machine.disks().items()}
    slow, busy, told = [], [], []
    for place, rates in found.items():
        for key, rate in rates.items():
            if rate is None:
                continue
            told.append(f"{place} {key.partition('_')[0]} {rate:.2g} GB/s")
            if (place, key) in needed and rate < DISK[key]:
                # One moment of a file system that many share says little.
                (busy if kinds.get(place) in NETWORK_DISKS else slow).append(told[-1])
    seen = "; ".join([", ".join(told), *missing])
    if slow:
        yield DISKS.fault(listed(slow))
    else:
        yield DISKS.note(f"{listed(busy)}, over the network") if busy else DISKS.ok(seen)
