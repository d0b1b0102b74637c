"""Batches as a pure function of (seed, step).

A token file is cut into windows of seq_len + 1 tokens at multiples of seq_len; one with loss bits has rows of whole
conversations instead, numbered in the same way (windows.py). Row `r` of step `s` has the global index g = s * global_batch + r,
and reads window permutation(epoch, g mod windows). So a run resumes exactly on any number of hosts, and any process can make
any rows. Nothing here imports jax, and `check` imports nothing that does.

Of a mixture, g says whose turn it is, and the turns of a source count its own rows. A run that goes on with another mixture
counts turns anew from there, and each source goes on with the rows that follow those it has given (`Batches.go_on`).
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import config
from jaxtrain.data import mixture, stdlib, synthetic
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.tokenfile import TokenFile, TokenFileError
from jaxtrain.data.windows import (
    PackedRows,
    Part,
    Read,
    Windows,
    count_windows,
    make_batch,
    masked_tokens,
    most_documents,
    open_windows,
)
from jaxtrain.shapes import BATCH_KEYS
from jaxtrain.synonyms import MOST, did_you_mean

Rows = slice | np.ndarray | None
FULL = 0.9  # of rows of conversations: a part below it is worth a line
MAX_WINDOWS = 1 << 32  # grain's index_shuffle counts in 32 bits


class Batches:
    """Batches of one split of a source. Made by `open_source`.

    Attributes: `vocab_size`; `tokenizer` (name, sha256, vocab_size, eot); `bytes_per_token` (UTF-8 bytes of text per token
    whose prediction counts; None where unknown); `synthetic`; `tokens_per_epoch`; `masked_fraction` (part of the tokens that
    `data.max_segments` masks); `max_segments` (documents in a row at most; optional for sources of one's own); `truncated`
    (conversations longer than a row, the tokens that they lose, the tokens of all conversations); `sparse` (files whose rows
    `max_segments` keeps from being filled, with the filled part); `fingerprint` (JSON: what was read, for receipts).
    `sources`, and `weights` of the mixture now, by the number of the source: its place among all that the run has read. Of one
    that is no longer in the mixture the weight is 0.
    """

    def __init__(
        self,
        sources: list[Windows],
        weights: list[float],
        *,
        global_batch: int,
        seq_len: int,
        seed: int,
        packing: str,
        max_segments: int,
        tokenizer: dict[str, Any],
        fingerprint: dict[str, Any],
        bytes_per_token: float | None = None,
        masked_fraction: float = 0.0,
        synthetic: bool = False,
    ):
        # imports jax, in seconds; only a run that has passed `check` comes here
        from grain.experimental import index_shuffle

        self._shuffle = index_shuffle
        self.global_batch = global_batch
        self.seq_len = seq_len
        self.seed = seed
        self.packing = packing
        self.max_segments = max_segments
        self.tokenizer = tokenizer
        self.vocab_size: int = tokenizer["vocab_size"]
        self.fingerprint = fingerprint
        self.bytes_per_token = bytes_per_token
        self.masked_fraction = masked_fraction
        cut = [s for s in sources if isinstance(s, PackedRows)]
        held = sum(s.file.header["tokens"] for s in cut)
        self.truncated = sum(s.truncated for s in cut), sum(s.truncated_tokens for s in cut), held
        self.sparse = {s.name: s.filled for s in cut if s.capped and s.filled < FULL}
        self.synthetic = synthetic
        self.tokens_per_epoch = sum(s.windows for s in sources) * seq_len
        files = fingerprint.get("files") or [{"name": s.name, "content_sha256": ""} for s in sources]
        named = [{k: f[k] for k in ("name", "content_sha256")} for f in files]
        shares = [w / math.fsum(weights) for w in weights]
        self._opened = list(zip(named, sources, shares, strict=True))
        self._set(named, list(sources), [{"step": 0, "tokens": 0, "weights": shares, "read": [0] * len(named)}])
        self._epoch_seed = functools.lru_cache(maxsize=64)(self._make_epoch_seed)

    def _make_epoch_seed(self, source: int, epoch: int) -> int:
        return int(np.random.SeedSequence([self.seed, source, epoch]).generate_state(1)[0])

    def _set(self, named: list[dict[str, str]], sources: list[Windows], parts: list[dict[str, Any]]) -> None:
        """All sources that the run has read, by number, and its mixtures as `mixture` gives them."""
        self._named, self.sources, self._stored = named, sources, parts
        self.parts: list[Part] = []
        for part in parts:
            none = [0] * (len(named) - len(part["read"]))  # sources that came later
            row, *read = (-(-tokens // self.seq_len) for tokens in (part["tokens"], *part["read"], *none))
            self.parts.append(Part(row, (*part["weights"], *none), tuple(read)))
        self.weights = self.parts[-1].weights

    def mixture(self, row: int) -> dict[str, Any]:
        """Return the mixture as a checkpoint stores it, JSON, when the rows before global index `row` have been read.

        `sources`: all that the run has read, by number: name, hash of the contents, tokens read. `parts`: each mixture that the
        run has had: the step and the tokens at which it began, and by the source's number its weight and the tokens read
        before. Tokens are rows times seq_len, so that they mean the same after a change of either.
        """
        read = self.parts[-1].read_before(row)
        sources = [{**name, "tokens": rows * self.seq_len} for name, rows in zip(self._named, read, strict=True)]
        return {"sources": sources, "parts": self._stored}

    def go_on(self, data: Mapping[str, Any], step: int, row: int) -> bool:
        """Go on from a checkpoint of `step` steps with the row of global index `row`. data: its own, from its meta.json.

        Returns whether the mixture is another one. Each source then goes on where it stopped, and a new one begins; in the same
        mixture every row is what it was. A source is known by the hash of its contents, one without files by its name.
        """
        stored = data.get("mixture")  # a user's own source may have none
        if stored is None:
            return False
        named = [{k: s[k] for k in ("name", "content_sha256")} for s in stored["sources"]]
        sources: list[Windows] = [_Gone(s["name"]) for s in stored["sources"]]
        weights, left = [0.0] * len(named), list(range(len(named)))
        for name, source, weight in self._opened:
            key = "content_sha256" if name["content_sha256"] else "name"
            number = next((k for k in left if named[k][key] == name[key]), len(named))
            if number < len(named):
                left.remove(number)
            put = slice(number, number + 1)  # in place of the one with this number, or as a new last one
            named[put], sources[put], weights[put] = [name], [source], [weight]
        parts = stored["parts"]
        before = [*parts[-1]["weights"], *[0.0] * (len(named) - len(parts[-1]["weights"]))]
        changed = not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(before, weights, strict=True))
        if changed:
            read = [*(s["tokens"] for s in stored["sources"]), *[0] * (len(named) - len(stored["sources"]))]
            parts = [*parts, {"step": step, "tokens": row * self.seq_len, "weights": weights, "read": read}]
        self._set(named, sources, parts)
        return changed

    def _places(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the source, index within it) of each global index."""
        if not index_R.size or index_R.min() >= self.parts[-1].row:
            return self.parts[-1].places(index_R)
        part_R = np.searchsorted([part.row for part in self.parts], index_R, "right") - 1
        number_R, within_R = np.empty_like(index_R), np.empty_like(index_R)
        for k in np.unique(part_R).tolist():
            mine = part_R == k
            number_R[mine], within_R[mine] = self.parts[k].places(index_R[mine])
        return number_R, within_R

    def epoch(self, step: int) -> float:
        """Tokens read before optimizer step `step`, over the tokens there are."""
        return step * self.global_batch * self.seq_len / self.tokens_per_epoch

    def window_numbers(self, source: int, index_R: np.ndarray) -> np.ndarray:
        """Window numbers of a source's indices 0, 1, 2, ...: every epoch is another permutation of all windows."""
        n = self.sources[source].windows
        epoch_R, within_R = np.divmod(index_R, n)
        pairs = zip(epoch_R.tolist(), within_R.tolist(), strict=True)
        return np.asarray([self._shuffle(i, n - 1, self._epoch_seed(source, e), 4) for e, i in pairs], np.int64)

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """The batch of optimizer step `step`: arrays (global_batch, seq_len), keys and types of shapes.BATCH_KEYS.

        `rows` (a slice or an index array) makes only those rows of it.
        """
        row_R = np.arange(self.global_batch, dtype=np.int64)[slice(None) if rows is None else rows]
        index_R = step * self.global_batch + row_R
        source_R, within_R = self._places(index_R)
        met = np.unique(source_R).tolist()
        if len(met) == 1:
            return self._rows_of(met[0], within_R)
        out = {k: np.empty((len(row_R), self.seq_len), dtype) for k, dtype in BATCH_KEYS.items()}
        for k in met:
            mine = source_R == k
            for name, part in self._rows_of(k, within_R[mine]).items():
                out[name][mine] = part
        return out

    def windows(self, step: int) -> dict[str, list[int]]:
        """Which windows the batch of optimizer step `step` is made of, by source, each in the order of its rows."""
        index_R = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)
        source_R, within_R = self._places(index_R)
        return {self.sources[k].name: self.window_numbers(k, within_R[source_R == k]).tolist() for k in np.unique(source_R)}

    def _rows_of(self, source: int, index_R: np.ndarray) -> dict[str, np.ndarray]:
        rows = self.sources[source].rows(self.window_numbers(source, index_R))
        return make_batch(*rows, self.packing != "none", self.max_segments)


