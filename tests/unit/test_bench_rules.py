"""Benchmarks without running a case: options, sweeps, the handling of results, and their comparison with plans."""

import json
import sys
from pathlib import Path

import pytest
import rich.console
from bench_helpers import ANSWER, SMALL, at_home  # noqa: F401

from jaxtrain.commands import bench as command
from jaxtrain.config import hardware
from jaxtrain.data import loading
from jaxtrain.node import kernels, measure, suite, train_step
from jaxtrain.node.train_step import DATA
from jaxtrain.plan import rates
from jaxtrain.step import state_size
from jaxtrain.train import child, step_log


def ask(**more):
    argv = [*SMALL, *DATA["synthetic"], "--config.log.peak_tflops=1"]
    return {"argv": argv, "devices": 2, "warmup": 2, "steps": 4, "limit_s": None} | more


def test_fp8_and_bf16_share_one_peak():
    """MFU of a step with FP8 is relative to the bfloat16 peak FLOP/s, as in the log of a run and in plans."""
    runs = {p: loading.load_config([*SMALL, f"--config.precision={p}"]).run for p in ("bf16", "fp8", "f32")}
    peaks = {p: step_log.peak_tflops(run, "NVIDIA H200") for p, run in runs.items()}
    assert peaks["fp8"] == peaks["bf16"] == pytest.approx(989.4, rel=1e-3) and peaks["f32"] == pytest.approx(66.9, rel=0.1)


def test_what_cannot_hold_its_state_is_not_compiled(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA H200", 4, 130.0, "described", 90))
    monkeypatch.delenv("XLA_FLAGS")  # the suite's fake devices are in the environment, which a run on a GPU would refuse
    argv = ["--config=configs/llama3_70b.py:gpus=4", *DATA["synthetic"]]
    r = train_step.measure(ask(argv=argv, devices=4))
    assert r["verdict"] == "out of memory" and f"{525.7 / 4:.1f} GiB" in r["why"] and "130.0" in r["why"]


@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [
        ("", 8),
        ("dtypes.m=int8 dtypes.v=int8", 6),
        ("optimizer.name=muon", 6),
        ("lora.rank=8", 2),
        ("train.freeze=embed.*", 4),
        # All but embedding and head (2 x 128256 x 8192) is in matrices.
        ("lora.rank=8 lora.base=fp8", 2 - 68.45 / 70.55),
        ("lora.rank=8 lora.base=nf4", 2 - 68.45 / 70.55 * (2 - 4.127 / 8)),
    ],
)
def test_the_least_state_of_a_config(settings, bytes_each):
    """Frozen weights have no moments, and the base weights of adapters have the compute dtype or fewer bits."""
    argv = ["--config=configs/llama3_70b.py:gpus=1", *DATA["synthetic"], *(f"--config.{word}" for word in settings.split())]
    run = loading.load_config(argv).run
    assert state_size.least_gib(run, ("params", "moments")) == pytest.approx(525.7 * bytes_each / 8, rel=1e-3)


# ---- A case, in its own process


@pytest.mark.parametrize(
    ("kept", "code", "verdict", "why"),
    [
        ({"verdict": "ok", "rows": [1]}, 0, "ok", ""),
        ({"verdict": "ok", "rows": [1]}, None, "ok", ""),  # the process ends after its last output
        ({"verdict": "refused", "why": "so it is"}, 0, "refused", "so it is"),
        ({"verdict": "out of time", "rows": [1]}, None, "out of time", "3 s"),
        ({"verdict": "out of time", "rows": [1]}, 0, "failed", "a | b | c"),
        (None, None, "out of time", "3 s"),
        (None, -9, "failed", "-9"),
    ],
)
def test_a_case_that_is_ended_keeps_what_it_had_found(kept, code, verdict, why, monkeypatch):
    def run(argv, log, *, environ, limit_s, killed_s):
        asked, answered = map(Path, argv[-2:])
        assert argv[-3] == "a:b" and limit_s == 3.0 and json.loads(asked.read_text())["kind"] == "gemm"
        if kept:
            child.save_partial(json.loads(asked.read_text()), kept)
            assert json.loads(answered.read_text()) == kept
        return code, "long before\na\nb\nc\n"

    monkeypatch.setattr(child, "run_program", run)
    found = child.run_case("a:b", {"kind": "gemm"}, limit_s=3.0)
    assert found["verdict"] == verdict and why in found.get("why", "")
    assert found.get("rows") == (kept or {}).get("rows") and found["seconds"] >= 0


def test_the_spread_of_times():
    assert train_step.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "max": 5.0}
    assert set(train_step.spread([2.0]).values()) == {2.0}


# ---- Sweeps


