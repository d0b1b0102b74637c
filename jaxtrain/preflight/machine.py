"""The one layer between the checks and a node: commands with a time limit, files, limits, disks. Or a recording of all that.

A recording is a folder with commands/ (a file a command: the command, its exit code, what it printed), files/ (copies, by path)
and a few JSON files. In base.txt it may name another recording to stand on: what it does not hold itself comes from there, so
a fault is one file over a healthy node.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

TIMED_OUT = -1  # as the exit code of a command that was given up
ABSENT = 127  # as a shell says it of a command that is not there
STDERR = "--- stderr"
FACTS = ("facts", "environ", "disks", "packages", "listings", "measured")  # the JSON files of a recording


class RecordingError(ValueError):
    """A folder that is no recording of a node."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said. `code` may be TIMED_OUT or ABSENT."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def told(self) -> bool:
        """Whether it did what it was asked."""
        return self.code == 0

    @property
    def why(self) -> str:
        """Why it did not, in a line."""
        if self.code == TIMED_OUT:
            return "it did not answer in time"
        if self.code == ABSENT:
            return "there is no such command"
        said = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        return said[0] if said else f"exit code {self.code}"


@dataclasses.dataclass(frozen=True)
class Disk:
    """The file system that a place is on. GiB; `device` tells two file systems of one node apart. `silent`: it did not answer
    in time, and nothing else is known."""

    path: str
    total_gib: float
    free_gib: float
    device: str
    kind: str  # of file system: ext4, nfs4, tmpfs
    mount: str
    silent: bool = False


class Machine(Protocol):
    """What the checks may ask. Nothing here raises: what the node does not tell is None, empty, or an answer that says why."""

    def ask(self, commands: Iterable[str]) -> None:
        """Begins all of these at once; `run` then waits for its own."""
        ...

    def run(self, command: str) -> Answer: ...

    def read(self, path: str) -> str | None:
        """A small text file; None where there is none, or it may not be read."""
        ...

    def listing(self, path: str) -> list[str]:
        """The names in a folder, sorted."""
        ...

    def environ(self) -> Mapping[str, str]:
        """The variables that matter to a run, and no others: a recording must not carry secrets."""
        ...

    def disks(self) -> dict[str, Disk]:
        """By the name of the run's place: data, checkpoints, cache, shm."""
        ...

    def packages(self) -> dict[str, dict[str, Any]]:
        """JAX's and NVIDIA's wheels: {name: {version, requires}}."""
        ...

    def facts(self) -> dict[str, Any]:
        """hostname, time_unix, cpus, memory_gib, memlock_bytes and open_files (None: unlimited), clock_synchronised (None: it
        does not tell)."""
        ...

    def measured(self) -> dict[str, Any] | None:
        """What was measured on a recorded node; None on a live one."""
        ...


def file_name(command: str) -> str:
    """The file of a recording that holds a command's answer: its words, shortened where there are many."""
    words = re.sub(r"[^\w.=-]+", "_", command).strip("_")
    return (words if len(words) <= 80 else words.partition("=")[0] + "=" + words.partition("=")[2][:40]) + ".txt"


class Recorded:
    """A node as a folder of recorded answers tells it. Raises RecordingError where the folder is none, or names no base."""

    def __init__(self, folder: Path):
        self._folders = list(_layers(folder))
        if not any((each / f"{name}.json").exists() for each in self._folders for name in ("facts", "environ")):
            raise RecordingError(f"{folder} holds no facts.json, and no base.txt that names a recording")

    def _find(self, name: str) -> Path | None:
        return next((found for folder in self._folders if (found := folder / name).exists()), None)

    def _json(self, name: str) -> Any:
        found = self._find(f"{name}.json")
        if found is None:
            return None
        try:
            return json.loads(found.read_text())
        except ValueError as error:
            raise RecordingError(f"{found} is no JSON: {error}") from None

    def ask(self, commands: Iterable[str]) -> None:
        return None

    def run(self, command: str) -> Answer:
        found = self._find(f"commands/{file_name(command)}")
        if found is None:
            return Answer(ABSENT)
        lines = found.read_text().split("\n", 2)
        if len(lines) < 3 or not (code := re.fullmatch(r"exit (\d+|timeout)", lines[1])):
            raise RecordingError(f"{found} must begin with '$ COMMAND' and 'exit CODE'")
        out, _, err = lines[2].partition(f"{STDERR}\n")
        return Answer(TIMED_OUT if code[1] == "timeout" else int(code[1]), out, err)

    def read(self, path: str) -> str | None:
        found = self._find(f"files{path}")
        return found.read_text() if found else None

    def listing(self, path: str) -> list[str]:
        return (self._json("listings") or {}).get(path, [])

    def environ(self) -> Mapping[str, str]:
        return self._json("environ") or {}

    def disks(self) -> dict[str, Disk]:
        return {name: Disk(**fields) for name, fields in (self._json("disks") or {}).items()}

    def packages(self) -> dict[str, dict[str, Any]]:
        return self._json("packages") or {}

    def facts(self) -> dict[str, Any]:
        return self._json("facts") or {}

    def measured(self) -> dict[str, Any] | None:
        return self._json("measured")


def _layers(folder: Path) -> Iterable[Path]:
    for _ in range(9):
        if not folder.is_dir():
            raise RecordingError(f"{folder} is no folder")
        yield folder
        base = folder / "base.txt"
        if not base.exists():
            return
        folder = (folder / base.read_text().strip()).resolve()
    raise RecordingError(f"{folder}: more than 9 recordings stand on each other, or in a circle")


class Recording:
    """A machine that also writes down what another one answers, into `folder`."""

    def __init__(self, machine: Machine, folder: Path):
        self._machine, self._folder = machine, folder
        self._listings: dict[str, list[str]] = {}

    def _keep(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _kept(self, name: str, found: Any) -> Any:
        plain = {k: dataclasses.asdict(v) if isinstance(v, Disk) else v for k, v in found.items()}
        self._keep(f"{name}.json", json.dumps(plain, indent=1) + "\n")
        return found

    def ask(self, commands: Iterable[str]) -> None:
        self._machine.ask(commands)

    def run(self, command: str) -> Answer:
        found = self._machine.run(command)
        code = "timeout" if found.code == TIMED_OUT else found.code
        err = f"{STDERR}\n{found.err}" if found.err else ""
        self._keep(f"commands/{file_name(command)}", f"$ {command}\nexit {code}\n{found.out}{err}")
        return found

    def read(self, path: str) -> str | None:
        found = self._machine.read(path)
        if found is not None:
            self._keep(f"files{path}", found)
        return found

    def listing(self, path: str) -> list[str]:
        self._listings[path] = self._machine.listing(path)
        return self._kept("listings", self._listings)[path]

    def environ(self) -> Mapping[str, str]:
        return self._kept("environ", self._machine.environ())

    def disks(self) -> dict[str, Disk]:
        return self._kept("disks", self._machine.disks())

    def packages(self) -> dict[str, dict[str, Any]]:
        return self._kept("packages", self._machine.packages())

    def facts(self) -> dict[str, Any]:
        return self._kept("facts", self._machine.facts())

    def measured(self) -> dict[str, Any] | None:
        return self._machine.measured()

    def keep_measured(self, found: Mapping[str, Any]) -> None:
        """What was measured on the node, beside what it answered."""
        self._kept("measured", dict(found))
