"""Preflight of all processes of a run: checks each node, measures all nodes together, and shares the findings.

Every process of the run takes part. On each host the findings of the first process count. All processes measure, because
collectives over all GPUs need all of them. At the end every process has all findings, so that all have the same verdict. If a
process is lost, each remaining process reports only its own node.
"""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.stores import is_bucket
from jaxtrain.node import checks, rates
from jaxtrain.node.checks import NETWORK_DISKS
from jaxtrain.node.facts import Unanswered, call_with_timeout
from jaxtrain.node.node_rates import measure_node
from jaxtrain.node.table import Check, NodeContext, Verdict, fault, join_items
from jaxtrain.report.preflight import FAULT, MISSING, OK, Finding, NodeReport
from jaxtrain.runtime.distributed import Cluster, ClusterError, PeerLost, Peers, connect
from jaxtrain.runtime.startup import quiet

RESERVE_S = 6.0  # of the limit, reserved for the last messages and the end of the processes
LEAST_S = 10.0  # least time to measure: the start of JAX takes some seconds on eight GPUs
GATHER_S = 5.0  # for a message after the limit
CLOSE_S, FAILED_CLOSE_S = 5.0, 2.5  # to leave JAX's service after the limit, and after a failure

CLOCKS_APART_S = 2.0  # largest difference of the clocks of two nodes

PROCESSES = Check(
    "processes",
    "all are connected",
    "A run begins when all of its processes are connected; if one is missing, the others wait until they give up.",
    "Start every process, and let each reach process 0's port through any firewall.",
)
# Fact that all nodes of a run must share -> the reason.
MUST_AGREE = {
    "driver": "Drivers of different versions have different errors and speeds, and one node then behaves differently.",
    "GPUs": "A mesh runs at the pace of its slowest GPU, and needs the same number on every node.",
    "packages": "With another version of JAX or NCCL a process compiles another program, and hangs in the first collective.",
    "network cards": "NCCL builds its rings over the same card of every node; one that is missing, or down, slows all of them.",
}
COMPARISONS = {
    what: Check(f"{what} of all nodes", "equal", why, "Bring the nodes to the same state, or leave this one out.")
    for what, why in MUST_AGREE.items()
}
CLOCKS = Check(
    "clocks of all nodes",
    f"within {CLOCKS_APART_S:g} s",
    "Logs of several nodes are compared by their times; certificates and file systems reject a clock that is wrong.",
    "sudo timedatectl set-ntp true, or start chronyd; in a VM, its host's clock.",
)
# Those of --allow
CHECKS = {check.name: check for check in (*checks.CHECKS, *rates.CHECKS, *COMPARISONS.values(), CLOCKS)}


