"""Mistakes that files alone reveal are reported before JAX starts."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from jaxtrain import config, launch, main, sample
from jaxtrain.hf import __main__ as hf

TINY = f"--config={Path(__file__).resolve().parents[2]}/configs/tiny.py"


@pytest.fixture(autouse=True)
def no_jax(monkeypatch, tmp_path):
    def start(*_):
        raise AssertionError("JAX was started")

    for module in (main, sample, hf):
        monkeypatch.setattr(module, "start_jax", start)
    monkeypatch.chdir(tmp_path)


def checkpoint(workdir: Path, step: int, **changes: str) -> None:
    """Write the meta.json of a step, whose config is tiny.py's with some keys changed."""
    loaded = launch.load([TINY, *(f"--config.{key.replace('__', '.')}={value}" for key, value in changes.items())])
    folder = workdir / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"config": config.to_dict(loaded.run)}))


def test_a_folder_in_which_a_run_is_at_work(tmp_path, capsys):
    workdir = tmp_path / "busy"
    workdir.mkdir()
    handle = os.open(workdir, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main.main([TINY, f"--workdir={workdir}"]) == 2
    assert f"--workdir = '{workdir}': another run is at work in this folder. Wait for it" in capsys.readouterr().err
    assert main.main([TINY, f"--workdir={workdir}", "--explain"]) == 0, "reading a config disturbs no run"
    os.close(handle)
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, f"--workdir={workdir}"])


def test_a_resume_with_another_model(tmp_path, capsys):
    checkpoint(tmp_path / "run", 9, model__num_layers="2")
    checkpoint(tmp_path / "run", 20, model__d_ff="96", train__steps="500")
    assert main.main([TINY, "--workdir=run"]) == 2
    said = capsys.readouterr().err
    assert "1 problem; nothing was started" in said and "model.d_ff = 384: was 96 in the checkpoint" in said
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, "--workdir=run", "--config.model.d_ff=96"])


def test_fewer_steps_than_the_newest_checkpoint_has(tmp_path, capsys):
    checkpoint(tmp_path / "run", 20)
    assert main.main([TINY, "--workdir=run", "--config.train.steps=19", "--config.optimizer.warmup_steps=5"]) == 2
    said = capsys.readouterr().err
    assert "1 problem;" in said
    assert "train.steps = 19: the newest checkpoint is at step 20 already. Set 20 or more, or another --workdir." in said


def test_a_step_that_is_not_there(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path / "run", 10)
    checkpoint(tmp_path / "run", 20)
    command = [TINY, "--workdir=run", "--config.checkpoint.step=15"]
    assert main.main(command) == 2
    assert "checkpoint.step = 15: run/checkpoints has no such step. Set one of its steps: 10, 20." in capsys.readouterr().err
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, "--workdir=run", "--config.checkpoint.step=10"])
    monkeypatch.setenv("JAXTRAIN_RESTART", "1")  # an earlier attempt has rolled back to step 15 and deleted it later
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main(command)


def test_a_change_that_is_asked_about(tmp_path, capsys):
    checkpoint(tmp_path / "run", 20, data__seq_len="64")
    assert main.main([TINY, "--workdir=run"]) == 2
    assert "--config.checkpoint.allow_change=data.seq_len" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, "--workdir=run", "--config.checkpoint.allow_change=data.seq_len"])


def test_a_shorter_schedule_than_the_checkpoints_may_go_on(tmp_path):
    """The saved warm-up was fitted to 20 steps. A resumed run may train longer, with another warm-up."""
    checkpoint(tmp_path / "run", 20, train__steps="20")
    assert json.loads((tmp_path / "run/checkpoints/20/meta.json").read_text())["config"]["optimizer"]["warmup_steps"] == 1
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, "--workdir=run"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}'])
def test_a_damaged_meta_is_left_to_the_start_of_the_run(tmp_path, text):
    checkpoint(tmp_path / "run", 20)
    (tmp_path / "run/checkpoints/20/meta.json").write_text(text)
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, "--workdir=run"])


@pytest.mark.parametrize(
    ("command", "argv", "said"),
    [
        (main, [TINY, "--config.init.from=runs/gone"], "init.from = 'runs/gone': no such folder. Name a run's folder"),
        (main, [TINY, "--config.data.source=gone/a.tok"], "data.source = 'gone/a.tok': no such file."),
        (sample, ["--workdir=runs/gone"], "--workdir = 'runs/gone': no such folder. Name a run's folder"),
        (hf, ["import", "/tmp/gone", "--out=x"], "error: /tmp/gone: no such folder. Name a model's folder, or hf:NAME"),
        (hf, ["config", "./gone"], "error: ./gone: no such folder."),
        (hf, ["export", "runs/gone", "--out=x"], "error: runs/gone: no such folder. Name a run's folder"),
    ],
)
def test_folders_and_files_that_do_not_exist(command, argv, said, capsys, tmp_path):
    assert command.main(argv) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
