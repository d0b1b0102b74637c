"""The differences between two runs that can explain different results or speed, and the results that differ.

Both receipts are flattened. PREFIXES selects the facts to compare, and the group of each fact. Facts that cannot explain a
difference are left out: times, ids, names of hosts, paths outside of the config. IGNORED lists most of them.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.config.environment import HARMLESS
from jaxtrain.config.hardware import HOST_LIMIT
from jaxtrain.config.schema import RunConfig, to_dict
from jaxtrain.metrics.alerts import THROTTLED
from jaxtrain.metrics.receipt_format import Run, flatten

GROUPS = ("code", "config", "versions", "environment", "hardware", "data")
# Prefix of a flattened path -> (group, replacement of the prefix in the name).
PREFIXES = {
    "source.files.": ("code", ""),
    "resolved.": ("config", ""),
    "packages.": ("versions", ""),
    "versions.": ("versions", ""),
    "python": ("versions", "python"),
    "host.system": ("versions", "operating system"),
    "host.cpus": ("hardware", "host processors"),
    "devices.": ("hardware", "devices."),
    "hardware.": ("hardware", ""),
    "data.": ("data", ""),
    "eval_data.": ("data", "eval_data."),
    "origin": ("data", "first state"),
}
# Fields of a data fingerprint that come from the config, and paths. `_files` compares the files.
DATA = (
    "source",
    "source_schedule",
    "split",
    "global_batch",
    "seq_len",
    "seed",
    "packing",
    "max_segments",
    "files.*",
    "tokenizer.name",
)
IGNORED = (
    *(f"data.{name}" for name in DATA),
    *(f"eval_data.*.{name}" for name in DATA),
    *("devices.processes.*", "devices.platform"),
    *(f"hardware.gpus.{name}" for name in ("index", "uuid", "pci", "power_limit_default_w", "nics")),  # nics: older receipts
    *("hardware.before.*", "hardware.after.*"),  # one sample does not represent a run; see `_conditions`
)
VARIABLES_IGNORED = (
    *HARMLESS,
    "NCCL_DEBUG*",  # messages
    HOST_LIMIT,  # follows from the memory of the host
    "JAXTRAIN_*",  # set by run.sh for the run; the image is compared as a version
    "SLURM_*",  # ids and sizes of the job; nodes and devices are compared as hardware
    "XLA_CLIENT_MEM_FRACTION",  # set by train.memory_fraction
    "CUDA_DEVICE_ORDER",  # changes only the numbering of GPUs
    "XLA_FLAGS --xla_force_host_platform_device_count",  # the number of devices is compared as hardware
)
MEASURED = ("gemm_tflops", "hbm_gb_s", "h2d_gb_s", "all_reduce_bus_gb_s", "reduce_scatter_bus_gb_s")  # by preflight
APART = 0.1  # relative difference above which measurements count as different
ORDER = "order of the files"
LINES = 40  # most changed lines of a source file
ABSENT = "absent"
MEASURES = (  # (title, path in the flattened receipt, unit)
    ("step time, median", "speed.step_time_s.median", " s"),
    ("tokens/s/device", "speed.tokens_per_s_per_device", ""),
    ("MFU, causal", "speed.mfu_causal", ""),
    ("peak memory", "memory.peak_gib", " GiB"),
)
CHOSEN = ("attention", "remat", "compiler_options", "mesh")  # values that follow from config, hardware and versions

Facts = dict[tuple[str, str], Any]  # (group, name) -> value


@dataclasses.dataclass(frozen=True)
class Difference:
    """A fact that differs between runs A and B. lines: the changed lines, if the fact is a source file."""

    group: str
    name: str
    a: str
    b: str
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A result of run A and of run B. ratio: B's value divided by A's, as text; for the loss, the first step that differs."""

    name: str
    a: str
    b: str
    ratio: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of two runs: their names `a` and `b`, the facts that differ, and their results."""

    a: str
    b: str
    differences: tuple[Difference, ...]
    outcomes: tuple[Outcome, ...]


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs. Raises ReceiptError if a file next to a receipt (metrics.jsonl) cannot be read."""
    found = differences(a.receipt | a.figures, b.receipt | b.figures)
    return Comparison(a.name, b.name, tuple(found), tuple(_outcomes(a, b)))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the facts in which two receipts differ, in the order of GROUPS."""
    names = {file["content_sha256"]: file["name"] for file in (a.get("data") or {}).get("files", ())}
    one, other = (_facts(side) | _files(side, names) | _changes(side) for side in (a, b))
    defaults = _facts({"resolved": to_dict(RunConfig())})  # for keys that another version's config does not have
    skipped = _follow(a, b)
    sources = [side.get("source") or {} for side in (a, b)]
    found = []
    for group, name in dict.fromkeys((*one, *other)):
        x, y = (side.get((group, name), defaults.get((group, name))) for side in (one, other))
        if x == y or name in skipped or (name.startswith("preflight.") and _close(x, y)):
            continue
        if name.endswith(ORDER) and sorted(x or ()) != sorted(y or ()):
            continue  # the files differ, which is a difference of its own
        lines = changed_lines(name, *sources) if group == "code" else ()
        found.append(Difference(group, name, _text(x), _text(y), lines))
    if any(d.name == "train.deterministic" for d in found):  # this key sets NCCL_ALGO
        found = [d for d in found if d.name != "NCCL_ALGO"]
    commits = [source.get("commit") for source in sources]
    if commits[0] != commits[1] and any(d.group == "code" for d in found):
        found.append(Difference("code", "commit", _text(commits[0]), _text(commits[1])))
    return sorted(found, key=lambda d: (GROUPS.index(d.group), d.name != "commit"))


def _facts(receipt: Mapping[str, Any]) -> Facts:
    """Return (group, name) -> value of the facts in a receipt that can explain a difference, except token files (`_files`)."""
    out: Facts = {}
    for path, value in flatten({key: value for key, value in receipt.items() if key != "attempts"}):
        prefix = next((p for p in PREFIXES if path.startswith(p)), None)
        if prefix is None or _matches(path, IGNORED):
            continue
        group, begin = PREFIXES[prefix]
        name = begin + path.removeprefix(prefix)
        out[group, name] = value[:12] if group == "code" else value
    out |= {("environment", name): value for name, value in _variables(receipt).items()}
    return out | {("hardware", name): value for name, value in _conditions(receipt).items()}


def _variables(receipt: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that can explain a difference. Each flag of XLA_FLAGS is a variable of its own."""
    env = receipt.get("env") or {}
    found = {**receipt.get("environment", {}), **env.get("inherited", {}), **env.get("set", {})}
    for flag in found.pop("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        found[f"XLA_FLAGS {name}"] = value or "true"
    return {name: value for name, value in sorted(found.items()) if not _matches(name, VARIABLES_IGNORED)}


def _conditions(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return throttling and new ECC errors of the run's GPUs, and the lowest rate that each preflight check measured."""
    out: dict[str, Any] = {}
    for gpu in receipt.get("throttled") or ():
        if gpu["share"] >= THROTTLED:  # the threshold of the monitor's alerts, since short throttling explains nothing
            out[f"GPU {gpu['gpu']}: throttled by"] = gpu["reasons"]
    hardware = receipt.get("hardware") or {}
    before, after = ({s["index"]: s.get("ecc_uncorrected") for s in hardware.get(w) or ()} for w in ("before", "after"))
    for index, errors in after.items():
        if errors is not None and before.get(index) is not None and errors > before[index]:
            out[f"GPU {index}: new uncorrected ECC errors"] = errors - before[index]
    for node in (receipt.get("preflight") or {}).get("nodes", ()):
        for name in MEASURED:
            value = (node.get("measured") or {}).get(name)
            found = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
            if found:
                out[f"preflight.{name}"] = min([*found, out.get(f"preflight.{name}", math.inf)])
    return out


def _changes(receipt: Mapping[str, Any]) -> Facts:
    """Return `changed` (changes at a resume) of each attempt whose steps are part of the final state.

    These attempts are the newest one, the attempt that saved the checkpoint from which it resumed, and so on.
    """
    savers = {one.get("id"): one for one in receipt.get("attempts", ())}
    out: Facts = {}
    while saver := savers.pop((receipt.get("loaded") or {}).get("saved_by"), None):
        changed = {(g, f"{name} (changed on resume)"): f"from {was} to {now}" for g, name, was, now in receipt["changed"]}
        out, receipt = changed | out, saver
    return out


def _files(receipt: Mapping[str, Any], names: Mapping[str, str]) -> Facts:
    """Return facts about the token files of training and held-out data: size, hash and weight of each file, and their order.

    Args:
      names: SHA-256 of contents -> name of the file in run A. Run B may have the same file under another name.
    """
    out: Facts = {}
    held_out = {f"eval_data.{name}.": data for name, data in (receipt.get("eval_data") or {}).items()}
    for prefix, data in {"": receipt.get("data") or {}, **held_out}.items():
        order = []
        for file in data.get("files") or ():
            name = first = names.get(file["content_sha256"], file["name"])
            number = 1
            while name in order:  # files of different folders may have the same name
                number += 1
                name = f"{first} #{number}"
            order.append(name)
            text = f"{file['tokens']:,} tokens, sha256 {file['content_sha256'][:12]}, weight {file['weight']:g}"
            out["data", prefix + name] = text
        if order[1:]:
            out["data", prefix + ORDER] = order  # the shuffle of a file depends on its index
    return out


def _follow(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    """Return the names of facts that need no comparison, because other compared facts decide them."""
    out: set[str] = set()
    if all((side.get("data") or {}).get("files") for side in (a, b)):
        out |= {"data.source", "data.tokenizer"}  # these are paths; the contents are compared
    if all(side.get("eval_data") is not None for side in (a, b)):
        out.add("data.eval_source")
    out.add("init.from" if all("origin" in side for side in (a, b)) else "first state")
    meshes = [side.get("mesh") or {} for side in (a, b)]
    return out | {f"mesh.{axis}" for axis, size in meshes[0].items() if meshes[1].get(axis) == size}  # -1 and its size


def changed_lines(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the changed lines of a file that are in one patch only; () if the commits differ or a patch was cut off.

    Args:
      name: path of the file from the repository's root.
      a, b: `source` of two receipts.
    """
    if a.get("commit") != b.get("commit") or a.get("patch_cut") or b.get("patch_cut"):
        return ()
    sides = {"A": _edits(a.get("patch") or "", name), "B": _edits(b.get("patch") or "", name)}
    lines = [f"{side}: {line}" for side in sides for line in sides[side] if line not in sides["A"] or line not in sides["B"]]
    return (*lines[:LINES], *([f"... and {len(lines) - LINES} more lines"] if len(lines) > LINES else []))


def _edits(patch: str, name: str) -> list[str]:
    """Return the hunk headers and changed lines of one file in the output of git diff."""
    for part in f"\n{patch}".split("\ndiff --git ")[1:]:
        header, at, hunks = part.partition("\n@@")
        if header.split("\n")[0].endswith(f" b/{name}"):
            return [line for line in f"{at[1:]}{hunks}".split("\n") if line.startswith(("@@", "+", "-"))]
    return []


def _outcomes(a: Run, b: Run) -> Iterable[Outcome]:
    """Yield the loss, and the figures in MEASURES that A or B has. Yield the end and values in CHOSEN only if they differ."""
    if a.end != b.end:
        yield Outcome("end", a.end, b.end)
    yield _compare_losses(a.losses, b.losses)
    one, other = (dict(flatten(run.figures)) for run in (a, b))
    for title, path, unit in MEASURES:
        x, y = one.get(path), other.get(path)
        if x is not None or y is not None:
            shown = [f"{v:,.5g}{unit}" if v is not None else "not measured" for v in (x, y)]
            yield Outcome(title, shown[0], shown[1], f"{y / x:.3f} times" if x and y is not None else "")
    for name in CHOSEN:
        x, y = a.receipt.get(name), b.receipt.get(name)
        if x != y and x is not None and y is not None:
            yield Outcome(name, _text(x), _text(y))


def _compare_losses(a: Mapping[int, float], b: Mapping[int, float]) -> Outcome:
    both = sorted(a.keys() & b.keys())
    first = next((step for step in both if repr(a[step]) != repr(b[step])), None)  # repr: NaN equals NaN
    if not both:
        return Outcome("loss", "", "", "no step whose loss both have")
    if first is None:
        return Outcome("loss", "", "", f"the same, bit for bit, to step {both[-1]} (steps compared: {len(both)})")
    before = [step for step in both if step < first]
    since = f"from step {first} on; the same to step {before[-1]}" if before else f"at step {first}, the first that both have"
    return Outcome("loss", _text(a[first]), _text(b[first]), f"differs {since}")


def _close(x: float | None, y: float | None) -> bool:
    """Return whether two measurements differ by at most APART, or one of them is missing."""
    return x is None or y is None or abs(x - y) <= APART * abs(y)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _text(value: Any) -> str:
    return ABSENT if value is None else str(value) or "''"
