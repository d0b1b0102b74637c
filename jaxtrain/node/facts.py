"""What preflight reads of a node: one JSON document, which `--record` writes to a folder and `--recorded` reads from it.

The GPUs are read by NVML. nvidia-smi's text is read for the two things that NVML does not have: which network cards are near
each GPU (`topo -m`), and vboost (`boost-slider`). NVML and the commands run at the same time, each in a process of its own,
because a call into a driver that hangs can be neither ended nor abandoned by the process that made it.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import environment
from jaxtrain.config.stores import is_bucket
from jaxtrain.metrics.files import write_atomic
from jaxtrain.train.child import open_program

FILE = "facts.json"  # of a recording; its key "base" may name the folder of another one, of which it is a JSON merge patch
MAX_BASES = 9
# Without persistence mode, the driver initializes eight GPUs one after the other. Every other command takes less time.
COMMAND_S = 25.0
ANSWER_S = 3.0  # for calls that return at once on a healthy system
KILLED_S = 1.0  # wait for a killed command to end; a process in a hanging driver does not
MAX_CHARACTERS = 16 << 20  # of a file or, at its end, of a command's output
ABSENT = 127  # exit code of a command that does not exist
COMMANDS = TOPOLOGY, BOOST, LOG = ("nvidia-smi topo -m", "nvidia-smi boost-slider --list", "dmesg")
NVML = shlex.join([sys.executable, "-m", "jaxtrain.metrics.gpu_facts"])  # a further argument names its file
# Variables that are read in addition to those that change a run: scheduler, launcher, libraries, proxies.
VARIABLES = re.compile(
    r"SLURM_\w+|JAXTRAIN_\w+|OMPI_COMM_WORLD_\w+|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LD_LIBRARY_PATH"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|KUBERNETES_SERVICE_HOST|JOB_COMPLETION_INDEX|JAX_PLATFORMS"
    r"|((https?|all|grpc|no)_proxy)|((HTTPS?|ALL|NO)_PROXY)"
)
SECRET = re.compile(r"(?i)token|secret|passw|(^|_)pass(_|$)|jwt|api_?key|(?<!_in)_key$|credential|webhook")
PASSWORD = re.compile(r"(?<=//)[^/\s]*@")  # and the user's name, before the host of an address
PACKAGES = re.compile(r"jax|jaxlib|jax-cuda\w*(-\w+)?|nvidia-[\w-]+")
DRIVER, DRIVER_GPUS, INFINIBAND = "/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus", "/sys/class/infiniband"
GOVERNOR, GOVERNOR_DRIVER = (f"/sys/devices/system/cpu/cpu0/cpufreq/scaling_{n}" for n in ("governor", "driver"))
FILES = (
    *(DRIVER, "/proc/uptime", "/proc/self/status", "/proc/sys/kernel/numa_balancing", "/sys/devices/system/node/online"),
    *(GOVERNOR, GOVERNOR_DRIVER),
)


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

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:  # raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=call, name="call with timeout", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise Unanswered(f"{subject} did not answer within {seconds:.0f} s")
    return results[0]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Exit code and output of a command. code: None if it did not end in time."""

    code: int | None = None
    out: str = ""

    @property
    def error(self) -> str:
        """Return the reason why the command failed, in one line; "" if it succeeded."""
        if self.code is None:
            return "it did not answer in time"
        lines = [line.strip() for line in self.out.splitlines() if line.strip()]
        reason = "there is no such command" if self.code == ABSENT else lines[-1] if lines else f"exit code {self.code}"
        return reason if self.code else ""


