"""The first run of a new user: configs/tiny.py learns Python, and beats a trigram model."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import runs
from trigram import Trigram

from jaxtrain import config, generation, metrics
from jaxtrain.checkpoint import locate
from jaxtrain.data import pipeline, tokenizer
from jaxtrain.data.stdlib import stdlib_files
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.train.evaluate import evaluate
from jaxtrain.train.program import build
from jaxtrain.train.state import TrainState, abstract_tensors, from_tensors

LAST = 700


def as_a_user(module: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command of jaxtrain in a new process on one CPU device."""
    line = [sys.executable, "-m", f"jaxtrain.{module}", *arguments]
    environment = {k: v for k, v in runs.os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(line, cwd=runs.REPO, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train configs/tiny.py. Returns (the run's folder, its output)."""
    workdir = tmp_path_factory.mktemp("tiny") / "run"
    return workdir, as_a_user("main", "--config=configs/tiny.py", f"--workdir={workdir}", timeout=1500).stdout


@pytest.fixture(scope="module")
def files() -> tuple[TokenFile, TokenFile]:
    """Return the token files of the standard library: the training and the validation split."""
    train, validation = stdlib_files(Path(config.Paths().data).expanduser())
    return TokenFile.open(train), TokenFile.open(validation)


def test_the_folder_holds_everything(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    assert {p.name for p in workdir.iterdir()} == {
        "config.json", "receipt.json", "metrics.jsonl", "log.txt", "tb", "checkpoints", "samples.txt", "goodput.jsonl",
    }  # fmt: skip
    run, problems = config.from_dict(json.loads((workdir / "config.json").read_text()))
    assert not problems
    assert run.train.steps == LAST
    assert [p.name for p in workdir.glob("tb/*")]
    assert runs.steps(workdir) == [600, LAST]
    receipt = runs.receipt(workdir)
    assert (receipt["exit_code"], receipt["attempt"], receipt["synthetic"]) == (0, 1, False)
    assert receipt["data"]["files"][0]["content_sha256"]
    assert receipt["memory_gib"]["parameters"] > 0


def test_every_line_of_metrics_keeps_the_contract(finished: tuple[Path, str]) -> None:
    lines = runs.lines(finished[0])
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "eval"]
    assert all(set(line) == set(metrics.TRAIN_KEYS) for line in train)
    assert all(set(line) == set(metrics.EVAL_KEYS) for line in held_out)
    assert [line["step"] for line in train] == list(range(10, LAST + 1, 10))
    assert [line["step"] for line in held_out] == [200, 400, 600, LAST]
    assert [line["tokens"] for line in train] == [line["step"] * 16 * 128 for line in train]
    # an evaluation or a save affects the line it falls in, and no other
    assert sum(line["tokens_per_s"] is None for line in train) < 10
    assert all(line["mfu_causal"] is None for line in train)  # this CPU's peak is unknown
    assert all(0 <= line["grad_norm"] < 100 for line in train)


def test_the_loss_falls(finished: tuple[Path, str]) -> None:
    loss = np.asarray(list(runs.losses(finished[0]).values()))
    assert 3.0 < loss[0] < np.log(264)  # after ten steps: near a uniform guess among all tokens, but already below it
    parts = np.asarray([part.mean() for part in np.array_split(loss, 7)])
    assert np.all(np.diff(parts) < 0)
    held_out = [line["loss"] for line in runs.lines(finished[0]) if line["kind"] == "eval"]
    assert held_out == sorted(held_out, reverse=True)


def test_better_than_a_trigram_model_on_the_whole_validation_split(
    finished: tuple[Path, str], files: tuple[TokenFile, TokenFile]
) -> None:
    checkpoints, last = locate(str(finished[0]))
    run, problems = config.resolve(checkpoints.meta(last)["config"])
    assert not problems
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch=64))
    program = build(run, jax.devices()[:1])
    weights_only = TrainState(program.state.step, program.state.params, ())
    params = from_tensors(weights_only, checkpoints.restore(last, abstract_tensors(weights_only), subset=True)).params
    data = Path(run.paths.data).expanduser()
    whole = pipeline.open_source(run.data, "", split="validation", global_batch=64, data_dir=data)
    windows = whole.sources[0].windows  # each window once
    ours = evaluate(program.eval_step, params, whole, program.eval_batch, program.context, windows)["loss"]

    train, validation = files
    end = windows * run.data.seq_len + 1  # the tokens in windows: the tail is shorter than a window
    trigram = Trigram(train)
    theirs = trigram.loss(validation, end)
    print(f"held-out loss: this model {ours:.4f}, trigram {theirs:.4f} (weights {trigram.weights_4.round(3)})")
    assert 1.5 < theirs < 2.2, "the yardstick itself is off"
    assert ours < theirs - 0.1


def test_the_trigram_model_is_what_it_says(files: tuple[TokenFile, TokenFile]) -> None:
    """Probabilities sum to one in a counted context, else to less. Fitted weights beat equal weights on held-out text."""
    train, validation = files
    model = Trigram(train)
    for a, b in ((ord("s"), ord("e")), (256, ord("#")), (3, 4)):
        every = np.arange(model.vocab)
        total = (model.weights_4 @ model.parts(np.stack([np.full_like(every, a), np.full_like(every, b), every]))).sum()
        assert (total == pytest.approx(1)) if model.contexts_VV[a, b] else (total < 1)
    fitted = model.loss(validation, 100_000)
    model.weights_4 = np.full(4, 0.25)
    assert fitted < model.loss(validation, 100_000)


def test_the_sample_is_shown_and_kept(finished: tuple[Path, str]) -> None:
    workdir, said = finished
    header, _, sample = (workdir / "samples.txt").read_text().partition("\n")
    assert header == f"--- step {LAST}"
    assert sample.startswith("def ")
    assert sample.strip() in said


def test_the_sample_command_asks_as_the_run_did(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    written = (workdir / "samples.txt").read_text().partition("\n")[2]
    assert as_a_user("sample", f"--workdir={workdir}", timeout=300).stdout.strip() == written.strip()
    assert as_a_user("sample", f"--workdir={workdir}", "--seed=1", timeout=300).stdout.strip() != written.strip()


def test_what_it_writes_is_recognisably_python(finished: tuple[Path, str], files: tuple[TokenFile, TokenFile]) -> None:
    """Over 40% of the words of eight samples are frequent in the corpus. One sample alone may end after a word or two."""
    run, sampler, params, _ = generation.load(str(finished[0]), jax.devices()[:1])
    byte = tokenizer.load_tokenizer(run.data.tokenizer)
    asks = [dataclasses.replace(run.sample, seed=seed) for seed in range(8)]
    text = "\n".join(generation.continue_text(sampler, params, byte, ask) for ask in asks)
    known = frequent_words(files[0])
    words = re.findall(r"[A-Za-z_]{2,}", text)
    share = np.mean([word in known for word in words])
    print(f"{share:.0%} of {len(words)} words are frequent in the corpus:\n{text}")
    assert len(words) >= 80
    assert share > 0.4
    assert text.count("\n") >= 24
    assert re.search(r":\n {4}", text), "no indented block"
    # For comparison, the same letters in random order have few frequent words.
    letters = np.random.Generator(np.random.PCG64(0)).permutation(list(text))
    shuffled = re.findall(r"[A-Za-z_]{2,}", "".join(letters))
    assert np.mean([word in known for word in shuffled]) < share / 2


def frequent_words(file: TokenFile) -> set[str]:
    """Return the words that occur at least a hundred times in a token file."""
    tokens = np.asarray(file.tokens)
    text = tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")
    words, counts = np.unique(re.findall(r"[A-Za-z_]{2,}", text), return_counts=True)
    return set(words[counts >= 100].tolist())
