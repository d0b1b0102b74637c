"""Made-up run folders: lines of metrics, receipts and ledgers in the form that a run writes."""

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import table
from jaxtrain.metrics.receipt import FORMAT


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    """Return every field of a train line that a caller of `Writers.train` passes."""
    return dict.fromkeys(table.required_names(), 0.5) | {"step": step, "tokens": 100 * step, "skipped_steps": 0} | changes


def gpu_line(step: int, gpu: int = 0, process: int = 0, **changes: Any) -> dict[str, Any]:
    """Return every field of a GPU's line that a caller of `Writers.gpu` passes."""
    sample = {"utilization": 0.9, "memory_used_gib": 100.0, "pool_gib": 120.0, "in_use_gib": 80.0}
    sample |= {"power_w": 500.0, "power_limit_w": 700.0, "temperature_c": 60.0, "sm_clock_mhz": 1900, "memory_clock_mhz": 3200}
    sample |= {"throttled": 0.0, "throttle_reasons": "", "nvlink_tx_gb_s": None, "nvlink_rx_gb_s": None, "ecc_uncorrected": 0}
    return {"step": step, "gpu": gpu, "process": process, **sample, **changes}


def line(step: int, **changes: Any) -> dict[str, Any]:
    """Return a train line as it is in metrics.jsonl."""
    return {"kind": "train", **train_line(step, skipped_steps=0.5), "time_unix": 1e9} | changes


def gpu(step: int, n: int, process: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the line of GPU `n` as it is in metrics.jsonl."""
    return {"kind": "gpu", **gpu_line(step, n, process), "time_unix": 1e9 + step, **changes}


def held_out(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    """Return an eval line as it is in metrics.jsonl."""
    return {"kind": "eval", "step": step, "loss": loss, "bits_per_byte": None, "perplexity": 9.0, **changes}


def fake(folder: Path, lines: list[dict[str, Any]], **files: str) -> Path:
    """Write a run's folder with these lines of metrics and these files. `__` in a file's name is a dot: log__txt."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", lines)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    """Write lines of metrics to a file."""
    path.write_text("".join(metrics.encode_line(line) + "\n" for line in lines))
    return path


def ended(code: int | None, reason: str = "why", **more: Any) -> str:
    """Return the text of a receipt with this exit code and reason. code=None: the attempt has not ended."""
    when = "2026-01-01T00:00:00+00:00"
    facts = {"format": FORMAT, "attempts": [], "started": when, "ended": None if code is None else when}
    return json.dumps(facts | {"exit_code": code, "reason": reason} | more)


def silence(folder: Path, seconds: float) -> None:
    """Make the files of a folder `seconds` old."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def everything(folder: Path, seed: int, steps: int = 3000) -> Path:
    """Write a run's folder with GPU lines, losses that are NaN or infinite, a spike, evaluations and warnings."""
    draw = random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        value = 2 + 8 / math.sqrt(step) + draw.random() / 5
        changes: dict[str, Any] = {"peak_memory_gib": 100.0 + seed, "memory_gib": 90.0, "tokens_per_s_per_device": 9e3 + step}
        changes["loss"] = {700: math.nan, 701: math.nan, 1500: 99.5, 2500: math.inf}.get(step, value)
        changes |= {"step_time_s": None, "tokens_per_s_per_device": None} if step % 100 == 0 else {}
        lines.append(line(step, **changes))
        if step % 50 == 0:
            hot = {"throttled": 0.5, "throttle_reasons": "sw_thermal"}
            lines += [gpu(step, n, power_w=500.0 + 10 * n, **(hot if n == 3 else {})) for n in range(8)]
        if step % 500 == 0:
            lines.append(held_out(step, value, set="web"))
    config = json.dumps({"train": {"steps": steps}})
    return fake(folder, lines, config__json=config, log__txt="2026-01-01 00:00:00+0000 WARNING hot\n")
