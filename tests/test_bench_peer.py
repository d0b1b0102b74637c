"""Benchmarks against PyTorch, and the list of what is to be measured on a Hopper GPU (benchmarks/hopper.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_helpers import ANSWER, at_home, here  # noqa: F401

from benchmarks import hopper, operate
from jaxtrain import flops, hardware, launch
from jaxtrain.bench import __main__ as command
from jaxtrain.bench import parts, peer, report, suite
from jaxtrain.bench.measure import DATA
from jaxtrain.models.llama import NAMES
from jaxtrain.plan import rates
from jaxtrain.validate import validate_step

# ---- the peer

TORCH = os.environ.get("JAXTRAIN_PEER_PYTHON", sys.executable)
PEER = [
    *("--config=configs/llama3_1b.py:gpus=1", *suite.SMALL, "--config.model.vocab_size=272", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=8", "--config.train.global_batch=4"),
    *("--config.train.grad_accum=2", "--devices=1", "--steps=2", "--warmup=1", "--peer=torch", "--rounds=2"),
]


def test_tensors_go_over_as_transformers_has_them():
    sizes = {"D": 6, "N": 4, "K": 2, "H": 3, "V": 7, "F": 5}
    for ours, theirs in NAMES.items():
        array = np.random.default_rng(0).normal(size=[sizes[a] for a in theirs.ours.split()])
        name, turned = peer.to_hf(ours.replace("{i}", "1"), array)
        assert name == theirs.name.replace("{i}", "1") and turned.ndim == (1 if turned.ndim == 1 else 2)
        if theirs.theirs == "(N H) D":
            assert turned[1 * 3 + 2, 5] == array[5, 1, 2]
        if theirs.theirs == "D (N H)":
            assert turned[5, 1 * 3 + 2] == array[5, 1, 2]
        if theirs.theirs == "F D":
            assert turned[4, 3] == array[3, 4]


def test_a_peer_that_cannot_be(capsys):
    """An interpreter without torch, several devices, and what transformers' Llama has not: all at once."""
    more = ["--devices=2", "--config.model.qk_norm=true", "--peer-python=nowhere/python"]
    assert command.main([*PEER, *more]) == 2
    said = capsys.readouterr().err
    assert "the peer runs on one device, and 2 would be measured" in said and "no such program" in said
    assert "model.qk_norm = True: transformers' Llama has no such thing" in said


