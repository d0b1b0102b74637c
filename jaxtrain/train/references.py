"""Compute the reference model's log-probabilities of pairs, for loss.name=dpo, once by the run's own program, and store them.

The reference is the model that training begins with: the initial weights, with the adapters of init.from if it holds some. New
adapters change nothing at first, so their reference is the base. The loss needs only its log-probability of each document's
completion, so no second set of weights is ever in memory.

    WORKDIR/reference/0123456789abcdef.npz    one file for each token file, named by the hash of the token file's contents
      log_probs    float32 (documents,), NaN for a document that is not computed yet or in no row
      about        JSON: format, version, the hash in full; digest of weights, model and precision of the reference

The file is written during the pass, so a killed run continues from it. If weights, model or precision of the reference differ
from `about`, the file is computed again, as long as the reference's weights exist. They no longer exist after training without
adapters, and after training adapters of init.from further. In this case, `check_log_probs` refuses a run whose files
are missing, before anything is compiled. Files of another precision are then used.
"""

import collections
import io
import json
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config.schema import Problem, RunConfig, to_dict
from jaxtrain.data.windows import PairRows
from jaxtrain.hf import lora
from jaxtrain.metrics.files import write_atomic
from jaxtrain.models.lora import B, is_adapter
from jaxtrain.models.module import Params, leaf_names
from jaxtrain.step import state
from jaxtrain.step.program import Program
from jaxtrain.train.batch_feed import BatchFeed
from jaxtrain.train.evaluate import mask_rows
from jaxtrain.train.initial_state import Restored
from jaxtrain.train.services import Services

FORMAT, VERSION = "jaxtrain reference log-probabilities", 1
FOLDER = "reference"
META = "reference"  # the digest of the reference's weights, in a checkpoint's meta.json
SAVE_S = 30.0  # between two writes of an unfinished file, and two lines about it
AGREE_S = 600.0
ANEW = "Start a new run in another --workdir (--config.init.from starts it from the model that is to be the reference)."


class NumberedRows:
    """A data source with only the rows `number_R`: batch i has the rows number_R[i x size] to number_R[(i + 1) x size - 1]."""

    def __init__(self, batches: Any, source: PairRows, number_R: np.ndarray, size: int):
        # The last batch is filled with its first row, which `References` masks.
        self._batches, self._source, self._size = batches, source, size
        self.number_R = np.concatenate([number_R, np.repeat(number_R[:1], -len(number_R) % size)])

    def batch(self, step: int, rows: Any = None) -> dict[str, np.ndarray]:
        """Return batch `step`. rows: indices of rows within the batch, to return only these; None: all rows."""
        number_R = self.number_R[step * self._size : (step + 1) * self._size]
        return self._batches.numbered_rows(self._source, number_R if rows is None else number_R[rows])


