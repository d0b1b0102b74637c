"""What the fault tests share: a small run in processes of its own, and figures that docs/evidence/faults.md shows.

`./run.sh test tests/campaign --campaign` runs all of them and writes the figures that it measures beside the ledger
(figures.json); docs/evidence/faults.md shows them.
"""

import contextlib
import importlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import runs
from compile_options import QUICKLY

from jaxtrain.checkpoint import Checkpoints

SEED = 20261122


class Faults:
    """A folder with a small config, a compile cache and modules of one's own, and runs in processes of their own."""

    def __init__(self, folder: Path, own: str = "", **overrides: Any):
        self.folder = folder
        self.config = folder / "small.py"
        self.config.write_text(runs.SMALL)
        (folder / "own.py").write_text(own)
        self.overrides = {"data__source": "synthetic", "eval__every_steps": 0, "log__tensorboard": "false", **overrides}
        self.started = 0

    def start(self, workdir: Path, *options: str, env: dict[str, str] | None = None, **overrides: Any) -> runs.Child:
        """A run. options: further arguments, as --process-id=1. The compile cache is shared by all of them."""
        self.started += 1
        chosen = {"paths__cache": self.folder / "cache", **self.overrides, **overrides}
        path = os.pathsep.join([str(self.folder), str(runs.REPO)])
        words = self.folder / f"words-{self.started}.txt"
        return runs.Child(self.config, workdir, words, env={"PYTHONPATH": path, **(env or {})}, options=options, **chosen)

    def processes(self, workdir: Path, number: int, devices: int, **overrides: Any) -> list[runs.Child]:
        """One run of so many processes on 127.0.0.1, with so many CPU devices each."""
        port = free_port()
        env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY}"}
        where = [f"--coordinator=127.0.0.1:{port}", f"--num-processes={number}"]
        return [self.start(workdir, *where, f"--process-id={i}", env=env, **overrides) for i in range(number)]

    def in_process(self, workdir: Path, **overrides: Any) -> int:
        """The same on the 8 devices of this process; the exit code."""
        with self._own():
            return runs.train(self.config, workdir, **{**self.overrides, **overrides})

    def replay(self, bundle: Path, *arguments: str) -> int:
        """A bundle taken again on the 8 devices of this process; the exit code."""
        with self._own():
            return runs.command.main([f"--replay={bundle}", *arguments])

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """`import own` finds this folder's, and not what another test has left behind."""
        sys.modules.pop("own", None)
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))
            sys.modules.pop("own", None)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def saving(workdir: Path, since: float = 0.0) -> bool:
    """Whether a save is under way that began after this time: a step's folder is there and not complete."""
    found = Checkpoints(workdir / "checkpoints")
    try:
        unfinished = [step for step, state in found.states().items() if state == "unfinished"]
        return any(os.stat(found.directory / str(step)).st_ctime > since for step in unfinished)
    except FileNotFoundError:  # swept just now
        return False


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two sets of tensors are the same, bit for bit."""
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def steps_written(workdir: Path) -> int:
    """The newest step in metrics.jsonl, 0 where there is none."""
    return max((line["step"] for line in runs.lines(workdir) if line["kind"] == "train"), default=0)


def dice(name: str) -> random.Random:
    """Random numbers of one campaign, the same each time."""
    return random.Random(f"{SEED} {name}")


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something that is true before long."""
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.002)


class Figures:
    """Figures of a campaign, by name; written to `path`, if any."""

    def __init__(self, path: Path | None):
        self._path = path

    def add(self, name: str, **values: Any) -> None:
        print(f"figures of {name}: {values}", file=sys.stderr)
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = json.loads(self._path.read_text()) if self._path.exists() else {}
            self._path.write_text(json.dumps(known | {name: values}, indent=1) + "\n")
