"""receipt.json: code, settings, data and hardware of a run, written before the first step and completed at the end.

The top level of the file describes the newest attempt, and `attempts` has a summary of each earlier one. An attempt without
`exit_code` was killed or still runs. Imports no jax. docs/observing.md describes the contents.
"""

import dataclasses
import fnmatch
import hashlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pynvml

from jaxtrain.config import environment, installed
from jaxtrain.config.hardware import HOST_LIMIT, host_gib
from jaxtrain.config.launch import REPO
from jaxtrain.config.schema import Data, RunConfig, to_dict
from jaxtrain.metrics import files, goodput, gpu_facts

NAME = "receipt.json"
FORMAT = 4
GPU_FACTS = (  # facts of a GPU (gpu_facts.py)
    *("name", "uuid", "pci", "ecc", "nvlinks", "power_limit_w", "power_limit_default_w", "max_sm_clock_mhz"),
    "max_memory_clock_mhz",
)
GIT_S = 20
FIX = "Fix: name the folder of another run (--workdir of training), such as runs/tiny."
# Fields that stay of an earlier attempt.
SUMMARY = ("id", "attempt", "started", "ended", "exit_code", "reason", "command", "resumed_from_step", "origin", "changed")
VARIABLES = (*environment.PREFIXES, "FI_", "UCX_", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "SLURM_JOB_ID")
VARIABLES += ("JAXTRAIN_IMAGE",)  # of the container
# Facts that explain no difference between two runs, or follow from others: places, whose contents are compared, and the limits
# of memory.
UNRELATED = (*environment.HARMLESS, "NCCL_DEBUG*", "SLURM_JOB_ID", "CUDA_DEVICE_ORDER", "XLA_CLIENT_MEM_FRACTION", HOST_LIMIT)
VOLATILE = (
    *("code.commit", "code.dirty", *(f"environment.{name}" for name in UNRELATED)),
    *(f"hardware.gpus.{name}" for name in ("index", "uuid", "pci", "power_limit_default_w")),
    *(
        f"config.{name}"
        for name in ("data.source", "data.eval_source", "data.tokenizer", "init.from", "checkpoint.allow_change")
    ),
)
# Fields of a fingerprint of data that are keys of the config.
CONFIG_FIELDS = ("global_batch", "split", *(field.name for field in dataclasses.fields(Data)))
# Fields of a receipt that are objects, if it has them.
OBJECTS = ("resolved", "environment", "versions", "code", "hardware", "devices", "data", "eval_data", "env", "changed")
RATES = ("step_time_s", "tokens_per_s_per_device", "mfu_causal", "mfu_full", "hfu")
ENOUGH = 5  # least lines for a median


class ReceiptError(ValueError):
    """An error: a receipt, or a file next to it, cannot be read."""