def test_a_sweep_says_what_became_of_each_case(monkeypatch, capsys, tmp_path):
    answers = iter([ANSWER, ANSWER | {"tokens_per_s": 20.0}, {"verdict": "out of memory", "why": "90 GiB"}])
    asked = []
    monkeypatch.setattr(train_step, "run_case", lambda kind, ask, log: asked.append(ask["argv"]) or dict(next(answers)))
    file = tmp_path / "sweep.json"
    assert command.main([*SMALL, "--sweep=remat.policy=full,dots,none; mesh.tensor=1,3", f"--json={file}"]) == 0
    assert "90 GiB" in capsys.readouterr().out and len(asked) == 3, "those that cannot be are not started"
    tree = json.loads(file.read_text())
    assert [c["verdict"] for c in tree["cases"]] == ["ok", "refused", "ok", "refused", "out of memory", "refused"]
    assert tree["best"] == "remat.policy=dots mesh.tensor=1" and asked[1][-2:] == [
        "--config.remat.policy=dots",
        "--config.mesh.tensor=1",
    ]


def test_an_interrupted_sweep_keeps_what_is_done(monkeypatch, tmp_path):
    def run_case(kind, ask, log):
        if "--config.remat.policy=none" in ask["argv"]:
            raise KeyboardInterrupt
        return dict(ANSWER)

    monkeypatch.setattr(train_step, "run_case", run_case)
    out = tmp_path / "out"
    assert command.main([*SMALL, "--sweep=remat.policy=full,none", f"--out={out}"]) == 130
    tree = json.loads((out / "results.json").read_text())
    assert [c["name"] for c in tree["cases"]] == ["remat.policy=full"] and tree["best"] == "remat.policy=full"
    assert json.loads((out / "receipt.json").read_text())["exit_code"] == 130


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--steps=0"], "--steps = '0'"),
        (["--sweep=remat.policy"], "--sweep = 'remat.policy'"),
        (["--sweep=mesh.fsdp=1;mesh.fsdp=2"], "--sweep = 'mesh.fsdp'"),
        (["--sweep=nun.layers=1,2"], "nun.layers = '1'"),
        (["--config.mesh.tensor=3"], "tensor=3"),
        (["--kernels=attention,rope"], "'rope'"),
        (["--kernels"], "--config"),
        (["--suite=world"], "--suite = 'world'"),
        (["--parts=run"], "--parts"),
        (["--json=nowhere/bench.json"], "--json = 'nowhere/bench.json'"),
    ],
)
def test_mistakes_are_named(argv, key, capsys):
    assert command.main([*SMALL, *argv]) == 2
    assert f"{key}" in capsys.readouterr().err


# ---- Kernels


def test_a_kernel_that_fails_is_a_row(monkeypatch, tmp_path):
    def broken():
        raise ValueError("no such luck\nand much more")

    (reading,) = measure.try_work(measure.TimedWork("k", "w", 1.0, 1.0, broken), measure.TINY)
    row = kernels.make_row(reading, None)
    assert (row["verdict"], row["why"]) == ("failed", "ValueError: no such luck")
    monkeypatch.setattr(kernels, "run_case", lambda kind, ask, log: {"verdict": "ok", "rows": [row], "seconds": 1.0})
    out = tmp_path / "kernels"
    assert command.main(["--kernels=norm", f"--out={out}"]) == 1
    assert json.loads((out / "receipt.json").read_text())["exit_code"] == 1


# ---- The suite of a node


@pytest.mark.parametrize(
    ("lines", "code", "want", "said"),
    [
        ([("a", "passed", ""), ("b", "skipped", "no cuDNN")], 0, "ok", "1"),
        ([("a", "passed", ""), ("b", "skipped", "no time was left")], 0, "off", "1"),
        ([("a", "passed", ""), ("b", "failed", "o: 3.0")], 1, "FAILED", "b: o: 3.0"),
        ([("a", "passed", "")], None, "FAILED", "1"),
        ([("a", "skipped", "no cuDNN")], 0, "FAILED", "0"),
        ([], 2, "FAILED", "2: no module"),
    ],
)
def test_verdicts_of_kernel_tests(lines, code, want, said, tmp_path, monkeypatch):
    """The verdict follows from the results of tests/gpu, whose process is faked here."""

    def run_program(command, log, *, environ, limit_s):
        assert command[:3] == [sys.executable, "-m", "pytest"] and environ["JAXTRAIN_TEST_SECONDS"] == "48.0"
        with open(environ["JAXTRAIN_TEST_RESULTS"], "a") as file:
            file.writelines(json.dumps(dict(zip(("test", "outcome", "why"), line, strict=True))) + "\n" for line in lines)
        return code, "no module"

    monkeypatch.setattr(suite, "run_program", run_program)
    node = suite.Node(str(tmp_path / "node"), "", "suite", True)
    (tmp_path / "node" / "logs").mkdir()
    found = suite.run_gpu_tests(node, 60.0)
    assert found.verdict == want and said in found.found


