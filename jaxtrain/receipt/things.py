"""Hardware and data of two runs: what differs, by what the things are and not by what they are called."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.monitor.alerts import THROTTLED
from jaxtrain.receipt.result import ABSENT, Difference, differing, shown

APART = 0.1  # figures of preflight may differ by this much: they are measured
STATIC = ("name", "power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz", "ecc")  # of a GPU; no serial numbers, no places
MEASURED = {  # of preflight, a node
    "gemm_tflops": "TFLOP/s",
    "hbm_gb_s": "GB/s",
    "h2d_gb_s": "GB/s",
    "all_reduce_bus_gb_s": "GB/s",
    "reduce_scatter_bus_gb_s": "GB/s",
}
# What a fingerprint of data says that the config says too, or that is a place.
IN_CONFIG = ("source", "split", "global_batch", "seq_len", "seed", "packing", "max_segments")


def hardware(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Of two attempts. Where one of them kept less (format 1), by what both kept."""
    one, other = described(a), described(b)
    if not a.get("hardware") or not b.get("hardware"):
        one, other = ({name: value for name, value in side.items() if name in one and name in other} for side in (one, other))
    measured = _preflight(a.get("preflight") or {}, b.get("preflight") or {})
    return [*differing("hardware", one, other), *measured]


def described(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """The hardware class of an attempt: what it is, in words, without anything that names a certain machine; and what was wrong
    with it. attempt: with `throttled` of its figures, where its own end did not write them."""
    devices, machine = attempt.get("devices") or {}, attempt.get("hardware") or {}
    found: dict[str, Any] = {}
    if "count" in devices and "kind" in devices:
        found["devices"] = f"{devices['count']} x {', '.join(devices['kind'])}"
    if "process_count" in devices:
        found["processes"] = devices["process_count"]
    found["host processors"] = (attempt.get("host") or {}).get("cpus")
    if machine:
        found["host CPU"], found["host memory, GiB"] = machine["cpu"]["model"], round(machine["cpu"]["memory_gib"])
    for name in STATIC:
        found[f"GPUs: {name}"] = _alike(["lost" if gpu.get("lost") else gpu.get(name) for gpu in machine.get("gpus", ())])
    links = machine.get("topology") or {}
    found["NVLinks of a GPU"] = _alike(links.get("nvlinks", []))
    found["links of GPU pairs"] = ", ".join(f"{n} x {how}" for how, n in sorted(links.get("pairs", {}).items())) or None
    for gpu in attempt.get("throttled") or ():
        # From as much on as the monitor warns of: a dip of a second explains nothing.
        found[f"GPU {gpu['gpu']}: throttled by"] = gpu["reasons"] if gpu["share"] >= THROTTLED else None
    errors = [{s["index"]: s.get("ecc_uncorrected") for s in machine.get(when) or ()} for when in ("before", "after")]
    for index, after in errors[1].items():
        before = errors[0].get(index)
        new = after - before if after is not None and before is not None else 0
        found[f"GPU {index}: new uncorrected ECC errors"] = new if new > 0 else None
    return {name: value for name, value in found.items() if value is not None}


def _alike(values: Sequence[Any]) -> str | None:
    """Equal values counted: "8 x 700.0"; None where there are none."""
    counted = Counter(shown(value) for value in values)
    return ", ".join(f"{n} x {value}" for value, n in counted.most_common()) or None


def _preflight(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """What preflight measured before each, where it is more than APART apart. Of several nodes and GPUs, the slowest."""
    out = []
    slowest_a, slowest_b = _slowest(a), _slowest(b)
    for name, unit in MEASURED.items():
        one, other = slowest_a.get(name), slowest_b.get(name)
        if one and other and abs(one / other - 1) > APART:
            out.append(Difference("hardware", f"preflight: {name}", f"{one:.4g} {unit}", f"{other:.4g} {unit}"))
    return out


def _slowest(preflight: Mapping[str, Any]) -> dict[str, float]:
    out: dict[str, float] = {}
    for node in preflight.get("nodes", ()):
        for name in MEASURED:
            value = (node.get("measured") or {}).get(name)
            found = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
            if found:
                out[name] = min([*found, *([out[name]] if name in out else [])])
    return out


def by_content(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether both fingerprints tell what their files hold."""
    return bool(a.get("files") and b.get("files"))


def data(a: Mapping[str, Any], b: Mapping[str, Any], what: str = "") -> list[Difference]:
    """Of two fingerprints, of training data or (what) of a held-out set."""
    known = by_content(a, b)
    rest = [{f"{what}{k}": v for k, v in side.items() if k not in (*IN_CONFIG, "files", "tokenizer")} for side in (a, b)]
    if a.get("tokenizer") and b.get("tokenizer"):
        # Its name may be a path; its digest is what it is.
        for side, added in zip((a, b), rest, strict=True):
            added[f"{what}tokenizer"] = _short(side["tokenizer"].get("sha256") or side["tokenizer"].get("name"))
    return [*(_files(a["files"], b["files"], what) if known else ()), *differing("data", *rest)]


def _files(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], what: str) -> list[Difference]:
    """Token files, paired by content, then by name; what is left over is on one side only."""
    left, out, pairs = list(b), [], []
    for same in ("content_sha256", "name"):
        for one in [f for f in a if not any(f is p for p, _ in pairs)]:
            other = next((f for f in left if f[same] == one[same]), None)
            if other is not None:
                left.remove(other)
                pairs.append((one, other))
    for one, other in pairs:
        if one["content_sha256"] != other["content_sha256"]:
            out.append(Difference("data", f"{what}{one['name']}", _file(one), _file(other)))
        if one["weight"] != other["weight"]:
            out.append(Difference("data", f"{what}weight of {one['name']}", shown(one["weight"]), shown(other["weight"])))
    lost = [f for f in a if not any(f is p for p, _ in pairs)]
    out += [Difference("data", f"{what}{f['name']}", _file(f), ABSENT) for f in lost]
    out += [Difference("data", f"{what}{f['name']}", ABSENT, _file(f)) for f in left]
    order_a = [one["name"] for one in a]
    order_b = [next((one["name"] for one, other in pairs if other is f), f["name"]) for f in b]
    if not lost and not left and order_a != order_b:  # each file's shuffle depends on its place
        out.append(Difference("data", f"{what}order of the files", ", ".join(order_a), ", ".join(order_b)))
    return out


def _file(one: Mapping[str, Any]) -> str:
    return f"{one['tokens']:,} tokens, sha256 {_short(one['content_sha256'])}"


def _short(digest: str | None) -> str | None:
    return digest[:12] if digest else digest
