"""benchmarks/first_hour.py in tiny form on a CPU: each stage, and items that crash or are late."""

import sys
import tarfile
from pathlib import Path

import pytest
from bench_helpers import at_home  # noqa: F401
from compile_options import QUICKLY

from benchmarks import first_hour


@pytest.fixture
def one_device(monkeypatch):
    """The script is for one GPU; and programs for several CPU devices are not kept."""
    monkeypatch.setenv("XLA_FLAGS", QUICKLY)


def final(tmp_path: Path) -> dict[str, str]:
    return {line["item"]: line["verdict"] for line in first_hour.read(tmp_path) if "found" in line}


SMOKE = {  # of each stage, items that between them go every way through the script
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
    printed = capsys.readouterr().out
    found = final(tmp_path)
    assert found == {name: "not run" if name == "rates" else "ok" for name in SMOKE[stage].split(";")}
    assert "Train steps, estimated beside measured" in printed
    with tarfile.open(tmp_path / f"logs{stage}.tar.gz") as logs:
        assert len(logs.getnames()) > len(found)
    if stage in (3, 5, 6):
        (line,) = [line for line in first_hour.read(tmp_path) if "steps" in line]
        assert line["steps"]["verdict"] == "ok" and line["steps"]["tokens_per_s"] > 0
        assert [*(tmp_path / "work" / "compiled").glob("jit_train_step-*")], "the next stage compiles nothing twice"
    if stage == 5:
        assert len([line for line in first_hour.read(tmp_path) if "row" in line]) == 8, "a line for each row"
    if stage == 6:
        with tarfile.open(tmp_path / "trace.tar.gz") as trace:
            names = trace.getnames()
        assert "trace/report.html" in names and [name for name in names if name.endswith(".xplane.pb")]
        assert not (tmp_path / "work" / "saved").exists()


@pytest.mark.parametrize("stage", first_hour.STAGES)
def test_a_whole_stage_in_tiny_form(stage, tmp_path, one_device):
    assert first_hour.main([f"--stage={stage}", f"--out={tmp_path}", "--smoke"]) == 0
    assert final(tmp_path).keys() == first_hour.STAGES[stage].keys()


def items(monkeypatch, tmp_path, code: dict[str, str]) -> None:
    """A stage whose items are these programs; each finds a Here that puts lines as `here`."""
    begin = f"import sys, time, pathlib; from benchmarks import first_hour; out = pathlib.Path({str(tmp_path)!r})\n"

    def run(command, log, *, environ, limit_s):
        name = next(word for word in command if word.startswith("--item=")).partition("=")[2]
        line = f"here = first_hour.Here(1, {name!r}, out, out / 'work', True, 9.0)\n"
        return real([sys.executable, "-c", begin + line + code[name]], log, environ=environ, limit_s=min(limit_s, 4.0))

    real = first_hour.run_program
    monkeypatch.setattr(first_hour, "run_program", run)
    monkeypatch.setitem(first_hour.STAGES, 1, {name: first_hour.Item(lambda here: ("ok", ""), 1.0, 60.0) for name in code})


def test_an_item_that_crashes_or_is_late_leaves_the_others(tmp_path, monkeypatch, capsys):
    good = "here.put(verdict='ok', found='it is', seconds=0.1)"
    late = "here.put(row=1); time.sleep(60)"
    items(
        monkeypatch,
        tmp_path,
        {"crash": "import os; os.abort()", "late": late, "raises": "raise ValueError('no luck')", "good": good},
    )
    monkeypatch.setattr(first_hour, "OF_CORRECTNESS", ("late",))
    work = f"--work={tmp_path / 'elsewhere'}"
    assert first_hour.main(["--stage=1", f"--out={tmp_path}", "--smoke", work, "--only=late;good"]) == 1, "it may hang"
    assert work in capsys.readouterr().out.partition("not measured:")[2].replace("\n", "")
    (tmp_path / "results.jsonl").unlink()
    monkeypatch.setattr(first_hour, "OF_CORRECTNESS", ())
    assert first_hour.main(["--stage=1", f"--out={tmp_path}", "--smoke", "--only=late;good"]) == 0
    (tmp_path / "results.jsonl").unlink()
    assert first_hour.main(["--stage=1", f"--out={tmp_path}", "--smoke"]) == 1
    assert final(tmp_path) == {"crash": "FAILED", "late": "out of time", "raises": "FAILED", "good": "ok"}
    assert [line["row"] for line in first_hour.read(tmp_path) if "row" in line] == [1], "what it had found is kept"
    printed = capsys.readouterr().out
    assert "exit code -6" in printed and "ValueError: no luck" in printed and "good: ok: it is" in printed
    assert "--only=late" in printed.partition("not measured:")[2], "with the command for it"
