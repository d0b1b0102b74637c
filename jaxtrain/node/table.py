"""The structure of checks: a table whose entries have a name, a probe, the expected state, a reason and a fix.

A probe is a function of a `NodeContext`. It returns the verdict `ok`, `note`, `fault` or `unknown`, or None if the check does
not apply to the node. A verdict may replace the texts of its check.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config.schema import RunConfig
from jaxtrain.node import machine
from jaxtrain.node.facts import NodeFacts
from jaxtrain.node.machine import Board, GpuRow, Gpus, GpuTopology
from jaxtrain.report.preflight import FAULT, NOTE, OK, UNKNOWN, Finding
from jaxtrain.runtime.distributed import Cluster

HOST, DRIVER, GPUS = "host", "driver", "GPUs"  # what a node must have, so that a check applies
NOT_REPORTED = "not reported by these GPUs"
LOOK = "Nothing, if the GPU is of another model; else look for Xid in dmesg, and at nvidia-smi -q."


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a probe. `texts` may replace `expected`, `why` and `fix` of its check.

    of_cpus: a fault also for a run on CPUs.
    """

    state: str
    seen: str
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    of_cpus: bool = False


def ok(seen: str, **texts: str) -> Verdict:
    return Verdict(OK, seen, texts)


def note(seen: str, **texts: str) -> Verdict:
    return Verdict(NOTE, seen, texts)


def fault(seen: str, **texts: str) -> Verdict:
    return Verdict(FAULT, seen, texts)


def unknown(reason: str, **texts: str) -> Verdict:
    return Verdict(UNKNOWN, reason, texts)


@dataclasses.dataclass(frozen=True)
class NodeContext:
    """A node, and the run for which it is checked.

    Args:
        paths: name -> folder or bucket of the run; "" if there is none.
        cluster: the run's processes; None for one process.
        has_config: whether the command line has --config.
        measured: rates of the node (node_rates.py); empty before they are measured.
    """

    facts: NodeFacts
    run: RunConfig
    paths: Mapping[str, str]
    cluster: Cluster | None = None
    has_config: bool = True
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def gpus(self) -> Gpus:
        return machine.read_gpus(self.facts)

    @functools.cached_property
    def board(self) -> Board | None:
        return machine.board_of(self.gpus.names)

    @functools.cached_property
    def topology(self) -> GpuTopology:
        """Return the connections of the GPUs that the run may use."""
        return machine.read_topology(self.facts, self.gpus.indices)

    @property
    def several_nodes(self) -> bool:
        """Return whether the run's processes use more GPUs than this node has."""
        if self.cluster is None:
            return False
        ids = self.cluster.local_device_ids or ()
        # If a process is assigned a GPU above the visible ones, CUDA_VISIBLE_DEVICES has renumbered the GPUs.
        gpu_count = self.gpus.on_node if ids and max(ids) >= self.gpus.count else self.gpus.count
        return self.cluster.num_processes * (len(ids) or gpu_count) > gpu_count


Probe = Callable[[NodeContext], Verdict | None]
GpuProbe = Callable[[NodeContext, GpuRow], Verdict | None]


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: its name, what it needs (HOST, DRIVER or GPUS), its texts for the report, and its probe."""

    name: str
    expected: str
    why: str
    fix: str
    probe: Probe | None = None  # None: the check compares nodes (multi_node.py)
    needs: str = GPUS

    def finding(self, verdict: Verdict, node: str = "") -> Finding:
        texts = {"expected": self.expected, "why": self.why, "fix": self.fix, **verdict.texts}
        texts |= {"fix": ""} if verdict.state in (OK, UNKNOWN) else {}
        return Finding(self.name, verdict.state, seen=verdict.seen, node=node, **texts)


class CheckTable(list[Check]):
    """Checks in the order of the report."""

    def add(self, name: str, *, expected: str, why: str, fix: str, needs: str = GPUS) -> Callable[[Probe], Probe]:
        """Return a decorator that adds a check whose probe is the decorated function."""

        def decorate(probe: Probe) -> Probe:
            self.append(Check(name, expected, why, fix, probe, needs))
            return probe

        return decorate

    def run(self, context: NodeContext) -> list[Finding]:
        """Return the findings of all checks. If a probe raises, its check is `unknown`."""
        findings = []
        for check in self:
            try:
                verdict = check.probe(context) if check.probe else None
            except Exception as error:
                verdict = unknown(f"{type(error).__name__}: {error}")
            if verdict and verdict.state == FAULT and context.gpus.absent and not verdict.of_cpus:
                verdict = dataclasses.replace(verdict, state=NOTE)
            findings += [check.finding(verdict)] if verdict else []
        return findings


# ---- most probes of GPUs: a verdict on each GPU, of which the worst counts


def each_gpu(fact: str) -> Callable[[GpuProbe], Probe]:
    """Return a decorator that makes a probe of all GPUs from a function of one GPU. The worst verdict counts.

    If the driver reports `fact` of some GPUs, the others have a note. If it reports it of none, the verdict is `unknown`.
    """

    def decorate(judge: GpuProbe) -> Probe:
        def probe(context: NodeContext) -> Verdict:
            verdicts = {gpu_name(row): verdict for row in context.gpus.rows if fact in row and (verdict := judge(context, row))}
            refused = {gpu_name(row): row["refused"].get(fact, NOT_REPORTED) for row in context.gpus.rows if fact not in row}
            if verdicts:
                unreported = {gpu: note(f"not reported ({why}), and of others", fix=LOOK) for gpu, why in refused.items()}
                return worst(verdicts | unreported, "")
            return unknown(next(iter(refused.values()), NOT_REPORTED))

        return probe

    return decorate


def worst(verdicts: Mapping[str, Verdict], absent: str) -> Verdict:
    """Return the verdict on all GPUs: the worst state, and the values (`seen`) of the GPUs in that state.

    Args:
        verdicts: GPU -> verdict.
        absent: the reason for the verdict `unknown` if `verdicts` is empty.
    """
    for state in (FAULT, NOTE):
        if chosen := [(gpu, verdict) for gpu, verdict in verdicts.items() if verdict.state == state]:
            return dataclasses.replace(chosen[0][1], seen=group_texts([(gpu, verdict.seen) for gpu, verdict in chosen]))
    seen = dict.fromkeys(verdict.seen for verdict in verdicts.values())
    return ok(join_items(list(seen))) if seen else unknown(absent)


# ---- texts


def gpu_name(row: GpuRow) -> str:
    return f"GPU{row['index']}"


def group_texts(pairs: Sequence[tuple[str, str]]) -> str:
    """Format (GPU, text) pairs, with GPUs of equal text together: "GPU0 to GPU7: 500 W of 700"."""
    by_text: dict[str, list[str]] = {}
    for gpu, text in pairs:
        by_text.setdefault(text, []).append(gpu)
    return "; ".join(f"{gpu_range(gpus)}: {text}" for text, gpus in by_text.items())


def gpu_range(gpus: Sequence[str]) -> str:
    numbers = [int(gpu[3:]) for gpu in gpus if gpu[3:].isdigit()]
    consecutive = len(numbers) == len(gpus) > 3 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{gpus[0]} to {gpus[-1]}" if consecutive else join_items(gpus, 8)


def join_items(texts: Sequence[str], most: int = 4) -> str:
    """Format a list with at most `most` items: "a, b, c, d and 3 more"."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
