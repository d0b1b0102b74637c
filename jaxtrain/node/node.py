"""A node as the checks read it: output of commands, files, variables, disks, packages, limits.

`LocalNode` reads the node of this process and can save a recording of it. `RecordedNode` reads a recording, so that the checks
run anywhere. A recording is a folder. commands/ has a file per command, with the command, its exit code and its output.
files/ has copies of files, by path. PARTS names the JSON files. base.txt may name another recording, which is read for
missing files.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import json
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import environment, hardware
from jaxtrain.config.stores import is_bucket

# Without persistence mode, nvidia-smi initializes eight GPUs one after the other. Every other command takes less time.
COMMAND_S = 25.0
ANSWER_S = 3.0  # for calls that return at once on a healthy system
MAX_CHARACTERS = 4 << 20  # read of a command's output or a file, since the kernel log can be long
TIMED_OUT, ABSENT, NOT_EXECUTABLE = -1, 127, 126  # exit codes of commands that did not finish
STDERR = "--- stderr"
PARTS = ("facts", "environ", "disks", "packages", "listings", "measured")
MAX_BASES = 9
# Variables that are read in addition to those that change a run: scheduler, launcher, libraries, proxies.
VARIABLES = re.compile(
    r"SLURM_\w+|JAXTRAIN_\w+|OMPI_COMM_WORLD_\w+|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LD_LIBRARY_PATH"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|KUBERNETES_SERVICE_HOST|JOB_COMPLETION_INDEX|JAX_PLATFORMS"
    r"|((https?|all|grpc|no)_proxy)|((HTTPS?|ALL|NO)_PROXY)"
)
SECRET = re.compile(r"(?i)token|secret|passw|jwt|api_?key|credential")
PROXY_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")
PACKAGES = re.compile(r"jax|jaxlib|jax-cuda\w*(-\w+)?|nvidia-[\w-]+")


class Unanswered(Exception):
    """A call that may hang did not return in time."""


class RecordingError(ValueError):
    """A folder is not a recording of a node."""


def call_with_timeout[T](seconds: float, subject: str, function: Callable[[], T]) -> T:
    """Return the result of `function`, or raise its exception. If it hangs, as on a lost NFS server, its thread is abandoned.

    Raises:
        Unanswered: `function` has not returned after `seconds`. The message names `subject`.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="call with timeout", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise Unanswered(f"{subject} did not answer within {seconds:.0f} s")
    return results[0]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def succeeded(self) -> bool:
        return self.code == 0

    @property
    def error(self) -> str:
        """Return the reason why the command failed, in one line."""
        if self.code == TIMED_OUT:
            return "it did not answer in time"
        if self.code == ABSENT:
            return "there is no such command"
        lines = [line.strip() for line in f"{self.err}\n{self.out}".splitlines() if line.strip()]
        return lines[0] if lines else f"exit code {self.code}"


@dataclasses.dataclass(frozen=True)
class Disk:
    """The file system of a path. silent: whether reading it took too long; then all other fields but `path` are empty."""

    path: str
    total_gib: float
    free_gib: float
    device: str  # st_dev
    kind: str  # type of the file system: ext4, nfs4, tmpfs
    mount: str
    silent: bool = False


def file_name(command: str) -> str:
    """Return the name of a command's file in a recording: the words of the command, shortened if they are long."""
    words = re.sub(r"[^\w.=-]+", "_", command).strip("_")
    return (words if len(words) <= 80 else words.partition("=")[0] + "=" + words.partition("=")[2][:40]) + ".txt"


def not_of_a_recording(folder: Path) -> list[str]:
    """Return the names in a folder that `LocalNode.save` does not write, sorted; [] if the folder does not exist."""
    own = {"commands", "files", *(f"{part}.json" for part in PARTS)}
    return sorted(path.name for path in folder.iterdir() if path.name not in own) if folder.is_dir() else []