def test_a_python_without_torch(capsys, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    assert command.main([*PEER, f"--peer-python={python}"]) == 2
    assert "cannot import torch and transformers: ModuleNotFoundError: No module named 'torch'" in capsys.readouterr().err


STAND_IN = """
import json, sys
spec = json.load(open(sys.argv[1]))
how = {"attention": "sdpa", "compile": "layers", "checkpoint": False}
tried = [] if spec["settings"] else [{**how, "step_s": 0.5, "why": ""}]
answer = {"verdict": "ok", "torch": "2", "transformers": "5", "device": "cpu", "settings": how, "tried": tried}
answer |= {"seconds": [0.5] * spec["steps"], "losses": [5.0] * 3, "parameters": spec["parameters"]}
json.dump(answer | {"allocated_gib": None, "reserved_gib": None}, open(sys.argv[2], "w"))
"""


def test_turns_and_their_ratio(tmp_path, monkeypatch, capsys):
    """Ours in this process, theirs by a stand-in that answers as the script does and takes half a second a step."""
    script, file = tmp_path / "stand_in.py", tmp_path / "peer.json"
    script.write_text(STAND_IN)
    monkeypatch.setattr(peer, "SCRIPT", script)
    monkeypatch.setattr(peer, "apart", lambda kind, ask, **how: dict(ANSWER) if kind == "steps" else here(kind, ask))
    monkeypatch.setattr(peer, "same_work", lambda *_: {"verdict": "ok", "off": 1e-7})
    monkeypatch.setattr(peer, "refusal", lambda *_: [])
    assert command.main([*PEER, f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    tree = json.loads(file.read_text())
    assert [t["who"] for t in tree["turns"]] == ["jaxtrain", "torch"] * 2
    theirs = 4 * 32 / 0.5
    assert tree["turns"][1]["tokens_per_s"] == pytest.approx(theirs) and tree["turns"][1]["steps"] == 2
    assert tree["compared"]["ratio"] == pytest.approx(10.0 / theirs) and tree["compared"]["rounds"] == 2
    assert "ratio ours/theirs in tokens/s: 0.039" in printed and "tried: SDPA sdpa, compile layers: 0.5 s" in printed


def test_a_peer_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(peer, "SCRIPT", script)
    answer = peer.theirs(sys.executable, {}, tmp_path / "log.txt", 0.5)
    assert answer["verdict"] == "out of time" and answer["why"].startswith("not done after")


def test_other_work_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "apart", lambda kind, ask, **how: {"verdict": "ok", "spec": {}, "losses": [5.0, 4.0]})
    monkeypatch.setattr(peer, "theirs", lambda *_: {"verdict": "ok", "losses": [5.0, 4.01]})
    found = peer.same_work(PEER[:1], "python", tmp_path, tmp_path / "log.txt")
    assert found["verdict"] == "failed" and "not the same work" in found["why"]


def test_torch_does_the_same_work(tmp_path, capsys):
    """Four losses of a small model with grouped queries, tied head and scaled rotary frequencies, from the same weights.

    Where there is no torch, that is what the command must say. JAXTRAIN_PEER_PYTHON names an interpreter that has it.
    """
    probe = subprocess.run([TORCH, "-c", "import torch, transformers"], capture_output=True, check=False)
    if probe.returncode:
        assert command.main([*PEER, f"--peer-python={TORCH}"]) == 2
        assert "cannot import torch and transformers" in capsys.readouterr().err
        return
    base = [*PEER[:-6], *DATA["synthetic"], *peer.SAME_WORK]
    found = peer.same_work(base, TORCH, tmp_path, tmp_path / "logs" / "log.txt")
    assert found["verdict"] == "ok", found
    assert found["off"] < 1e-5 and found["ours"][-1] < found["ours"][0] - 0.01, "steps were taken"


def test_what_the_peer_cannot_import():
    """The script must run where jaxtrain is not installed."""
    assert "jaxtrain" not in [
        line.split()[1].split(".")[0] for line in peer.SCRIPT.read_text().splitlines() if line.startswith(("import ", "from "))
    ]


# ---- benchmarks/hopper.py


def test_hopper_without_a_gpu_says_so(capsys, tmp_path):
    assert hopper.main(["--part=1", f"--out={tmp_path}"]) == 2
    assert "no GPU here" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_aims_follow_from_what_was_measured(tmp_path, monkeypatch, capsys):
    """Part 2 on a described GPU: everything is asked for, one case fails, and what the aims say is read from the rest."""
    half = ANSWER | {"mfu_causal": 0.61, "planned": {"step_s": 0.9, "peak_gib": 41.0, "rates": "calibrated"}}

    def apart(kind, ask, *, log, limit_s):
        if "--config.precision=fp8" in ask["argv"]:
            return half | {"tokens_per_s": 15.0, "devices": {"count": 1, "kind": ["NVIDIA H200"]}}
        if "--config.attention.impl=pallas" in ask["argv"]:
            return {"verdict": "failed", "why": "no such luck"}
        return dict(half)

    monkeypatch.setattr(hopper, "apart", apart)
    monkeypatch.setattr(report, "step_details", lambda name, r: [[name, r["verdict"]]])
    monkeypatch.setattr(hopper, "run_program", lambda command, log, limit_s: (0, "where the time went"))
    (tmp_path / "part2" / "traces" / "8b_half").mkdir(parents=True)
    monkeypatch.setattr(hopper, "free", lambda out, part: out / "part2")
    monkeypatch.setattr(hardware, "probe", lambda: described(140.0))
    assert hopper.main(["--part=2", f"--out={tmp_path}"]) == 1
    printed = capsys.readouterr().out
    assert "NOT WELL: 8b:half pallas (failed: no such luck)" in printed
    tree = json.loads((tmp_path / "part2" / "results.json").read_text())
    assert list(tree["parts"]) == [*hopper.HALVES, "trace"]
    page = (tmp_path / "part2" / "results.md").read_text()
    for line in (
        "| 8b:half, MFU causal | 61.0% | 60% |",
        "| 8b:half, fp8 over bf16 | 1.50 x | 1.4 x |",
        "| 8b:half, measured over planned step | 1.11 | 0.85 to 1.15 |",
        "| 8b:half, measured over planned peak | 0.98 | 0.90 to 1.10 |",
    ):
        assert line in page


def test_what_the_operators_tools_cost_follows_from_turns(tmp_path, monkeypatch, capsys):
    """Part 5 on a described GPU: runs whose steps take 1.01 s with lines on the GPU, 1 s without."""
    asked = []

    def run(command, log, *, limit_s):
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

    monkeypatch.setattr(operate, "run", run)
    monkeypatch.setattr(hardware, "probe", lambda: described(80.0))
    assert hopper.main(["--part=5", f"--out={tmp_path}"]) == 0
    found = json.loads((tmp_path / "part5" / "results.json").read_text())["parts"]
    assert (found["preflight"]["verdict"], found["preflight"]["found"]) == ("off", "FAULT: ECC")
    assert found["a run and its receipt"]["found"].startswith("lines on the GPU: 1; it does not tell nvlink_tx_gb_s")
    assert found["cost of sampling"]["found"].startswith("a step takes +1.00% with it (off 1 and 1 s, on 1.01 and 1.01 s)")
    every = [word for command in asked for word in command if word.startswith("--config.log.gpu_every_s=")]
    assert [word.partition("=")[2] for word in every] == ["2", "0", "1", "1", "0"]
    assert not [*tmp_path.rglob("checkpoints")]


@pytest.mark.more
def test_the_operators_tools_in_tiny_form(tmp_path):
    """Part 5 as it is, on CPUs."""
    assert hopper.main(["--part=5", f"--out={tmp_path}", "--smoke"]) == 0
    folder = tmp_path / "part5"
    assert json.loads((folder / "preflight.json").read_text())["verdict"] == "no GPUs"
    assert (folder / "run" / "report.html").exists() and (folder / "recorded_node").is_dir()
    assert json.loads((folder / "results.json").read_text())["parts"]["cost of sampling"]["verdict"] == "ok"


def test_what_there_is_no_time_for_is_left_out(tmp_path, monkeypatch, capsys):
    """With the command that measures it; and a second time beside what is there."""
    monkeypatch.setattr(hardware, "probe", lambda: described(140.0))
    monkeypatch.setattr(peer, "interpreter", lambda python: [])
    for folder in ("part4", "part4_2"):
        assert hopper.main(["--part=4", f"--out={tmp_path}", "--seconds=1"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("left out") >= len(hopper.items(4, "python"))
        assert f"--part=4 --out={tmp_path} '--only=1b,1b fp8,configs/tiny.py,peer: 1b'" in printed
        assert json.loads((tmp_path / folder / "receipt.json").read_text())["reason"] == "done"


def described(gib: float) -> hardware.Devices:
    return hardware.Devices("gpu", "NVIDIA H200", 1, gib, "described", 90)


@pytest.mark.parametrize(
    ("argv", "gib", "said"),
    [
        (["--part=2"], 79.6, "part 2 needs 100 GiB, and NVIDIA H200 has 80 GiB. Run it on an H200; here, run --part=4."),
        (["--part=3"], 79.6, "part 3 needs 100 GiB"),
        (["--part=2", "--only=8b"], 140.0, "part 2 has no such item. It has 8b:half, 8b:half fp8,"),
        (["--part=3", "--peer-python=nowhere/python"], 140.0, "--peer-python = 'nowhere/python': no such program"),
    ],
)
def test_what_cannot_be_measured_here_is_said_first(argv, gib, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "probe", lambda: described(gib))
    if "nowhere" not in argv[-1]:
        monkeypatch.setattr(peer, "interpreter", lambda python: [])
    assert hopper.main([*argv, f"--out={tmp_path}"]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_cases_of_hopper_can_be():
    """Their configs, on one H200; no two load the same run, or differ in what one of them makes no use of."""
    runs = {}
    mixtrals = {name: (*hopper.MIXTRAL, *how) for name, how in hopper.MIXTRALS.items()}
    for name, argv in {**hopper.HALVES, **hopper.ONES, **mixtrals, "1b beside PyTorch": hopper.ONE_PEER}.items():
        loaded = launch.load([*argv, *DATA["synthetic"]])
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, described(140.0)))], name
        assert loaded.run not in runs.values(), name
        runs[name] = loaded.run
    # Layers that stand one by one are compiled without a level in any case.
    for name, run in runs.items():
        assert not ("optimization_level" in run.compiler.options and run.compiler.unroll), name
    shipped = launch.load(["--config=configs/llama3_8b.py:half"]).run
    assert runs["8b:half"].train == shipped.train
    # Weights, gradients and moments in float32 leave half of a card of 80 GB.
    model = runs["mixtral"].model
    assert 16 * flops.parameters(model)["total"] < 40e9 and model.d_ff * 2 == 7 * model.d_model


def test_kernels_and_checks_of_hopper_in_tiny_form(tmp_path, monkeypatch, capsys):
    """Part 1: each kind is asked for; one that is ended keeps its rows, and one that breaks takes nothing from the others."""
    row = {"kind": "k", "what": "w", "verdict": "ok", "seconds_a_call": 1.0, "spread": 0.1, "floor_s": 0.5, "of_floor": 0.5}
    row |= {"tflops": 1.0, "gb_s": 1.0, "flop": 1.0}
    asked = []

    def apart(kind, ask, *, log, limit_s):
        asked.append(ask.get("kind", kind))
        if asked[-1] == "norm":
            raise RuntimeError("no such luck\nand much more")
        if kind == "attention":
            return {"verdict": "ok", "right": 2, "wrong": 0, "rows": []}
        late = {"verdict": "out of time", "why": "not done after 90 s"} if asked[-1] == "gemm" else {"verdict": "ok"}
        return {"rows": [row], **late}

    monkeypatch.setattr(hopper, "apart", apart)
    monkeypatch.setattr(suite, "apart", apart)
    assert hopper.main(["--part=1", "--smoke", f"--out={tmp_path}"]) == 1
    printed = capsys.readouterr().out
    assert asked == ["attention", "gemm", "attention", "loss", "norm", "optimizer"]
    tree = json.loads((tmp_path / "part1" / "results.json").read_text())["parts"]
    assert [
        tree[n]["verdict"] for n in ("rates", "kernels: attention", "kernels: gemm", "kernels: norm", "kernels: optimizer")
    ] == [*("left out", "ok", "left out", "FAILED", "ok")]
    assert "1 timed, 50% to 50% of their floors; not done after 90 s" in printed and "'--only=rates,kernels: gemm'" in printed
    assert "RuntimeError: no such luck" in tree["kernels: norm"]["found"]
    assert "Traceback" in (tmp_path / "part1" / "logs" / "kernels__norm_error.txt").read_text()


def test_experts_of_hopper_in_tiny_form(tmp_path, monkeypatch, capsys):
    """Part 6: a check, kernels and three cases of steps; in a smoke test a small model, with experts too."""
    asked = []

    def apart(kind, ask, *, log, limit_s):
        asked.append((kind, log.name, tuple(ask.get("argv", ()))[: -len(DATA["synthetic"])]))
        if kind == "steps":
            loaded = launch.load(ask["argv"])
            assert not [*loaded.problems, *validate_step(loaded.run, hardware.Devices("cpu", "cpu", 1, 8.0, "described"))]
            return ANSWER | {"planned": {"step_s": 0.5, "peak_gib": 40.0, "rates": "calibrated"}}
        return {"verdict": "ok", "right": 8, "wrong": 0, "rows": []}

    monkeypatch.setattr(hopper, "apart", apart)
    monkeypatch.setattr(suite, "apart", apart)
    monkeypatch.setattr(report, "step_details", lambda name, r: [[name, r["verdict"]]])
    assert hopper.main(["--part=6", "--smoke", f"--out={tmp_path}"]) == 0
    assert "8 shapes within their bounds" in capsys.readouterr().out
    assert len({log for _, log, _ in asked}) == len(asked), "none writes over the log of another"
    assert [kind for kind, *_ in asked] == ["experts", "kernels", *["steps"] * len(hopper.MIXTRALS)]
    for how, (_, _, argv) in zip(hopper.MIXTRALS.values(), asked[2:], strict=True):
        assert argv[-len(how) :] == how
    done = json.loads((tmp_path / "part6" / "results.json").read_text())["parts"]
    assert ["mixtral, measured over planned step", "2.00", "0.85 to 1.15"] in hopper.aims(done)


def test_the_peer_of_hopper_in_tiny_form(tmp_path, monkeypatch, capsys):
    """Part 3 through the command line, with a stand-in for PyTorch's script."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(peer, "SCRIPT", script)
    monkeypatch.setattr(peer, "apart", lambda kind, ask, **how: dict(ANSWER) if kind == "steps" else here(kind, ask))
    monkeypatch.setattr(peer, "same_work", lambda *_: {"verdict": "ok", "off": 1e-7})
    monkeypatch.setattr(peer, "interpreter", lambda python: [])

    def run_program(argv, log, *, limit_s):
        return command.main(argv[3:]), capsys.readouterr().out

    monkeypatch.setattr(hopper, "run_program", run_program)
    assert hopper.main(["--part=3", "--smoke", f"--out={tmp_path}"]) == 0
    assert "ok: ours/theirs 0.0" in capsys.readouterr().out
    assert "ratio ours/theirs" in (tmp_path / "part3" / "results.md").read_text()


def test_an_interrupted_part_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    def stop(node, limit_s):
        raise KeyboardInterrupt

    done = parts.Part("one", lambda node, limit_s: parts.Outcome("ok", "it is"), 60.0)
    monkeypatch.setattr(hopper, "items", lambda *_: [done, parts.Part("two", stop, 60.0)])
    assert hopper.main(["--part=1", "--smoke", f"--out={tmp_path}"]) == 130
    assert json.loads((tmp_path / "part1" / "receipt.json").read_text())["exit_code"] == 130
    assert [*json.loads((tmp_path / "part1" / "results.json").read_text())["parts"]] == ["one"]


def test_rates_of_an_earlier_part_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "FOLDER", tmp_path / "home")
    monkeypatch.setattr(rates.path, "__defaults__", (tmp_path / "home",))
    gpu = hardware.lookup("NVIDIA H200")
    rates.save(rates.datasheet(gpu, "bf16"), gpu.name, tmp_path / "out" / "rates")
    assert str(tmp_path / "home") in hopper.rates_found(tmp_path / "out", "NVIDIA H200")
    assert rates.load(gpu.name, tmp_path / "home") == rates.datasheet(gpu, "bf16")
    assert hopper.rates_found(tmp_path / "out", "NVIDIA H200") == "", "there are some now"
