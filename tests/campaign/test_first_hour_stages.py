"""Each stage of benchmarks/first_hour.py runs in tiny form on a CPU."""

import json
import tarfile
from pathlib import Path

import pytest
from bench_helpers import at_home  # noqa: F401
from compile_options import QUICKLY

from benchmarks import first_hour


@pytest.fixture
def one_device(monkeypatch):
    """Use one CPU device: the script is for one GPU, and programs for several CPU devices are not cached."""
    monkeypatch.setenv("XLA_FLAGS", QUICKLY)


def final(tmp_path: Path, stage: int) -> dict[str, dict]:
    return json.loads((tmp_path / f"stage{stage}" / "results.json").read_text())["parts"]


SMOKE = {  # items of each stage that together use every function of the script
    1: "device;steps as on a CPU",
    2: "rates;gemm;cost of packing",
    3: "bf16 loop",
    4: "fp8 matmuls",
    5: "experts;mixtral capacity",
    6: "trace;save and restore",
}


@pytest.mark.parametrize("stage", SMOKE)
def test_a_stage_in_tiny_form(stage, tmp_path, capsys, one_device):
    argv = [f"--stage={stage}", f"--out={tmp_path}", "--smoke", f"--only={SMOKE[stage]}", "--summary"]
    assert first_hour.main(argv) == 0
    done = final(tmp_path, stage)
    wanted = {name: "left out" if name == "rates" else "ok" for name in SMOKE[stage].split(";")}
    assert {name: p["verdict"] for name, p in done.items()} == wanted
    assert "Train steps, estimated beside measured" in capsys.readouterr().out
    with tarfile.open(tmp_path / f"stage{stage}.tar.gz") as packed:
        assert len([name for name in packed.getnames() if "/logs/" in name]) >= len(wanted) - ("rates" in wanted)
    if stage in (3, 5):
        answer = done[SMOKE[stage].rpartition(";")[2]]["data"]
        assert answer["verdict"] == "ok" and answer["tokens_per_s"] > 0
        assert [*(tmp_path / "work" / "compiled").glob("jit_train_step-*")], "the next stage compiles nothing twice"
    if stage == 6:
        with tarfile.open(tmp_path / "trace.tar.gz") as trace:
            names = trace.getnames()
        assert "trace/report.html" in names and [name for name in names if name.endswith(".xplane.pb")]
        assert not (tmp_path / "stage6" / "checkpoint").exists()


@pytest.mark.parametrize("stage", first_hour.STAGES)
def test_a_whole_stage_in_tiny_form(stage, tmp_path, one_device):
    assert first_hour.main([f"--stage={stage}", f"--out={tmp_path}", "--smoke"]) == 0
    assert final(tmp_path, stage).keys() == {part.name for part in first_hour.STAGES[stage]}
