"""benchmarks/first_hour.py: its plan of an hour, its configs on described GPUs, and what it makes of findings."""

import json
from pathlib import Path

import numpy as np
import pytest
import rich.console
from bench_helpers import ANSWER, at_home  # noqa: F401

from benchmarks import first_hour, operate
from jaxtrain import flops, hardware, launch
from jaxtrain.bench import report
from jaxtrain.plan import rates
from jaxtrain.validate import validate_step


def described(gib: float) -> hardware.Devices:
    return hardware.Devices("gpu", "NVIDIA H200", 1, gib, "described", 90)


def here(tmp_path: Path, stage: int = 1, item: str = "") -> first_hour.Here:
    return first_hour.Here(stage, item, tmp_path, tmp_path / "work", True, 100.0)


def final(tmp_path: Path) -> dict[str, str]:
    return {line["item"]: line["verdict"] for line in first_hour.read(tmp_path) if "found" in line}


def test_stages_fit_into_their_time():
    """What is wanted most comes first and always fits; a number from a loop comes before an unrolled step."""
    assert len(first_hour.STAGES) * first_hour.SECONDS < 3600
    for items in first_hour.STAGES.values():
        assert all(item.need_s <= item.most_s < first_hour.SECONDS for item in items.values())
        assert sum(item.need_s for item in items.values()) < first_hour.SECONDS - first_hour.PACKING_S
    asked = [name for items in first_hour.STAGES.values() for name in items]
    assert asked.index("bf16 loop") < asked.index("bf16 unrolled") and asked.index("attention") < asked.index("bf16 loop")
    assert set(first_hour.CASES) < set(asked) and len(set(asked)) == len(asked)


@pytest.mark.parametrize("gib", [140.0, 79.6])
def test_cases_can_be_run(gib):
    """On one described H200 and one H100; no two load the same run, but the 1B's where it stands in for the 8B."""
    runs = {}
    for name in first_hour.CASES:
        loaded = launch.load(first_hour.argv_of(name, False, gib))
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, described(gib)))], name
        assert loaded.run not in runs.values() or (gib < 100 and name == "1b loop"), name
        runs[name] = loaded.run
    assert runs["bf16 loop"].model.num_layers == 16 and not runs["bf16 unrolled"].parallel.scan_layers
    assert (runs["bf16 loop"].model.d_model == 4096) == (gib > 100)
    model = runs["mixtral"].model
    assert 16 * flops.parameters(model)["total"] < 40e9, "weights, gradients and moments in float32: half of a card of 80 GB"


def test_tiny_cases_can_be_run():
    for name in first_hour.CASES:
        loaded = launch.load(first_hour.argv_of(name, True, 8.0))
        devices = hardware.Devices("cpu", "cpu", 1, 8.0, "described")
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, devices))], name


def test_what_does_not_fit_is_listed_as_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "probe", lambda: described(140.0))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert first_hour.main(["--stage=4", f"--out={tmp_path}", "--seconds=30", "--summary"]) == 0
    assert set(final(tmp_path).values()) == {"not run"} and len(final(tmp_path)) == len(first_hour.STAGES[4])
    printed = capsys.readouterr().out
    assert "15 s were left, and it needs 90" in printed
    assert f"--stage=4 --out={tmp_path} '--only=fp8 matmuls;fp8 loop;fp8 unrolled'" in printed
    assert "taken from the environment of all items:" in printed and "XLA_PYTHON_CLIENT_PREALLOCATE" in printed


def test_variables_that_runs_refuse_are_taken_away():
    image = {
        "XLA_FLAGS": "--a",
        "NCCL_ALGO": "Ring",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_VISIBLE_DEVICES": "1",
        "HOME": "/",
    }
    assert first_hour.clean(image, False) == (
        {"CUDA_VISIBLE_DEVICES": "1", "HOME": "/"},
        ["NCCL_ALGO", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"],
    )
    assert first_hour.clean(image, True) == (image, [])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stage=1"], "no GPU here"),
        ([], "--stage is missing. For example --stage=1."),
        (["--stage=3", "--only=8b", "--smoke"], "--only = 8b: no such item in stage 3. It has bf16 loop; bf16 loop, one"),
    ],
)
def test_what_cannot_be_run_is_said_first(argv, said, tmp_path, capsys):
    assert first_hour.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- What was found


