"""What a run does between its steps: loss on held-out text, and samples. Neither changes what is learnt."""

import math
from collections.abc import Callable
from typing import Any

from jaxtrain import evaluate, generate
from jaxtrain.config import RunConfig
from jaxtrain.metrics import Writers
from jaxtrain.models.module import Params
from jaxtrain.progress import Console
from jaxtrain.receipt import Receipt
from jaxtrain.samples import Sample, read
from jaxtrain.step import Program


class HeldOut:
    """The held-out sets of a run, each evaluated by the same compiled step."""

    def __init__(
        self, run: RunConfig, program: Program, sets: dict[str, Any], writers: Writers, console: Console, receipt: Receipt
    ):
        self._run, self._program, self._sets = run, program, sets
        self._writers, self._console, self._receipt = writers, console, receipt

    def due(self, done: int) -> bool:
        """Whether held-out text is looked at after this step."""
        return bool(self._sets) and (done == self._run.train.steps or done % self._run.eval.every_steps == 0)

    def evaluate(self, compiled: Any, params: Params, done: int, unwanted: Callable[[], bool] = lambda: False) -> None:
        """To metrics, log and receipt, once all sets are evaluated; nothing where `unwanted()` came true before that.

        compiled: the evaluation step.
        """
        program, lines, found = self._program, [], {}
        for name, batches in self._sets.items():
            how = (program.eval_batch, program.context, self._run.eval.sequences, unwanted)
            found[name] = evaluate.evaluate(compiled, params, batches, *how)
            if found[name] is None:
                return
        for name, loss in found.items():
            batches = self._sets[name]
            bits, perplexity = evaluate.bits_per_byte(loss, batches.bytes_per_token), evaluate.perplexity(loss)
            lines.append(self._writers.eval(step=done, loss=loss, bits_per_byte=bits, perplexity=perplexity, name=name))
            said = f"step {done}: held-out loss {f'of {name} ' if name else ''}{loss:.4f}"
            said += f", {bits:.3f} bits a byte" if bits else ""
            self._console.say(f"{said}, perplexity {perplexity:.5g}")
        self._receipt.update(held_out=[{k: finite(v) for k, v in line.items() if k != "kind"} for line in lines])


class Samples:
    """Lets the model write. The sampler's steps are compiled when they are first needed, and once."""

    def __init__(self, run: RunConfig, program: Program, tokenizer: Any, writers: Writers, console: Console):
        self._run, self._program, self._tokenizer = run, program, tokenizer
        self._writers, self._console = writers, console
        self._sampler: generate.Sampler | None = None

    def due(self, done: int) -> bool:
        """Whether the model writes after this step, before the last one."""
        every = self._run.sample.every_steps
        return self._tokenizer is not None and every > 0 and done % every == 0 and done < self._run.train.steps

    def write(self, params: Params, done: int) -> None:
        """To the terminal, samples.txt and the trackers; nothing where there is no tokenizer."""
        if self._tokenizer is None:
            return
        if self._sampler is None:
            self._sampler = generate.Sampler(self._run, self._program.placement)
        texts = generate.continue_all(self._sampler, params, self._tokenizer, self._run.sample)
        samples = [Sample(done, i if len(texts) > 1 else 0, text) for i, text in enumerate(texts, start=1)]
        self._writers.samples(samples)
        self._console.end_live()
        for sample in samples:
            where = f"prompt {sample.prompt}, " if sample.prompt else ""
            at = f"step {done}, " if done < self._run.train.steps else ""
            self._console.say(f"sample ({where}{at}{self._writers.samples_path}):\n{sample.text}")

    def written(self, done: int) -> bool:
        """Whether samples.txt has what the model writes after this step."""
        path = self._writers.samples_path
        return path.exists() and any(sample.step == done for sample in read(path.read_bytes().decode()))


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    return value if not isinstance(value, float) or math.isfinite(value) else None