class RecordedNode:
    """A node from a recording. Raises RecordingError if the folder is not a recording."""

    def __init__(self, folder: Path):
        self._folders = [folder]
        while (base := self._folders[-1] / "base.txt").exists():
            self._folders.append((base.parent / base.read_text(encoding="utf-8").strip()).resolve())
            if len(self._folders) > MAX_BASES:
                raise RecordingError(f"{folder}: base.txt files form a chain of more than {MAX_BASES} recordings, or a circle")
        if not self._folders[-1].is_dir():
            raise RecordingError(f"{self._folders[-1]} is no folder")
        if not any(self._find(f"{name}.json") for name in ("facts", "environ")):
            raise RecordingError(f"{folder} holds no facts.json, and no base.txt that names a recording")
        self.facts: dict[str, Any] = self._json("facts")
        self.environ: dict[str, str] = self._json("environ")
        self.disks = {name: Disk(**fields) for name, fields in self._json("disks").items()}
        self.packages: dict[str, dict[str, Any]] = self._json("packages")
        self.measured: dict[str, Any] = self._json("measured")
        self._listings: dict[str, list[str]] = self._json("listings")

    def start(self, commands: Iterable[str]) -> None:
        """Do nothing, since the answers are recorded."""

    def run(self, command: str) -> Answer:
        path = self._find(f"commands/{file_name(command)}")
        if path is None:
            return Answer(ABSENT)
        lines = path.read_text(encoding="utf-8").split("\n", 2)
        if len(lines) < 3 or not (code := re.fullmatch(r"exit (\d+|timeout)", lines[1])):
            raise RecordingError(f"{path} must begin with '$ COMMAND' and 'exit CODE'")
        out, _, err = lines[2].partition(f"{STDERR}\n")
        return Answer(TIMED_OUT if code[1] == "timeout" else int(code[1]), out, err)

    def read(self, path: str) -> str | None:
        found = self._find(f"files{path}")
        return found.read_text(encoding="utf-8") if found else None

    def listing(self, path: str) -> list[str]:
        return self._listings.get(path, [])

    def clock(self) -> float | None:
        return self.facts.get("time_unix")

    def close(self) -> None:
        """Do nothing, since no command runs."""

    def _find(self, name: str) -> Path | None:
        return next((path for folder in self._folders if (path := folder / name).exists()), None)

    def _json(self, name: str) -> Any:
        path = self._find(f"{name}.json")
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path else {}
        except ValueError as error:
            raise RecordingError(f"{path} is no JSON: {error}") from None