class Preflight:
    """One process's part in the preflight of a run.

    Args:
        context: the process's node. If the node is a recording, `context.cluster` is the cluster of the recorded run.
        cluster: the processes of this run.
        limit_s: seconds for everything after the processes have connected.
        connect_s: seconds for the other processes to connect.
        is_recorded: whether the node is a recording, so that nothing is measured.
        skip_reason: the reason to skip measurements; "" to measure.
        on_lost: called in another thread with the report of this node if a process is lost. The function should end this
            process, because JAX ends it 6 s after process 0 is lost.
    """

    def __init__(
        self,
        context: NodeContext,
        cluster: Cluster | None,
        limit_s: float,
        connect_s: float = 300.0,
        is_recorded: bool = False,
        skip_reason: str = "",
        on_lost: Callable[[list[NodeReport]], object] | None = None,
    ):
        self._context, self._cluster, self._is_recorded = context, cluster, is_recorded
        self._limit_s, self._connect_s, self._skip_reason, self._on_lost = limit_s, connect_s, skip_reason, on_lost
        self._deadline = time.monotonic() + limit_s
        self._peers = Peers(0, 1)
        self._findings = checks.inspect(context)
        self._decision = threading.Lock()  # held by the thread that reports

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def run(self) -> list[NodeReport]:
        """Return the findings on every node, equal in all processes. If a process is lost, return the findings on this node.

        Call `close` afterwards.
        """
        try:
            if self._cluster is not None:
                with quiet():
                    import jax  # noqa: F401  prints notes on stderr without a driver

                    connect(self._cluster, init_timeout_s=max(2, int(self._connect_s)))
                self._peers = Peers.from_jax()
                self._peers.watch(self._lost)
                self._deadline = time.monotonic() + self._limit_s
            reports = self._all_nodes()
        except (ClusterError, PeerLost) as error:
            self._decision.acquire()  # if `_lost` reports, this thread waits until the process ends
            return self._report_alone(str(error))
        self._decision.acquire()
        return reports

    def close(self, failed: str = "") -> None:
        """Disconnect from JAX's coordination service together with the other processes.

        failed: the reason to send to them; "" after a success.
        """
        with contextlib.suppress(Unanswered):
            limit_s = FAILED_CLOSE_S if failed else max(self.left_s, CLOSE_S)
            call_with_timeout(limit_s, "the service", lambda: self._peers.close(failed))

    def _lost(self, message: str) -> None:
        if self._on_lost and self._decision.acquire(blocking=False):
            self._on_lost(self._report_alone(message))

    def _report_alone(self, message: str) -> list[NodeReport]:
        absent = PROCESSES.finding(Verdict(MISSING, message))
        return [self._report([*self._findings, absent])]

    def _report(self, findings: list[Finding]) -> NodeReport:
        gpus = self._context.gpus
        return NodeReport(self._context.facts.hostname, gpus.text, gpus.absent, findings, dict(self._context.measured))

    def _gather(self, name: str, value: Any) -> list[Any]:
        """Send `value` to all processes. Return the value of every process, ordered by process index."""
        texts = self._peers.gather(f"preflight/{name}", json.dumps(value), max(self.left_s, GATHER_S))
        return [json.loads(text) for text in texts]

    def _all_nodes(self) -> list[NodeReport]:
        facts = self._context.facts
        visible = facts.environ.get(checks.VISIBLE, "unset")
        processes = [(host, value) for host, value in self._gather("hello", [facts.hostname, visible])]
        # Read the clock at once, since all nodes have just received the last message.
        connected = facts.time_unix if self._is_recorded else time.time()
        hosts, process_index = [host for host, _ in processes], self._peers.process_index
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        figures = self._gather("figures", self._measure(reads_disks=process_index in firsts))
        measured = merge_figures([each for each, host in zip(figures, hosts, strict=True) if host == hosts[process_index]])
        if measured:
            self._context = dataclasses.replace(self._context, measured=measured)
            self._findings = [*self._findings, *rates.CHECKS.run(self._context)]
        local_report = [dataclasses.asdict(self._report(self._findings)), describe_node(self._context, connected)]
        all_reports = self._gather("report", local_report if process_index in firsts else None)
        reports = [NodeReport(**report) for report, _ in filter(None, all_reports)]
        for each in reports:
            each.findings = [Finding(**finding) for finding in each.findings]  # pyright: ignore[reportCallIssue]
        first = reports[0].findings
        if len(firsts) > 1:
            first += compare_nodes([hosts[i] for i in firsts], [all_reports[i][1] for i in firsts])
        # The check of a node may have reported renumbered GPUs already.
        if not any(f.name == checks.VISIBLE and f.state == FAULT for each in reports for f in each.findings):
            first += compare_processes(processes)
        return reports

    def _measure(self, reads_disks: bool) -> dict[str, Any]:
        """Return the rates of this process's GPUs and, with `reads_disks`, of the node's disks."""
        facts, reason = self._context.facts, self._skip_reason
        if not reason and facts.nvml.get("hangs"):
            reason = "the driver does not answer: no work is given to these GPUs"
        elif not reason and self.left_s - RESERVE_S < LEAST_S:
            reason = f"only {max(self.left_s, 0):.0f} s of --limit are left"
        paths, left_out = paths_to_measure(self._context, self._peers.process_index) if reads_disks else ({}, {})
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        ready = self._gather("ready", {"reason": reason, "budget_s": self.left_s - RESERVE_S, "port": port})
        # If one process cannot measure, none measures, since a collective would wait for it.
        reasons = [each["reason"] for each in ready if each["reason"]]
        if facts.measured:
            return dict(facts.measured)
        if reasons:
            disks = {} if self._is_recorded else {f"disk.{name}": reasons[0] for name in paths}
            return {"disk": {}, "left_out": dict.fromkeys(rates.RATES, reasons[0]) | disks | left_out}
        children = None
        if self._cluster is not None:  # the children that measure use another port than this process
            host = self._cluster.coordinator.rpartition(":")[0]
            children = dataclasses.replace(self._cluster, coordinator=f"{host}:{ready[0]['port']}")
        # All children have the same budget, since the end of one child would end the others.
        figures = measure_node(paths, min(each["budget_s"] for each in ready), children)
        figures["left_out"] |= left_out
        return figures


