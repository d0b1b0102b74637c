"""The provenance of a run: commit, changes since the commit, host and devices. It is read when a run starts."""

import collections
import glob
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.runtime.messages import End, say
from jaxtrain.runtime.variables import COMMIT, DIRTY, EXPECTED

NODE_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "RANK", "JAXTRAIN_PROCESS_ID", "JOB_COMPLETION_INDEX")
NODE_RANKS += ("JAX_PROCESS_ID", "PMI_RANK", "FLUX_TASK_RANK", "PET_NODE_RANK", "SKYPILOT_NODE_RANK", "NODE_RANK")
ANSWER_S = 20


def ask(*command: str, timeout_s: float | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the output of a command.

    Args:
        command: a program and its arguments.
        timeout_s: seconds to wait for the end of the command; None: no limit.
        environ: the environment of the command; None: the environment of this process.

    Returns: the command's stdout; None if the program does not exist, the command fails or exceeds the time.
    """
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, stdin=null, stdout=pipe, stderr=null, env=environ, encoding="utf-8", errors="replace"
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()  # A broken GPU can block nvidia-smi in the kernel, so its end is not awaited.
        return None
    return output if process.returncode == 0 else None


def gpu_names() -> list[str]:
    """Return the model of each GPU of this node, sorted.

    The driver's files are read first, since nvidia-smi may hang on a broken GPU.
    """
    names = []
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        found = re.search(r"^Model:\s*(.+?)\s*$", Path(path).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        names += [found[1]] if found else []
    if not names:
        listed = ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", timeout_s=ANSWER_S)
        names = [line.strip() for line in (listed or "").splitlines() if line.strip()]
    return sorted(names)


def gpus_present(names: list[str]) -> bool:
    """Return whether this node has NVIDIA GPUs, including those that do not respond."""
    return bool(names) or bool(glob.glob("/dev/nvidia[0-9]*"))


def host_class(names: list[str]) -> str:
    """Return the class of this node, such as "8 NVIDIA H200" or "2 CPUs, AMD EPYC". names: the models of its GPUs."""
    if names:
        return "+".join(f"{count} {name}" for name, count in collections.Counter(names).items())
    model = cpu_model()
    return f"{os.cpu_count()} CPUs" + (f", {model}" if model else "")


def cpu_model() -> str | None:
    """Return the model of the CPU; None if it is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    model = re.search(r"^model name[^:]*: *(.+)$", facts, re.MULTILINE)
    return model[1] if model else platform.processor() or None


def host_facts() -> dict[str, Any]:
    """Return the model of the CPU, and the number of logical processors that this process may use."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()  # macOS does not have the call
    return {"cpu": cpu_model(), "cpus": len(usable) or os.cpu_count()}


def device_facts(devices: Iterable[Any]) -> dict[str, Any]:
    """Return platforms, kinds and number of the devices, and the number of their processes. devices: `jax.devices()`."""
    devices = list(devices)
    kinds = {"platform": sorted({d.platform for d in devices}), "kind": sorted({d.device_kind for d in devices})}
    return kinds | {"count": len(devices), "process_count": len({d.process_index for d in devices})}


def checkout(root: Path) -> tuple[str, str, str]:
    """Return (commit, "yes" if files changed since the commit, else "no", a phrase for the log) of a checkout.

    Changes are changed files that git tracks, and new files in folders from which a run may import. If `root` is no git
    checkout, commit and changes are "".
    """
    # An optional lock would write the index, which other nodes share.
    environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}

    def git(*words: str) -> str | None:
        return ask("git", "-C", str(root), *words, environ=environ)

    commit = git("rev-parse", "HEAD")
    if commit is None:
        # git has no exit code of its own for a refusal, which the user can fix.
        owned = not (root / ".git").exists() or (root / ".git").stat().st_uid == os.getuid()
        fix = f"git refuses a checkout of another user (git config --global --add safe.directory {root})"
        return "", "", "this is no git checkout" if owned else fix
    if git("ls-files", "--error-unmatch", "run.sh") is None:  # the repository of a folder above
        return "", "", "this is no git checkout"
    changed = git("status", "--porcelain", "--untracked-files=no")
    new = git("ls-files", "--others", "--exclude-standard", "jaxtrain", "configs")
    dirty = bool(changed) or bool(new)
    return commit.strip(), "yes" if dirty else "no", "changed since" if dirty else "unchanged"


def prints_common_messages(environ: Mapping[str, str]) -> bool:
    """Return whether this node is the first of the run, which alone prints the messages that are equal on all nodes."""
    ranks = [environ[name] for name in NODE_RANKS if environ.get(name)]
    return EXPECTED not in environ and (not ranks or ranks[0] == "0")


def provenance(root: Path, names: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with commit and changes, and print the provenance in a line.

    Args:
        root: the repository.
        names: the models of this node's GPUs.
        environ: the environment of the supervisor.

    Raises: End, if this node's commit differs from that of the node that started the run, or only one of the two has changes.
    """
    commit, dirty, state = checkout(root)
    expected = environ.get(EXPECTED)
    if expected and expected != f"{commit} {dirty}":
        theirs, _, changed = expected.rpartition(" ")
        raise End(
            2,
            f"this node has commit {commit or 'none'} (changed: {dirty or 'unknown'}), and the node that started the run has "
            f"{theirs or 'none'} (changed: {changed or 'unknown'}). Fix: bring {root} to the same state on all nodes.",
        )
    if prints_common_messages(environ):
        say(f"{f'commit {commit[:12]}, ' if commit else ''}{state}; on {host_class(names)}")
    return {COMMIT: commit, DIRTY: dirty}
