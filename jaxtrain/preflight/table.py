"""The form of the checks: a table whose entries have a name, a probe, the expected state, why it matters and a fix.

A probe is a function of a `Context` that returns a verdict: `ok`, `note`, `fault` or `unknown`, or None if the check does not
apply to the node. A verdict may replace the entry's texts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config import RunConfig
from jaxtrain.distributed import Cluster
from jaxtrain.preflight import nvidia_smi
from jaxtrain.preflight.node import Node, RecordingError
from jaxtrain.preflight.nvidia_smi import Gpus, Row, Topology
from jaxtrain.preflight.thresholds import Board, board_of

OK, NOTE, FAULT, UNKNOWN = "ok", "note", "FAULT", "not measured"
MISSING = "missing"  # a process of the run is absent or lost: no known fault, and a retry may help


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: str
    expected: str
    seen: str
    why: str = ""
    fix: str = ""
    node: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a probe. `texts` may replace `expected`, `why` and `fix` of its check."""

    state: str
    seen: str
    texts: dict[str, str]


def ok(seen: str, **texts: str) -> Verdict:
    return Verdict(OK, seen, {**texts, "fix": ""})


def note(seen: str, fix: str = "", **texts: str) -> Verdict:
    return Verdict(NOTE, seen, {**texts, "fix": fix} if fix else texts)


def fault(seen: str, fix: str = "", **texts: str) -> Verdict:
    return Verdict(FAULT, seen, {**texts, "fix": fix} if fix else texts)


def missing(seen: str) -> Verdict:
    return Verdict(MISSING, seen, {})


def unknown(reason: str, **texts: str) -> Verdict:
    return Verdict(UNKNOWN, reason, {**texts, "fix": ""})


@dataclasses.dataclass(frozen=True)
class Context:
    """A node and the run that it is checked for.

    Args:
        paths: name -> folder or bucket of the run, "" for none.
        cluster: the run's processes; None for one process.
        has_config: whether a config was given for the run.
        measured: rates of the node (measure.py); None before they are measured.
    """

    node: Node
    run: RunConfig
    paths: Mapping[str, str]
    cluster: Cluster | None = None
    has_config: bool = True
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def gpus(self) -> Gpus:
        return nvidia_smi.read_gpus(self.node)

    @functools.cached_property
    def board(self) -> Board | None:
        return board_of(self.gpus.names)

    @functools.cached_property
    def topology(self) -> Topology:
        """nvidia-smi's matrix of the GPUs that the run may use; empty if there is none."""
        answer = self.node.run(nvidia_smi.TOPOLOGY)
        return nvidia_smi.parse_topology(answer.out if answer.succeeded else "").select(self.gpus.indices)

    def rows(self, query: nvidia_smi.Query) -> list[Row]:
        """Return a query's rows of the GPUs that the run may use."""
        return [row for row in nvidia_smi.rows(self.node, query) if nvidia_smi.index(row) in self.gpus.indices]

    @property
    def several_nodes(self) -> bool:
        """Whether the run has more processes than this node has GPUs for."""
        if self.cluster is None:
            return False
        ids = self.cluster.local_device_ids or ()
        # If a process is to use a GPU beyond those it sees, CUDA_VISIBLE_DEVICES has renumbered them (software.py).
        here = self.gpus.on_node if ids and max(ids) >= self.gpus.count else self.gpus.count
        return self.cluster.num_processes * (len(ids) or here) > here

    @property
    def gpu_gib(self) -> float:
        """Memory of all GPUs."""
        return sum(nvidia_smi.number(row, "memory.total") or 0.0 for row in self.gpus.rows) / 1024


Probe = Callable[[Context], Verdict | None]


@dataclasses.dataclass(frozen=True)
class Check:
    """An entry of the table."""

    name: str
    expected: str
    why: str
    fix: str
    probe: Probe | None = None

    def finding(self, verdict: Verdict, node: str = "") -> Finding:
        texts = {"expected": self.expected, "why": self.why, "fix": self.fix} | verdict.texts
        return Finding(self.name, verdict.state, seen=verdict.seen, node=node, **texts)


class Table(list[Check]):
    """Checks in the order of the report."""

    def add(self, name: str, *, expected: str, why: str, fix: str) -> Callable[[Probe], Probe]:
        """Return a decorator that adds a check with the decorated probe."""

        def decorate(probe: Probe) -> Probe:
            self.append(Check(name, expected, why, fix, probe))
            return probe

        return decorate

    def run(self, context: Context) -> list[Finding]:
        """Return the findings of all checks. A probe that raises is one finding: nodes answer in forms not seen before."""
        found = []
        for check in self:
            try:
                verdict = check.probe(context) if check.probe else None
            except RecordingError:
                raise
            except Exception as error:
                verdict = unknown(f"{type(error).__name__}: {error}")
            found += [check.finding(verdict)] if verdict else []
        return found


def grouped(parts: Sequence[tuple[str, str]]) -> str:
    """Format (GPU, text) pairs, equal texts together: "GPU0 to GPU7: 500 W of 700"."""
    by_text: dict[str, list[str]] = {}
    for gpu, text in parts:
        by_text.setdefault(text, []).append(gpu)
    return "; ".join(f"{span(gpus)}: {text}" for text, gpus in by_text.items())


def span(gpus: Sequence[str]) -> str:
    numbers = [int(gpu[3:]) for gpu in gpus if gpu[3:].isdigit()]
    consecutive = len(numbers) == len(gpus) > 3 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{gpus[0]} to {gpus[-1]}" if consecutive else listed(gpus, 8)


def listed(parts: Sequence[str], most: int = 4) -> str:
    """Format "a, b, c, d and 3 more"."""
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")
