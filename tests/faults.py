"""Helpers of the fault tests: a small run in child processes or in this one."""

import contextlib
import importlib
import os
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import runs
from compile_options import QUICKLY

from jaxtrain.checkpoint import Checkpoints

SEED = 20261122


class Faults:
    """A folder with a small config, a compile cache and a module `own`. Its methods train in child processes or in this one."""

    def __init__(self, folder: Path, own: str = "", **overrides: Any):
        self.folder = folder
        self.config = folder / "small.py"
        self.config.write_text(runs.SMALL)
        (folder / "own.py").write_text(own)
        self.overrides = {"data__source": "synthetic", "eval__every_steps": 0, "log__tensorboard": "false", **overrides}
        self.started = 0

    def start(self, workdir: Path, *options: str, env: dict[str, str] | None = None, **overrides: Any) -> runs.Child:
        """Start a run in a child process. options: more command-line arguments. All runs share the folder's compile cache."""
        self.started += 1
        chosen = {"paths__cache": self.folder / "cache", **self.overrides, **overrides}
        path = os.pathsep.join([str(self.folder), str(runs.REPO)])
        words = self.folder / f"words-{self.started}.txt"
        return runs.Child(self.config, workdir, words, env={"PYTHONPATH": path, **(env or {})}, options=options, **chosen)

    def processes(self, workdir: Path, number: int, devices: int, **overrides: Any) -> list[runs.Child]:
        """Start one run of `number` processes on 127.0.0.1, with `devices` CPU devices each."""
        port = free_port()
        env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY}"}
        where = [f"--coordinator=127.0.0.1:{port}", f"--num-processes={number}"]
        return [self.start(workdir, *where, f"--process-id={i}", env=env, **overrides) for i in range(number)]

    def in_process(self, workdir: Path, **overrides: Any) -> int:
        """Train in this process, on its 8 devices, and return the exit code."""
        with self._own():
            return runs.train(self.config, workdir, **{**self.overrides, **overrides})

    def replay(self, bundle: Path, *arguments: str) -> int:
        """Replay a bundle in this process, on its 8 devices, and return the exit code."""
        with self._own():
            return runs.command.main([f"--replay={bundle}", *arguments])

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """Let `import own` find this folder's module, even if an earlier test has imported another module named `own`."""
        sys.modules.pop("own", None)
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))
            sys.modules.pop("own", None)


def free_port() -> int:
    """Return a port that nobody uses, below those that Linux gives to connections: none takes it before it is used."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def saving(workdir: Path, since: float = 0.0) -> bool:
    """Return whether a save that began after `since` (seconds since 1970) is under way: its step is not complete yet."""
    found = Checkpoints(workdir / "checkpoints")
    try:
        unfinished = [step for step, state in found.states().items() if state == "unfinished"]
        return any(os.stat(found.directory / str(step)).st_ctime > since for step in unfinished)
    except FileNotFoundError:  # the run has just removed the folder
        return False


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two sets of tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def steps_written(workdir: Path) -> int:
    """Return the newest step in metrics.jsonl, 0 if there is none."""
    return max((line["step"] for line in runs.lines(workdir) if line["kind"] == "train"), default=0)


def dice(name: str) -> random.Random:
    """Return the random generator of the fault test `name`. Its seed is the same in every campaign."""
    return random.Random(f"{SEED} {name}")