@dataclasses.dataclass(frozen=True)
class Disk:
    """The file system of a path. silent: whether reading it took too long; then all other fields but `path` are empty."""

    path: str
    total_gib: float = 0.0
    free_gib: float = 0.0
    kind: str = ""  # type of the file system: ext4, nfs4, tmpfs
    silent: bool = False


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """A node, as JSON.

    Attributes:
        memlock_bytes, open_files: limits of this process; None if there is no limit.
        environ: variables that change a run or locate its processes. Secrets are left out, since recordings are sent around.
        packages: JAX's and NVIDIA's wheels: name -> version, requires.
        disks: name of a path of the run, or "shm" -> its file system, or the one of its nearest existing parent.
        files: path -> text of a file; a file that cannot be read is left out.
        folders: path -> names in a folder, sorted.
        commands: command -> answer. Of the kernel's log, only the driver's lines.
        nvml: result of `gpu_facts.read_gpu_facts`, or `error` and `hangs` if its process failed.
        measured: rates of the node (node_rates.py), in a recording.
    """

    hostname: str
    time_unix: float | None = None
    memlock_bytes: int | None = None
    open_files: int | None = None
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    packages: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    disks: dict[str, Disk] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    folders: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    commands: dict[str, Answer] = dataclasses.field(default_factory=dict)
    nvml: dict[str, Any] = dataclasses.field(default_factory=dict)
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, command: str) -> Answer:
        return self.commands.get(command, Answer(ABSENT))

    def read(self, path: str) -> str:
        """Return the text of a file, without white space at its ends; "" if it could not be read."""
        return self.files.get(path, "").strip()

    def save(self, folder: Path) -> None:
        """Write the facts as a recording."""
        write_atomic(folder / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


# ---- recordings


def read_recording(folder: Path) -> NodeFacts:
    """Return the facts that a recording has. Raises RecordingError."""
    chain: list[dict[str, Any]] = []
    path, base = folder, "."
    try:
        while base:
            path = path / base
            chain.append(json.loads((path / FILE).read_text(encoding="utf-8")))
            base = chain[-1].pop("base", "")
            if len(chain) > MAX_BASES:
                raise ValueError(f"bases form a chain of more than {MAX_BASES} recordings, or a circle")
        merged = functools.reduce(merge_patch, reversed(chain), {})
        gpus = merged.get("nvml", {}).get("gpus", {})
        for name, value, kind in (
            *((f"nvml.gpus.{i}", gpu, dict) for i, gpu in gpus.items() if int(i) >= 0),
            *_shapes(merged),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}")
        types = {"disks": Disk, "commands": Answer}
        decoded = {key: {k: constructor(**v) for k, v in merged.get(key, {}).items()} for key, constructor in types.items()}
        return NodeFacts(**{**merged, **decoded})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordingError(f"{path / FILE} is no recording: {error}") from None


def _shapes(merged: Mapping[str, Any]) -> Iterator[tuple[str, Any, type]]:
    """Yield (name, value, the type that it should have) of the values that are used before any check runs."""
    yield from (("hostname", merged.get("hostname"), str), ("measured", merged.get("measured", {}), dict))
    kinds = {"environ": str, "files": str, "folders": list, "packages": dict}
    for key, kind in kinds.items():
        yield from ((f"{key}.{name}", value, kind) for name, value in merged.get(key, {}).items())
    yield from ((f"commands.{name}", value.get("out", ""), str) for name, value in merged.get("commands", {}).items())


def merge_patch(base: Any, patch: Any) -> Any:
    """Return `base` with a JSON merge patch (RFC 7396): objects are merged, null removes a key, all else is replaced."""
    if not isinstance(patch, dict):
        return patch
    out = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        out[key] = merge_patch(out.get(key), value)
    return {key: value for key, value in out.items() if value is not None or key not in patch}


# ---- this node


def read_facts(paths: Mapping[str, str], command_s: float = COMMAND_S) -> NodeFacts:
    """Return the facts of this node. What cannot be read is left out, and what hangs is given up.

    Args:
        paths: name -> folder or bucket that the run reads or writes; the folder need not exist yet.
        command_s: time limit in seconds of NVML and of each command. A command that hangs is killed.
    """
    with contextlib.ExitStack() as stack:  # at its end, also after Ctrl-C, the commands that still run are killed
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {command: stack.enter_context(_start(command, folder / str(i))) for i, command in enumerate(COMMANDS)}
        nvml_file = folder / "nvml.json"
        running[NVML] = stack.enter_context(_start(f"{NVML} {shlex.quote(str(nvml_file))}", folder / "nvml"))
        deadline = time.monotonic() + command_s
        environ, cards = _variables(), _listing(INFINIBAND)
        ports = [f"{INFINIBAND}/{card}/ports/1/{field}" for card in cards for field in ("state", "rate")]
        libraries = [path for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path]
        files = {path: _read_text(path) for path in (*FILES, *ports)}
        folders = {path: _listing(path) for path in (DRIVER_GPUS, *libraries)} | {INFINIBAND: cards}
        disks, packages = _disks(paths), _packages()
        answers = {command: wait(deadline) for command, wait in running.items()}
        nvml, log = answers.pop(NVML), answers[LOG]
        try:
            gpus = json.loads(_read_text(str(nvml_file)))
        except ValueError:
            gpus = {"error": f"NVML: {nvml.error or 'no answer'}", "hangs": nvml.code is None}
    if not log.error:
        answers[LOG] = Answer(0, "".join(line for line in log.out.splitlines(keepends=True) if "NVRM" in line))
    return NodeFacts(
        socket.gethostname(),
        time.time(),
        _limit(resource.RLIMIT_MEMLOCK),
        _limit(resource.RLIMIT_NOFILE),
        environ,
        packages,
        disks,
        {path: content for path, content in files.items() if content},
        {path: names for path, names in folders.items() if names},
        answers,
        gpus,
    )


@contextlib.contextmanager
def _start(command: str, log: Path) -> Iterator[Callable[[float], Answer]]:
    """Start a command, and yield a function that waits for its answer until a deadline (time.monotonic)."""
    words = shlex.split(command)
    if not shutil.which(words[0]):
        yield lambda _: Answer(ABSENT)
        return
    with open_program(words, log, killed_s=KILLED_S) as process:

        def wait(deadline: float) -> Answer:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            return Answer(code, log.read_text(encoding="utf-8", errors="replace")[-MAX_CHARACTERS:])

        yield wait


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARACTERS)
    except OSError:
        return ""