def paths_to_measure(context: NodeContext, process: int) -> tuple[dict[str, Path], dict[str, str]]:
    """Return (name -> path whose disk process `process` measures, "disk.NAME" -> reason why it does not measure that disk)."""
    disks = context.facts.disks
    candidates = {n: path for n, path in context.paths.items() if path and not is_bucket(path) and n != "cache"}
    left_out = {f"disk.{n}": "it does not answer" for n in candidates if n in disks and disks[n].silent}
    if process:
        shared = [n for n in candidates if n in disks and disks[n].kind in NETWORK_DISKS]
        reason = "it is on the network, and process 0 measures it: many at once would disturb each other"
        left_out |= {f"disk.{n}": reason for n in shared}
    return {n: Path(path).expanduser() for n, path in candidates.items() if f"disk.{n}" not in left_out}, left_out


def merge_figures(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rates of a node: the rates of GPUs from all of its processes, all other rates from its first process."""
    out: dict[str, Any] = dict(figures[0])
    for process_figures in figures[1:]:
        for name in rates.GPU_LISTS:
            out[name] = [*out.get(name, []), *process_figures.get(name, [])]
        for name in ("left_out", "failed"):
            out[name] = {**process_figures.get(name, {}), **out.get(name, {})}
    return out


# ---- the nodes and processes of a run beside each other


def describe_node(context: NodeContext, connected_unix: float | None) -> dict[str, Any]:
    """Return the properties of this node that `compare_nodes` compares among nodes.

    Args:
        connected_unix: this node's time when all processes were connected, in Unix seconds.
    """
    gpus = context.gpus
    return {
        "driver": context.facts.nvml.get("driver", "none"),
        "GPUs": gpus.text or "none",
        "packages": {name: package["version"] for name, package in context.facts.packages.items()},
        "network cards": len(checks.active_nics(context)),
        "connected_unix": connected_unix,
    }


def compare_nodes(hosts: Sequence[str], descriptions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a fault for each property of a node that differs from the most frequent value.

    If the clocks differ by over CLOCKS_APART_S, add a fault for the clock farthest from the median. Without a fault, return
    one finding, that the nodes are alike.
    """
    findings = []
    for fact, check in COMPARISONS.items():
        values = [description[fact] for description in descriptions]
        usual = max(values, key=values.count)
        for node, value in zip(hosts, values, strict=True):
            if value != usual:
                text = different_packages(value, usual) if fact == "packages" else f"{value}, others {usual}"
                findings.append(check.finding(fault(text), node))
    times = {node: d["connected_unix"] for node, d in zip(hosts, descriptions, strict=True) if d["connected_unix"]}
    if times and max(times.values()) - min(times.values()) > CLOCKS_APART_S:
        middle = sorted(times.values())[len(times) // 2]
        node = max(times, key=lambda n: abs(times[n] - middle))
        findings.append(CLOCKS.finding(fault(f"{times[node] - middle:+.1f} s from the others"), node))
    return findings or [Finding("nodes alike", OK, f"{', '.join(MUST_AGREE)} and clocks", f"{len(hosts)} nodes", node="all")]


def different_packages(packages: Mapping[str, str], usual: Mapping[str, str]) -> str:
    names = sorted(name for name in {*packages, *usual} if packages.get(name) != usual.get(name))
    return join_items([f"{name} {packages.get(name, 'missing')}, others {usual.get(name, 'none')}" for name in names])


def compare_processes(processes: Sequence[tuple[str, str]]) -> list[Finding]:
    """Return a fault for each host whose processes differ in CUDA_VISIBLE_DEVICES. processes: (host, value) of each process."""
    values = {host: sorted({value for process_host, value in processes if process_host == host}) for host, _ in processes}
    return [
        CHECKS[checks.VISIBLE].finding(
            fault(f"{len(distinct)} values on {host}: {join_items([repr(v) for v in distinct])}"), host
        )
        for host, distinct in values.items()
        if len(distinct) > 1
    ]