class References:
    """Adds the reference log-probabilities to a run's data, from their files or by a pass over the pairs."""

    def __init__(self, program: Program, restored: Restored, saved: Mapping[str, Any], services: Services):
        """Args: saved: meta.json of the checkpoint that the run resumes from; {} for a new run."""
        self._run, self._program, self._services = program.run, program, services
        self._params: Params | None = None  # the reference's; None if training has changed them
        weights = state.weights(restored.state)
        if program.adapters and not restored.start.adapters:
            self._params = without_adapters(weights)
            # The reference computes with the base as it is stored.
            self.digest = "-".join([restored.base["digest"], *[program.run.lora.base] * (program.run.lora.base != "bf16")])
        elif not restored.start.resumed:
            self._params = weights
            self.digest = lora.digest(weights, restored.state.layers)
        else:
            self.digest = saved[META]
        self._compiled: Any = None

    def learn(self, workdir: Path, data: Iterable[Any]) -> bool:
        """Add the reference log-probabilities to all data sources in `data`. Return False if the run was asked to stop."""
        for batches in data:
            for source in batches.sources:
                if isinstance(source, PairRows) and source.name not in batches.references:
                    log_probs = self._load_or_compute(workdir, batches, source)
                    if log_probs is None:
                        return False
                    batches.references[source.name] = log_probs
        return True

    def _load_or_compute(self, workdir: Path, batches: Any, source: PairRows) -> np.ndarray | None:
        """Return the reference log-probability of each document of a source; None if the run was asked to stop.

        Reads the source's file in `workdir`, and computes missing documents.
        """
        header = source.file.header
        path, about = file_of(workdir, to_dict(self._run), self.digest, header)
        peers, log_probs = self._services.peers, np.full(header["documents"], np.nan, np.float32)
        if peers.process_index == 0:
            log_probs, fault = read_log_probs(path, about, header["documents"], self._params is None)
            if fault:
                self._services.console.warn(f"{path}: {fault}. It is computed again.")
        if peers.count > 1:  # other processes may not see the files of process 0
            log_probs = np.array(multihost_utils.broadcast_one_to_all(log_probs))
        row_R = rows_without(source, log_probs)
        return self._compute(path, about, batches, source, row_R, log_probs) if len(row_R) else log_probs

    def _compute(
        self, path: Path, about: dict[str, Any], batches: Any, source: PairRows, row_R: np.ndarray, log_probs: np.ndarray
    ) -> np.ndarray | None:
        if self._params is None:
            raise CheckpointError(f"{path}: was deleted or changed while the run started. {ANEW}")
        services, program = self._services, self._program
        abstract = program.eval_batch
        size = abstract["tokens"].shape[1]
        rows, count = NumberedRows(batches, source, row_R, size), -(-len(row_R) // size)
        services.console.say(
            f"reference log-probabilities of {source.name}: {len(row_R):,} of {source.windows:,} sequences to compute"
        )
        waiting: collections.deque[tuple[int, Any]] = collections.deque()  # results on the devices
        saved = shown = time.monotonic()

        def store_result(i: int, output: Any) -> None:
            result_BM = np.asarray(jax.device_get(output))[0]
            numbers = rows.number_R[i * size : (i + 1) * size][: len(row_R) - i * size]
            for row, result_M in zip(numbers.tolist(), result_BM, strict=False):
                documents = source.documents_of(row)
                log_probs[documents] = result_M[: len(documents)]

        def save() -> None:
            if services.peers.process_index:
                return
            try:
                write_atomic(path, encode_log_probs(log_probs, about))
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be written ({error.strerror or error}). Free space there, and start the run again: "
                    "the pass continues."
                ) from error

        def unwanted() -> bool:
            services.watchdog.beat()
            return services.peers.count == 1 and services.stop_requested

        with services.phase("step", "eval"):
            if self._compiled is None:
                self._compiled = program.log_probs.lower(program.state.params, abstract).compile()
            feed = BatchFeed(rows, 0, abstract, program.context, count)
            try:
                for i in range(count):
                    host = None if unwanted() else feed.next(unwanted)
                    if host is None:
                        save()
                        return None
                    number = i * size + np.asarray(range(size) if feed.rows is None else feed.rows)
                    waiting.append((i, self._compiled(self._params, feed.place(mask_rows(host, number >= len(row_R))))))
                    if len(waiting) > 1:
                        store_result(*waiting.popleft())
                        if i == 1 or time.monotonic() - saved > SAVE_S:
                            saved = time.monotonic()
                            save()
                    if time.monotonic() - shown > SAVE_S:
                        shown = time.monotonic()
                        services.console.say(f"reference log-probabilities: {(i + 1) * size:,} of {len(row_R):,} sequences")
            finally:
                feed.close()
            while waiting:
                store_result(*waiting.popleft())
        done = np.concatenate([source.documents_of(row) for row in row_R.tolist()])
        if not np.isfinite(log_probs[done]).all():
            bad = np.count_nonzero(~np.isfinite(log_probs[done]))
            raise CheckpointError(
                f"{source.name}: the reference model gives {bad} completions no finite log-probability. Name another model in "
                "init.from."
            )
        save()
        return log_probs


