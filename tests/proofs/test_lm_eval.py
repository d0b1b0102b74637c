"""Scores and texts for the evaluation harness against a NumPy reference, on the logits of one text at a time on one device."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.commands import lm_eval
from jaxtrain.config import schema
from jaxtrain.data import text_format
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.step.state import to_tensors
from jaxtrain.train import scoring
from jaxtrain.train.scoring import ScoreRequest

# Weights are so large that some tokens are far more likely than others.
MODEL = {"model.num_layers": 1, "model.init_std": 0.2, "data.seq_len": 32, "model.num_heads": 2, "model.num_kv_heads": 1}
EOT = ByteTokenizer.eot
LONGEST = 80  # length of the longest text here


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run's folder with a checkpoint of the initial weights."""
    run = helpers.tiny(MODEL)
    place = tmp_path_factory.mktemp("run") / "a, run=1"
    saver = Checkpoints(place / "checkpoints")
    data = {"tokens": 0, "fingerprint": {}}
    meta = {"config": schema.to_dict(run), "data": data, "text": text_format.read_text_format("byte").record()} | {
        "positions": 64
    }
    saver.save(1, to_tensors(helpers.fresh_state(run)), meta)
    saver.close()
    return place


@pytest.fixture(scope="module")
def model(workdir: Path) -> Iterator[Any]:
    """Return jaxtrain's model for the harness on eight devices, which shard rows and weights. Logits are computed in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "LOGITS", 64)
        yield lm_eval.harness_model()(workdir=str(workdir), batch_size=3)


@functools.cache
def forward() -> Any:
    """Return a function that computes the logits (T, V) of a text of LONGEST tokens."""
    run = helpers.tiny(MODEL)
    params = helpers.fresh_state(run).params

    def logits(tokens_T: jax.Array) -> jax.Array:
        bound = helpers.program(run).definition.bind(params)
        tokens_BT, positions_BT = tokens_T[None], jnp.arange(LONGEST, dtype=jnp.int32)[None]
        return bound.logits(bound(tokens_BT, jnp.ones_like(tokens_BT), positions_BT))[0]

    return jax.jit(logits)


def log_probs(tokens: list[int]) -> np.ndarray:
    """Return the log-probability of every token of the vocabulary after each prefix: float64 (len - 1, V)."""
    seen = tokens[:-1]
    logits_TV = np.asarray(forward()(jnp.asarray(seen + [0] * (LONGEST - len(seen)), jnp.int32)), np.float64)[: len(seen)]
    return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))


def expected(tokens: list[int], count: int) -> tuple[float, bool]:
    last_CV, targets = log_probs(tokens)[-count:], tokens[-count:]
    return last_CV[np.arange(count), targets].sum(), bool((last_CV.argmax(-1) == targets).all())


def greedy(prompt: list[int], count: int) -> list[int]:
    """Return `count` likeliest next tokens, one after another, each computed from the whole text before it."""
    made: list[int] = []
    for _ in range(count):
        made.append(int(log_probs([*prompt, *made, 0])[-1].argmax()))
    return made


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_scores_are_those_of_the_logits(model: Any) -> None:
    """Contexts and continuations have many lengths, and come in several batches. Only likeliest tokens count as greedy."""
    byte = ByteTokenizer()
    asked = [("def f(", "x):"), ("a", "b"), ("", "whole"), ("two words ", "here")]
    asked += [("x" * n, "yz") for n in (3, 9, 27)] + [("c" * 20, "d" * 5)]
    given = model.loglikelihood(requests(*asked), disable_tqdm=True)
    for (context, continuation), (score, is_likeliest) in zip(asked, given, strict=True):
        bare = context.rstrip()  # the harness moves the space to the word after it
        before, continuation = byte.encode(bare) or [EOT], context[len(bare) :] + continuation
        want, want_likeliest = expected([*before, *byte.encode(continuation)], len(byte.encode(continuation)))
        assert score == pytest.approx(want, abs=2e-4)
        assert is_likeliest == want_likeliest
    likeliest = [*b"ab", *greedy([*b"ab"], 3)]
    assert [found for _, found in model.scorer.score([ScoreRequest(likeliest, 3), ScoreRequest([*likeliest, 1], 3)])] == [
        True,
        False,
    ]
    assert len({round(score, 3) for score, _ in given}) == len(given), "the scores tell nothing apart"


def test_long_inputs_lose_their_left(model: Any) -> None:
    """The model's context is 32 tokens: the last of 33 tokens is predicted from the 32 before it."""
    tokens = ByteTokenizer().encode("".join(chr(ord("a") + i % 26) for i in range(50)))
    ((score, _),) = model.scorer.score([ScoreRequest(tokens, 4)])
    assert score == pytest.approx(expected(tokens[-33:], 4)[0], abs=2e-4)
    assert score != pytest.approx(expected(tokens[-32:], 4)[0], abs=2e-4)
    assert model.scorer.score([ScoreRequest(tokens, 0)]) == [(0.0, True)]
    with pytest.raises(ValueError):
        model.scorer.score([ScoreRequest(tokens, 33)])