class _Gone:
    """A source that the run has read and whose file is not opened now. Only rows from before a change of mixture need it."""

    def __init__(self, name: str):
        self.name = name

    @property
    def windows(self) -> int:
        raise ValueError(f"{self.name}: is not in data.source any more, and a row of it was asked for")

    def rows(self, index_R: np.ndarray) -> Read:
        raise ValueError(f"{self.name}: is not in data.source any more, and rows {index_R.tolist()} of it were asked for")


class _Steps:
    """Steps from `start` on, as grain's random-access source."""

    def __init__(self, batches: Any, start: int, rows: Rows):
        self.batches, self.start, self.rows = batches, start, rows

    def __len__(self) -> int:
        return (1 << 62) - self.start

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        if self.rows is None:
            return self.batches.batch(self.start + index)
        return self.batches.batch(self.start + index, self.rows)


def iterate(batches: Any, start_step: int, prefetch: int, rows: Rows = None) -> Generator[dict[str, np.ndarray]]:
    """batch(start_step), batch(start_step + 1), ... made ahead by one thread (`prefetch` 0: in the caller's own).

    An exception in the thread is raised at the batch it belongs to. Closing the generator ends the thread.
    """
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    steps = grain.MapDataset.source(_Steps(batches, start_step, rows)).to_iter_dataset(options)
    if prefetch:
        steps = grain.experimental.ThreadPrefetchIterDataset(steps, prefetch_buffer_size=prefetch)
    iterator = iter(steps)
    try:
        yield from iterator
    finally:
        iterator.close()


