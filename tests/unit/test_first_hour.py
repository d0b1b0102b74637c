"""benchmarks/first_hour.py: its schedule of an hour, its configs on GPUs that this machine lacks, and its verdicts."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import rich.console
from bench_helpers import ANSWER, at_home  # noqa: F401

from benchmarks import first_hour
from jaxtrain import flops, hardware, launch
from jaxtrain.bench import node_suite, parts, report
from jaxtrain.plan import rates
from jaxtrain.validate import validate_step


def described(gib: float) -> hardware.Devices:
    return hardware.Devices("gpu", "NVIDIA H200", 1, gib, "described", 90)


def node(tmp_path: Path, gib: float = 140.0, smoke: bool = True) -> parts.Node:
    folder = report.Folder(str(tmp_path / "stage1"), "", "first_hour")
    return parts.Node(described(gib), smoke, folder, str(tmp_path / "work" / "compiled"))


def test_stages_fit_into_their_time():
    """The items of a stage fit into its time. Attention, a looped step and an unrolled step come in this order."""
    assert len(first_hour.STAGES) * first_hour.SECONDS < 3600
    for items in first_hour.STAGES.values():
        assert all(item.need_s <= item.most_s < first_hour.SECONDS for item in items)
        assert sum(item.need_s for item in items) < first_hour.SECONDS - first_hour.PACKING_S
    names = [item.name for items in first_hour.STAGES.values() for item in items]
    assert names.index("bf16 loop") < names.index("bf16 unrolled") and names.index("attention") < names.index("bf16 loop")
    assert set(first_hour.CASES) < set(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("gib", [140.0, 79.6])
def test_cases_can_be_run(gib):
    """The cases are valid on one H200 and one H100. All runs differ, except on the H100: "1b loop" equals "bf16 loop", which
    has the 1B model in place of the 8B model there.
    """
    runs = {}
    for name in first_hour.CASES:
        loaded = launch.load(first_hour.case_argv(name, False, gib))
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, described(gib)))], name
        assert loaded.run not in runs.values() or (gib < 100 and name == "1b loop"), name
        runs[name] = loaded.run
    assert runs["bf16 loop"].model.num_layers == 16 and not runs["bf16 unrolled"].parallel.scan_layers
    assert (runs["bf16 loop"].model.d_model == 4096) == (gib > 100)
    model = runs["mixtral"].model
    assert 16 * flops.parameters(model)["total"] < 40e9, "weights, gradients and moments in float32: half of a card of 80 GB"


def test_tiny_cases_can_be_run():
    for name in first_hour.CASES:
        loaded = launch.load(first_hour.case_argv(name, True, 8.0))
        devices = hardware.Devices("cpu", "cpu", 1, 8.0, "described")
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, devices))], name


def test_items_without_time_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "probe", lambda: described(140.0))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert first_hour.main(["--stage=4", f"--out={tmp_path}", "--seconds=30", "--summary"]) == 0
    done = json.loads((tmp_path / "stage4" / "results.json").read_text())["parts"]
    assert {p["verdict"] for p in done.values()} == {"left out"} and len(done) == len(first_hour.STAGES[4])
    printed = capsys.readouterr().out
    assert "15 s were left, and it needs 90" in printed
    assert f"--stage=4 --out={tmp_path} '--only=fp8 matmuls;fp8 loop;fp8 unrolled'" in printed
    assert "removed from the environment of all items:" in printed and "XLA_PYTHON_CLIENT_PREALLOCATE" in printed
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ and (tmp_path / "stage4.tar.gz").exists()


def test_a_second_run_of_an_item_keeps_the_others(tmp_path, monkeypatch):
    answers = iter(("out of time", "ok", "ok"))
    items = tuple(parts.Part(name, lambda node, limit_s: parts.Outcome(next(answers), "so"), 60.0) for name in ("a", "b"))
    monkeypatch.setitem(first_hour.STAGES, 1, items)
    for only, found in (("", ["out of time", "ok"]), ("a", ["ok", "ok"])):
        assert first_hour.main(["--stage=1", f"--out={tmp_path}", "--smoke", f"--only={only}"]) == 0
        done = json.loads((tmp_path / "stage1" / "results.json").read_text())["parts"]
        assert [done[name]["verdict"] for name in "ab"] == found


def test_variables_that_runs_refuse_are_removed():
    image = {"XLA_FLAGS": "--a", "NCCL_ALGO": "Ring", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "1"}
    assert first_hour.clean_environment(image) == ["NCCL_ALGO", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stage=1"], "no GPU here"),
        ([], "--stage: missing. For example --stage=1."),
        (["--stage=3", "--only=8b", "--smoke"], "--only = '8b': no such item in stage 3. It has bf16 loop; bf16 loop, one"),
    ],
)
def test_mistakes_are_refused_first(argv, said, tmp_path, capsys):
    assert first_hour.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- Results


def test_steps_are_judged_by_their_estimate(tmp_path, monkeypatch):
    one = node(tmp_path)
    answer = ANSWER | {"planned": {"step_s": 0.5, "peak_gib": 41.0, "rates": "calibrated on this GPU"}}
    answers = iter((answer, {"verdict": "out of memory", "why": "no room"}))
    monkeypatch.setattr(node_suite, "run_case", lambda *_, **__: next(answers))
    items = (
        parts.Part(name, first_hour.STAGES[stage][at].act, 60.0)
        for name, stage, at in (("bf16 loop", 3, 0), ("fp8 loop", 4, 1))
    )
    done: dict = {}
    console = rich.console.Console(width=report.WIDTH, record=True, quiet=False)
    assert parts.run_parts([*items], one, console, 60.0, "Stage", done) == 1
    assert done["bf16 loop"]["verdict"] == "off"
    assert done["bf16 loop"]["found"] == "1 (2.00 x plan) s, 10 tokens/s, MFU 50.0% causal, peak 40.00 (0.98 x plan) GiB"
    assert (done["fp8 loop"]["verdict"], done["fp8 loop"]["found"]) == ("FAILED", "out of memory: no room")
    for stage in (3, 4):
        shutil.copytree(tmp_path / "stage1", tmp_path / f"stage{stage}", dirs_exist_ok=True)
    first_hour.summary(tmp_path, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["bf16", "loop", "1", "0.5", "2.00", "40.00", "41.00", "0.98", "10", "50.0%", "0.5", "no", "plan"] in lines
    assert [line for line in lines if line[:2] == ["fp8", "loop"] and line[-2:] == ["no", "room"]]


def test_losses_that_differ_are_wrong(tmp_path, monkeypatch):
    def run_case(kind, request, *, environ, **_):
        factor = 1.01 if environ.get("JAX_PLATFORMS") == "cpu" else 1.0
        return {"verdict": "ok", "loss": {"first": 5.0, "last": 4.0 * factor}}

    monkeypatch.setattr(node_suite, "run_case", run_case)
    monkeypatch.delenv("JAX_PLATFORMS")
    found = first_hour.compare_with_cpu(node(tmp_path), 60.0)
    assert found.verdict == "FAILED" and found.found == "f32: losses differ by 9.9e-03, 1e-04 is tolerated"


@pytest.mark.parametrize(
    ("answer", "verdict", "said"),
    [
        ({"verdict": "ok", "rows": [{"verdict": "ok", "of_bound": 0.5}]}, "ok", "1 timed, 50% to 50% of their bounds"),
        ({"verdict": "out of time", "why": "late", "rows": [{"verdict": "ok", "of_bound": None}]}, "off", "1 timed; late"),
        ({"verdict": "failed", "why": "no luck"}, "FAILED", "0 timed; no luck"),
        ({"verdict": "ok", "rows": [{"verdict": "failed", "kind": "k", "what": "w", "why": "x"}]}, "FAILED", "0 timed; k w: x"),
    ],
)
def test_verdicts_of_timed_kernels(answer, verdict, said, tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "run_case", lambda *_, **__: answer)
    monkeypatch.setattr(first_hour.kernels, "make_table", lambda *_: report.make_table("", ("",), []))
    found = first_hour.time_kernels("gemm", node(tmp_path), 60.0)
    assert (found.verdict, found.found) == (verdict, said)


def test_archives_stay_below_what_can_be_sent(tmp_path, monkeypatch):
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(50_000))
    (only,) = first_hour.pack(folder, tmp_path / "a.tar.xz")
    whole = only.read_bytes()
    monkeypatch.setattr(first_hour, "MAX_FILE_BYTES", 20_000)
    made = first_hour.pack(folder, tmp_path / "a.tar.xz")
    assert [file.name for file in made] == ["a.tar.xz.00", "a.tar.xz.01", "a.tar.xz.02"] and not only.exists()
    assert max(file.stat().st_size for file in made) == 20_000 and len(b"".join(f.read_bytes() for f in made)) == len(whole)


def test_rates_of_an_earlier_stage_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "FOLDER", tmp_path / "home")
    monkeypatch.setattr(rates.path, "__defaults__", (tmp_path / "home",))
    gpu = hardware.lookup("NVIDIA H200")
    assert gpu
    rates.save(rates.datasheet(gpu, "bf16"), gpu.name, tmp_path / "out" / "rates")
    assert str(tmp_path / "home") in first_hour.use_rates(tmp_path / "out", "NVIDIA H200")
    assert rates.load(gpu.name, tmp_path / "home") == rates.datasheet(gpu, "bf16")
    assert first_hour.use_rates(tmp_path / "out", "NVIDIA H200") == "", "there are some now"


def test_the_cost_of_gpu_metrics_follows_from_turns(tmp_path, monkeypatch):
    """The programs of stage 6 are fakes. Their steps take 1.01 s with GPU metrics and 1 s without."""
    asked = []

    def run_program(command, log, *, environ=None, limit_s):
        asked.append(command)
        words = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        if "jaxtrain.preflight" in command:
            Path(words["json"]).write_text(json.dumps({"exit_code": 3}))
            return 3, "FAULT: ECC"
        if "jaxtrain.main" in command:
            folder = Path(words["workdir"])
            (folder / "checkpoints" / "60").mkdir(parents=True)
            every = float(words["config.log.gpu_every_s"])
            (folder / "receipt.json").write_text(json.dumps({"speed": {"step_time_s": {"median": 1.01 if every else 1.0}}}))
            (folder / "metrics.jsonl").write_text(json.dumps({"kind": "gpu", "power_w": 650.0, "nvlink_tx_gb_s": None}) + "\n")
        return 0, "done"

    monkeypatch.setattr(parts, "run_program", run_program)
    one = node(tmp_path, 80.0, smoke=False)
    found = {part.name: part.act(one, 300.0) for part in first_hour.STAGES[6][2:]}
    assert (found["preflight"].verdict, found["preflight"].found) == ("off", "exit code 3: FAULT: ECC")
    assert found["a run and its receipt"].found.startswith("lines of GPU metrics: 1; without nvlink_tx_gb_s")
    assert found["cost of sampling"].found.startswith("a step takes +1.00% with it (off 1 and 1 s, on 1.01 and 1.01 s)")
    every = [word for command in asked for word in command if word.startswith("--config.log.gpu_every_s=")]
    assert [word.partition("=")[2] for word in every] == ["2", "0", "1", "1", "0"]
    assert not [*tmp_path.rglob("checkpoints")]
