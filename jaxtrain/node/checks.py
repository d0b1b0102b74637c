"""Run all checks of one node, in the order of the report, and compare the nodes and processes of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.node import gpus, host, links, rates, software
from jaxtrain.node.table import Check, Context, Table, fault, listed
from jaxtrain.report.preflight import OK, Finding

CLOCKS_APART_S = 2.0  # largest difference of the clocks of two nodes

PROCESSES = Check(
    "processes",
    "all are connected",
    "A run begins when all of its processes are connected; if one is missing, the others wait until they give up.",
    "Start every process, and let each reach process 0's port through any firewall.",
)
# Fact that all nodes of a run must share -> the reason.
EQUAL = {
    "driver": "Drivers of different versions have different errors and speeds, and one node then behaves differently.",
    "GPUs": "A mesh runs at the pace of its slowest GPU, and needs the same number on every node.",
    "packages": "With another version of JAX or NCCL a process compiles another program, and hangs in the first collective.",
    "network cards": "NCCL builds its rings over the same card of every node; one that is missing, or down, slows all of them.",
}
COMPARISONS = {
    what: Check(f"{what} of all nodes", "equal", why, "Bring the nodes to the same state, or leave this one out.")
    for what, why in EQUAL.items()
}
CLOCKS = Check(
    "clocks of all nodes",
    f"within {CLOCKS_APART_S:g} s",
    "Logs of several nodes are compared by their times; certificates and file systems reject a clock that is wrong.",
    "sudo timedatectl set-ntp true, or start chronyd; in a VM, its host's clock.",
)
OF_NODES = (*gpus.DRIVER, *gpus.CHECKS, *links.CHECKS, *software.VERSIONS, *host.CHECKS, *software.VARIABLES, *rates.CHECKS)
CHECKS = {check.name: check for check in (*OF_NODES, *COMPARISONS.values(), CLOCKS)}  # those of --allow


def inspect(context: Context) -> list[Finding]:
    """Return the findings of all checks that need no measurement."""
    if context.gpus.absent:
        return host.CHECKS.run(context)
    of_gpus = [*gpus.CHECKS, *links.CHECKS] if context.gpus.rows else []
    return Table([*gpus.DRIVER, *of_gpus, *software.VERSIONS, *host.CHECKS, *software.VARIABLES]).run(context)


def describe(context: Context, connected_unix: float | None) -> dict[str, Any]:
    """Return the properties of this node that `compare` compares among nodes.

    Args:
        connected_unix: this node's time when all processes were connected, in Unix seconds.
    """
    of_node = context.gpus
    return {
        "driver": context.facts.nvml.get("driver", "none"),
        "GPUs": of_node.text or "none",
        "packages": {name: package["version"] for name, package in context.facts.packages.items()},
        "network cards": len(links.active_nics(context)),
        "connected_unix": connected_unix,
    }


def compare(hosts: Sequence[str], descriptions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a fault for each property of a node that differs from the most frequent value.

    If the clocks differ by over CLOCKS_APART_S, add a fault for the clock farthest from the median. Without a fault, return
    one finding, that the nodes are alike.
    """
    found = []
    for what, check in COMPARISONS.items():
        values = [description[what] for description in descriptions]
        usual = max(values, key=values.count)
        for node, value in zip(hosts, values, strict=True):
            if value != usual:
                text = different_packages(value, usual) if what == "packages" else f"{value}, others {usual}"
                found.append(check.finding(fault(text), node))
    times = {node: d["connected_unix"] for node, d in zip(hosts, descriptions, strict=True) if d["connected_unix"]}
    if times and max(times.values()) - min(times.values()) > CLOCKS_APART_S:
        middle = sorted(times.values())[len(times) // 2]
        node = max(times, key=lambda n: abs(times[n] - middle))
        found.append(CLOCKS.finding(fault(f"{times[node] - middle:+.1f} s from the others"), node))
    return found or [Finding("nodes alike", OK, f"{', '.join(EQUAL)} and clocks", f"{len(hosts)} nodes", node="all")]


def different_packages(packages: Mapping[str, str], usual: Mapping[str, str]) -> str:
    names = sorted(name for name in {*packages, *usual} if packages.get(name) != usual.get(name))
    return listed([f"{name} {packages.get(name, 'missing')}, others {usual.get(name, 'none')}" for name in names])


def compare_processes(processes: Sequence[tuple[str, str]]) -> list[Finding]:
    """Return a fault for each host whose processes differ in CUDA_VISIBLE_DEVICES. processes: (host, value) of each process."""
    values = {host: sorted({value for other, value in processes if other == host}) for host, _ in processes}
    return [
        CHECKS[software.VISIBLE].finding(fault(f"{len(seen)} values on {host}: {listed([repr(v) for v in seen])}"), host)
        for host, seen in values.items()
        if len(seen) > 1
    ]