def local_time() -> str:
    """Return the local time to the second, with its UTC offset, as ISO 8601 text."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


class Receipt:
    """The receipt of the run in `workdir`. Only process 0 has `fields`, and writes them to receipt.json."""

    def __init__(self, workdir: str | Path, *, process_index: int = 0, driver: Any = pynvml):
        """Create the receipt without writing it. driver: pynvml, or an object with the same functions."""
        self.path, self.id = Path(workdir) / NAME, str(uuid.uuid4())
        self.fields: dict[str, Any] = {}
        self._active, self._driver = process_index == 0, driver
        self._earlier_is_lost = False

    def start(self, fields: Mapping[str, Any]) -> str:
        """Write the receipt of this attempt: `fields`, and facts about this process and node that this method collects.

        An earlier receipt that cannot be read is renamed. Return a sentence about it, or "".
        """
        if not self._active:
            return ""
        commit, dirty = checkout()
        driver, gpus = describe_gpus(self._driver)
        versions = {"jaxtrain": installed.VERSION, "python": platform.python_version(), "system": platform.platform()}
        entry: dict[str, Any] = {
            **fields,
            "format": FORMAT,
            "id": self.id,
            "attempt": 1,
            "started": local_time(),
            "ended": None,
            "exit_code": None,
            "reason": None,
            "command": shlex.join(sys.orig_argv),
            "host": platform.node(),
            "code": {
                "commit": commit,
                "dirty": dirty,
                "digest": installed.code_sha256(),
                "own": own_code(fields.get("resolved")),
            },
            "versions": versions | installed.versions(installed.RUN_PACKAGES) | driver,
            "environment": select_environment(os.environ),
            "hardware": {"cpu": cpu_model(), "cpus": usable_cpus(), "memory_gib": round(host_gib()), "gpus": gpus},
            "attempts": [],
        }
        note = ""
        if self.path.exists():
            try:
                before = load_receipt(self.path)
            except ReceiptError as error:
                with files.naming(self.path):
                    aside = self.path.rename(self.path.with_name(f"receipt.set_aside-{datetime.now():%Y%m%d-%H%M%S-%f}.json"))
                self._earlier_is_lost = True
                note = f"{error} It is now {aside.name}, and this run writes another."
            else:
                entry["attempts"] = [*before["attempts"], {key: before[key] for key in SUMMARY if key in before}]
                changed = differences({**before, "origin": None}, json.loads(json.dumps(entry)))  # the new origin is not known
                entry |= {"attempt": len(entry["attempts"]) + 1, "changed": changed}
        self.update(**entry)
        return note

    def update(self, **fields: Any) -> None:
        """Add fields to the receipt, or replace fields of these names, and write the file."""
        if self._active:
            self.fields |= fields
            files.write_atomic(self.path, json.dumps(self.fields, indent=2) + "\n")

    def record_start(self, loaded: Mapping[str, Any] | None) -> None:
        """Write where the first state of the attempt is from, and the origin: the digest of the first state of the run.

        Later calls (after a rollback) are ignored.

        Args:
          loaded: `from` (path), `step` and `saved_by` (id of the saving attempt) of the loaded checkpoint, and `digest` of its
            tensors. For weights of init.from, `step` and `saved_by` are None. None: the state was made from train.seed.
        """
        if self._active and "origin" not in self.fields:
            origins = {attempt["id"]: attempt.get("origin") for attempt in self.fields["attempts"]}
            origin = origins.get(loaded["saved_by"]) or loaded["digest"] if loaded else "made from train.seed"
            if loaded and loaded["saved_by"] and self._earlier_is_lost:
                origin = None  # unknown
            self.update(loaded=loaded, origin=origin)

    def finish(self, exit_code: int, reason: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write the end of the attempt, and further fields."""
        self.update(**(fields or {}), ended=local_time(), exit_code=exit_code, reason=reason)


def checkout(root: Path = REPO) -> tuple[str | None, bool | None]:
    """Return (commit, whether files changed since it) of a checkout whose top folder is `root`.

    Both are None without git, without a checkout, or if git does not answer in GIT_S seconds.
    """

    def git(*words: str) -> str:
        # An optional lock would write the index, which other nodes share.
        environ, command = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}, ("git", "-C", str(root), *words)
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        done = subprocess.run(command, stdin=null, stdout=pipe, stderr=null, env=environ, timeout=GIT_S, check=True)
        return os.fsdecode(done.stdout)

    try:
        folder, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(folder).resolve() != root.resolve():
            return None, None
        # New files count in the folders from which a run may import.
        new = git("ls-files", "--others", "--exclude-standard", "jaxtrain", "configs")
        return commit, bool(new or git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None


def cpu_model() -> str | None:
    """Return the model of the CPU; None if it is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    model = re.search(r"^model name[^:]*: *(.+)$", facts, re.MULTILINE)
    return model[1] if model else platform.processor() or None


def usable_cpus() -> int | None:
    """Return the number of logical processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS does not have the call


def device_facts(devices: Iterable[Any]) -> dict[str, Any]:
    """Return platforms, kinds and number of the devices, and the number of their processes. devices: `jax.devices()`."""
    devices = list(devices)
    kinds = {"platform": sorted({d.platform for d in devices}), "kind": sorted({d.device_kind for d in devices})}
    return kinds | {"count": len(devices), "process_count": len({d.process_index for d in devices})}


def describe_gpus(driver: Any) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the versions `driver` and `driver_cuda`, and the facts GPU_FACTS of each GPU; both empty without a driver.

    A fact that the driver refuses is None. The facts of a GPU that it cannot reach are `index` and `lost`.
    """
    node = gpu_facts.read_gpu_facts(driver, GPU_FACTS)
    gpus = []
    for index, gpu in node.get("gpus", {}).items():
        entry: dict[str, Any] = {"lost": True} if "error" in gpu else {name: gpu.get(name) for name in GPU_FACTS}
        if links := entry.get("nvlinks"):
            entry["nvlinks"] = len(links["up"])
        gpus.append({"index": int(index), **entry})
    return ({"driver": node["driver"], "driver_cuda": node["cuda"]} if "driver" in node else {}), gpus


def select_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can change results or speed, sorted by name, without secrets."""
    return {k: v for k, v in sorted(environ.items()) if k.startswith(VARIABLES) and not environment.is_secret(k)}


def own_code(config: Any) -> dict[str, str]:
    """Return module -> SHA-256 of its file, of the imported modules that a config names as package.module:name."""
    values = " ".join(str(value) for _, value in json_items(config))
    names = re.findall(r"(?<![\w./])([A-Za-z_][\w.]*):[A-Za-z_]\w*", values)
    paths = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in paths.items() if file}