def parse_files(source: str, key: str = "data.source") -> tuple[list[tuple[str, float]], list[config.Problem]]:
    """`a.tok=0.7,b.mix=0.3` -> paths with their weights (1 where none is given); a mixture's files share its weight."""
    files, problems = [], []
    for item in filter(None, (part.strip() for part in source.split(","))):
        path, given, text = (item, "", "") if item.endswith((".tok", mixture.SUFFIX)) else item.rpartition("=")
        if not given:
            path, text = item, "1"
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (0 < weight < math.inf):
            problems.append(config.Problem(key, item, "a weight is a number above 0", f"Write {path}=0.5, for example."))
        files.append((path, weight))
    if not files and not problems:
        problems.append(config.Problem(key, source, "names no data", "Set stdlib, synthetic, or token files."))
    return files, problems


def parse_sets(text: str) -> tuple[dict[str, str], list[config.Problem]]:
    """`data.eval_source` as name -> source: `web=web.val.tok;code=code.val.tok`. One source without a name has the name "".

    A name has only letters, digits, _ and -, and what follows it is no number: that would be a file and its weight.
    """
    key, sets, problems = "data.eval_source", {}, []
    items = [item for part in text.split(";") if (item := part.strip())]
    for item in items:
        name, _, source = (part.strip() for part in item.partition("="))
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not source or is_number(source):
            name, source = "", item
        if not name and len(items) > 1:
            rule = "is one of several held-out sets, and has no name"
            problems.append(config.Problem(key, item, rule, f"Write NAME={item}; a name has letters, digits, _ and -."))
        elif name in sets:
            problems.append(config.Problem(key, item, f"the name {name!r} is given twice", "Give each set a name of its own."))
        else:
            sets[name] = source
    return sets or {"": ""}, problems


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_custom(source: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source) is not None


