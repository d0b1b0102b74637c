"""Check that a node computes correctly, and measure its speed, in at most half an hour (`--suite=node`).

Each part has a time limit (PARTS). Its verdict is `ok`, `off`, `FAILED`, or `left out` with the reason. `off` is no fault: time
or memory differs from the plan, or the part ran out of time. The suite fails if a part failed.
"""

import datetime
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from jaxtrain.config import hardware, launch
from jaxtrain.data import loading
from jaxtrain.node import train_step
from jaxtrain.node.parts import BAD, GOOD, OFF, OUT, Node, Outcome, Part, run_parts
from jaxtrain.node.train_step import DATA
from jaxtrain.report import bench
from jaxtrain.train import parity_layouts
from jaxtrain.train.child import FAILED, LATE, OK, REFUSED, jaxtrain_command, run_case

BUDGET_S = 1800.0  # for all parts together
PEAK_ERROR = 0.10  # tolerated relative difference of measured from planned peak memory

# Shipped configs: (file, sequences per device and microbatch, microbatches). With the full batch, a step would take minutes.
SHIPPED = (("llama3_1b", 4, 4), ("llama2_7b", 2, 4), ("llama3_8b", 1, 4), ("llama3_70b", 1, 1))
LAYOUTS = {
    8: parity_layouts.DEFAULT,
    4: "one,data4,fsdp4,data2xfsdp2,fsdp2xtensor2,fsdp2xseq2,tensor2xseq2,tensor4",
    2: "one,data2,fsdp2,tensor2,seq2",
}
SMOKE_LAYOUTS = "one,fsdp8,fsdp2xtensor2xseq2"
TINY = f"--config={launch.DEFAULT_CONFIG}"
SMALL = tuple(f"--config.{o}" for o in ("model.num_layers=1", "model.d_model=32", "model.d_ff=64", "data.seq_len=32"))
# A model with a head size that cuDNN supports, so that parity compares the kernels of large runs.
WIDER = ("model.d_model=512", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=64", "data.seq_len=512")
GPU_TESTS = launch.REPO / "tests" / "gpu"


def smoke_config(node: Node) -> list[str]:
    """Return the command line of a tiny config on all devices of the node."""
    return [TINY, *SMALL, f"--config.train.global_batch={2 * node.devices.count}", *DATA["synthetic"]]


# ---- Parts


def check_health(node: Node, limit_s: float) -> Outcome:
    """Check GPUs, links, versions, host and environment by preflight, without measuring."""
    command = jaxtrain_command("preflight", "--no-measure", f"--json={node.path / 'preflight.json'}")
    return node.run_program("Preflight", command, limit_s)[1]


def calibrate(node: Node, limit_s: float) -> Outcome:
    """Measure rates of matmuls, attention, memory and links, for the plans of the later parts."""
    if node.smoke:
        return Outcome(OUT, "plans are made for GPUs")
    code, outcome = node.run_program("Rates", jaxtrain_command("plan", "--calibrate"), limit_s)
    return Outcome(OUT, outcome.found, outcome.lines) if code is None else outcome


def run_gpu_tests(node: Node, limit_s: float, name: str = "Kernels", only: Sequence[str] = ("",)) -> Outcome:
    """Compare attention, grouped matmuls and FP8 matmuls with their definitions (tests/gpu).

    No test starts in the last fifth of `limit_s`. A test that still runs after `limit_s` is a fault, since it may hang.

    Args:
        only: files of tests/gpu, or FILE::TEST; "": all files.
    """
    if not GPU_TESTS.is_dir() or importlib.util.find_spec("pytest") is None:
        return Outcome(OUT, "tests/gpu or pytest is missing. Fix: JAXTRAIN_TEST_DEVICE=gpu ./run.sh test tests/gpu")
    file = node.path / "logs" / f"{bench.file_name(name)}.jsonl"
    file.unlink(missing_ok=True)
    where = {"JAXTRAIN_TEST_DEVICE": "" if node.smoke else "gpu", "JAXTRAIN_TEST_RESULTS": str(file)}
    where["JAXTRAIN_TEST_SECONDS"] = str(0.8 * limit_s)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    command += [str(GPU_TESTS / target) for target in only]
    code, outcome = node.run_program(name, command, limit_s, os.environ | where)
    results = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    by_outcome = {kind: [r for r in results if r["outcome"] == kind] for kind in ("passed", "failed", "skipped")}
    rows = [[r["test"], r["outcome"], f"{r['ratio']:.2f}" if "ratio" in r else "", r["why"]] for r in results]
    table = bench.make_table(f"{name} against their definitions", ("test", "", "error / bound", ""), rows, text=2)
    passed, failed = len(by_outcome["passed"]), by_outcome["failed"]
    unfinished = sum("no time was left" in r["why"] for r in by_outcome["skipped"])
    text = f"{passed} tests passed" + (f"; for {unfinished} there was no time" if unfinished else "")
    if ratios := [r["ratio"] for r in results if "ratio" in r]:
        text += f"; error at most {max(ratios):.2f} of its bound"
    if failed:
        text = f"{len(failed)} of {passed + len(failed)} tests failed, first {failed[0]['test']}: {failed[0]['why']}"
    elif code != 0:
        text = f"{text}; {outcome.found}"
    verdict = BAD if failed or code != 0 or not passed else OFF if unfinished else GOOD
    return Outcome(verdict, text, bench.markdown(table) + outcome.lines * (verdict == BAD), results)


def check_parity(node: Node, limit_s: float) -> Outcome:
    """Train the same steps on several layouts and compare them."""
    count = node.devices.count
    meshes = SMOKE_LAYOUTS if node.smoke else next((text for n, text in LAYOUTS.items() if n <= count), "")
    if not meshes:
        return Outcome(OUT, "one device has one layout")
    wider = [f"--config.{o}" for o in WIDER]
    asked = {"f32": [*SMALL, "--steps=1"]} if node.smoke else {"f32": ["--dtype=f32"], "bf16": [*wider, "--dtype=bf16"]}
    data, lines, bad, late = {}, [], [], []
    began = time.monotonic()
    for name, more in asked.items():
        file = node.path / f"parity_{name}.json"
        file.unlink(missing_ok=True)  # an earlier suite may have written it
        command = jaxtrain_command("parity", TINY, "--config.data.source=synthetic", *more)
        command += [f"--meshes={meshes}", f"--json={file}"]
        code, outcome = node.run_program(f"Parity {name}", command, limit_s - (time.monotonic() - began))
        lines += outcome.lines
        if file.exists():
            data[name] = json.loads(file.read_text(encoding="utf-8"))
            bad += [f"{name} {r['name']}" for r in data[name]["layouts"] if r["verdict"] not in ("agrees", "reference")]
        elif code:
            bad.append(f"{name}: {outcome.found}")
        if code is None:
            late.append(name)
    if bad:
        return Outcome(BAD, f"not the same steps: {', '.join(bad)}", lines, data)
    if late:
        return Outcome(OFF if data else BAD, f"{', '.join(late)} not done in time", lines, data)
    return Outcome(GOOD, f"{len(meshes.split(','))} layouts take the same steps in {' and '.join(data)}", lines, data)


def time_configs(node: Node, limit_s: float) -> Outcome:
    """Time shipped configs for 30 steps each, or as many as fit into the time, and compare them with their plans."""
    cases = [("tiny", smoke_config(node))] if node.smoke else [node.config(*c) for c in SHIPPED]
    found: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    for i, (name, argv) in enumerate(cases):
        share = (limit_s - (time.monotonic() - began)) / (len(cases) - i)
        found[name] = time_steps(node, name, argv, share, (2, 1) if node.smoke else (25, 5))
    lines = bench.markdown(bench.step_table("Shipped configs", found))
    bad = [f"{name}: {r['why']}" for name, r in found.items() if r["verdict"] in (FAILED, REFUSED)]
    late = [f"{name}: {r['why']}" for name, r in found.items() if r["verdict"] == LATE]
    measured = [name for name, r in found.items() if r["verdict"] == OK]
    if bad or not measured:
        return Outcome(BAD, "; ".join(bad or ["no shipped config was measured", *late]), lines, found)
    off = late + [text for name in measured for text in differences_from_plan(name, found[name])]
    text = "; ".join(f"{n} {found[n]['tokens_per_s_per_device']:,.0f} tokens/s a device" for n in measured)
    return Outcome(OFF if off else GOOD, "; ".join([text, *off]), lines, found)


def differences_from_plan(name: str, r: Mapping[str, Any]) -> list[str]:
    """Return a text for an unexpected step time (`Expected.is_unexpected`), and one for a peak memory off by over PEAK_ERROR.

    Without a plan, return [].
    """
    from jaxtrain.plan.expect import Expected  # imports JAX

    if not r.get("planned"):
        return []
    planned, step_s, peak_gib, out = Expected(**r["planned"]), r["step_s"]["median"], r["memory"]["peak_gib"], []
    if step_s and planned.is_unexpected(step_s):
        within = " ({:.3g} to {:.3g} s are expected)".format(*planned.range_s) if planned.range_s else ""
        out.append(f"{name}: step time {step_s / planned.step_s:.2f} times the plan{within}")
    if peak_gib and abs(peak_gib / planned.peak_gib - 1) > PEAK_ERROR:
        out.append(f"{name}: peak memory {peak_gib / planned.peak_gib:.2f} times the plan")
    return out


def check_checkpoint(node: Node, limit_s: float) -> Outcome:
    """Save and restore a state, and compare it bit for bit."""
    argv = smoke_config(node) if node.smoke else node.config("llama3_1b", 1, 1)[1]
    return save_and_restore(node, argv, limit_s)


def save_and_restore(node: Node, argv: list[str], limit_s: float, devices: int = 0) -> Outcome:
    """Save and restore the state of a config in a child process. devices: number of devices; 0: all."""
    folder = node.path / "checkpoint"
    request = {"argv": argv, "devices": devices, "folder": str(folder)}
    try:
        answer = run_case("jaxtrain.node.suite:measure_checkpoint", request, log=node.folder.log("checkpoint"), limit_s=limit_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a checkpoint has gigabytes
    if answer["verdict"] != OK:
        return Outcome(BAD, answer["why"], data=answer)
    text = f"{answer['gib']:.3g} GiB in {answer['tensors']} tensors restored bit for bit; written in {answer['save_s']:.2g} s "
    text += f"(the loop waits {answer['blocked_s']:.2g} s), read in {answer['restore_s']:.2g} s"
    return Outcome(GOOD, text, ["## Checkpoint", "", text, ""], answer)


def measure_checkpoint(request: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, save and restore the state, and compare every bit. This is a case (child.py).

    Args:
      request: `argv`, config file and overrides; `devices`, their number, 0 for all; `folder`, for the checkpoint.
    """
    loaded = loading.load(request["argv"])
    if wrong := train_step.find_problems(loaded, request["devices"]):
        return {"verdict": REFUSED, "why": "; ".join(dict.fromkeys(map(str, wrong)))}
    run = loaded.run
    devices = train_step.start_devices(run, request["devices"])
    import jax
    import jax.numpy as jnp

    from jaxtrain.checkpoint import Checkpoints, Failed
    from jaxtrain.data import pipeline
    from jaxtrain.step import state
    from jaxtrain.step.batch import place_batch
    from jaxtrain.train.parity import compile_step, open_rows

    rows = open_rows(run)
    program, train, _ = compile_step(pipeline.with_documents(run, rows), devices)
    current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    for i in range(2):  # two steps, so that no moment is zero
        current, _ = train(current, place_batch(rows.batch(i), program.batch, program.context))
    jax.block_until_ready(current)

    checkpoints = Checkpoints(request["folder"])
    checkpoints.save(2, state.to_tensors(current), {"config": {}, "data": {}}, began=time.perf_counter())
    (saved,) = checkpoints.wait()
    if isinstance(saved, Failed):
        raise saved.error
    began = time.perf_counter()
    tensors = checkpoints.restore(2, state.abstract_tensors(program.state))
    restored = jax.block_until_ready(state.from_tensors(program.state, tensors))
    restore_s = time.perf_counter() - began
    checkpoints.close()

    @jax.jit
    def equal(a: jax.Array, b: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        return jnp.all(jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits))

    pairs = zip(state.to_tensors(current).items(), state.to_tensors(restored).values(), strict=True)
    differ = [name for (name, a), b in pairs if not equal(a, b)]
    out = {"gib": saved.bytes / 2**30, "save_s": saved.total_s, "blocked_s": saved.blocked_s, "restore_s": restore_s}
    out["tensors"] = len(state.abstract_tensors(program.state))
    if differ:
        return out | {"verdict": FAILED, "why": f"{len(differ)} tensors restored with differences: {', '.join(differ[:4])}"}
    return out | {"verdict": OK}


def train_tiny(node: Node, limit_s: float) -> Outcome:
    """Run configs/tiny.py through the command line, from text to a sample."""
    folder = node.path / "run"
    small = [*SMALL, f"--config.train.global_batch={2 * node.devices.count}", "--config.train.steps=4"]
    small += ["--config.optimizer.warmup_steps=1", "--config.eval.sequences=8", "--config.sample.max_tokens=4"]
    command = jaxtrain_command("main", TINY, *(small if node.smoke else ()), f"--workdir={folder}")
    code, outcome = node.run_program("configs/tiny.py", command, limit_s)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if code != 0:
        return outcome
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][-1]
    return Outcome(GOOD, f"trained, evaluated (loss {last['loss']:.3f}), saved and sampled", outcome.lines, last)


def time_steps(
    node: Node,
    name: str,
    argv: list[str],
    limit_s: float,
    steps: tuple[int, int],
    environ: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the answer of train_step.measure for the config of `argv`.

    Args:
      steps: (timed steps, warm-up steps).
      more: further fields of the request to `measure`.
    """
    request = {"argv": argv, "devices": 0, "steps": steps[0], "warmup": steps[1], **more}
    request["limit_s"] = 0.8 * limit_s  # the process needs some time to end after its last step
    return run_case(train_step.CASE, request, log=node.folder.log(name), environ=environ, limit_s=limit_s)


# Name -> (function, most seconds). The sum is below BUDGET_S.
PARTS: dict[str, tuple[Callable[[Node, float], Outcome], float]] = {
    "preflight": (check_health, 20),
    "rates": (calibrate, 120),
    "kernels": (run_gpu_tests, 300),
    "parity": (check_parity, 300),
    "configs": (time_configs, 540),
    "checkpoint": (check_checkpoint, 180),
    "run": (train_tiny, 120),
}


def run(out: str, file: str, parts: str, smoke: bool, console: rich.console.Console) -> int:
    """Run the suite. Return 0, or 1 if a part failed.

    Args:
      out: the output folder; "": a new folder under runs/. The suite also packs the folder into one .tar.gz.
      file: the file of --json.
      parts: names of parts, separated by commas; "": all.
      smoke: whether to use tiny shapes on GPUs too.
    """
    devices = hardware.probe()
    folder = bench.Folder(out or f"runs/node-{datetime.datetime.now():%Y%m%d-%H%M%S}", file, "suite")
    node = Node(devices, smoke or devices.kind != "gpu", folder)
    chosen = [Part(name, *PARTS[name]) for name in PARTS if not parts or name in parts.split(",")]
    try:
        return run_parts(chosen, node, console, BUDGET_S, "A node", {})
    finally:
        packed = shutil.make_archive(str(node.path), "gztar", node.path.parent, node.path.name)
        bench.print_line(console, f"{node.path}, and as one file to send in: {packed}")
