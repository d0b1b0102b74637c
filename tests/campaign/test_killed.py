"""A run in child processes that is killed and stopped five times equals an uninterrupted run, bit for bit."""

import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import runs

from jaxtrain.hf import exporting
from jaxtrain.hf.folder import open_folder


class Bench:
    """A folder with the small config and one compile cache. Its runs can wait for data at a given step (sources.Gated)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "small.py"
        self.config.write_text(runs.SMALL)
        self.started = 0

    def start(self, workdir: Path, *, gate: int | None = None) -> runs.Child:
        self.started += 1
        self.opener = self.folder / f"gate-{self.started}"
        env = {"PYTHONPATH": os.pathsep.join([str(runs.REPO / "tests"), str(runs.REPO)]), "GATE_FILE": str(self.opener)}
        env |= {} if gate is None else {"GATE_STEP": str(gate)}
        chosen = {"data__source": "sources:gated", "optimizer__schedule": "cosine", "paths__cache": self.folder / "cache"}
        return runs.Child(self.config, workdir, self.folder / f"words-{self.started}.txt", env=env, **chosen)

    def at_gate(self, workdir: Path, gate: int) -> runs.Child:
        """Start a run that waits for data after `gate` steps, with all due checkpoints saved."""
        child = self.start(workdir, gate=gate)
        # Metrics are read one step late: a line of the step before shows that the newest step has been dispatched.
        saved = gate // 5 * 5
        child.until(lambda: gate - 1 in written_steps(workdir) and (not saved or saved in runs.steps(workdir)))
        # The loop must wait for its next batch: before that, a signal would stop it a step earlier.
        waits = self.opener.with_suffix(".waits")
        waits.unlink(missing_ok=True)
        child.until(waits.exists)
        return child

    def in_eval(self, workdir: Path) -> runs.Child:
        """Start a run, and wait until it is in an evaluation that does not end."""
        self.opener = self.folder / f"gate-{self.started + 1}"
        self.opener.with_suffix(".no-eval").touch()
        child = self.start(workdir)
        child.until(self.opener.with_suffix(".in-eval").exists)
        return child


def stopped(child: runs.Child, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a run that waits in its data or an evaluation. Returns (exit code, output)."""
    child.process.send_signal(number)
    child.until(lambda: "finishing this step" in child.said)
    return child.end()


def killed(child: runs.Child) -> tuple[int, str]:
    child.process.kill()
    return child.end()


def written_steps(workdir: Path) -> list[int]:
    return [line["step"] for line in runs.lines(workdir) if line["kind"] == "train"]


class Recording(NamedTuple):
    """An uninterrupted run, and a run of six attempts that must equal it."""

    whole: Path  # the uninterrupted run
    workdir: Path  # the run that is stopped in five ways before it finishes
    ended: dict[str, tuple[int, str]]  # exit code and output of each of its attempts


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    bench = Bench(tmp_path_factory.mktemp("resume with spaces"))
    whole, workdir, ended = bench.folder / "whole", bench.folder / "hunted", {}
    code, said = bench.start(whole).end()
    assert code == 0, said
    assert "\x1b" not in said, "control characters in a file"
    assert said.count("\nstep 24/24  loss ") == 1

    ended["killed before the first checkpoint"] = killed(bench.at_gate(workdir, 3))
    assert (runs.steps(workdir), written_steps(workdir)) == ([], [1, 2])
    ended["Ctrl-C"] = stopped(bench.at_gate(workdir, 7), signal.SIGINT)
    assert runs.steps(workdir) == [5, 7]
    ended["killed"] = killed(bench.at_gate(workdir, 13))
    assert (runs.steps(workdir), written_steps(workdir)[-1]) == ([5, 7, 10], 12)
    ended["Ctrl-C in an evaluation"] = stopped(bench.in_eval(workdir), signal.SIGINT)
    assert runs.steps(workdir) == [5, 7, 10, 15, 16]
    ended["SIGTERM"] = stopped(bench.at_gate(workdir, 20), signal.SIGTERM)
    assert runs.steps(workdir) == [5, 7, 10, 15, 16, 20]
    ended["finished"] = bench.start(workdir).end()
    return Recording(whole, workdir, ended)


def test_each_attempt_ends_with_its_code_and_says_where_it_stands(recording: Recording) -> None:
    ended = recording.ended
    assert [code for code, _ in ended.values()] == [-signal.SIGKILL, 130, -signal.SIGKILL, 130, 75, 0]
    assert "Ctrl-C: state saved at step 7; the same command goes on from there." in ended["Ctrl-C"][1]
    assert "resuming from step 7 in" in ended["killed"][1]
    assert "resuming from step 10 in" in ended["Ctrl-C in an evaluation"][1]
    assert "state saved at step 16" in ended["Ctrl-C in an evaluation"][1]
    assert "state saved at step 20" in ended["SIGTERM"][1]
    assert not any("Traceback" in said for _, said in ended.values())


def test_the_receipt_tells_of_every_attempt(recording: Recording) -> None:
    receipt = runs.receipt(recording.workdir)
    attempts = [*receipt["attempts"], receipt]
    assert [a["exit_code"] for a in attempts] == [None, 130, None, 130, 75, 0]
    assert [a["resumed_from_step"] for a in attempts] == [None, None, 7, 10, 16, 20]
    assert attempts[1]["reason"] == "SIGINT at step 7"
    assert attempts[-1]["reason"] == "24 steps"


def test_metrics_weights_and_moments_are_those_of_an_uninterrupted_run(recording: Recording) -> None:
    """Metrics (once each, in order), weights and moments are equal. Lines of an attempt without a checkpoint are set aside."""
    evaluated = [*range(1, 9), 8, *range(9, 17), 16, *range(17, 25), 24]
    assert [line["step"] for line in runs.lines(recording.whole)] == evaluated
    assert runs.exact(recording.workdir) == runs.exact(recording.whole)
    (aside,) = recording.workdir.glob("metrics.set_aside-*.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == [1, 2]
    ours, theirs = runs.tensors(recording.workdir, 24), runs.tensors(recording.whole, 24)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


def test_a_finished_run_writes_the_sample_that_is_missing_and_no_second_one(tmp_path: Path) -> None:
    how: dict[str, Any] = {"train__steps": 4, "eval__every_steps": 0, "data__source": "stdlib"}
    config = tmp_path / "small.py"
    config.write_text(runs.SMALL)
    for tokens in (0, 4, 4):
        assert runs.train(config, tmp_path / "run", **how, sample__max_tokens=tokens) == 0
    assert (tmp_path / "run/samples.txt").read_text().count("--- step 4\n") == 1


def test_an_export_of_bfloat16_masters_is_in_bfloat16(tmp_path: Path) -> None:
    """An export has one dtype: bfloat16 if all matrices are, although the checkpoint's scales of norms are float32."""
    assert runs.train(runs.small(), tmp_path / "run", train__steps=4, eval__every_steps=0, dtypes__params="bf16") == 0
    tensors = runs.tensors(tmp_path / "run")
    assert {str(tensors[f"params.{name}"].dtype) for name in ("final_norm.scale", "layers.0.attention_norm.scale")} == {
        "float32"
    }
    exporting.export(str(tmp_path / "run"), tmp_path / "out")
    folder = open_folder(tmp_path / "out")
    assert folder.dtype(folder.tensors) == "bf16"