def near_files(path: str) -> list[str]:
    """Return up to three data files of a path's folder that are spelt like it, held-out ones for a held-out one; or the
    built-in source that is.
    """
    if close := difflib.get_close_matches(path, ("stdlib", "synthetic"), 1, 0.75):
        return close
    asked = Path(path).expanduser()
    held_out = ".val." in asked.name
    there = {
        p.stem.removesuffix(".val"): p.name
        for p in sorted(asked.parent.glob("*"))
        if p.suffix in (".tok", mixture.SUFFIX) and (".val." in p.name) == held_out
    }
    close = difflib.get_close_matches(asked.stem.removesuffix(".val"), there, MOST, 0.7)
    return [str(Path(path).parent / there[stem]) for stem in close]


def missing_file(key: str, path: str, tokenizer: str) -> config.Problem:
    """Return the problem of a file that does not exist: the nearest one of its folder, or the two commands that make it."""
    if near := near_files(path):
        return config.Problem(key, path, "no such file", did_you_mean(near))
    stem = path.removesuffix(".val.tok") + ".tok" if path.endswith(".val.tok") else path
    return config.Problem(
        key,
        path,
        "no such file",
        "Two commands make it (a 10-billion-token sample of FineWeb-Edu, or put your own files into corpus/):\n"
        "    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/10BT/*' --local-dir=corpus\n"
        "    python -m jaxtrain.data prepare --input='corpus/**/*.parquet' "
        f"--tokenizer={tokenizer} --validation=0.001 --output={stem}",
    )


def open_files(data: config.Data, source: str, key: str, seq_len: int) -> tuple[list[TokenFile], list[float]]:
    """Opens the files of a source, those of mixtures among them. Raises ConfigError with all that is wrong with them."""
    named, problems = parse_files(source, key)
    files = []
    weights = []
    wanted: list[tuple[str, float, str, dict[str, Any]]] = []  # path, weight, the mixture it is of, its entry there
    for path, weight in named:
        if not path.endswith(mixture.SUFFIX):
            wanted.append((path, weight, "", {}))
            continue
        try:
            entries = mixture.read(path)
        except (FileNotFoundError, NotADirectoryError):
            near = near_files(path)
            remedy = "Write it with: python -m jaxtrain.data mix --output=NAME.mix A.tok=0.7 B.tok=0.3"
            remedy = did_you_mean(near) if near else remedy
            problems.append(config.Problem(key, path, "no such file", remedy))
            continue
        except (mixture.MixtureError, OSError) as e:
            problems.append(config.Problem(key, path, str(e), "Check it with: python -m jaxtrain.data verify FILE"))
            continue
        total = math.fsum(entry["weight"] for entry in entries)
        wanted += [(entry["path"], weight * entry["weight"] / total, path, entry) for entry in entries]
    for path, weight, of, entry in wanted:
        try:
            files.append(mixture.open_checked(of, entry) if of else TokenFile.open(path))
            weights.append(weight)
        except (FileNotFoundError, NotADirectoryError):
            problems.append(missing_file(key, path, data.tokenizer))
            continue
        except (mixture.MixtureError, TokenFileError, OSError) as e:
            problems.append(config.Problem(key, path, str(e), "Check it with: python -m jaxtrain.data verify FILE"))
            continue
        header = files[-1].header
        if reason := tokenizers.differs(data.tokenizer, header["tokenizer"]):
            problems.append(
                config.Problem(
                    "data.tokenizer",
                    data.tokenizer,
                    f"is not the tokenizer of {path}: {reason}",
                    f"Set data.tokenizer={header['tokenizer']['name']}, or prepare the text again.",
                )
            )
        packed = files[-1].loss_bits is not None or data.packing == "best_fit"
        windows = header["documents"] if packed else count_windows(header["tokens"], seq_len)
        if not 0 < windows <= MAX_WINDOWS:
            rule = f"{path} has {header['tokens']:,} tokens: {windows:,} sequences, outside 1 to 2^32"
            remedy = "Choose another length, more data, or data.packing=best_fit, which pads a short sequence."
            problems.append(config.Problem("data.seq_len", seq_len, rule, remedy))
    if problems:
        raise config.ConfigError(problems)
    return files, weights


