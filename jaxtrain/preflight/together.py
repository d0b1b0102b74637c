"""One process's part in a preflight of a run: which process inspects each node, and how they measure and share findings.

Every process of the run calls this. On each host the first process looks at the node; all of them measure, because collectives
over all GPUs need all of them. In the end each has the findings of all, so that all come to the same verdict.
"""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.distributed import Cluster, ClusterError, PeerLost, Peers, start
from jaxtrain.preflight import inspection, judge, variables
from jaxtrain.preflight.check import FAULT, Asked, Check, Node, Subject
from jaxtrain.preflight.machine import TIMED_OUT, Machine, Recording
from jaxtrain.preflight.measure import BUS, EACH, GPU_LISTS, INTER_NODE, measure
from jaxtrain.preflight.places import NETWORK
from jaxtrain.preflight.report import NodeReport
from jaxtrain.preflight.smi import GPUS
from jaxtrain.startup import quiet
from jaxtrain.stores import is_bucket

SPARE_S = 6.0  # of the limit, for the processes to tell each other and to end
LEAST_S = 10.0  # JAX alone takes some seconds to start on eight GPUs

MEETING = Subject(
    "processes",
    "all are connected",
    "A run begins when all of its processes are connected; if one is missing, the others wait until they give up.",
    "Start every process, and let each reach process 0's port through any firewall.",
)


@dataclasses.dataclass(frozen=True)
class Part:
    """What this process was asked.

    `ends`: when all should be over, by time.monotonic(); with other processes the time that is left counts from when they have
    met, for which there are `meet_s` seconds. `left_out`: why not to measure.
    """

    machine: Machine
    asked: Asked
    cluster: Cluster | None  # that this process really belongs to; a recorded node may have been part of another
    ends: float
    left_out: str = ""
    meet_s: float = 300.0  # as long as the run itself would wait

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()


def preflight(part: Part) -> list[NodeReport]:
    """The findings on every node of the run, the same in every process."""
    if part.cluster is None:
        return _all(part, Peers(0, 1))
    limit_s = part.left_s
    try:
        with _met(part.cluster, part.meet_s) as peers:
            return _all(dataclasses.replace(part, ends=time.monotonic() + limit_s), peers)
    except (ClusterError, PeerLost) as error:
        node, checks = inspection.look(part.machine, part.asked)
        return [_report(node, [*checks, MEETING.missing(str(error))], {})]


@contextlib.contextmanager
def _met(cluster: Cluster, limit_s: float) -> Iterator[Peers]:
    with quiet():
        import jax  # noqa: F401  it says on stderr what it misses where there is no driver

        start(cluster, init_timeout_s=max(2, int(limit_s)))
    peers = Peers.of_this_run()
    try:
        yield peers
    except BaseException as error:
        peers.close(str(error) or type(error).__name__)
        raise
    peers.close()


def _all(part: Part, peers: Peers) -> list[NodeReport]:
    def gather(name: str, value: Any) -> list[Any]:
        return [json.loads(text) for text in peers.gather(f"preflight/{name}", json.dumps(value), max(part.left_s, 5.0))]

    visible = part.machine.environ().get(variables.VISIBLE, "unset")
    processes = gather("hello", [part.machine.facts().get("hostname", "?"), visible])
    met = part.machine.facts().get("time_unix")  # now, before each node takes its own time to answer
    hosts = [host for host, _ in processes]
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]  # the process that speaks for each host
    node, checks = inspection.look(part.machine, part.asked) if peers.process_index in firsts else (None, [])
    portraits = gather("portrait", inspection.portrait(node, met) if node else {})
    figures = gather("figures", _measured(part, node, peers, gather))
    own = merged([each for each, host in zip(figures, hosts, strict=True) if host == hosts[peers.process_index]])
    checks += judge.checks(node, own) if node and own else []
    told = gather(
        "told", {"checks": [dataclasses.asdict(c) for c in checks], "measured": own, **(_words(node) if node else {})}
    )
    reports = [
        NodeReport(hosts[i], told[i]["gpus"], told[i]["absent"], [Check(**c) for c in told[i]["checks"]], told[i]["measured"])
        for i in firsts
    ]
    if len(firsts) > 1:
        reports[0].checks.extend(inspection.alike([hosts[i] for i in firsts], [portraits[i] for i in firsts]))
    # A renumbering that a node could see by itself is told there already.
    if not any(c.name == variables.VISIBLE and c.state == FAULT for report in reports for c in report.checks):
        reports[0].checks.extend(variables.of_processes(processes))
    return reports