# ---- Compare


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return "group.name" -> (value in receipt a, in receipt b) of the facts that differ; None: absent."""
    first, second, defaults = facts(a), facts(b), facts({"resolved": to_dict(RunConfig())})  # for keys that one version lacks
    pairs = {name: (first.get(name, defaults.get(name)), second.get(name, defaults.get(name))) for name in (*first, *second)}
    unknown = {name for name, pair in pairs.items() if name == "data.origin" and None in pair}
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y and name not in unknown}


def facts(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return "group.name" -> value of all in a receipt that can explain other results or another speed.

    The groups are code, config, versions, environment, hardware and data. The contents of data and of the first state are in
    place of their paths. What changed at a resume is a fact of its own.
    """
    env, data, held_out = (receipt.get(name) or {} for name in ("env", "data", "eval_data"))
    config = dict(json_items(receipt.get("resolved") or {}))
    sets = {name: _contents(entry, config.get("data.eval_source")) for name, entry in held_out.items()}
    groups = {
        "code": receipt.get("code"),
        "config": config,
        "versions": receipt.get("versions"),
        "environment": {**receipt.get("environment", {}), **env.get("inherited", {}), **env.get("set", {})},
        "hardware": {**(receipt.get("hardware") or {}), "devices": receipt.get("devices")},
        "data": {**_contents(data, config.get("data.source")), "held_out": sets, "origin": receipt.get("origin")},
    }
    values = {name: v for name, v in json_items(groups) if not any(fnmatch.fnmatchcase(name, pattern) for pattern in VOLATILE)}
    for attempt in (*receipt.get("attempts", ()), receipt):
        if step := attempt.get("resumed_from_step"):
            changes = attempt.get("changed", {}).items()
            values |= {f"{name} (from step {step} on)": f"{now}, before it {was}" for name, (was, now) in changes}
    return values


