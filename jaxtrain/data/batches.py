"""Batches as a pure function of (seed, step).

A token file is cut into windows of seq_len + 1 tokens at multiples of seq_len. Packed rows (windows.py) replace windows if the
file has loss bits (one bit for each token), or if data.packing is best_fit. Row `r` of step `s` has the global index
g = s * global_batch + r. It reads window permutation(epoch, g mod windows), with epoch = floor(g / windows). So a
run resumes exactly on any number of hosts, and any process can make any rows. This module does not import jax; only
`Batches` imports jax, through grain.

If a run has several sources, its mixture assigns each global index to a row of one source (mixture.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxtrain.config import declaration, own_parts, schema
from jaxtrain.config.shapes import BATCH_KEYS, PAIR_KEYS
from jaxtrain.data import stdlib, synthetic, text_format
from jaxtrain.data.mixture import Mixture, resolve_path
from jaxtrain.data.opening import is_custom, open_mixture, open_rows
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.windows import PackedRows, PairRows, Windows, make_batch

RowSelection = slice | np.ndarray | None
MIN_FILLED = 0.9  # rows of conversations with a smaller fraction of tokens that are not padding are reported


# Attributes of a source from outside the package, by split
REQUIRED_ATTRIBUTES = {
    "train": ("batch", "epoch", "fingerprint", "synthetic", "masked_fraction"),
    "validation": ("batch", "bytes_per_token", "fingerprint"),
}


class Batches:
    """Batches of one split of a source, made by `open_source`.

    Attributes:
      vocab_size: one more than the tokenizer's largest id.
      tokenizer: name, sha256, vocab_size, eot.
      text: how the texts end, and the chat template that wrote them; a user's own source may lack this attribute.
      templates: names of further chat templates, if the files were written with several.
      bytes_per_token: UTF-8 bytes of text per token that counts in the loss; None if unknown.
      synthetic: whether the data is synthetic.
      tokens_per_epoch: tokens in all rows of all sources, with padding.
      masked_fraction: fraction of the tokens that are masked because their row has more than `data.max_segments` documents.
      max_segments: the most documents in a row; a user's own source may lack this attribute.
      truncated: number of conversations cut to fit a row, tokens that were cut off, tokens of all conversations.
      sparse: name of each file whose rows are less than MIN_FILLED filled because of `max_segments` -> filled
        fraction of the rows.
      fingerprint: a JSON dict for receipts: source, split, settings, and hashes of the files.
      pairs: whether rows are pairs.
      answers: whether every source has loss bits: conversations or pairs.
      left_out: number of pairs that are never read because they are longer than a row.
      references: for pairs, name of the source -> reference log-probability of each document; empty until computed.
      sources: the rows of each source of all phases, past ones included. The index in the list is the source's number.
      mixture: the phases of the run and their weights of the sources; they decide the source of each row (mixture.py).
    """

    def __init__(
        self,
        sources: list[Windows],
        weights: Sequence[float],
        *,
        global_batch: int,
        seq_len: int,
        seed: int,
        packing: str,
        max_segments: int,
        tokenizer: dict[str, Any],
        text: TextFormat,
        templates: Sequence[str] = (),
        fingerprint: dict[str, Any],
        densities: Sequence[tuple[float, float]] = (),
        masked_fraction: float = 0.0,
        synthetic: bool = False,
    ):
        """Args: densities: of each source, targets that count per token of its rows, in bytes of text and in tokens; or ()."""
        load_shuffle()  # not with the first batch
        self.global_batch = global_batch
        self.seq_len = seq_len
        self.seed = seed
        self.packing = packing
        self.max_segments = max_segments
        self.tokenizer = tokenizer
        self.text, self.templates = text, templates
        self.vocab_size: int = tokenizer["vocab_size"]
        self.fingerprint = fingerprint
        self._densities = densities
        self.bytes_per_token = self._bytes_per_token(weights)
        self.masked_fraction = masked_fraction
        packed = [s for s in sources if isinstance(s, PackedRows)]
        packed_tokens = sum(s.file.header["tokens"] for s in packed)
        self.truncated = sum(s.truncated for s in packed), sum(s.truncated_tokens for s in packed), packed_tokens
        self.sparse = {s.name: s.filled for s in packed if s.capped and s.filled < MIN_FILLED}
        self.pairs = all(isinstance(s, PairRows) for s in sources)
        self.answers = bool(packed) and len(packed) == len(sources) and all(s.file.loss_bits is not None for s in packed)
        self.left_out = sum(s.left_out for s in sources if isinstance(s, PairRows))
        self.references: dict[str, np.ndarray] = {}
        self.synthetic = synthetic
        self.tokens_per_epoch = sum(s.windows for s in sources) * seq_len
        files = fingerprint.get("files") or [{"name": s.name, "content_sha256": ""} for s in sources]
        source_records = [
            {"name": f["name"], "path": str(resolve_path(s.name)), "content_sha256": f["content_sha256"]}
            for s, f in zip(sources, files, strict=True)
        ]
        self._opened = list(sources)
        self.mixture = Mixture(source_records, weights, seq_len)
        self.start_mixture(None, 0, 0)

    def start_mixture(self, stored: Mapping[str, Any] | None, step: int, begin: int) -> bool:
        """Set the mixture of a run that begins, or that resumes after `step` steps: a source continues from its last position.

        Args:
          stored: the entry `data` of the checkpoint's meta.json; None or {} for a new run.
          begin: the global index of the first row of the first unread batch. The run may skip this batch and later ones.

        Returns:
          Whether the weights differ from those of the checkpoint.
        """
        stored = stored or {}
        stored_mixture, tokens = stored.get("mixture"), stored.get("tokens", 0)  # a user's own source stores no mixture
        numbers = self.mixture.start(stored_mixture, tokens, step, begin)
        sources: list[Any] = [_RemovedSource(source["name"]) for source in self.mixture.sources]
        for number, source in zip(numbers, self._opened, strict=True):
            sources[number] = source
        self.sources = sources
        return self.mixture.changed

    def labels(self) -> list[str]:
        """Return a short name of each source, by number: the file's name, or its path if two files have the same name."""
        names = [source["name"] for source in self.mixture.sources]
        return [s.name if names.count(name) > 1 else name for s, name in zip(self.sources, names, strict=True)]

    def sources_read(self, step: int) -> list[dict[str, Any]]:
        """Return a line of metrics.jsonl for each source, counted over the batches before `step`; [] if there is one source.

        The keys are `source` (its label), `tokens` (read so far), `epoch` (epochs read so far; None for a source that the
        config no longer names), and `weight` (in the newest phase that has begun).
        """
        if len(self.sources) == 1:
            return []
        row = step * self.global_batch
        tokens, weights = self.mixture.tokens_read(row), self.mixture.phase_of(row - 1).weights
        lines = []
        for label, source, read, weight in zip(self.labels(), self.sources, tokens, weights, strict=True):
            epoch = None if isinstance(source, _RemovedSource) else read / (source.windows * self.seq_len)
            lines.append({"source": label, "tokens": read, "epoch": epoch, "weight": weight})
        return lines

    def epoch(self, step: int) -> float:
        """Return the tokens read before optimizer step `step`, divided by `tokens_per_epoch`."""
        return step * self.global_batch * self.seq_len / self.tokens_per_epoch

    def distinct(self, rows: int) -> int:
        """Return the number of different sequences among the first `rows` rows of a held-out set."""
        return sum(self._distinct(rows))

    def _distinct(self, rows: int) -> list[int]:
        read = self.mixture.tokens_read(rows)
        return [min(tokens // self.seq_len, s.windows) for tokens, s in zip(read, self.sources, strict=True)]

    def repeats(self, index_R: np.ndarray) -> np.ndarray:
        """Return whether an earlier row of a held-out set has the sequence of each row, bool (R,). index_R: global indices."""
        source_R, within_R = self.mixture.sources_of(index_R)
        return within_R >= np.asarray([source.windows for source in self.sources], np.int64)[source_R]

    def bytes_per_token_of(self, rows: int) -> float | None:
        """Return `bytes_per_token` of the different sequences among the first `rows` rows of a held-out set."""
        return self._bytes_per_token(self._distinct(rows))

    def _bytes_per_token(self, share_of_sources: Sequence[float]) -> float | None:
        pairs = list(zip(share_of_sources, self._densities, strict=True)) if self._densities else []
        text_bytes, predicted = (math.fsum(share * density[i] for share, density in pairs) for i in (0, 1))
        return text_bytes / predicted if predicted else None

    def window_numbers(self, source: int, index_R: np.ndarray) -> np.ndarray:
        """Return the number of the window at each row index of a source. Each epoch has another permutation of all windows."""
        return window_numbers(self.seed, source, self.sources[source].windows, index_R)

    def batch(self, step: int, rows: RowSelection = None) -> dict[str, np.ndarray]:
        """Return the batch of optimizer step `step`: arrays (global_batch, seq_len), keys and types of shapes.BATCH_KEYS.

        A batch of pairs also has shapes.PAIR_KEYS.

        Args:
          rows: a slice or an array of row numbers; only these rows of the batch are returned. None: all rows.
        """
        row_R = np.arange(self.global_batch, dtype=np.int64)[slice(None) if rows is None else rows]
        index_R = step * self.global_batch + row_R
        source_R, within_R = self.mixture.sources_of(index_R)
        numbers = np.unique(source_R).tolist() if len(self.sources) > 1 else [0]
        if len(numbers) == 1:
            return self._rows_of(numbers[0], within_R)
        keys = BATCH_KEYS | (PAIR_KEYS if self.pairs else {})
        out = {k: np.empty((len(row_R), self.seq_len), dtype) for k, dtype in keys.items()}
        for k in numbers:
            in_source = source_R == k
            for name, values in self._rows_of(k, within_R[in_source]).items():
                out[name][in_source] = values
        return out

    def _rows_of(self, source: int, index_R: np.ndarray) -> dict[str, np.ndarray]:
        return self.numbered_rows(self.sources[source], self.window_numbers(source, index_R))

    def numbered_rows(self, source: Windows, number_R: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the rows of a source with these window numbers, (R,)."""
        batch = make_batch(*source.rows(number_R), self.packing != "none", self.max_segments)
        if isinstance(source, PairRows):
            # The reference log-probability of each document, at its first token: the loss sums over a document, so one number
            # for each is enough. 0 if unknown.
            batch["reference"] = np.zeros(batch["tokens"].shape, np.float32)
            if (values := self.references.get(source.name)) is not None:
                documents = np.concatenate([source.documents_of(row) for row in number_R.tolist()])
                batch["reference"][(batch["segments"] > 0) & (batch["positions"] == 0)] = values[documents]
        return batch


@functools.cache
def load_shuffle() -> Callable[[int, int, int, int], int]:
    """Return grain's permutation of indices. The first call imports jax, which takes seconds."""
    from grain.experimental import index_shuffle

    return index_shuffle


def window_numbers(seed: int, source: int, windows: int, index_R: np.ndarray) -> np.ndarray:
    """Return the number of the window, of `windows`, at each row index of source number `source`, int64 (R,).

    Each epoch has another permutation of all windows.
    """
    index_shuffle = load_shuffle()
    numbers = [index_shuffle(i % windows, windows - 1, _epoch_seed(seed, source, i // windows), 4) for i in index_R.tolist()]
    return np.asarray(numbers, np.int64)


@functools.lru_cache(maxsize=256)
def _epoch_seed(seed: int, source: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, source, epoch]).generate_state(1)[0])


class _RemovedSource:
    """A source that the run read before, and that its config no longer names. Later phases read no row of this source."""

    def __init__(self, name: str):
        self.name = name


class UserSource:
    """A source from outside the package. Its batches are checked, and all other attributes are its own."""

    def __init__(self, key: str, value: str, source: Any, required: Sequence[str], rows: int, seq_len: int, vocab_size: int):
        self._key_value, self._source, self._rows, self._seq_len = (key, value), source, rows, seq_len
        self._limits = {"tokens": vocab_size, "targets": vocab_size} if vocab_size else {}
        if missing := [name for name in required if not hasattr(source, name)]:
            rule = f"returns {type(source).__name__} without {', '.join(missing)}"
            raise own_parts.WrongPart(key, value, rule, "Return an object with the interface of jaxtrain.data.batches.Batches.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle
            raise AttributeError(name)
        return getattr(self._source, name)

    def batch(self, step: int, *rows: Any) -> dict[str, np.ndarray]:
        """Return batch `step` of the source, or these rows of it. Raises WrongPart if it is no batch."""
        count = len(np.arange(self._rows)[rows[0]]) if rows and rows[0] is not None else self._rows
        shape = (count, self._seq_len)

        def refuse(rule: str) -> NoReturn:
            rule = f"its batch({step}) {rule}"
            raise own_parts.WrongPart(*self._key_value, rule, f"Return arrays {list(shape)}: {', '.join(BATCH_KEYS)}.")

        try:
            with own_parts.calling(*self._key_value, "batch(step, rows)"):
                arrays = self._source.batch(step, *rows)
        except StopIteration:
            refuse("ends the data: it raises StopIteration")
        if not isinstance(arrays, Mapping):
            refuse(f"returns {type(arrays).__name__}, and no dict of arrays")
        for name, dtype in BATCH_KEYS.items():
            if name not in arrays:
                refuse(f"has no {name!r}")
            array = np.asarray(arrays[name])
            if array.shape != shape or (np.dtype(dtype).kind == "f") != (array.dtype.kind == "f"):
                refuse(f"has {name!r} as {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
            if np.dtype(dtype).kind != "f" and array.size:
                low, high, limit = int(array.min()), int(array.max()), self._limits.get(name, declaration.MOST + 1)
                if low < 0 or high >= limit:
                    refuse(f"has {low if low < 0 else high:,} in {name!r}, which must be from 0 to {limit - 1:,}")
        return dict(arrays)


def resolve_max_segments(run: schema.RunConfig, *sources: Any) -> schema.RunConfig:
    """Return the run with `data.max_segments` = 0 replaced by the largest number of documents in a row of any source.

    sources: every source of the run, from `open_source`. A user's own source without `max_segments` counts as
    config.MOST_DOCUMENTS. Raises config.ConfigError if a source has more documents in a row than config.MOST_DOCUMENTS.
    """
    if run.data.max_segments:
        return run
    max_documents = max(getattr(source, "max_segments", schema.MOST_DOCUMENTS) for source in sources)
    if max_documents > schema.MOST_DOCUMENTS:
        rule = (
            f"a data source has {max_documents} documents in a sequence, and up to {schema.MOST_DOCUMENTS} "
            "are taken by themselves"
        )
        raise schema.ConfigError([schema.Problem("data.max_segments", 0, rule, f"Set it to {max_documents}.")])
    return dataclasses.replace(run, data=dataclasses.replace(run.data, max_segments=max_documents))


def open_source(
    data: schema.Data,
    source: str,
    *,
    split: str,
    global_batch: int,
    data_dir: Path | str,
    seed: int | None = None,
    seq_len: int | None = None,
    user_settings: schema.Own = schema.NO_SETTINGS,
    vocab_size: int = 0,
) -> Batches:
    """Return the batches of one split of a source. The token files of stdlib are made if they do not exist.

    With `data.max_segments` = 0, `Batches.max_segments` follows from the documents in the files, up to config.MOST_DOCUMENTS.

    Args:
      source: stdlib, synthetic, token files, or `package.module:name`, which is called as `name(data, split, global_batch,
        own)` and must return an object with the interface of `Batches`. "": `data.source`.
      split: train | validation.
      data_dir: the folder of stdlib's token files.
      seed, seq_len: replace the values in `data`; None: those values.
      user_settings: the settings of the config's section `own`, for a user's own source.
      vocab_size: of the model, which the token ids of a user's own source must be below; 0: any.

    Raises:
      config.ConfigError: the source cannot be opened, or it is "" although `data.source` is token files.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split = {split!r}: must be train or validation")
    key = "data.source" if split == "train" else "data.eval_source"
    if not source:
        source = data.source
        if source not in ("stdlib", "synthetic") and not is_custom(source):
            raise schema.ConfigError([schema.Problem(key, "", "files have no split of their own", "Name a held-out file.")])
    seed = data.seed if seed is None else seed
    seq_len = data.seq_len if seq_len is None else seq_len
    max_segments, data = data.max_segments, dataclasses.replace(data, max_segments=data.most_documents)
    if is_custom(source):
        function = own_parts.load_part(key, source)
        with own_parts.calling(key, source, "name(data, split, global_batch, own)"):
            user_source = function(data, split, global_batch, user_settings)
        wrapped: Any = UserSource(key, source, user_source, REQUIRED_ATTRIBUTES[split], global_batch, seq_len, vocab_size)
        return wrapped
    common: dict[str, Any] = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "seed": seed,
        "packing": data.packing,
        "max_segments": data.max_segments,
    }
    fingerprint: dict[str, Any] = {"source": source, "split": split, **common}
    if source == "synthetic":
        rows = synthetic.Synthetic(seed, split, seq_len, data.max_segments)
        common["max_segments"] = max_segments or rows.documents
        vocab, eot = synthetic.VOCAB, synthetic.EOT
        info = {"name": "synthetic", "sha256": "", "vocab_size": vocab, "eot": eot}
        fields = {"tokenizer": info, "text": TextFormat(eot=eot), "fingerprint": fingerprint, "synthetic": True}
        return Batches([rows], [1.0], **fields, **common)
    if source == "stdlib":
        source = str(stdlib.stdlib_files(data_dir)[split == "validation"])
    files, weights = open_mixture(data, source, key, seq_len)
    sources: list[Windows] = []
    masked_by_source = []
    densities = []
    max_documents = 1
    for file in files:
        header = file.header
        loss = header["loss"] or {"tokens": header["tokens"], "bytes": header["source_bytes"], "first": header["documents"]}
        masked = 0.0
        windows = open_rows(file, data, key, seq_len, seed)
        if not data.masks_documents:
            pass
        elif isinstance(windows, PackedRows):
            max_documents = max(max_documents, windows.documents)
        else:
            documents, masked_tokens = windows.count_documents(data.max_segments)
            max_documents = max(max_documents, min(documents, data.max_segments))
            masked = masked_tokens / (windows.windows * seq_len)
        sources.append(windows)
        masked_by_source.append(masked)
        # The sums are per token read from the mixture: bytes and number of the targets that count. Rows of conversations
        # contain padding, but no truncated tokens.
        tokens = header["tokens"]
        if isinstance(windows, PackedRows):
            tokens *= windows.windows * seq_len / (header["tokens"] - windows.truncated_tokens)
        predicted = loss["tokens"] - (loss["first"] if data.masks_documents else 0)
        predicted_bytes = loss["bytes"] - (header["first_bytes"] if data.masks_documents else 0)
        densities.append((predicted_bytes / tokens, predicted / tokens))
    common["max_segments"] = max_segments or max_documents
    fingerprint["tokenizer"] = files[0].header["tokenizer"]
    fingerprint["files"] = [
        {"name": f.path.name, "weight": w, **{k: f.header[k] for k in ("content_sha256", "tokens", "documents")}}
        | ({"rows": windows.windows} if isinstance(windows, PackedRows) else {})
        for f, w, windows in zip(files, weights, sources, strict=True)
    ]
    return Batches(
        sources,
        weights,
        tokenizer=files[0].header["tokenizer"],
        text=text_format.format_from_headers([file.header for file in files]),
        templates=text_format.other_templates([file.header for file in files]),
        fingerprint=fingerprint,
        densities=densities,
        masked_fraction=float(np.dot(weights, masked_by_source)),
        **common,
    )