def _listing(path: str) -> list[str]:
    try:
        return call_with_timeout(ANSWER_S, path, lambda: sorted(os.listdir(path)))
    except (OSError, Unanswered):
        return []


def _limit(resource_id: int) -> int | None:
    soft = resource.getrlimit(resource_id)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _variables() -> dict[str, str]:
    chosen = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
    chosen |= environment.select_variables(os.environ)
    chosen = {name: PASSWORD.sub("", chosen[name]) for name in sorted(chosen) if not SECRET.search(name)}
    for name in chosen:
        if name.lower().endswith("_proxy") and "//" not in chosen[name]:  # USER:PASSWORD@HOST
            chosen[name] = chosen[name].rpartition("@")[2]
    return chosen


def _packages() -> dict[str, dict[str, Any]]:
    packages = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if PACKAGES.fullmatch(name) and name not in packages:  # Python imports the first one on its path
            packages[name] = {"version": distribution.version, "requires": distribution.requires or []}
    return dict(sorted(packages.items()))


def _disks(paths: Mapping[str, str]) -> dict[str, Disk]:
    mounts, disks = _read_text("/proc/self/mountinfo"), {}
    for name, location in {**paths, "shm": "/dev/shm"}.items():
        if location and not is_bucket(location):
            path = Path(os.path.abspath(os.path.expanduser(location)))
            try:
                disks[name] = call_with_timeout(ANSWER_S, location, functools.partial(_disk, path, mounts))
            except Unanswered:
                disks[name] = Disk(str(path), silent=True)
            except OSError:  # a check reports the missing disk
                continue
    return disks


def _disk(path: Path, mountinfo: str) -> Disk:
    """Return the file system of a path. Raises OSError. mountinfo: text of /proc/self/mountinfo."""
    existing = next(p for p in (path, *path.parents) if p.exists()).resolve()
    size, mount, kind = os.statvfs(existing), "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = (half.split() for half in line.partition(" - "))
        point = before[4].replace("\\040", " ") if len(before) > 4 and after else ""
        if point and existing.is_relative_to(point) and len(point) >= len(mount):  # the last mount at a point counts
            mount, kind = point, after[0]
    scale = size.f_frsize / 2**30
    return Disk(str(path), round(size.f_blocks * scale, 2), round(size.f_bavail * scale, 2), kind)
