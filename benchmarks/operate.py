"""The operator's tools on a real GPU, in stage 6 of benchmarks/first_hour.py: preflight, lines on the GPU, their cost.

Preflight is recorded, so that the node becomes a test input (tests/recorded). The runs are short ones of llama3_1b with fewer
layers, without checkpoints that anybody keeps; receipt, metrics and page of one of them stay.
"""

import json
import shutil
import statistics
from typing import Any

from jaxtrain import launch
from jaxtrain.bench import suite
from jaxtrain.bench.case import last_words, program, run
from jaxtrain.bench.measure import DATA
from jaxtrain.bench.parts import BAD, GOOD, OFF, Node, Outcome, Part

STEPS = 60
TURNS = ("off", "on", "on", "off")  # log.gpu_every_s 0 and 1; the driver is asked each second where it is on
# Four layers, so that the state that a run saves in the end is small; a batch that takes about a second.
SHORT = (
    f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1",
    *("--config.model.num_layers=4", "--config.train.global_batch=16", "--config.train.grad_accum=4"),
)
TINY = (suite.TINY, *suite.SMALL, "--config.train.global_batch=8")
LEAN = (
    *(f"--config.train.steps={STEPS}", "--config.optimizer.warmup_steps=5", "--config.log.every_steps=5"),
    *("--config.eval.every_steps=0", "--config.sample.max_tokens=0", "--config.checkpoint.every_steps=0"),
)


def preflight(node: Node, limit_s: float) -> Outcome:
    """Everything that preflight checks and measures, and what the node answered, to be judged elsewhere."""
    file, recorded = node.path / "preflight.json", node.path / "recorded_node"
    command = program("preflight", f"--json={file}", f"--record={recorded}")
    code, said = run(command, node.path / "logs" / "preflight.txt", limit_s=limit_s)
    lines = ["## Preflight", "", "```text", said.strip(), "```", ""]
    found = json.loads(file.read_text()) if file.exists() else {}
    if code not in (0, 3) or not found:
        return Outcome(BAD, "not done in time" if code is None else f"exit code {code}: {last_words(said)}", lines, found)
    return Outcome(GOOD if code == 0 else OFF, last_words(said), lines, found)


def trained(node: Node, name: str, more: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """The receipt of a short run; {} with its last words under `why` where it did not end well."""
    folder = node.path / name
    command = program("main", *(TINY if node.smoke else SHORT), *DATA["synthetic"], *LEAN, *more, f"--workdir={folder}")
    code, said = run(command, node.path / "logs" / f"{name}.txt", limit_s=limit_s)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes, and of use to nobody
    if code != 0:
        return {"why": "not done in time" if code is None else f"exit code {code}: {last_words(said)}"}
    return json.loads((folder / "receipt.json").read_text())


def gpu_lines(node: Node, limit_s: float) -> Outcome:
    """What NVML tells while a run trains, and the receipt of it."""
    receipt = trained(node, "run", ("--config.log.gpu_every_s=2",), limit_s)
    if "why" in receipt:
        return Outcome(BAD, receipt["why"])
    folder = node.path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["kind"] == "gpu"]
    code, said = run(program("report", str(folder)), node.path / "logs" / "report.txt", limit_s=60)
    if code:
        return Outcome(BAD, f"the report: {last_words(said)}", data=receipt)
    if not seen and not node.smoke:
        return Outcome(BAD, "no line on the GPU", data=receipt)
    missing = sorted({key for line in seen for key, value in line.items() if value is None})
    text = f"lines on the GPU: {len(seen)}" + (f"; it does not tell {', '.join(missing)}" if missing else "")
    return Outcome(GOOD, f"{text}; receipt, metrics and page in {folder.name}/", data={"gpu": seen, "receipt": receipt})


def sampling(node: Node, limit_s: float) -> Outcome:
    """Steps with and without lines on the GPU, in turns: what asking the driver each second costs."""
    medians: dict[str, list[float]] = {"off": [], "on": []}
    turns = TURNS[:2] if node.smoke else TURNS
    for turn, which in enumerate(turns):
        name = f"turn{turn}_{which}"
        every = "--config.log.gpu_every_s=" + {"off": "0", "on": "1"}[which]
        receipt = trained(node, name, (every,), limit_s / len(turns))
        shutil.rmtree(node.path / name, ignore_errors=True)
        if "why" in receipt:
            return Outcome(BAD, f"turn {turn}, {which}: {receipt['why']}", data=medians)
        medians[which].append(receipt["speed"]["step_time_s"]["median"])
    on, off = statistics.mean(medians["on"]), statistics.mean(medians["off"])
    said = ", ".join(f"{which} {' and '.join(f'{s:.4g}' for s in seconds)} s" for which, seconds in medians.items())
    return Outcome(GOOD, f"a step takes {on / off - 1:+.2%} with it ({said})", data=medians)


ITEMS = (
    Part("preflight", preflight, 75.0, 30.0),
    Part("a run and its receipt", gpu_lines, 150.0, 60.0),
    Part("cost of sampling", sampling, 300.0, 120.0, f"{len(TURNS)} runs of {STEPS} steps"),
)