class LocalNode:
    """The node of this process. Methods that read it never raise. A check reports an answer that is None, empty or an error.

    Args:
        paths: name -> folder or bucket that the run reads or writes; the folder need not exist yet.
        command_s: time limit of a command in seconds. A command that hangs is killed, without a wait for its end.
    """

    def __init__(self, paths: Mapping[str, str], command_s: float = COMMAND_S):
        self.measured: dict[str, Any] = {}  # empty, since this process measures the node
        self._paths, self.command_s = paths, command_s
        self._commands: dict[str, _Command] = {}
        self._files: dict[str, str] = {}
        self._listings: dict[str, list[str]] = {}

    def start(self, commands: Iterable[str]) -> None:
        """Start all these commands at the same time. `run` waits for one command."""
        for command in commands:
            if command not in self._commands:
                self._commands[command] = _Command(command, self.command_s)

    def run(self, command: str) -> Answer:
        self.start([command])
        return self._commands[command].answer()

    def read(self, path: str) -> str | None:
        """Return the text of a small file; None if it is absent or not readable."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                self._files[path] = file.read(MAX_CHARACTERS)
                return self._files[path]
        except OSError:
            return None

    def listing(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; empty if it cannot be read."""
        try:
            self._listings[path] = call_with_timeout(ANSWER_S, path, lambda: sorted(os.listdir(path)))
        except (OSError, Unanswered):
            self._listings[path] = []
        return self._listings[path]

    def clock(self) -> float | None:
        """Return the node's time in Unix seconds."""
        return time.time()

    @functools.cached_property
    def environ(self) -> Mapping[str, str]:
        """Return the environment variables that change a run or locate its processes.

        Secrets are left out, since a recording may be sent to other people.
        """
        chosen = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
        chosen |= environment.select_variables(os.environ)
        return {name: PROXY_PASSWORD.sub("", chosen[name]) for name in sorted(chosen) if not SECRET.search(name)}

    @functools.cached_property
    def disks(self) -> dict[str, Disk]:
        """Return the file systems of the run's paths and of /dev/shm."""
        mountinfo = self.read("/proc/self/mountinfo") or ""
        found = {}
        for name, text in {**self._paths, "shm": "/dev/shm"}.items():
            if not text or is_bucket(text):
                continue
            path = Path(os.path.abspath(os.path.expanduser(text)))
            try:
                found[name] = call_with_timeout(ANSWER_S, text, functools.partial(_disk, path, mountinfo))
            except Unanswered:
                found[name] = Disk(str(path), 0.0, 0.0, "", "", "", silent=True)
            except OSError:  # a check reports the missing disk
                continue
        return found

    @functools.cached_property
    def packages(self) -> dict[str, dict[str, Any]]:
        """Return JAX's and NVIDIA's wheels: name -> version, requires."""
        found = {}
        for each in importlib.metadata.distributions():
            name = (each.metadata["Name"] or "").lower().replace("_", "-")
            if PACKAGES.fullmatch(name) and name not in found:  # Python imports the first one on its path
                found[name] = {"version": each.version, "requires": each.requires or []}
        return dict(sorted(found.items()))

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Return host name, time, CPUs, memory and limits. None means no limit, or that the kernel does not report it."""

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

    def save(self, folder: Path, measured: Mapping[str, Any]) -> None:
        """Write everything that was read, and the rates in `measured`, as a recording to a folder."""
        texts = {f"files{path}": text for path, text in self._files.items()}
        for command, started in self._commands.items():
            answer = started.answer()
            code = "timeout" if answer.code == TIMED_OUT else answer.code
            err = f"{STDERR}\n{answer.err}" if answer.err else ""
            texts[f"commands/{file_name(command)}"] = f"$ {command}\nexit {code}\n{answer.out}{err}"
        disks = {name: dataclasses.asdict(disk) for name, disk in self.disks.items()}
        parts = (self.facts, dict(self.environ), disks, self.packages, self._listings, dict(measured))
        texts |= {f"{name}.json": json.dumps(part, indent=1) + "\n" for name, part in zip(PARTS, parts, strict=True)}
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Kill the commands that still run, without waiting for them.

        A command inside a hanging driver (state D) ends when the driver returns.
        """
        for command in self._commands.values():
            command.kill()


Node = LocalNode | RecordedNode


class _Command:
    """A running command. Its output goes to files, because a pipe would stay open until all child processes have ended."""

    def __init__(self, command: str, limit_s: float):
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115, open as long as this object
        self._answer: Answer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = time.monotonic() + limit_s
        try:
            self._process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, start_new_session=True
            )
        except OSError as error:
            self._answer = Answer(ABSENT if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE, "", str(error))

    def answer(self) -> Answer:
        if self._answer is None and self._process:
            try:
                code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                code = TIMED_OUT
            self._answer = Answer(code, _text(self._out), _text(self._err))
        return self._answer or Answer(ABSENT)

    def kill(self) -> None:
        # After the command's end, another process may have its id. A process of another user cannot be killed.
        if self._process and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _text(file: Any) -> str:
    file.seek(0)
    return file.read(MAX_CHARACTERS).decode(errors="replace")


def _disk(path: Path, mountinfo: str) -> Disk:
    """Return the file system of a path, or of its nearest existing parent. Raises OSError.

    Args:
        mountinfo: the text of /proc/self/mountinfo.
    """
    existing = next(p for p in (path, *path.parents) if p.exists()).resolve()
    size = os.statvfs(existing)
    mount, kind = "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = (part.split() for part in line.partition(" - "))
        point = before[4].replace("\\040", " ") if len(before) > 4 and after else ""
        if point and existing.is_relative_to(point) and len(point) >= len(mount):  # the last mount at a point counts
            mount, kind = point, after[0]
    scale = size.f_frsize / 2**30
    device = str(os.stat(existing).st_dev)
    return Disk(str(path), round(size.f_blocks * scale, 2), round(size.f_bavail * scale, 2), device, kind, mount)


def clock_synchronised() -> bool | None:
    """Return whether the kernel's clock follows a time server, by adjtimex(2); None if the system has no such call."""
    unsynchronised = 5  # TIME_ERROR
    try:
        # struct timex has 208 bytes. If all are zero, adjtimex reads the state and changes nothing.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != unsynchronised