def file_of(workdir: Path, config: Mapping[str, Any], digest: str, header: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the path of the reference log-probabilities of a token file, and the `about` entry that the file must have.

    Args:
      config: of the run, as in config.json.
      digest: the digest of the reference's weights.
      header: the header of the token file.
    """
    fp8 = config["fp8"] if config["precision"] == "fp8" else {}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "content_sha256": header["content_sha256"],
        "weights": digest,
        "model": {k: v for k, v in config["model"].items() if k != "init_std"},
        "precision": {"activations": config["precision"], "weights": config["dtypes"]["params"], "fp8": fp8},
    }
    return workdir / FOLDER / f"{header['content_sha256'][:16]}.npz", about


def read_log_probs(path: Path, about: Mapping[str, Any], documents: int, trained: bool) -> tuple[np.ndarray, str]:
    """Return (reference log-probability of each document, NaN if unknown; the fault of the file, "" if it has none).

    If there is no file, all log-probabilities are NaN and the fault is "".

    Args:
      trained: training has changed the weights, so a file in another precision is used too.
    """
    empty = np.full(documents, np.nan, np.float32)
    if not path.exists():
        return empty, ""
    try:
        with np.load(path) as archive:
            log_probs, stored = archive["log_probs"], json.loads(str(archive["about"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        return empty, f"is damaged ({type(error).__name__}: {error})"
    mismatches = [name for name, value in about.items() if stored.get(name) != value and not (trained and name == "precision")]
    if mismatches or log_probs.shape != empty.shape:
        return empty, f"is of another reference: it differs in {', '.join(mismatches) or 'documents'}"
    return log_probs, ""


def rows_without(source: PairRows, log_probs: np.ndarray) -> np.ndarray:
    """Return the numbers of the rows with a document whose reference log-probability is unknown."""
    return np.asarray([row for row in range(source.windows) if np.isnan(log_probs[source.documents_of(row)]).any()])


def check_log_probs(run: RunConfig, workdir: Path, step: int, saved: Mapping[str, Any], data: Iterable[Any]) -> list[Problem]:
    """Return a problem for each file of reference log-probabilities that is missing, damaged or incomplete. Reads the files.

    Call it for a run whose training has changed the reference's weights: they no longer exist, so nothing can be computed
    again. If the checkpoint is of a run with another loss, return only this problem.

    Args:
      step: the step of the checkpoint that the run resumes from.
      saved: meta.json of the checkpoint.
    """
    if META not in saved:
        rule = f"the checkpoint of step {step} is of a run with another loss, so it names no reference model"
        return [Problem("loss.name", run.loss.name, rule, ANEW)]
    problems = []
    for source in (source for batches in data for source in batches.sources if isinstance(source, PairRows)):
        header = source.file.header
        path, about = file_of(workdir, to_dict(run), saved[META], header)
        log_probs, fault = read_log_probs(path, about, header["documents"], trained=True)
        if not fault and len(rows_without(source, log_probs)):
            fault = f"lacks reference log-probabilities of {source.name}"
        if fault:
            rule = f"{path} {fault}, and the weights have been trained since"
            problems.append(Problem("loss.name", run.loss.name, rule, f"Put the file back, or the data as they were. {ANEW}"))
    return problems


def without_adapters(params: Params) -> Params:
    """Return the parameters with zeros in the matrix b of each adapter. The model's output is then that of the base weights."""

    def member(name: str, x: jax.Array) -> jax.Array:
        return jax.jit(jnp.zeros_like, out_shardings=x.sharding)(x) if is_adapter(name) and name.endswith(B) else x

    return jax.tree.map(member, leaf_names(params), params)


def encode_log_probs(log_probs: np.ndarray, about: Mapping[str, Any]) -> bytes:
    """Return the contents of a file of reference log-probabilities."""
    file = io.BytesIO()
    np.savez(file, log_probs=log_probs, about=np.asarray(json.dumps(about)))
    return file.getvalue()