def check(data: config.Data, model_vocab: int, need_eval: bool) -> list[config.Problem]:
    """What is wrong with the data of a run, before anything is made or any device touched. Reads headers only.

    The types and ranges of the keys themselves are checked before (jaxtrain/validate).
    """
    problems, largest = [], 0
    sources = [("data.source", data.source)]
    builtin = data.source in ("stdlib", "synthetic")
    if data.eval_source:
        sets, problems = parse_sets(data.eval_source)
        sources += [("data.eval_source", source) for source in sets.values()]
    elif need_eval and not builtin and not is_custom(data.source):
        paths = [path for path, _ in parse_files(data.source)[0] if path.endswith(".tok")]
        guess = ",".join(path.removesuffix(".tok") + ".val.tok" for path in paths)
        remedy = f"Set it to held-out text (prepare --validation=0.001 makes {guess or 'NAME.val.tok'}), or eval.every_steps=0."
        problems.append(config.Problem("data.eval_source", "", "evaluation needs held-out data", remedy))
    for key, source in sources:
        vocab = 0
        if source == "stdlib":
            vocab = tokenizers.ByteTokenizer.vocab_size
            if data.tokenizer != "byte":
                rule = "the stdlib corpus is bytes"
                problems.append(config.Problem("data.tokenizer", data.tokenizer, rule, "Set data.tokenizer=byte."))
        elif source == "synthetic":
            vocab = synthetic.VOCAB
        elif is_custom(source):
            module = source.partition(":")[0]
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                found = None
            if found is None:
                problems.append(config.Problem(key, source, f"no module {module}", "Is it installed, or on PYTHONPATH?"))
        else:
            try:
                files, _ = open_files(data, source, key, data.seq_len)
                # Not its tokenizer's: that of Gemma 3 has one id more, for pictures, than the models that read text alone.
                vocab = max(f.header["largest_id"] for f in files) + 1
            except config.ConfigError as e:
                problems += e.problems
        if vocab > max(model_vocab, largest):
            largest = vocab
            problems = [p for p in problems if p.key != "model.vocab_size"]
            rule = f"must be above {vocab - 1}, the largest id of {key}={source}"
            problems.append(config.Problem("model.vocab_size", model_vocab, rule, f"Set {-(-vocab // 8) * 8} or more."))
    return _one_of_each(problems, data.tokenizer)


def _one_of_each(problems: list[config.Problem], tokenizer: str) -> list[config.Problem]:
    """Return one problem for each mistake: a wrong tokenizer or length is found again in every file."""
    kept: dict[object, config.Problem] = {}
    for problem in problems:
        own_file = problem.key in ("data.source", "data.eval_source")
        mark = (problem.key, problem.value, problem.rule) if own_file else problem.key
        if own_file and any(problem.remedy == other.remedy and "\n" in other.remedy for other in kept.values()):
            problem = dataclasses.replace(problem, remedy="The same two commands make it.")
        kept.setdefault(mark, problem)
    wrong = kept.get("data.tokenizer")
    if wrong and tokenizer != "byte" and not tokenizer.startswith("hf:") and not Path(tokenizer).expanduser().exists():
        remedy = "Name byte, the path of a tokenizer.json, or hf:NAME."
        kept["data.tokenizer"] = config.Problem("data.tokenizer", tokenizer, "no such file", remedy)
    return list(kept.values())


def with_documents(run: config.RunConfig, *opened: Any) -> config.RunConfig:
    """The run with a number for `data.max_segments` = 0: the most documents that a row of these batches may have.

    opened: everything that the run reads, as `open_source` gives it. A user's own source without a number
    counts with config.MOST_DOCUMENTS. Raises config.ConfigError where one has more than that.
    """
    if run.data.max_segments:
        return run
    most = max(getattr(each, "max_segments", config.MOST_DOCUMENTS) for each in opened)
    if most > config.MOST_DOCUMENTS:
        rule = f"a data source has {most} documents in a sequence, and up to {config.MOST_DOCUMENTS} are taken by themselves"
        raise config.ConfigError([config.Problem("data.max_segments", 0, rule, f"Set it to {most}.")])
    return dataclasses.replace(run, data=dataclasses.replace(run.data, max_segments=most))


