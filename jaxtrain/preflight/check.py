"""What a check is, and what checks look at. A check is a function of a Node that returns one or more `Check`s."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxtrain.config import RunConfig
from jaxtrain.distributed import Cluster
from jaxtrain.preflight.boards import Board
from jaxtrain.preflight.machine import Machine, RecordingError
from jaxtrain.preflight.smi import Gpus

OK, NOTE, FAULT, UNKNOWN = "ok", "note", "FAULT", "not measured"
MISSING = "missing"  # a process of the run did not come, or was lost: no fault that is known, and worth another try


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    state: ok; note, which is worth knowing; FAULT, the run should not start; or not measured, for the reason in `seen`.
    """

    name: str
    state: str
    expected: str
    seen: str
    why: str = ""
    fix: str = ""
    node: str = ""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is checked: what is expected, why it matters, and how to put it right. Its methods are the verdicts."""

    name: str
    expected: str
    why: str
    fix: str

    def ok(self, seen: str) -> Check:
        return Check(self.name, OK, self.expected, seen, self.why)

    def note(self, seen: str, fix: str = "") -> Check:
        return Check(self.name, NOTE, self.expected, seen, self.why, fix or self.fix)

    def fault(self, seen: str, fix: str = "") -> Check:
        return Check(self.name, FAULT, self.expected, seen, self.why, fix or self.fix)

    def missing(self, seen: str) -> Check:
        return Check(self.name, MISSING, self.expected, seen, self.why, self.fix)

    def unknown(self, reason: str) -> Check:
        return Check(self.name, UNKNOWN, self.expected, reason, self.why)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The run that the node is checked for.

    places: name -> folder or bucket, "" for none. cluster: the processes it is one of. named: a config was given for it.
    """

    run: RunConfig
    places: Mapping[str, str]
    cluster: Cluster | None
    named: bool = True


@dataclasses.dataclass(frozen=True)
class Node:
    """A node, its GPUs as nvidia-smi tells them, and the run it is checked for. `board`: None where it is not in the table."""

    machine: Machine
    asked: Asked
    gpus: Gpus
    board: Board | None

    @property
    def several_nodes(self) -> bool:
        """Whether the run has processes on other nodes too: more of them than this node has GPUs for."""
        cluster = self.asked.cluster
        if cluster is None:
            return False
        own = cluster.local_device_ids or ()
        # A process that is to take a GPU beyond those it sees was left one of the node's by somebody (variables.py).
        here = self.gpus.on_node if own and max(own) >= self.gpus.count else self.gpus.count
        return cluster.num_processes * (len(own) or here) > here


Part = tuple[Subject, Callable[[Node], Check | Iterable[Check]]]


def run(parts: Sequence[Part], node: Node) -> Iterable[Check]:
    """What each part finds. One that cannot make sense of what the node says is not measured, and the others are."""
    for subject, part in parts:
        try:
            found = part(node)
            yield from [found] if isinstance(found, Check) else list(found)
        except RecordingError:
            raise
        except Exception as error:  # nodes say what nobody has seen yet
            yield subject.unknown(f"{type(error).__name__}: {error}")


def grouped(parts: Sequence[tuple[str, str]]) -> str:
    """(GPU, what is wrong with it) in words, those that are alike together: GPU0 to GPU7: 500 W of 700."""
    texts: dict[str, list[str]] = {}
    for who, text in parts:
        texts.setdefault(text, []).append(who)
    return "; ".join(
        f"{f'{at[0]} to {at[-1]}' if len(at) > 3 and in_row(at) else listed(at, 8)}: {text}" for text, at in texts.items()
    )


def in_row(names: Sequence[str]) -> bool:
    """Whether names such as GPU3 are counted on without a gap."""
    numbers = [int(name.lstrip("GPU")) for name in names if name.lstrip("GPU").isdigit()]
    return len(numbers) == len(names) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def listed(parts: Sequence[str], most: int = 4) -> str:
    """a, b, c, d and 3 more."""
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")
