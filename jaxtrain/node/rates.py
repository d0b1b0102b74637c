"""Checks of the measured rates: the GPUs of a node against each other, and collectives against the board's bandwidth.

If the board has no published bus bandwidth, every measured bandwidth passes the check.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.config import hardware
from jaxtrain.node.checks import NETWORK_DISKS, SLOWDOWNS, active_nics, port
from jaxtrain.node.machine import Board
from jaxtrain.node.table import CheckTable, NodeContext, Probe, Verdict, fault, join_items, note, ok, unknown, worst

CHECKS = CheckTable()

GPU_RATES = ("gemm_tflops", "hbm_gb_s")  # lists with a figure for each GPU
GPU_LISTS = ("gpus", *GPU_RATES, "under_load")
BUS_RATES = ("all_reduce_bus_gb_s", "inter_node_all_reduce_bus_gb_s")  # over the GPUs of the node, and of all nodes
RATES = (*GPU_RATES, *BUS_RATES)
SLOWER = 0.10  # largest tolerated difference below the median of the other GPUs
PEAK_SHARE = 0.5  # of the data sheet's rate; large matmuls and copies reach this on every healthy GPU
BUS_SHARE = 0.8  # of the board's bus bandwidth
NETWORK_SHARE = 0.5  # of the NICs' total rate
THROTTLED_SHARE = 0.5  # of the samples under load; a fault from this share on
LOW_CLOCK, LOW_POWER = 0.75, 0.8  # of the highest clock and of the power limit; a low clock is normal at full power
DISK_GB_S = {"write_gb_s": 0.05, "read_gb_s": 0.02}
NOT_MEASURED = "it was not measured"


def reason(context: NodeContext, *keys: str) -> Verdict:
    """Return the verdict `unknown`, with the first known reason, in the order of `keys`, why a rate was not measured."""
    left_out = context.measured.get("left_out", {})
    return unknown(next((left_out[key] for key in keys if key in left_out), NOT_MEASURED))


@CHECKS.add(
    "GPU work",
    expected="matmuls, copies and collectives run to their end",
    why="A small program that crashes or hangs predicts a run that does so in its first step, or in its thousandth.",
    fix="Look for Xid in dmesg, at the checks above, and at NCCL's log (NCCL_DEBUG=INFO); then reset the GPUs or take the node "
    "out.",
)
def gpu_work(context: NodeContext) -> Verdict | None:
    failed = [text for key, text in context.measured.get("failed", {}).items() if not key.startswith("disk.")]
    if not failed:
        return None
    # Programs of GPUs run only if the driver reports GPUs, so a node whose NVML hangs has GPUs too.
    return dataclasses.replace(fault(join_items(failed, 2)), of_cpus=True)


def rate_of_gpus(key: str, unit: str, peak: Callable[[hardware.Gpu], float]) -> Probe:
    """Return the probe of the rate `key` of all GPUs.

    The verdict is a fault if one GPU is more than SLOWER below the median of the other GPUs, or below PEAK_SHARE of the data
    sheet's rate, which `peak` returns.
    """

    def probe(context: NodeContext) -> Verdict | None:
        if not context.gpus.count:
            return None
        rates = dict(zip(context.measured.get("gpus") or context.gpus.indices, context.measured.get(key) or (), strict=False))
        if not rates:
            return reason(context, key)
        text, slow = f"{min(rates.values()):,.0f} to {max(rates.values()):,.0f} {unit}", []
        for gpu, rate in rates.items():
            median = statistics.median([other_rate for i, other_rate in rates.items() if i != gpu] or [rate])
            slow += [f"GPU{gpu} {rate:,.0f} ({rate / median - 1:+.0%})"] if rate < (1 - SLOWER) * median else []
        if slow:
            return fault(f"{join_items(slow)}; all {text}")
        sheet = hardware.lookup(context.gpus.names[0])
        if not sheet:
            return ok(text)
        return (fault if min(rates.values()) < PEAK_SHARE * peak(sheet) else ok)(f"{text}, of {peak(sheet):,.0f}")

    return probe


CHECKS.add(
    "GEMM",
    expected=f"no GPU more than {SLOWER:.0%} below the median of the others, none below {PEAK_SHARE:.0%} of its peak",
    why="Every step waits for the slowest GPU, in every collective: one that is 15% slower costs all of them 15%.",
    fix="See whether it is hot, capped or used by others (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE); if none of these, "
    "take it out and report it.",
)(rate_of_gpus("gemm_tflops", "TFLOP/s", lambda gpu: gpu.bf16))


@CHECKS.add(
    "under load",
    expected="no GPU slowed down by heat, the board or its power supply while all compute",
    why="Heat and weak power supplies show only while all GPUs work; then all wait for the slowest.",
    fix="Look at fans, coolant and inlet temperature, power supplies and cables; see also nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE.",
)
def under_load(context: NodeContext) -> Verdict | None:
    """Return the verdict on clocks, power and throttling of all GPUs, sampled during the matmuls."""
    if not context.gpus.count:
        return None
    if not (samples := context.measured.get("under_load")):
        return reason(context, "under_load", "gemm_tflops")
    highest = {row["index"]: row.get("max_sm_clock_mhz") for row in context.gpus.rows}
    return worst({f"GPU{gpu['gpu']}": samples_verdict(gpu, highest.get(gpu["gpu"]), context.board) for gpu in samples}, "")


def samples_verdict(gpu: Mapping[str, Any], highest: float | None, board: Board | None) -> Verdict:
    """Return the verdict on the samples of one GPU (`node_rates.load_samples`). highest: its highest SM clock in MHz."""
    mhz, watt, limit = gpu["sm_mhz"], gpu["power_w"], gpu["power_limit_w"]
    slowed = {why: share for why, share in gpu["reasons"].items() if why in SLOWDOWNS.values()}
    texts = {why: f"{why} in {share:.0%} of the samples" for why, share in slowed.items()}
    # Laptop and desktop GPUs reach their highest temperature by design, so sw_thermal is normal for them.
    often = [why for why, share in slowed.items() if share >= THROTTLED_SHARE and (board or why != "sw_thermal")]
    if often:
        return fault(join_items([texts[why] for why in often]))
    if mhz and watt and limit and highest and mhz < LOW_CLOCK * highest and watt < LOW_POWER * limit:
        fix = "Its clocks may be locked, which nvidia-smi does not show: sudo nvidia-smi -rgc resets them."
        return note(f"slow, at {mhz:,.0f} of {highest:,.0f} MHz and {watt:.0f} of {limit:.0f} W", fix=fix)
    if slowed:
        return note(join_items(list(texts.values())))
    return ok(f"{mhz:,.0f} MHz" if mhz else "none")


CHECKS.add(
    "HBM",
    expected=f"no GPU more than {SLOWER:.0%} below the median of the others, none below {PEAK_SHARE:.0%} of its data sheet",
    why="Norms, the optimizer and parts of attention are bound by the memory.",
    fix="Look at ECC and row remaps of that GPU; if they are fine, take it out and report it.",
)(rate_of_gpus("hbm_gb_s", "GB/s", lambda gpu: 1000 * gpu.hbm_tb_s))


@CHECKS.add(
    "all-reduce",
    expected="bus bandwidth of the board",
    why="It sums the gradients; if it is slower than the links, steps wait for it.",
    fix="Look at topology, NVLink and fabric above; then NCCL_DEBUG=INFO shows NCCL's path, and whether it uses NVLS.",
)
def all_reduce(context: NodeContext) -> Verdict | None:
    if context.gpus.count < 2:
        return None
    rate = context.measured.get("all_reduce_bus_gb_s")
    if rate is None:
        return reason(context, "all_reduce_bus_gb_s")
    seen = f"{rate:,.0f} GB/s"
    best, least = (
        (context.board.all_reduce, context.board.without_nvls)
        if context.board and context.board.gpus == context.gpus.count
        else (None, None)
    )
    if not best or not least:
        return ok(f"{seen}; the bandwidth of this board is not known")
    expected = f"{best:,.0f} GB/s with NVLS, {least:,.0f} without; not {1 - BUS_SHARE:.0%} below"
    if rate < BUS_SHARE * least:
        return fault(seen, expected=expected)
    if rate < BUS_SHARE * best:
        return note(f"{seen}: NVLS is probably not used", expected=expected)
    return ok(seen, expected=expected)


@CHECKS.add(
    "between nodes",
    expected=f"bus bandwidth at least {NETWORK_SHARE:.0%} of the rate of the cards near the GPUs, or of the node's own if "
    "that is less",
    why="Each step crosses the network; if one node's cards are slow or unused, all nodes wait.",
    fix="Look at the nodes' GPU and NIC, InfiniBand and GPUDirect lines; NCCL_DEBUG=INFO shows whether NET/IB or NET/Socket is "
    "used.",
)
def between_nodes(context: NodeContext) -> Verdict | None:
    if not context.several_nodes:
        return None
    rate = context.measured.get("inter_node_all_reduce_bus_gb_s")
    if rate is None:
        return reason(context, "inter_node_all_reduce_bus_gb_s")
    seen = f"all-reduce {rate:,.0f} GB/s"
    cards = sum(float(words[0]) / 8 for card in active_nics(context) if (words := port(context, card, "rate").split()))
    if not cards:
        return ok(f"{seen}; the rate of the cards near the GPUs is not known")
    # Between nodes a collective is not faster than within a node, even if the cards are.
    limit = min(cards, context.measured.get("all_reduce_bus_gb_s") or cards)
    return (fault if rate < NETWORK_SHARE * limit else ok)(f"{seen}, of {limit:,.0f}")


@CHECKS.add(
    "disk rates",
    expected=f"checkpoints written at {DISK_GB_S['write_gb_s']:g} GB/s or more, data read at {DISK_GB_S['read_gb_s']:g}",
    why="A save that takes longer than the steps between two saves delays training; so does input that comes too late.",
    fix="Set checkpoint.dir or paths.data to a faster file system, and see who else uses this one.",
)
def disk_rates(context: NodeContext) -> Verdict | None:
    def disk_texts(kind: str) -> dict[str, str]:
        texts = {k: why for k, why in context.measured.get(kind, {}).items() if k.startswith("disk.")}
        return {key: f"{key.removeprefix('disk.')}: {why}" for key, why in texts.items()}

    if failed := disk_texts("failed"):
        verdict = fault if "disk.checkpoints" in failed else note  # data may exist already
        fix = "Look at quota, permissions and errors of that file system, or name another."
        return verdict("; ".join(failed.values()), fix=fix)
    left_out, disks = disk_texts("left_out").values(), context.measured.get("disk") or {}
    if not disks:
        return unknown("; ".join(left_out)) if left_out else None
    rates = {(name, key): rate for name, each in disks.items() for key, rate in each.items() if rate is not None}
    texts = {at: f"{at[0]} {at[1].partition('_')[0]} {rate:.2g} GB/s" for at, rate in rates.items()}
    judged = (("checkpoints", "write_gb_s"), ("data", "read_gb_s"))
    slow = [at for at in judged if rates.get(at, math.inf) < DISK_GB_S[at[1]]]
    # Other users can slow a shared file system down, so a single measurement is no fault.
    shared = [at for at in slow if at[0] in context.facts.disks and context.facts.disks[at[0]].kind in NETWORK_DISKS]
    if local_texts := [texts[at] for at in slow if at not in shared]:
        return fault(join_items(local_texts))
    if shared:
        return note(f"{join_items([texts[at] for at in shared])}, over the network")
    return ok("; ".join([", ".join(texts.values()), *left_out]))