def test_rolling_scores_every_token_once(model: Any) -> None:
    text = "".join(chr(ord("A") + i * 7 % 50) for i in range(75))
    tokens = ByteTokenizer().encode(text)
    total, short, none = model.loglikelihood_rolling(requests((text,), ("abc",), ("",)))
    after = [EOT, *tokens]
    parts = [(after[:33], 32), (after[32:65], 32), (after[75 - 32 :], 11)]
    assert sum(count for _, count in parts) == 75
    assert total == pytest.approx(sum(expected(part, count)[0] for part, count in parts), abs=1e-3)
    assert short == pytest.approx(expected([EOT, *b"abc"], 3)[0], abs=2e-4)
    assert none == 0


def test_texts_begin_as_in_training(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This tokenizer puts a token before every text. The token comes once before contexts, prompts and whole texts."""
    byte = ByteTokenizer()
    monkeypatch.setattr(byte, "bos", (7,), raising=False)
    monkeypatch.setattr(model, "ids", byte)
    known, empty = model.loglikelihood(requests(("def f(", "x):"), ("", "x):")), disable_tqdm=True)
    assert known[0] == pytest.approx(expected([7, *b"def f(x):"], 3)[0], abs=2e-4)
    assert empty[0] == pytest.approx(expected([7, *b"x):"], 3)[0], abs=2e-4)
    (rolling,) = model.loglikelihood_rolling(requests(("abc",)))
    assert rolling == pytest.approx(expected([7, *b"abc"], 3)[0], abs=2e-4)
    (text,) = model.generate_until(requests(("d", {"max_gen_toks": 3})))
    assert text == byte.decode([t for t in greedy([7, *b"d"], 3) if t != EOT])


def test_texts_are_the_likeliest_tokens(model: Any) -> None:
    """A batch has prompts of different lengths. Each text ends at its own limit or stop string, independent of the others."""
    byte = ByteTokenizer()
    prompts = ["d", "def f(x", "a longer prompt here", "", "z" * 60]
    seen = [byte.encode(p)[-(32 - 8) :] or [EOT] for p in prompts]
    wanted = [greedy(ids, 8) for ids in seen]
    assert not any(EOT in made for made in wanted), "choose other prompts: the end of a document is tested apart"
    ask = {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.6}
    assert model.generate_until(requests(*((p, ask) for p in prompts))) == [byte.decode(made) for made in wanted]
    stop = byte.decode(wanted[1][3:5])
    stops = [{"until": [stop, "\n\n"], "max_gen_toks": 8, "temperature": 0.0}, {"until": "", "max_gen_toks": 2}]
    first, second = model.generate_until(requests((prompts[1], stops[0]), (prompts[0], stops[1])))
    assert first == byte.decode(wanted[1]).partition(stop)[0]
    assert second == byte.decode(wanted[0][:2])
    made = model.scorer.greedy(seen[:2], [8, 3], lambda i, made: made[-1] == wanted[0][1])
    assert made[0] == wanted[0][: wanted[0].index(wanted[0][1]) + 1]


def test_what_it_cannot_do_is_refused(model: Any, workdir: Path) -> None:
    sampled = ({"do_sample": True}, {"temperature": 0.7}, {"do_sample": None, "temperature": 0.7})
    for ask in (*sampled, {"num_beams": 4}, {"max_gen_toks": 32}):
        with pytest.raises(ValueError, match="|".join(ask)):
            model.generate_until(requests(("a", ask)))
    harness = lm_eval.harness_model()
    for key, value in {"batch_size": "auto", "dtype": "float16", "max_length": 64}.items():
        with pytest.raises(lm_eval.TaskError, match=key):
            harness(workdir=str(workdir), **{key: value})


# ---- The harness itself, with made-up tasks and no network

CHOICE = {
    "task": "own_choice",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


@pytest.mark.more
def test_tasks_of_the_harness(workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own command line runs a task, and the scores in its file follow from the logits."""
    byte = ByteTokenizer()
    questions = [("one", [" a", " bb"]), ("two ", ["x", "y", "z"]), ("three", ["!", "?"]), ("f", ["oo", "rr"])]
    best = [
        int(np.argmax([expected([*byte.encode(q), *byte.encode(c)], len(c))[0] for c in choices])) for q, choices in questions
    ]
    answers = [best[0], best[1], best[2], 1 - best[3]]  # three of four are right
    rows = [{"question": q, "choices": c, "answer": a} for (q, c), a in zip(questions, answers, strict=True)]
    file = tmp_path / "choice.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": f"{tmp_path}/cache"}}
    (tmp_path / "choice.yaml").write_text(json.dumps(CHOICE | data))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = [f"--workdir={workdir}", "--tasks=own_choice", f"--include_path={tmp_path}", "--batch_size=3"]
    assert lm_eval.main([*line, f"--output_path={tmp_path / 'out'}"]) == 0
    (file,) = (tmp_path / "out").rglob("*.json")
    assert json.loads(file.read_text())["results"]["own_choice"]["acc,none"] == 0.75
    assert lm_eval.main([f"--workdir={workdir}", "--tasks=own_chioce", f"--include_path={tmp_path}"]) == 2


def test_a_wrong_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"--workdir={tmp_path}"
    assert lm_eval.main([there]) == 2
    assert lm_eval.main([there, "--tasks=a", "--model=hf"]) == 2
    monkeypatch.setattr(lm_eval.importlib.util, "find_spec", lambda name: None)
    assert lm_eval.main([there, "--tasks=a"]) == 2