def _contents(data: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """Return hash and weight of each token file of a fingerprint; without files, the fingerprint and the source."""
    if "files" not in data:
        return {**{name: v for name, v in data.items() if name not in CONFIG_FIELDS}, "source": source}
    hashes = {str(i): f"sha256 {f['content_sha256'][:12]}, weight {f['weight']:g}" for i, f in enumerate(data["files"], 1)}
    return {"files": hashes, "tokenizer": data.get("tokenizer", {}).get("sha256")}


# ---- Read


def load_receipt(path: Path) -> dict[str, Any]:
    """Return the receipt in a file. Raises ReceiptError if the file is not a receipt, or has another FORMAT."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
        if receipt["format"] != FORMAT:
            fix = "Fix: use the version that wrote it, or move the file away and resume, which writes another."
            raise ReceiptError(f"{path}: format {receipt['format']!r}, this jaxtrain reads {FORMAT}. {fix}")
        for attempt in (receipt, *receipt["attempts"]):
            if bad_fields := [name for name in OBJECTS if not isinstance(attempt.get(name) or {}, dict)]:
                raise TypeError(f"{bad_fields[0]} is no object")
    except ReceiptError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReceiptError(f"{path}: not a receipt, or damaged ({error!r}). {FIX}") from error
    return receipt


def json_items(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of all values in nested JSON except nulls.

    A list becomes one text with its items and their counts, most frequent first: "7 x 700.0, 500.0". A list of objects becomes
    one such text for each key of the objects.
    """
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        keys = dict.fromkeys(key for item in value for key in item)
        value = {key: [item[key] for item in value if item.get(key) is not None] for key in keys}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # The key of a held-out set without a name is "".
            yield from json_items(inner, ".".join(filter(None, (path, str(key)))))
    elif isinstance(value, list):
        counted = sorted(Counter(map(str, value)).items(), key=lambda pair: (-pair[1], pair[0]))
        if counted:
            yield path, ", ".join(f"{count} x {item}" if count > 1 else item for item, count in counted)
    elif value is not None:
        yield path, value


def rates(lines: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the medians of RATES over the timed train lines after their first fifth, and the maximum of `peak_memory_gib`.

    None: not measured, or over fewer than ENOUGH lines. In the first fifth, clocks, caches and input settle.
    """
    train = [line for line in lines if line["kind"] == "train"]
    timed = [line for line in train if line.get("step_time_s") is not None]
    window = timed[math.ceil(len(timed) / 5) :]
    values = {name: [line[name] for line in window if line.get(name) is not None] for name in RATES}
    medians = {name: statistics.median(v) if len(v) >= ENOUGH else None for name, v in values.items()}
    return medians | {"peak_memory_gib": max(filter(None, (line.get("peak_memory_gib") for line in train)), default=None)}


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run, read from its receipt.

    Attributes:
      folder: the run's folder; None if the receipt is a single file.
      receipt: the receipt; {} if the folder has no receipt.
    """

    name: str
    folder: Path | None
    receipt: dict[str, Any]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return all attempts, oldest first; [{}] without a receipt. Attempts before the newest have only a summary."""
        return [*self.receipt.get("attempts", ()), self.receipt]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; [] without that file. Raises ReceiptError if it cannot be read."""
        path = self.folder / "metrics.jsonl" if self.folder else None
        try:
            return list(files.read_metrics(path)) if path and path.exists() else []
        except (OSError, files.MetricsError) as error:
            raise ReceiptError(str(error)) from error

    @cached_property
    def rates(self) -> dict[str, float | None]:
        """Return the rates of the run from metrics.jsonl: see the function `rates`."""
        return rates(self.lines)

    @cached_property
    def losses(self) -> dict[int, float]:
        """Return step -> training loss, from metrics.jsonl."""
        return {line["step"]: line["loss"] for line in self.lines if line["kind"] == "train"}

    @cached_property
    def goodput(self) -> dict[str, Any] | None:
        """Return the goodput from the receipt; if the run has not ended, from its ledger; None if neither has it."""
        if "goodput" in self.receipt or not self.folder:
            return self.receipt.get("goodput")
        try:
            ledger = goodput.read_ledger(self.folder / goodput.FILE)
        except ValueError as error:
            raise ReceiptError(str(error)) from error
        return goodput.summarise(ledger).record() if ledger else None

    @property
    def end(self) -> str:
        """Return exit code and reason of the newest attempt, as text."""
        code = self.receipt.get("exit_code")
        return "killed, or still running" if code is None else f"{code}: {self.receipt['reason']}"


def open_run(target: str | Path) -> RunRecord:
    """Return the run of a folder or of a receipt file. Raises ReceiptError if `target` is neither."""
    path = Path(target).expanduser()
    file = path / NAME if path.is_dir() else path
    if not file.exists():
        raise ReceiptError(f"{path}: {f'no {NAME} in this folder' if path.is_dir() else 'no such file or folder'}. {FIX}")
    receipt = load_receipt(file)
    return (
        RunRecord(file.resolve().parent.name, file.parent, receipt)
        if file.name == NAME
        else RunRecord(file.name, None, receipt)
    )
