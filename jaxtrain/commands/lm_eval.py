"""A trained model under EleutherAI's evaluation harness.

    python -m jaxtrain lm_eval --workdir=runs/tiny --tasks=lambada_openai,hellaswag --output_path=scores.json

All options except those of `parser` are the harness's own (`lm_eval run --help`). The package `lm-eval`, an extra of jaxtrain,
is imported on first use. In Python, `harness_model()` is the class: `simple_evaluate(harness_model()(workdir="runs/tiny"))`.
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware, installed
from jaxtrain.config.command_line import Args, Parser, at_least
from jaxtrain.config.schema import Problem
from jaxtrain.data.tokenizer import TokenizerError
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.runtime.startup import start_jax

MAX_TOKENS = 256  # if a task has no number, as with the harness's other models
ROWS = 8


class TaskError(ValueError):
    """The model cannot do the task, or an argument of the command or the model is wrong."""


@functools.cache
def harness_model() -> type:
    """Return the model class, registered in the harness as `jaxtrain`.

    Arguments of the class: workdir (a run's folder, or one of its checkpoints/<step>), tokenizer (its path, if it was moved),
    base (for a run with adapters, the base model's folder, if it was moved), ema (True: the average of the weights),
    max_length (longest input in tokens), batch_size."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    class HarnessModel(TemplateLM):
        def __init__(
            self,
            workdir: str,
            tokenizer: str = "",
            base: str = "",
            ema: bool = False,
            max_length: int = 0,
            batch_size: int | str = ROWS,
            **kwargs: Any,
        ):
            import jax

            from jaxtrain.data import text_format
            from jaxtrain.train import generation
            from jaxtrain.train.scoring import Scorer

            super().__init__()
            if unknown := sorted(kwargs.keys() - {"device", "max_batch_size"}):  # the harness always sets these two
                known_args = "workdir, tokenizer, base, ema, max_length, batch_size"
                raise TaskError(f"model argument {unknown[0]!r}: known are {known_args}")
            if not str(batch_size).isdigit() or int(batch_size) < 1:
                raise TaskError(f"batch_size = {batch_size!r}: must be a number from 1 on; there is no auto")
            run, sampler, params, self.step, text = generation.load_model(workdir, jax.local_devices(), base, ema)
            if not 0 <= int(max_length) <= run.data.seq_len:
                raise TaskError(f"max_length = {max_length}: must be at most data.seq_len = {run.data.seq_len}, as in training")
            ids, text = text_format.load_with_tokenizer(text, tokenizer or run.data.tokenizer)
            self.ids: Any = ids
            self._vocab, self._stops = run.model.vocab_size, text.stops
            if not text.stops:
                raise TaskError(f"tokenizer {ids.name!r}: no token is known to end a text")
            self._check_ids([*ids.bos, self.eot_token_id])
            self.scorer = Scorer(run, sampler, params, rows=int(batch_size), max_length=int(max_length))

        @property
        def eot_token_id(self) -> int:
            return self._stops[0]

        @property
        def prefix_token_id(self) -> int:
            """Return the token that comes before a text without a context. The harness allows only one such token."""
            return self.ids.bos[-1] if self.ids.bos else self.eot_token_id

        @property
        def max_length(self) -> int:
            return self.scorer.max_length

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            # As at the beginning of a document, unless the harness prepends a token itself.
            return self._check_ids([*(self.ids.bos if add_special_tokens is not False else ()), *self.ids.encode(string)])

        def _check_ids(self, ids: list[int]) -> list[int]:
            # A tokenizer may have more ids than the model, for images or as padding: only the requested ids are checked.
            if ids and max(ids) >= self._vocab:
                raise TaskError(f"tokenizer {self.ids.name!r} gives the id {max(ids)}, and the model has {self._vocab}")
            return ids

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **kwargs: Any) -> list[tuple[float, bool]]:
            from jaxtrain.train.scoring import ScoreRequest

            scores = self.scorer.score(
                [ScoreRequest([*context, *continuation], len(continuation)) for _, context, continuation in requests]
            )
            for (texts, _, _), score in zip(requests, scores, strict=True):
                self.cache_hook.add_partial("loglikelihood", texts, score)
            return scores

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            texts = [self.tok_encode(r.args[0], add_special_tokens=False) for r in requests]
            windows = [list(self.scorer.windows(text, self.prefix_token_id)) for text in texts]
            scores = iter(self.scorer.score([window for text_windows in windows for window in text_windows]))
            totals = [sum(next(scores)[0] for _ in text_windows) for text_windows in windows]
            for request, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asks = [parse_generation(r.args[1], min(MAX_TOKENS, self.max_length // 2)) for r in requests]
            prompts = [self.tok_encode(r.args[0]) or [self.prefix_token_id] for r in requests]

            def is_done(i: int, ids: list[int]) -> bool:
                return ids[-1] in self._stops or any(stop in self.ids.decode(ids) for stop in asks[i][0])

            outputs = self.scorer.greedy(prompts, [most for _, most in asks], is_done)
            texts = [
                cut_at_stops(self.ids.decode([t for t in ids if t not in self._stops]), settings[0])
                for ids, settings in zip(outputs, asks, strict=True)
            ]
            for request, text in zip(requests, texts, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            return texts

    register_model("jaxtrain")(HarnessModel)
    return HarnessModel


def parse_generation(settings: dict[str, Any], default_length: int) -> tuple[list[str], int]:
    """Return (strings to stop at, largest number of tokens) from a task's generation arguments.

    default_length: the largest number if the task names none. Raises TaskError for unknown arguments, and for sampling: without
    do_sample, a temperature above 0 asks for it.
    """
    remaining = dict(settings)
    until = remaining.pop("until", None) or []
    lengths = [remaining.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")]
    do_sample = remaining.pop("do_sample", None)
    if remaining.get("temperature", 0) if do_sample is None else do_sample:
        raise TaskError(
            f"generation arguments {settings}: only the likeliest token at a time; pass --gen_kwargs do_sample=False"
        )
    sampling_keys = {"temperature", "top_p", "top_k", "min_p"}  # without an effect in greedy decoding
    if unknown := sorted(remaining.keys() - sampling_keys):
        raise TaskError(f"generation argument {unknown[0]!r} is not supported")
    stops = [until] if isinstance(until, str) else list(until)
    return [stop for stop in stops if stop], int(next((n for n in lengths if n is not None), default_length))


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """Return the text before the earliest occurrence of any of these strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def parser() -> Parser:
    """Return the parser of this command's own options. All other options go to the harness."""
    cli = Parser(
        "lm_eval",
        "Evaluate a trained model with EleutherAI's lm-evaluation-harness.",
        notes="All other options go to the harness: --tasks=NAME,NAME --num_fewshot=N --limit=N --output_path=FILE "
        "--include_path=FOLDER --gen_kwargs NAME=VALUE ...",
        passes_on=True,
    )
    cli.option("workdir", "a run's folder, or one of its checkpoints/<step>", "DIR", example="runs/tiny", required=True)
    cli.option("tokenizer", "where the tokenizer is now, if it moved since training", "PATH")
    cli.option("base", "of a run with adapters: where the base model is now, if it moved", "DIR")
    cli.option("ema", "use the average of the weights (train.ema_decay)")
    cli.option("max-length", "tokens that the model sees (default: data.seq_len)", "N", 0, type=at_least(0))
    cli.option("batch_size", f"texts at a time (default: {ROWS})", "N", ROWS, type=at_least(1))
    return cli


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code; 2 if the command line is wrong."""
    return run_command(
        parser(), argv, evaluate, check=find_problems, errors=(CheckpointError, HuggingFaceError, TokenizerError, TaskError)
    )


def find_problems(args: Args) -> list[Problem]:
    """Return the problems of the harness's options, and of its package."""
    problems = []
    if importlib.util.find_spec("lm_eval") is None:
        problems.append(Problem("lm_eval", None, "this package is not installed", installed.install_remedy("lm-eval")))
    if not any(word == "--tasks" or word.startswith("--tasks=") for word in args.unknown):
        problems.append(Problem("--tasks", None, "is missing", "Name tasks of the harness, comma-separated."))
    if reserved := [word for word in args.unknown if word.split("=")[0] in ("--model", "--model_args", "--device")]:
        problems.append(Problem(reserved[0], None, "this command sets it", "Name the model with --workdir."))
    return problems


def evaluate(args: Args) -> int:
    """Run the harness with these options, and return the exit code."""
    start_jax(hardware.probe())
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    harness_model()
    model = {name: getattr(args, name) for name in ("workdir", "tokenizer", "base", "ema", "max_length")}
    argv = ["run", "--model", "jaxtrain", "--model_args", json.dumps(model), "--batch_size", str(args.batch_size)]
    saved_argv = sys.argv
    sys.argv = ["lm_eval", *argv, *args.unknown]  # the harness reads its options only there
    setup_logging()
    try:
        harness = HarnessCLI()
        harness.execute(harness.parse_args())
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):  # the harness's message for an unknown name
            raise
        names = str(error).partition(":")[2].strip()
        raise TaskError(f"--tasks: the harness has no task {names}. List its tasks with: lm_eval ls tasks") from error
    finally:
        sys.argv = saved_argv
    return 0
