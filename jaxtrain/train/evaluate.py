"""Compute the held-out loss, and generate samples, between the steps of a run."""

import bisect
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.config.context import Context
from jaxtrain.metrics import samples
from jaxtrain.metrics.files import Writers
from jaxtrain.metrics.samples import TextSample
from jaxtrain.models.module import Params
from jaxtrain.step.batch import HostBatch
from jaxtrain.step.loss import CROSS_ENTROPY, Batch
from jaxtrain.step.program import Program
from jaxtrain.train import generation
from jaxtrain.train.batch_feed import BatchFeed
from jaxtrain.train.services import Services
from jaxtrain.train.setup import Setup

AGREE_S = 5400.0  # timeout of processes that wait for each other
CONVERSATIONS = 2  # most held-out conversations that samples answer
LOOKED_AT = 1000  # documents of a file in which conversations to answer are searched


def evaluate(
    eval_step: Any,
    params: Params,
    batches: Any,
    abstract: Batch,
    context: Context,
    sequences: int,
    unwanted: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return the means over the first `sequences` sequences of a source: `loss` and the other metrics of the loss.

    `loss` is in nats per predicted token, or the mean over pairs with loss.name=dpo. Every call evaluates the same sequences,
    on any mesh, each once: rows that repeat a sequence, and rows of the last batch after these sequences, are masked. The sums
    of the batches are added exactly on the host, so the order of the batches has no effect.

    Args:
      eval_step: the compiled `Program.eval_step`.
      abstract: shapes and shardings of a batch, `Program.eval_batch`.
      batches: a data source whose `.batch(i)` has as many rows as `abstract`. The rows of a source without `distinct` and
        `repeats` (data/batches.py, `Batches`) count as different sequences.
      unwanted: called for each batch. As soon as it returns True, the evaluation ends and the result is None.
    """
    size = abstract["tokens"].shape[1]
    # The rows up to the last that has a new sequence.
    distinct, repeats = getattr(batches, "distinct", None), getattr(batches, "repeats", None)
    end = bisect.bisect_left(range(sequences), distinct(sequences), key=distinct) if distinct and repeats else sequences
    feed = BatchFeed(batches, 0, abstract, context, count=-(-end // size))
    results = []
    try:
        for i in range(-(-end // size)):
            host = None if unwanted() else feed.next(unwanted)
            if host is None:
                return None
            numbers = i * size + np.asarray(range(size) if feed.rows is None else feed.rows)
            unused = numbers >= end
            if repeats is not None:
                unused |= repeats(numbers)
            results.append(eval_step(params, feed.place(mask_rows(host, unused))))
    finally:
        feed.close()
    if not results:
        return {"loss": math.nan}
    sums, counts = [], []
    for loss, count, reported in results:
        if unwanted():
            return None
        sums.append({name: float(x) for name, x in ({"loss": loss} | reported).items()})
        counts.append(float(count))
    count = math.fsum(counts)
    return {name: math.fsum(s[name] for s in sums) / count if count else math.nan for name in sums[0]}


def mask_rows(host: HostBatch, mask_R: np.ndarray) -> HostBatch:
    """Return a copy of a batch in which the rows that `mask_R` selects, bool (R,), are padding: weight 0, segment 0."""
    if not mask_R.any():
        return host
    masked = [name for name in ("weights", "segments", "positions", "reference") if name in host]
    return host | {name: np.where(mask_R[:, None], 0, host[name]) for name in masked}


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """Return the loss in bits per byte, comparable between tokenizers; None if the bytes per token are unknown.

    loss: nats per token.
    """
    return loss / math.log(2) / bytes_per_token if bytes_per_token else None


def perplexity(loss: float) -> float:
    """Return exp(loss), inf for a loss beyond float64's range."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def without_paths(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a held-out set without the batch size, and without the paths of its files and tokenizer."""
    out = {**fingerprint, "global_batch": 0}
    if "files" in out:
        del out["source"]
        out["files"] = [{k: v for k, v in file.items() if k != "name"} for file in out["files"]]
        out["tokenizer"] = out["tokenizer"]["sha256"]
    return out


class HeldOut:
    """The held-out sets of a run, each evaluated by the same compiled step."""

    def __init__(self, program: Program, sets: Mapping[str, Any], services: Services):
        run = program.run
        self._run, self._program, self._sets, self._services = run, program, sets, services
        self._newest: tuple[int, float] | None = None  # step, and mean loss over the sets
        contents = {name: without_paths(batches.fingerprint) for name, batches in sets.items()}
        described = [contents, run.eval.sequences, dataclasses.asdict(run.loss), run.own]
        self._average = {"weights": "ema"} if run.train.ema_decay else {}
        described += [self._average] if self._average else []
        # Tells losses apart that cannot be compared: those of other sets, of another loss, or of averages of the weights.
        self.sets = hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()[:16]

    def due(self, done: int) -> bool:
        """Return whether the sets are evaluated after step `done`, or before the first step if it is 0."""
        return bool(self._sets) and (done == self._run.train.steps or done % self._run.eval.every_steps == 0)

    def loss_of(self, done: int) -> float | None:
        """Return the mean loss over the sets after step `done`; None if it is not finite, or not of the newest evaluation."""
        step, loss = self._newest or (-1, math.nan)
        return loss if step == done and math.isfinite(loss) else None

    def is_best(self, done: int, checkpoints: Checkpoints) -> bool:
        """Return whether the loss after step `done` is lower than that of each checkpoint. All processes call it."""
        if (loss := self.loss_of(done)) is None:
            return False
        best, services = True, self._services
        if services.peers.process_index == 0:  # other processes may list the steps of a network file system late
            try:
                best = loss < checkpoints.best(self.sets)
            except CheckpointError as error:
                services.console.warn(f"step {done} is saved, because the best one is not known: {error}")
        return json.loads(services.peers.gather("best", json.dumps(best), AGREE_S)[0])

    def evaluate(self, eval_step: Any, params: Params, done: int, finish: bool) -> None:
        """Write the losses of all sets to metrics, log and receipt.

        If a stop is requested during the evaluation, nothing is written, and the next attempt evaluates again. With `finish`,
        or with several processes, a stop request does not end the evaluation. Each process has rows of every batch, so no
        process may stop alone.
        """
        services, program = self._services, self._program
        alone = services.peers.count == 1 and not finish

        def unwanted() -> bool:
            services.watchdog.beat()
            return alone and services.stop_requested

        self._newest = None
        set_means: dict[str, dict[str, float]] = {}
        with services.phase("step", "eval"):
            for name, batches in self._sets.items():
                eval_args = (program.eval_batch, program.context, self._run.eval.sequences, unwanted)
                means = evaluate(eval_step, params, batches, *eval_args)
                if means is None:
                    return
                set_means[name] = means
            self._newest = done, math.fsum(means["loss"] for means in set_means.values()) / len(set_means)
            lines = [self._write(done, name, means) for name, means in set_means.items()]
            services.receipt.update(held_out=[{k: finite_or_none(v) for k, v in line.items() if k != "kind"} for line in lines])

    def _write(self, done: int, name: str, means: Mapping[str, float]) -> dict[str, Any]:
        loss = means["loss"]
        label = f"of {name} " * bool(name) + "by the average of the weights " * bool(self._average)
        text = f"step {done}: held-out loss {label}{loss:.4f}"
        if "rewards/margins" in means:
            text += f", {means['rewards/accuracies']:.1%} of the pairs in order, mean margin {means['rewards/margins']:.4f}"
            self._services.console.say(text)
            return self._services.writers.eval(step=done, name=name, **self._average, **means)
        plain = means.get(CROSS_ENTROPY, loss)  # an own loss need not be in nats per token
        batches = self._sets[name]
        evaluated = getattr(batches, "bytes_per_token_of", lambda _: batches.bytes_per_token)
        bits = bits_per_byte(plain, evaluated(self._run.eval.sequences))
        if CROSS_ENTROPY in means:
            text += f" ({self._run.loss.name}), cross entropy {plain:.4f}"
        text += f", {bits:.3f} bits a byte" if bits else ""
        self._services.console.say(f"{text}, perplexity {perplexity(plain):.5g}")
        units = {"bits_per_byte": bits, "perplexity": perplexity(plain)}
        return self._services.writers.eval(step=done, **self._average, **means, **units, name=name)


class SampleWriter:
    """Samples continuations of the prompts in `sample.prompt`, and answers to the first held-out conversations.

    The sampler's steps are compiled once, at the first use.
    """

    def __init__(self, setup: Setup, services: Services):
        self._run, self._program, self._tokenizer, self._services = setup.run, setup.program, setup.tokenizer, services
        self._stops = setup.text.stops
        self._writers: Writers = services.writers
        self._sampler: generation.Sampler | None = None
        count = CONVERSATIONS if self._tokenizer is not None else 0
        self._questions = first_questions(setup.held_out, count, self._run.data.seq_len)

    def due(self, done: int) -> bool:
        """Return whether samples are due after step `done`. The last step's samples are written after its save instead."""
        every = self._run.sample.every_steps
        return self._tokenizer is not None and every > 0 and done % every == 0 and 0 < done < self._run.train.steps

    def write(self, params: Params, done: int) -> None:
        """Generate samples, and write them to the log, samples.txt and the trackers. Without a tokenizer, do nothing."""
        if self._tokenizer is None:
            return
        with self._services.phase("step", "eval"):
            if self._sampler is None:
                self._sampler = generation.Sampler(self._run, self._program.placement)
            texts = self._texts(self._sampler, params)
            new_samples = [TextSample(done, i if len(texts) > 1 else 0, text) for i, text in enumerate(texts, start=1)]
            self._writers.samples(new_samples)
            console = self._services.console
            console.end_live()
            for sample in new_samples:
                prompt_label = f"prompt {sample.prompt}, " if sample.prompt else ""
                at = f"step {done}, " if done < self._run.train.steps else ""
                at += "by the average of the weights, " if self._run.train.ema_decay else ""
                console.say(f"sample ({prompt_label}{at}{self._writers.samples_path}):\n{sample.text}")

    def _texts(self, sampler: generation.Sampler, params: Params) -> list[str]:
        """Return the continuation of each prompt, then the answer to each conversation with the reference answer below."""
        settings, tokenizer = self._run.sample, self._tokenizer
        sampling = samples.Sampling(settings.prompt, settings.max_tokens, settings.temperature)
        texts = []
        if sampling.prompt or not self._questions:
            texts = generation.continue_all(sampler, params, tokenizer, sampling, self._stops)
        room = max((len(prompt) for prompt, _ in self._questions), default=0) + sampling.max_tokens
        for prompt, reference in self._questions:
            answer = generation.continue_ids(sampler, params, prompt, sampling, self._stops, room)
            while reference and reference[-1] in self._stops:
                reference = reference[:-1]
            texts.append(f"{tokenizer.decode([*prompt, *answer])}\n[reference] {tokenizer.decode(reference)}")
        return texts

    def has_written(self, done: int) -> bool:
        """Return whether samples.txt has the samples of step `done`."""
        path = self._writers.samples_path
        return path.exists() and any(sample.step == done for sample in samples.parse_samples(path.read_bytes().decode()))


def first_questions(held_out: Mapping[str, Any], count: int, seq_len: int) -> list[tuple[list[int], list[int]]]:
    """Return (ids up to the last answer, ids of that answer) of the first conversations, or pairs, in held-out token files.

    Args:
      held_out: held-out data by name.
      count: most conversations.
      seq_len: a conversation with more tokens than this before its last answer is passed over. Of each file, the first
        LOOKED_AT documents are read.
    """
    files = [source.file for data in held_out.values() for source in getattr(data, "sources", ()) if hasattr(source, "file")]
    out: list[tuple[list[int], list[int]]] = []
    for file in (each for each in files if each.loss_bits is not None):
        for i in range(0, min(LOOKED_AT, file.header["documents"]), 2 if file.pairs else 1):
            if len(out) >= count:
                return out
            first, last = int(file.doc_offsets[i]), int(file.doc_offsets[i + 1])
            counts = np.flatnonzero(file.loss_flags(first, last))
            if not counts.size:
                continue
            before = np.flatnonzero(~file.loss_flags(first, first + int(counts[-1])))
            begin = int(before[-1]) + 1 if before.size else 0
            if 0 < begin <= seq_len:
                tokens = [int(token) for token in file.tokens[first : first + int(counts[-1]) + 1]]
                out.append((tokens[:begin], tokens[begin:]))
    return out


def finite_or_none(value: Any) -> Any:
    """Return a value for JSON: None for NaN and infinities."""
    return value if not isinstance(value, float) or math.isfinite(value) else None
