"""The operator's tools on a real GPU, in stage 6 of benchmarks/first_hour.py: preflight, GPU metrics of a run, their cost.

Preflight is recorded, so that the node becomes a test input (tests/recorded). The runs are short ones of llama3_1b with fewer
layers. Receipt, metrics and page of one of them are kept.
"""

import json
import shutil
import statistics
from typing import Any

from jaxtrain import launch
from jaxtrain.bench import node_suite
from jaxtrain.bench.child import module_command
from jaxtrain.bench.parts import BAD, GOOD, OFF, Node, Outcome, Part
from jaxtrain.bench.train_step import DATA

STEPS = 60
TURNS = ("off", "on", "on", "off")  # log.gpu_every_s 0 and 1: with "on" the driver is queried each second
# Four layers, so that the state at the end of a run is small; a batch that takes about a second.
SHORT = (
    f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1",
    *("--config.model.num_layers=4", "--config.train.global_batch=16", "--config.train.grad_accum=4"),
)
TINY = (node_suite.TINY, *node_suite.SMALL, "--config.train.global_batch=8")
LEAN = (
    *(f"--config.train.steps={STEPS}", "--config.optimizer.warmup_steps=5", "--config.log.every_steps=5"),
    *("--config.eval.every_steps=0", "--config.sample.max_tokens=0", "--config.checkpoint.every_steps=0"),
)


def record_preflight(node: Node, limit_s: float) -> Outcome:
    """All checks and measurements of preflight, and a recording of the node's answers."""
    file, recorded = node.path / "preflight.json", node.path / "recorded_node"
    command = module_command("preflight", f"--json={file}", f"--record={recorded}")
    code, outcome = node.run_program("Preflight", command, limit_s)
    verdict = {0: GOOD, 3: OFF}.get(code or 0, BAD) if code is not None and file.exists() else BAD
    return Outcome(verdict, outcome.found, outcome.lines, json.loads(file.read_text()) if file.exists() else {})


def train(node: Node, name: str, every_s: int, limit_s: float) -> tuple[Outcome, dict[str, Any]]:
    """Train a short run with GPU metrics every `every_s` seconds. Return its outcome and receipt."""
    folder = node.path / name
    command = module_command("main", *(TINY if node.smoke else SHORT), *DATA["synthetic"], *LEAN)
    command += [f"--config.log.gpu_every_s={every_s}", f"--workdir={folder}"]
    code, outcome = node.run_program(name, command, limit_s)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes
    return outcome, json.loads((folder / "receipt.json").read_text()) if code == 0 else {}


def check_gpu_metrics(node: Node, limit_s: float) -> Outcome:
    """GPU metrics while a run trains, and its receipt."""
    outcome, receipt = train(node, "run", 2, limit_s)
    if outcome.verdict == BAD:
        return outcome
    folder = node.path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["kind"] == "gpu"]
    code, said = node.run_program("report", module_command("report", str(folder)), 60)
    if code != 0:
        return Outcome(BAD, f"the report: {said.found}", said.lines, receipt)
    if not seen and not node.smoke:
        return Outcome(BAD, "no GPU metrics", data=receipt)
    missing = sorted({key for line in seen for key, value in line.items() if value is None})
    text = f"lines of GPU metrics: {len(seen)}" + (f"; without {', '.join(missing)}" if missing else "")
    return Outcome(GOOD, f"{text}; receipt, metrics and page in {folder.name}/", data={"gpu": seen, "receipt": receipt})


def time_gpu_metrics(node: Node, limit_s: float) -> Outcome:
    """Steps with and without GPU metrics each second, alternately: the cost of querying the driver."""
    medians: dict[str, list[float]] = {"off": [], "on": []}
    turns = TURNS[:2] if node.smoke else TURNS
    for turn, which in enumerate(turns):
        name = f"turn{turn}_{which}"
        outcome, receipt = train(node, name, int(which == "on"), limit_s / len(turns))
        shutil.rmtree(node.path / name, ignore_errors=True)
        if outcome.verdict == BAD:
            return Outcome(BAD, f"turn {turn}, {which}: {outcome.found}", outcome.lines, medians)
        medians[which].append(receipt["speed"]["step_time_s"]["median"])
    on, off = statistics.mean(medians["on"]), statistics.mean(medians["off"])
    times = ", ".join(f"{which} {' and '.join(f'{s:.4g}' for s in seconds)} s" for which, seconds in medians.items())
    return Outcome(GOOD, f"a step takes {on / off - 1:+.2%} with it ({times})", data=medians)


PARTS = (
    Part("preflight", record_preflight, 75.0, 30.0),
    Part("a run and its receipt", check_gpu_metrics, 150.0, 60.0),
    Part("cost of sampling", time_gpu_metrics, 300.0, 120.0),
)