@pytest.mark.parametrize(
    ("act", "code", "restore", "want"),
    [
        ("", 0, {"digests": "matched", "seconds": 0.5}, "ok"),
        ("", 0, None, "FAILED"),  # the second process began a run of its own
        ("verify", 1, {"digests": "matched", "seconds": 0.5}, "FAILED"),
        ("restore", None, {"digests": "matched", "seconds": 0.5}, "FAILED"),
    ],
)
def test_verdicts_of_a_restore(act, code, restore, want, tmp_path, monkeypatch):
    """The verdict follows from the exit codes and the receipt of a run, whose processes are faked here."""
    started = []

    def run_program(command, log, *, environ, limit_s):
        started.append(command[3:])
        folder = tmp_path / "node" / "suite_run"
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"kind": "train", "loss": 3.0}\n{"kind": "gpu", "step": 1}\n')
        receipt = {"goodput": {"parts_s": {"save": 0.2}}} | ({"restore": restore} if restore else {})
        (folder / "receipt.json").write_text(json.dumps(receipt))
        (folder / "checkpoints").mkdir(exist_ok=True)
        return code if log.stem == f"run_{act}" else 0, "said"

    monkeypatch.setattr(suite, "run_program", run_program)
    node = suite.Node(str(tmp_path / "node"), "", "suite", True)
    found = suite.train_tiny(node, 60.0)
    assert found.verdict == want and (want == "FAILED" or found.data["loss"] == 3.0)
    assert [words[0] for words in started] == ["main", "main", "checkpoint"][: 2 if act == "restore" else 3]
    assert started[0] == started[1] and not (tmp_path / "node" / "suite_run" / "checkpoints").exists()


def test_the_budget_of_a_suite_and_its_layouts():
    assert sum(part.most_s for part in suite.PARTS) <= suite.BUDGET_S == 1800
    for count, text in suite.LAYOUTS.items():
        found, problems = suite.parity_layouts.parse_layouts(text)
        assert not problems and max(layout.devices for layout in found) == count and found[0].name == "one"
    assert len(suite.LAYOUTS[8].split(",")) == 8


PLANNED = {"step_s": 1.0, "peak_gib": 51.0, "rates": "calibrated"}
AS_PUBLISHED = PLANNED | {"rates": rates.PUBLISHED}


@pytest.mark.parametrize(
    ("planned", "named"),
    [
        (PLANNED, ["1.20"]),
        (PLANNED | {"step_s": 1.15}, []),
        (AS_PUBLISHED, []),  # longer than a roofline without a comparable run
        (AS_PUBLISHED | {"range_s": [1.1, 1.3]}, []),
        (AS_PUBLISHED | {"range_s": [1.05, 1.15], "peak_gib": 50.0}, ["1.05 to 1.15 s"]),
        (AS_PUBLISHED | {"peak_gib": 40.0}, ["1.25"]),
        (AS_PUBLISHED | {"peak_gib": 80.0}, ["0.62"]),
        (None, []),
    ],
)
def test_a_step_that_differs_from_its_plan(planned, named):
    r = {"step_s": {"median": 1.2}, "memory": {"peak_gib": 50.0}, "planned": planned}
    found = suite.differences_from_plan(r)
    assert len(found) == len(named) and all(figure in text for figure, text in zip(named, found, strict=True))


def test_what_lies_in_the_folder_of_a_suite_stays(tmp_path, monkeypatch):
    """--out may be a folder with runs, one of which is called run."""
    for name in ("run", "checkpoint"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    monkeypatch.setattr(suite, "run_program", lambda *_, **__: (1, "no"))
    console = rich.console.Console(quiet=True)
    assert suite.run_suite(str(tmp_path), "", "run,checkpoint", True, console) == 1
    assert all((tmp_path / name / "thesis.txt").exists() for name in ("run", "checkpoint"))


def test_layouts_that_hang_are_a_fault_and_ctrl_c_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "run_program", lambda *_, **__: (None, ""))
    node = suite.Node(str(tmp_path), "", "suite", True)
    assert suite.check_parity(node, 60.0).verdict == "FAILED"

    def interrupted(*_):
        raise KeyboardInterrupt

    parts = [suite.SuitePart("a", lambda *_: suite.PartOutcome("ok", "done"), 5), suite.SuitePart("b", interrupted, 5)]
    with pytest.raises(KeyboardInterrupt):
        suite.run_parts(parts, node, rich.console.Console(), 60.0, "A node")
    assert "2 of 2" in capsys.readouterr().out.splitlines()[-1]