def test_steps_are_judged_by_their_estimate(tmp_path, monkeypatch):
    answer = ANSWER | {"planned": {"step_s": 0.5, "peak_gib": 41.0, "rates": "calibrated on this GPU"}}
    monkeypatch.setattr(first_hour, "apart", lambda *_, **__: answer)
    verdict, text = first_hour.train_steps("bf16 loop", here(tmp_path, 3, "bf16 loop"))
    assert verdict == "off" and text == "1 (2.00 x plan) s, 10 tokens/s, MFU 50.0% causal, peak 40.00 (0.98 x plan) GiB"
    monkeypatch.setattr(first_hour, "apart", lambda *_, **__: {"verdict": "out of memory", "why": "no room"})
    assert first_hour.train_steps("fp8 loop", here(tmp_path, 4, "fp8 loop")) == ("FAILED", "out of memory: no room")
    monkeypatch.setattr(first_hour, "apart", lambda *_, **__: answer | {"step_s": {"median": 9.0}})
    first_hour.train_steps("bf16 loop", here(tmp_path, 6, "trace"))  # a trace costs time: it is a row of its own
    console = rich.console.Console(width=report.WIDTH, record=True, quiet=False)
    first_hour.summary(tmp_path, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["bf16", "loop", "1", "0.5", "2.00", "40.00", "41.00", "0.98", "10", "50.0%", "0.5"] in lines
    assert [line for line in lines if line[:2] == ["fp8", "loop"] and line[-2:] == ["no", "room"]]


def test_losses_that_are_apart_are_wrong(tmp_path, monkeypatch):
    def apart(kind, ask, *, environ, **_):
        off = 1.01 if environ.get("JAX_PLATFORMS") == "cpu" else 1.0
        return {"verdict": "ok", "loss": {"first": 5.0, "last": 4.0 * off}, "attention": "cudnn"}

    monkeypatch.setattr(first_hour, "apart", apart)
    monkeypatch.delenv("JAX_PLATFORMS")
    verdict, text = first_hour.as_on_a_cpu(here(tmp_path, 1, "steps as on a CPU"))
    assert verdict == "FAILED" and text == "f32: losses are 9.9e-03 apart, 1e-04 are allowed"


def test_archives_stay_below_what_can_be_sent(tmp_path, monkeypatch):
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(50_000))
    (only,) = first_hour.pack(folder, tmp_path / "a.tar.xz")
    whole = only.read_bytes()
    monkeypatch.setattr(first_hour, "MOST_BYTES", 20_000)
    made = first_hour.pack(folder, tmp_path / "a.tar.xz")
    assert [file.name for file in made] == ["a.tar.xz.00", "a.tar.xz.01", "a.tar.xz.02"] and not only.exists()
    assert max(file.stat().st_size for file in made) == 20_000 and len(b"".join(f.read_bytes() for f in made)) == len(whole)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    here(tmp_path, 1, "device").put(found="it is", verdict="ok", seconds=1.0)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"stage": 1, "it')
    assert final(tmp_path) == {"device": "ok"}


def test_rates_of_an_earlier_stage_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "FOLDER", tmp_path / "home")
    monkeypatch.setattr(rates.path, "__defaults__", (tmp_path / "home",))
    gpu = hardware.lookup("NVIDIA H200")
    assert gpu
    rates.save(rates.datasheet(gpu, "bf16"), gpu.name, tmp_path / "out" / "rates")
    assert str(tmp_path / "home") in first_hour.rates_found(tmp_path / "out", "NVIDIA H200")
    assert rates.load(gpu.name, tmp_path / "home") == rates.datasheet(gpu, "bf16")
    assert first_hour.rates_found(tmp_path / "out", "NVIDIA H200") == "", "there are some now"


def test_what_the_operators_tools_cost_follows_from_turns(tmp_path, monkeypatch):
    """Stage 6 on a described GPU: runs whose steps take 1.01 s with lines on the GPU, 1 s without."""
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
    one = first_hour.Here(6, "", tmp_path, tmp_path / "work", False, 300.0)
    found = {
        name: first_hour.STAGES[6][name].act(first_hour.dataclasses.replace(one, item=name))
        for name in (each.name for each in operate.ITEMS)
    }
    assert found["preflight"] == ("off", "FAULT: ECC")
    assert found["a run and its receipt"][1].startswith("lines on the GPU: 1; it does not tell nvlink_tx_gb_s")
    assert found["cost of sampling"][1].startswith("a step takes +1.00% with it (off 1 and 1 s, on 1.01 and 1.01 s)")
    every = [word for command in asked for word in command if word.startswith("--config.log.gpu_every_s=")]
    assert [word.partition("=")[2] for word in every] == ["2", "0", "1", "1", "0"]
    assert not [*tmp_path.rglob("checkpoints")]
