"""Whole runs for tests: a small config, a run in this process (8 CPU devices) or in a child process, and its files."""

import atexit
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from compile_options import QUICKLY

from jaxtrain import main as command
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.metrics import files

REPO = Path(__file__).resolve().parent.parent

# The learning rate is constant after the warm-up, so that a test can train in parts by raising train.steps.
SMALL = """
from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.precision = "f32"
    config.model.num_layers = 2
    config.model.d_model = 32
    config.model.num_kv_heads = 2
    config.model.d_ff = 64
    config.data.seq_len = 64
    config.train.steps = 24
    config.train.global_batch = 8
    config.optimizer.lr = 1e-2
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 4
    config.eval.every_steps = 8
    config.eval.sequences = 16
    config.checkpoint.every_steps = 5
    config.checkpoint.keep = 100
    config.log.every_steps = 1
    config.sample.max_tokens = 0
    return config
"""

# Fields of a train line that depend on config and data alone; the others are times and memory.
EXACT = ("kind", "step", "loss", "grad_norm", "lr", "tokens", "epoch")


# The smallest run: a compile takes seconds. Its settings replace those of SMALL.
SMALLEST = {
    "data.source": "synthetic",
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.d_ff": 16,
    "data.seq_len": 32,
    "train.steps": 8,
    "optimizer.warmup_steps": 2,
    "eval.every_steps": 3,
    "eval.sequences": 8,
    "checkpoint.every_steps": 4,
}


def smallest(folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write the smallest config, with changes (key -> value), into a folder. All runs of a process share its compiled steps."""
    text = "\n".join(f"    config.{key} = {value!r}" for key, value in {**SMALLEST, **changes}.items())
    path = folder / "small.py"
    path.write_text(SMALL.replace("    return config", f"{text}\n    return config"))
    return path


@functools.cache
def small() -> Path:
    """Return the file of the smallest config, on synthetic data."""
    folder = Path(tempfile.mkdtemp(prefix="small-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return smallest(folder)


def arguments(config: Path, workdir: Path, overrides: Mapping[str, Any]) -> list[str]:
    """Return command-line arguments. `__` in an override's name is a dot: train__steps=8."""
    keys = [f"--config.{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return [f"--config={config}", f"--workdir={workdir}", *keys]


def train(config: Path, workdir: Path, **overrides: Any) -> int:
    """Train in this process, on its 8 devices, and return the exit code."""
    return command.main(arguments(config, workdir, {"paths__cache": config.parent / "compiled", **overrides}))


class Child:
    """A run in a child process, on one device unless `env` sets more. Its output goes to the file `words`."""

    def __init__(
        self,
        config: Path,
        workdir: Path,
        words: Path,
        *,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        **overrides: Any,
    ):
        environment = os.environ | {"XLA_FLAGS": QUICKLY} | dict(env or {})
        line = [sys.executable, "-m", "jaxtrain.main", *arguments(config, workdir, overrides), *options]
        self.words = words
        with open(words, "wb") as out:
            self.process = subprocess.Popen(line, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    @property
    def said(self) -> str:
        return self.words.read_text()

    def until(self, what: Callable[[], bool], timeout: float = 300) -> None:
        """Wait until `what()` is true. Fails with the process's output if the process ends first or the time is over."""
        limit = time.monotonic() + timeout
        while not what():
            code = self.process.poll()
            # the process may have ended just after `what` was checked
            if (code is not None and not what()) or time.monotonic() > limit:
                self.process.kill()
                raise AssertionError(f"it never came to that; exit code {code}:\n{self.said}")
            time.sleep(0.02)

    def end(self, timeout: float = 300) -> tuple[int, str]:
        """Wait until the run ends. Returns (exit code, all output)."""
        self.until(lambda: self.process.poll() is not None, timeout)
        return self.process.returncode, self.said


def lines(workdir: Path) -> list[dict[str, Any]]:
    """Return all lines of metrics.jsonl; none if the file does not exist."""
    path = workdir / "metrics.jsonl"
    return list(files.read_metrics(path)) if path.exists() else []


def exact(workdir: Path) -> list[dict[str, Any]]:
    """Return the reproducible fields of every line, train and eval lines in the file's order."""
    return [{k: v for k, v in line.items() if line["kind"] == "eval" or k in EXACT} for line in lines(workdir)]


def losses(workdir: Path) -> dict[int, float]:
    """Return {step: training loss}. Fails if a step occurs twice."""
    steps = [line["step"] for line in lines(workdir) if line["kind"] == "train"]
    assert len(steps) == len(set(steps)), f"steps twice in metrics.jsonl: {steps}"
    return {line["step"]: line["loss"] for line in lines(workdir) if line["kind"] == "train"}


def tensors(workdir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return every tensor of a checkpoint, by name. None: the newest step."""
    return tensors_in(workdir / "checkpoints", step)


def tensors_in(folder: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return every tensor of a step in a folder of checkpoints, by name. None: the newest step."""
    found = Checkpoints(folder)
    step = found.steps()[-1] if step is None else step
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one) for k, a in found.tensor_specs(step).items()}
    return {k: np.asarray(a) for k, a in found.restore(step, stored).items()}


def steps(workdir: Path) -> list[int]:
    """Return the steps of the complete checkpoints."""
    return Checkpoints(workdir / "checkpoints").steps()


def receipt(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / "receipt.json").read_text())


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content, to check that nothing was written."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def events(folder: Path) -> tuple[list[tuple[int, float, dict[str, Any]]], int]:
    """Read TensorBoard's events in a folder.

    Returns:
        (step, wall time, {tag: number or text}) of every line of metrics and every text, and the number of events that mark a
        restart.
    """
    from tensorboardX.proto import event_pb2

    def value(v: Any) -> Any:
        return v.tensor.string_val[0].decode() if v.HasField("tensor") else v.simple_value

    found, restarts, last = [], 0, None
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + size])  # pyright: ignore[reportAttributeAccessIssue]
            data = data[16 + size :]
            restarts += event.HasField("session_log")
            for v in event.summary.value:
                line = event.step, event.wall_time, v.tag.rpartition("/")[0]
                if line != last:
                    found.append((event.step, event.wall_time, {}))
                found[-1][2][v.tag] = value(v)
                last = line
    return found, restarts