def _words(node: Node) -> dict[str, str]:
    names = sorted(set(node.gpus.names))
    return {"gpus": f"{node.gpus.count} x {', '.join(names)}" if names else "", "absent": node.gpus.absent}


def _report(node: Node, checks: list[Check], measured: dict[str, Any]) -> NodeReport:
    return NodeReport(node.machine.facts().get("hostname", "?"), **_words(node), checks=checks, measured=measured)


def _measured(part: Part, node: Node | None, peers: Peers, gather: Callable[[str, Any], list[Any]]) -> dict[str, Any]:
    """What this process's GPUs reach and, where it speaks for its node (`node`), the disks."""
    recorded, reason = part.machine.measured(), part.left_out
    if not reason and node and node.machine.run(GPUS).code == TIMED_OUT:
        reason = "nvidia-smi does not answer: no work is given to these GPUs"
    elif not reason and part.left_s - SPARE_S < LEAST_S:
        reason = f"only {max(part.left_s, 0):.0f} s of --limit are left"
    # All or none: in a collective, those that measure would wait for one that does not.
    reasons = [each for each in gather("ready", reason) if each]
    if reasons:
        return recorded or left_out(reasons[0])
    places, others = _places(part, node, peers.process_index)
    options = _options(part, peers, gather)
    budget = min(gather("budget", part.left_s - SPARE_S))  # they end together: one that is ended takes the others along
    found = measure(places, budget, options)
    found["left_out"] |= others
    if isinstance(part.machine, Recording):
        part.machine.keep_measured(found)
    return found


def _places(part: Part, node: Node | None, process: int) -> tuple[dict[str, Path], dict[str, str]]:
    """The places to measure, and those that are left out, with the reason."""
    wanted = {n: p for n, p in part.asked.places.items() if node and p and not is_bucket(p) and n != "cache"}
    disks = node.machine.disks() if node else {}
    left = {f"disk.{n}": "it does not answer" for n in wanted if n in disks and disks[n].silent}
    if process:
        network = [n for n in wanted if n in disks and disks[n].kind in NETWORK]
        left |= {
            f"disk.{n}": "it is on the network, and process 0 measures it: many at once would disturb each other"
            for n in network
        }
    return {n: Path(p).expanduser() for n, p in wanted.items() if f"disk.{n}" not in left}, left


def _options(part: Part, peers: Peers, gather: Callable[[str, Any], list[Any]]) -> list[str]:
    """For the processes that measure: where they meet, at another port than these did."""
    if part.cluster is None:
        return []
    with socket.socket() as free:
        free.bind(("", 0))
        port = gather("port", free.getsockname()[1])[0]
    cluster = part.cluster
    host = cluster.coordinator.rpartition(":")[0]
    ids = [f"--local-devices={','.join(map(str, cluster.local_device_ids))}"] if cluster.local_device_ids else []
    return [f"--coordinator={host}:{port}", f"--num-processes={peers.count}", f"--process-id={peers.process_index}", *ids]


def left_out(reason: str) -> dict[str, Any]:
    return {"disk": {}, "left_out": dict.fromkeys((*GPU_LISTS, *BUS, *INTER_NODE), reason)}


def merged(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a node from those of its processes, which have GPUs of their own each."""
    out: dict[str, Any] = dict(parts[0])
    for part in parts[1:]:
        for name in EACH:
            out[name] = [*out.get(name, []), *part.get(name, [])]
        for name in ("left_out", "failed"):
            out[name] = {**part.get(name, {}), **out.get(name, {})}
    return out