def open_source(
    data: config.Data,
    source: str,
    *,
    split: str,
    global_batch: int,
    data_dir: Path | str,
    seed: int | None = None,
    seq_len: int | None = None,
) -> Batches:
    """Opens (and for stdlib makes) a source. `source` "" is the same split of `data.source`.

    `split`: train | validation. `seed` and `seq_len` default to the config's. A `package.module:name` is called as
    `name(data, split, global_batch)` and returns an object with this interface. Raises config.ConfigError.

    With `data.max_segments` = 0 the files' own offsets of documents say how many a row has, up to config.MOST_DOCUMENTS.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split = {split!r}: must be train or validation")
    key = "data.source" if split == "train" else "data.eval_source"
    if not source:
        source = data.source
        if source not in ("stdlib", "synthetic") and not is_custom(source):
            raise config.ConfigError([config.Problem(key, "", "files have no split of their own", "Name a held-out file.")])
    seed = data.seed if seed is None else seed
    seq_len = data.seq_len if seq_len is None else seq_len
    asked, data = data.max_segments, dataclasses.replace(data, max_segments=data.most_documents)
    if is_custom(source):
        module, _, name = source.partition(":")
        return getattr(importlib.import_module(module), name)(data, split, global_batch)
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
        common["max_segments"] = asked or rows.documents
        vocab, eot = synthetic.VOCAB, synthetic.EOT
        info = {"name": "synthetic", "sha256": "", "vocab_size": vocab, "eot": eot}
        return Batches([rows], [1.0], tokenizer=info, fingerprint=fingerprint, synthetic=True, **common)
    if source == "stdlib":
        source = str(stdlib.stdlib_files(data_dir)[split == "validation"])
    files, weights = open_files(data, source, key, seq_len)
    shares = [w / math.fsum(weights) for w in weights]
    sources: list[Windows] = []
    masked = text_bytes = predicted = 0.0
    most = 1
    for file, share in zip(files, shares, strict=True):
        header = file.header
        loss = header["loss"] or {"tokens": header["tokens"], "bytes": header["source_bytes"], "first": header["documents"]}
        try:
            windows = open_windows(file, seq_len, data.max_segments if data.masks_documents else None, seed, data.packing)
            if data.masks_documents and isinstance(windows, PackedRows):
                most = max(most, windows.documents)
            elif data.masks_documents:
                found = data.max_segments if asked else most_documents(file.doc_offsets, windows.windows, seq_len)
                most = max(most, min(found, data.max_segments))
                count = masked_tokens(file.doc_offsets, windows.windows, seq_len, data.max_segments)
                masked += share * count / (windows.windows * seq_len)
        except TokenFileError as e:
            remedy = f"Check it with: python -m jaxtrain.data verify {file.path}"
            raise config.ConfigError([config.Problem(key, str(file.path), str(e), remedy)]) from e
        if not windows.windows:
            rule = f"{file.path} has no sequence of {seq_len} tokens in which a token counts"
            raise config.ConfigError(
                [config.Problem("data.seq_len", seq_len, rule, f"Set {int(np.diff(file.doc_offsets[:]).max())}.")]
            )
        sources.append(windows)
        # For each token read from the mixture: the bytes and the number of the predictions that count. Rows of
        # conversations hold padding too, and not what is cut off.
        held = header["tokens"]
        if isinstance(windows, PackedRows):
            held *= windows.windows * seq_len / (header["tokens"] - windows.truncated_tokens)
        text_bytes += share * loss["bytes"] / held
        predicted += share * (loss["tokens"] - (loss["first"] if data.masks_documents else 0)) / held
    common["max_segments"] = asked or most
    fingerprint["tokenizer"] = files[0].header["tokenizer"]
    fingerprint["files"] = [
        {"name": f.path.name, "weight": w, **{k: f.header[k] for k in ("content_sha256", "tokens", "documents")}}
        | ({"rows": windows.windows} if isinstance(windows, PackedRows) else {})
        for f, w, windows in zip(files, shares, sources, strict=True)
    ]
    return Batches(
        sources,
        weights,
        tokenizer=files[0].header["tokenizer"],
        fingerprint=fingerprint,
        bytes_per_token=text_bytes / predicted if predicted else None,
        masked_fraction=masked,
        **common,
    )
