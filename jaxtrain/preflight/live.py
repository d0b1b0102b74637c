"""This node, as `machine.Machine` asks it. A command that hangs is given up and told to end: nothing waits for it."""

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain import environment, hardware
from jaxtrain.preflight import bounded
from jaxtrain.preflight.bounded import Unmeasured, within
from jaxtrain.preflight.machine import ABSENT, TIMED_OUT, Answer, Disk
from jaxtrain.stores import is_bucket

# nvidia-smi wakes eight GPUs without persistence one after the other, which takes longer than anything else here; and it takes
# for ever on a GPU that has died.
COMMAND_S = 25.0
MOST = 4 << 20  # characters that are read of a command or a file: the kernel's log can be long
# Variables besides those that change a run: where it is, who started it, and how it gets through to the others.
MORE = re.compile(
    r"SLURM_\w+|JAXTRAIN_\w+|OMPI_COMM_WORLD_\w+|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LD_LIBRARY_PATH"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|KUBERNETES_SERVICE_HOST|JOB_COMPLETION_INDEX|JAX_PLATFORMS"
    r"|((https?|all|grpc|no)_proxy)|((HTTPS?|ALL|NO)_PROXY)|XLA_\w+|TF_FORCE_UNIFIED_MEMORY"
)
SECRET = re.compile(r"(?i)token|secret|passw|jwt|api_?key|credential")
PACKAGES = re.compile(r"jax|jaxlib|jax-cuda\w*(-\w+)?|nvidia-[\w-]+")
_started: list[subprocess.Popen[bytes]] = []  # commands of this process, until `end_commands`


def end_commands() -> None:
    """Kills every command that is still on its way, also those whose answer nobody came for.

    One that waits for a dead GPU (state D) ends when the driver lets it, and nothing here waits for that.
    """
    while _started:
        process = _started.pop()
        # The number of one that is over may be another's by now. (One that runs as another user is not ours to end.)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


class Live:
    """The node of this process. `places`: name -> folder that a run reads or writes, whether it is there yet or not."""

    def __init__(self, places: Mapping[str, str], command_s: float = COMMAND_S):
        self._places = places
        self._command_s = command_s
        self._asked: dict[str, _Command] = {}
        self._disks: dict[str, Disk] | None = None

    def ask(self, commands: Iterable[str]) -> None:
        for command in commands:
            if command not in self._asked:
                self._asked[command] = _Command(command, self._command_s)

    def run(self, command: str) -> Answer:
        self.ask([command])
        return self._asked[command].answer()

    def read(self, path: str) -> str | None:
        try:
            with open(path, errors="replace") as file:
                return file.read(MOST)
        except OSError:  # absent, or not for us: the check says that it was not measured
            return None

    def listing(self, path: str) -> list[str]:
        try:
            return within(bounded.GRACE_S, path, lambda: sorted(os.listdir(path)))
        except (OSError, Unmeasured):
            return []

    def environ(self) -> Mapping[str, str]:
        wanted = {name: value for name, value in os.environ.items() if MORE.fullmatch(name)} | environment.changing(os.environ)
        hidden = re.compile(r"(?<=//)[^/@\s]*@")  # user and password of a proxy
        return {name: hidden.sub("", wanted[name]) for name in sorted(wanted) if not SECRET.search(name)}

    def disks(self) -> dict[str, Disk]:
        if self._disks is None:  # asked once: each place may cost its time
            mounts = _mounts(self.read("/proc/self/mountinfo") or "")
            self._disks = {}
            for name, place in {**self._places, "shm": "/dev/shm"}.items():
                if place and not is_bucket(place):
                    path = Path(os.path.abspath(os.path.expanduser(place)))
                    try:
                        self._disks[name] = within(bounded.GRACE_S, place, functools.partial(_disk, path, mounts))
                    except Unmeasured:
                        self._disks[name] = Disk(str(path), 0.0, 0.0, "", "", "", silent=True)
                    except OSError:  # then it is not told
                        continue
        return self._disks

    def packages(self) -> dict[str, dict[str, Any]]:
        found = {}
        for each in importlib.metadata.distributions():
            name = (each.metadata["Name"] or "").lower().replace("_", "-")
            if PACKAGES.fullmatch(name) and name not in found:  # the first on the path is the one that is imported
                found[name] = {"version": each.version, "requires": each.requires or []}
        return dict(sorted(found.items()))

    def facts(self) -> dict[str, Any]:
        def limit(which: int) -> int | None:
            soft = resource.getrlimit(which)[0]
            return None if soft == resource.RLIM_INFINITY else soft

        return {
            "hostname": socket.gethostname(),
            "time_unix": time.time(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(hardware.host_gib(), 1),
            "memlock_bytes": limit(resource.RLIMIT_MEMLOCK),
            "open_files": limit(resource.RLIMIT_NOFILE),
            "clock_synchronised": clock_synchronised(),
        }

    def measured(self) -> dict[str, Any] | None:
        return None


class _Command:
    """A command that is on its way. Its output goes to files: a pipe held open by what it left behind would never end."""

    def __init__(self, command: str, limit_s: float):
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115, they live as long as this
        self._found: Answer | None = None
        self._over = threading.Event()
        try:
            words = shlex.split(command)
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True
            )
        except OSError as error:
            self._found = Answer(ABSENT if isinstance(error, FileNotFoundError) else 126, "", str(error))
            return
        _started.append(self._process)
        self._until = time.monotonic() + limit_s

    def answer(self) -> Answer:
        if self._found is None:
            try:
                code = self._process.wait(max(0.0, self._until - time.monotonic()))
            except subprocess.TimeoutExpired:
                # One that waits for a dead GPU cannot be killed: it is told to end, and not waited for.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                code = TIMED_OUT
            self._found = Answer(code, _text(self._out), _text(self._err))
        return self._found


def _text(file: Any) -> str:
    file.seek(0)
    return file.read(MOST).decode(errors="replace")


def _mounts(text: str) -> list[tuple[str, str]]:
    """(mount point, kind of file system) of /proc/self/mountinfo, the last mounted first."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) > 4 and after:
            found.append((before.split()[4].replace("\\040", " "), after.split()[0]))
    return found[::-1]


def _disk(path: Path, mounts: list[tuple[str, str]]) -> Disk:
    """The file system of `path`, or of its nearest parent that is there. Raises OSError."""
    there = next(p for p in (path, *path.parents) if p.exists()).resolve()
    size = os.statvfs(there)
    holding = [(mount, kind) for mount, kind in mounts if there.is_relative_to(mount)]
    mount, kind = max(holding, key=lambda m: len(m[0]), default=("", "unknown"))
    scale = size.f_frsize / 2**30
    device = str(os.stat(there).st_dev)
    return Disk(str(path), round(size.f_blocks * scale, 2), round(size.f_bavail * scale, 2), device, kind, mount)


def clock_synchronised() -> bool | None:
    """Whether the kernel's clock follows a time server, by adjtimex(2), which any user may call; None: it does not tell."""
    unsynchronised = 5  # TIME_ERROR
    try:
        # struct timex is 208 bytes; all zero asks, and changes nothing.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != unsynchronised
