"""Batches as a pure function of (seed, step).

A token file is cut into windows of seq_len + 1 tokens at multiples of seq_len. Packed rows (windows.py) replace windows if the
file has loss bits (one bit for each token), or if data.packing is best_fit. Row `r` of step `s` has the global index
g = s * global_batch + r. It reads window permutation(epoch, g mod windows), with epoch = floor(g / windows). So a
run resumes exactly on any number of hosts, and any process can make any rows. This module and `check` do not import jax; only
`Batches` imports jax, through grain.

If a run has several sources, its mixture assigns each global index to a row of one source (mixture.py).
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxtrain.config import declaration, installed, own_parts, schema
from jaxtrain.config.schema import split_paths
from jaxtrain.config.shapes import BATCH_KEYS, PAIR_KEYS
from jaxtrain.config.synonyms import MOST, did_you_mean
from jaxtrain.data import stdlib, synthetic, text_format
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.mixture import Mixture, Named, all_exist, identity, is_file, parse_files, parse_schedule, shares
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenfile import TokenFile, TokenFileError
from jaxtrain.data.windows import FileWindows, PackedRows, PairRows, Windows, count_windows, make_batch, open_windows

Rows = slice | np.ndarray | None
FULL = 0.9  # rows of conversations with a smaller fraction of tokens that are not padding are reported
CROSS_ENTROPY = schema.Loss()
# Forms of data, and the options of `prepare` for each
FORMS = {"text": "", "chat": "--chat ", "pairs": "--preference --chat ", "plain pairs": "--preference "}
VALIDATION = {"text": "0.001", "chat": "0.02", "pairs": "0.05"}  # --validation in the commands for each form
GONE = "no such file"  # the rule of a token file that does not exist
MAX_WINDOWS = 1 << 32  # grain's index_shuffle counts in 32 bits


# Attributes of a source from outside the package, by split
NEEDED = {
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
      sparse: name of each file whose rows are less than FULL filled because of `max_segments` -> filled fraction of the rows.
      fingerprint: a JSON dict for receipts: source, split, settings, and hashes of the files.
      pairs: whether rows are pairs.
      answers: whether every source has loss bits: conversations or pairs.
      left_out: number of pairs that are never read because they are longer than a row.
      references: for pairs, name of the source -> reference log-probability of each document; empty until computed.
      sources: the rows of each source of all phases, past ones included. The index in the list is the source's number.
      mixture: the phases of the run and their weights of the sources, which decide the source of each row (mixture.py).
    """

    def __init__(
        self,
        sources: list[Windows],
        schedule: Sequence[tuple[int, Sequence[float]]],
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
        """Args: densities: of each source, bytes of text and targets that count, per token of its rows; () if unknown."""
        # This imports jax, which takes seconds. `check` runs before.
        from grain.experimental import index_shuffle

        self._shuffle = index_shuffle
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
        self.bytes_per_token = self._bytes_per_token(schedule[0][1])
        self.masked_fraction = masked_fraction
        cut = [s for s in sources if isinstance(s, PackedRows)]
        held = sum(s.file.header["tokens"] for s in cut)
        self.truncated = sum(s.truncated for s in cut), sum(s.truncated_tokens for s in cut), held
        self.sparse = {s.name: s.filled for s in cut if s.capped and s.filled < FULL}
        self.pairs = all(isinstance(s, PairRows) for s in sources)
        self.answers = bool(cut) and len(cut) == len(sources) and all(s.file.loss_bits is not None for s in cut)
        self.left_out = sum(s.left_out for s in sources if isinstance(s, PairRows))
        self.references: dict[str, np.ndarray] = {}
        self.synthetic = synthetic
        self.tokens_per_epoch = sum(s.windows for s in sources) * seq_len
        files = fingerprint.get("files") or [{"name": s.name, "content_sha256": ""} for s in sources]
        named = [{k: f[k] for k in ("name", "content_sha256")} for f in files]
        self._opened = list(sources)
        self.mixture = Mixture(named, schedule, seq_len)
        self.start_mixture(None, 0, 0, lambda step: step * global_batch)
        self._epoch_seed = functools.lru_cache(maxsize=64)(self._make_epoch_seed)

    def _make_epoch_seed(self, source: int, epoch: int) -> int:
        return int(np.random.SeedSequence([self.seed, source, epoch]).generate_state(1)[0])

    def start_mixture(self, stored: Mapping[str, Any] | None, step: int, begin: int, row_at: Callable[[int], int]) -> bool:
        """Set the mixture of a run that begins, or that resumes after `step` steps: a source continues from its last position.

        Args:
          stored: the entry `data` of the checkpoint's meta.json; None or {} for a new run.
          begin: the global index of the first row of the first unread batch. The run may skip this batch and later ones.
          row_at: returns the global index of the first row that is read after n steps, for n of at least `step`.

        Returns:
          Whether the weights differ from those of the checkpoint, although the schedule begins no phase at `step`.
        """
        stored = stored or {}
        before, tokens = stored.get("mixture"), stored.get("tokens", 0)  # a user's own source stores no mixture
        numbers = self.mixture.start(before, tokens, step, begin, row_at)
        sources: list[Any] = [_Removed(source["name"]) for source in self.mixture.sources]
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
        tokens, weights = self.mixture.tokens_read(row), self.mixture.begun(row)[-1].weights
        lines = []
        for label, source, read, weight in zip(self.labels(), self.sources, tokens, weights, strict=True):
            epoch = None if isinstance(source, _Removed) else read / (source.windows * self.seq_len)
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
        n = self.sources[source].windows
        numbers = [self._shuffle(i % n, n - 1, self._epoch_seed(source, i // n), 4) for i in index_R.tolist()]
        return np.asarray(numbers, np.int64)

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Return the batch of optimizer step `step`: arrays (global_batch, seq_len), keys and types of shapes.BATCH_KEYS.

        A batch of pairs also has shapes.PAIR_KEYS.

        Args:
          rows: a slice or an array of row numbers; only these rows of the batch are returned. None: all rows.
        """
        row_R = np.arange(self.global_batch, dtype=np.int64)[slice(None) if rows is None else rows]
        index_R = step * self.global_batch + row_R
        source_R, within_R = self.mixture.sources_of(index_R)
        met = np.unique(source_R).tolist() if len(self.sources) > 1 else [0]
        if len(met) == 1:
            return self._rows_of(met[0], within_R)
        keys = BATCH_KEYS | (PAIR_KEYS if self.pairs else {})
        out = {k: np.empty((len(row_R), self.seq_len), dtype) for k, dtype in keys.items()}
        for k in met:
            mine = source_R == k
            for name, part in self._rows_of(k, within_R[mine]).items():
                out[name][mine] = part
        return out

    def windows(self, step: int) -> dict[str, list[int]]:
        """Return the numbers of the windows in the batch of optimizer step `step`, by source, in the order of the rows."""
        index_R = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)
        source_R, within_R = self.mixture.sources_of(index_R)
        return {self.sources[k].name: self.window_numbers(k, within_R[source_R == k]).tolist() for k in np.unique(source_R)}

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


class _Removed:
    """A source that the run read before, and that its config no longer names. Later phases read no row of this source."""

    def __init__(self, name: str):
        self.name = name


def parse_sets(text: str) -> tuple[dict[str, str], list[schema.Problem]]:
    """Parse `web=web.val.tok;code=code.val.tok`: return (name -> source, problems).

    A single source may have no name; its key is then "". A name has only letters, digits, _ and -. If a number follows
    the `=`, or if the text begins with the path of a file, the text before the `=` is a file, not a name.
    """
    sets: dict[str, str] = {}
    items = split_paths(text, ";", lambda item: all_exist(item) or all_exist(item.partition("=")[2]))
    for item in items:
        name, _, source = (part.strip() for part in item.partition("="))
        begins_with_file = any(is_file(each.path) for each in parse_files(item)[0][:1])
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not source or is_number(source) or begins_with_file:
            name, source = "", item
        rule = ""
        if not name and len(items) > 1:
            rule = f"{item} is one of several held-out sets, and has no name"
        elif name in sets:
            rule = f"the name {name!r} is given twice"
        if rule:
            fix = "Give each set a name of its own." if name else f"Write {';'.join(map(_with_name, items))}."
            return {"": ""}, [schema.Problem("data.eval_source", text, rule, fix)]
        sets[name] = source
    return sets or {"": ""}, []


def _with_name(item: str) -> str:
    """Return NAME=SOURCE of a held-out set, with a valid name made of what stands there."""
    name, _, source = (part.strip() for part in item.partition("="))
    if not source or is_number(source):  # FILE, or FILE=WEIGHT
        name, source = Path(name).name.partition(".")[0], item
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}={source}"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_custom(source: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source) is not None and not os.path.exists(source)


def near_files(path: str) -> list[str]:
    """Return a similar built-in source, or up to three similar data files in the path's folder.

    A held-out file (.val.) is similar to held-out files only, and a training file to training files only.
    """
    if close := difflib.get_close_matches(path, ("stdlib", "synthetic"), 1, 0.75):
        return close
    asked = Path(path).expanduser()
    held_out = ".val." in asked.name
    there = {
        p.stem.removesuffix(".val"): p.name
        for p in sorted(asked.parent.glob("*"))
        if p.suffix == ".tok" and (".val." in p.name) == held_out
    }
    close = difflib.get_close_matches(asked.stem.removesuffix(".val"), there, MOST, 0.7)
    return [str(Path(path).parent / there[stem]) for stem in close]


def missing_file(key: str, path: str, tokenizer: str, form: str = "text") -> schema.Problem:
    """Return the problem of a missing file. Its remedy names similar files; without any, the commands that make the file.

    A missing NAME.val.tok is made with NAME.tok by one command. If NAME.tok exists, the command makes both again.

    Args:
      form: the form of the data that the run needs, a key of FORMS.
    """
    if near := near_files(path):
        return schema.Problem(key, path, GONE, did_you_mean(near))
    held_out = path.endswith(".val.tok")
    output = path.removesuffix(".val.tok") + ".tok" if held_out else str(token_file_of(path))
    if held_out and (options := _made_with(output)):
        command = f"{options} --force --output={shlex.quote(output)}"
        without = ", or set data.eval_source='' and eval.every_steps=0" if key == "data.eval_source" else ""
        remedy = f"This command makes both again{without}:\n    python -m jaxtrain data prepare {command}"
        return schema.Problem(key, path, f"no such file, although {output} is there", remedy)
    share = "" if key == "data.eval_source" and not held_out else f"--validation={VALIDATION[form]} "
    ending = f"--tokenizer={shlex.quote(tokenizer)} {share}--output={shlex.quote(output)}"
    if form == "text":
        remedy = (
            "Two commands make it (a 10-billion-token sample of FineWeb-Edu, or put your own files into corpus/):\n"
            f"    {installed.script('hf')} download HuggingFaceFW/fineweb-edu --repo-type=dataset "
            "--include 'sample/10BT/*' --local-dir=corpus\n"
            f"    python -m jaxtrain data prepare --input='corpus/**/*.parquet' {ending}"
        )
    else:
        what = "pairs" if form == "pairs" else "conversations"
        remedy = (
            f"This command makes it of {what} in JSON lines (plain texts: without --chat):\n"
            f"    python -m jaxtrain data prepare {FORMS[form]}--input=YOUR.jsonl {ending}"
        )
    return schema.Problem(key, path, GONE, remedy)


def _made_with(path: str) -> str:
    """Return the options of `prepare` that made a token file, with --validation; "" if they are not known."""
    try:
        header = TokenFile.open(path).header
    except (TokenFileError, OSError):  # where the config names this file, its own problem is told
        return ""
    texts, documents = header["sources"], header["documents"]
    if not texts or "options" not in header["made"]:
        return ""
    words = [f"--tokenizer={shlex.quote(header['tokenizer']['name'])}"]
    for name, value in header["made"]["options"].items():
        text = str(value).replace("\n", "\\n").replace("\t", "\\t")
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={shlex.quote(text)}"))
    words += [f"--input={shlex.quote(text)}" for text in texts]
    return " ".join([*words, f"--validation={next((x for x in (0.001, 0.02) if x * documents > 20), 0.2)}"])


def open_files(data: schema.Data, named: Sequence[Named], key: str, seq_len: int, form: str = "text") -> list[TokenFile]:
    """Open the token files that config key `key` names. Raises ConfigError with the problems of all files.

    form: the form of the data that the run needs, a key of FORMS, for the commands that the problems name.
    """
    files: list[TokenFile] = []
    problems = []
    for path in (each.path for each in named):
        try:
            files.append(TokenFile.open(path))
        except (FileNotFoundError, NotADirectoryError):
            problems.append(missing_file(key, path, data.tokenizer, form))
            continue
        except (TokenFileError, OSError) as e:
            if Path(path).suffix == ".tok":
                problems.append(
                    schema.Problem(key, path, str(e), f"Check it with: python -m jaxtrain data verify {shlex.quote(path)}")
                )
            else:
                note = "with --chat for conversations" if form == "text" else "without --chat for plain texts"
                fix = f"Make one: {prepare_command(data.tokenizer, path, FORMS[form])} ({note})."
                problems.append(schema.Problem(key, path, "is no token file", fix))
            continue
        header = files[-1].header
        if reason := tokenizers.differs(data.tokenizer, header["tokenizer"]):
            its = header["tokenizer"]["name"]
            again = f"prepare the text again with --tokenizer={shlex.quote(data.tokenizer)}"
            # The tokenizer at the file's own path may be gone, or be another one now.
            gone = tokenizers.differs(its, header["tokenizer"])
            back = f"Set data.tokenizer to a folder with the former {its}" if gone else f"Set data.tokenizer={shlex.quote(its)}"
            fix = f"{back} or {again}"  # no stop behind what is typed
            if data.tokenizer == "byte" or tokenizers.is_bare(data.tokenizer):  # the default, or it can prepare no text
                fix = back
            elif its == "byte":  # the config is for another model, and --tokenizer was forgotten
                fix = f"{again[0].upper()}{again[1:]}"
            problems.append(schema.Problem("data.tokenizer", data.tokenizer, f"is not the tokenizer of {path}: {reason}", fix))
        packed = files[-1].loss_bits is not None or data.packing == "best_fit"
        windows = header["documents"] if packed else count_windows(header["tokens"], seq_len)
        if not 0 < windows <= MAX_WINDOWS:
            rule = f"{path} has {header['tokens']:,} tokens: {windows:,} sequences, outside 1 to 2^32"
            remedy = "Choose another length, more data, or data.packing=best_fit, which pads a short sequence."
            problems.append(schema.Problem("data.seq_len", seq_len, rule, remedy))
    if problems:
        raise schema.ConfigError(problems)
    return files


def open_mixture(
    data: schema.Data, source: str, key: str, seq_len: int, schedule: str = "", form: str = "text"
) -> tuple[list[TokenFile], list[tuple[int, list[float]]]]:
    """Open the token files of a source and of a schedule, each once. form: as for `open_files`.

    Returns:
      The files, and (steps before the phase, weight of each file) of each phase. The weights of a phase sum to 1.

    Raises:
      ConfigError: a file or the text of `source` or `schedule` is wrong. The error lists all problems.
    """
    named, problems = parse_files(source, key)
    later, wrong = parse_schedule(schedule)
    problems += wrong
    phases = [(0, named), *later]
    files: dict[Path, TokenFile] = {}
    for at, phase in phases:
        new = [each for each in phase if identity(each.path) not in files]
        try:
            opened = open_files(data, new, "data.source_schedule" if at else key, seq_len, form)
        except schema.ConfigError as e:
            problems += e.problems
            continue
        files |= {identity(each.path): file for each, file in zip(new, opened, strict=True)}
    if problems:
        raise schema.ConfigError(problems)
    weights = []
    for at, phase in phases:
        places = [identity(each.path) for each in phase]
        weight = dict(zip(places, shares(phase, [files[place].header["tokens"] for place in places]), strict=True))
        weights.append((at, [weight.get(place, 0.0) for place in files]))
    return list(files.values()), weights


def check(
    data: schema.Data, model_vocab: int, need_eval: bool, loss: schema.Loss = CROSS_ENTROPY, finetunes: bool = False
) -> list[schema.Problem]:
    """Return the problems of a run's data, before any file is made or any device is used. Of files, only headers are read.

    jaxtrain/step/validate.py has checked the types and ranges of the keys before.

    Args:
      model_vocab: model.vocab_size.
      need_eval: whether the run evaluates, and needs held-out data.
      loss: section `loss` of the config. `loss.name` decides whether the data must be pairs; a user's own loss supports both.
      finetunes: whether the run begins with trained weights. Then it usually learns conversations.
    """
    problems, largest = [], 0
    names: dict[str, str] = {}  # source of a held-out set -> its name
    pairs = None if ":" in loss.name else loss.of_pairs
    form = "pairs" if pairs else "chat" if finetunes else "text"
    sources = [("data.source", data.source)]
    builtin = data.source in ("stdlib", "synthetic")
    if data.source_schedule and (builtin or is_custom(data.source)):
        rule = f"a schedule is for token files, and data.source={data.source} has none"
        remedy = "Set data.source to token files, or data.source_schedule=''."
        problems.append(schema.Problem("data.source_schedule", data.source_schedule, rule, remedy))
    if data.eval_source:
        sets, wrong = parse_sets(data.eval_source)
        problems += wrong
        sources += [("data.eval_source", source) for source in sets.values() if not wrong]
        names = {source: name for name, source in sets.items() if name}
    elif need_eval and not builtin and not is_custom(data.source):
        paths = [each.path for each in parse_files(data.source)[0] if each.path.endswith(".tok")]
        guess = ",".join(path.removesuffix(".tok") + ".val.tok" for path in paths)
        made = f"prepare --validation={VALIDATION[form]} makes {guess or 'NAME.val.tok'}"
        remedy = f"Set it to held-out text ({made}), or eval.every_steps=0."
        problems.append(schema.Problem("data.eval_source", "", "evaluation needs held-out data", remedy))
    for key, source in sources:
        vocab = 0
        if source == "stdlib":
            vocab = tokenizers.ByteTokenizer.vocab_size
            if data.tokenizer != "byte":
                make = prepare_command(data.tokenizer, options=FORMS[form])
                fix = f"Set data.tokenizer=byte, or {key} to a token file: {make}"
                problems.append(schema.Problem("data.tokenizer", data.tokenizer, "the stdlib corpus is bytes", fix))
        elif source == "synthetic":
            vocab = synthetic.VOCAB
        elif is_custom(source):
            problems += filter(None, [own_parts.not_found(key, source)])
        else:
            try:
                schedule = data.source_schedule if key == "data.source" else ""
                files, _ = open_mixture(data, source, key, data.seq_len, schedule, form)
                # The largest id decides: Gemma 3's tokenizer has one more id, for images, than its text models.
                vocab = max(f.header["largest_id"] for f in files) + 1
                problems += [p for f in files if (p := _other_form(key, f, pairs, data.tokenizer))]
            except schema.ConfigError as e:
                named = source in names and [p.rule for p in e.problems] == [GONE]
                problems += [_as_typed(e.problems[0], names[source], data.tokenizer, form)] if named else e.problems
        if pairs and (source in ("stdlib", "synthetic") or is_custom(source)):
            rule = "loss.name=dpo compares the members of pairs, which token files alone hold"
            problems.append(
                schema.Problem(key, source, rule, f"Make one: {prepare_command(data.tokenizer, options=FORMS['pairs'])}")
            )
        if vocab > max(model_vocab, largest):
            largest = vocab
            problems = [p for p in problems if p.key != "model.vocab_size"]
            rule = f"must be above {vocab - 1}, the largest id of {key}={source}"
            problems.append(schema.Problem("model.vocab_size", model_vocab, rule, f"Set {-(-vocab // 8) * 8} or more."))
    return _one_of_each(problems, data.tokenizer)


class OwnSource:
    """A source from outside the package. Its batches are checked, and all other attributes are its own."""

    def __init__(self, key: str, value: str, made: Any, needed: Sequence[str], rows: int, seq_len: int, vocab_size: int):
        self._named, self._made, self._rows, self._seq_len = (key, value), made, rows, seq_len
        self._limits = {"tokens": vocab_size, "targets": vocab_size} if vocab_size else {}
        if missing := [name for name in needed if not hasattr(made, name)]:
            rule = f"returns {type(made).__name__} without {', '.join(missing)}"
            raise own_parts.WrongPart(
                key, value, rule, "Return an object with the interface of jaxtrain.data.pipeline.Batches."
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle
            raise AttributeError(name)
        return getattr(self._made, name)

    def batch(self, step: int, *rows: Any) -> dict[str, np.ndarray]:
        """Return batch `step` of the source, or these rows of it. Raises WrongPart if it is no batch."""
        count = len(np.arange(self._rows)[rows[0]]) if rows and rows[0] is not None else self._rows
        shape = (count, self._seq_len)

        def refuse(rule: str) -> NoReturn:
            rule = f"its batch({step}) {rule}"
            raise own_parts.WrongPart(*self._named, rule, f"Return arrays {list(shape)}: {', '.join(BATCH_KEYS)}.")

        try:
            with own_parts.calling(*self._named, "batch(step, rows)"):
                found = self._made.batch(step, *rows)
        except StopIteration:
            refuse("ends the data: it raises StopIteration")
        if not isinstance(found, Mapping):
            refuse(f"returns {type(found).__name__}, and no dict of arrays")
        for name, dtype in BATCH_KEYS.items():
            if name not in found:
                refuse(f"has no {name!r}")
            array = np.asarray(found[name])
            if array.shape != shape or (np.dtype(dtype).kind == "f") != (array.dtype.kind == "f"):
                refuse(f"has {name!r} as {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
            if np.dtype(dtype).kind != "f" and array.size:
                low, high, limit = int(array.min()), int(array.max()), self._limits.get(name, declaration.MOST + 1)
                if low < 0 or high >= limit:
                    refuse(f"has {low if low < 0 else high:,} in {name!r}, which must be from 0 to {limit - 1:,}")
        return dict(found)


def prepare_command(tokenizer: str, text: str = "FILE.jsonl", options: str = "") -> str:
    """Return the command that makes a token file with this tokenizer. options: of its form, a value of FORMS."""
    options += "" if tokenizer == "byte" else f"--tokenizer={shlex.quote(tokenizer)} "
    inputs = shlex.quote(f"{text}/*.jsonl" if Path(text).is_dir() else text)
    return f"python -m jaxtrain data prepare {options}--input={inputs} --output={shlex.quote(str(token_file_of(text)))}"


def token_file_of(text: str) -> Path:
    """Return the name of the token file that is made from `text`: a text file, which may be compressed, or a folder."""
    path = Path(text)
    if path.is_dir():
        return Path(f"{path.resolve().name}.tok")
    return (path.with_suffix("") if path.suffix in (".gz", ".bz2", ".xz", ".zst") else path).with_suffix(".tok")


def _other_form(key: str, file: TokenFile, pairs: bool | None, tokenizer: str) -> schema.Problem | None:
    """Return the problem of a file with pairs if `pairs` is False, or without pairs if `pairs` is True; None otherwise."""
    if file.pairs and pairs is False:
        rule = "holds pairs of a preferred and another completion, and loss.name does not compare them"
        return schema.Problem(key, str(file.path), rule, "Set loss.name=dpo.")
    if pairs and not file.pairs:
        options = FORMS["plain pairs" if file.loss_bits is None else "pairs"]
        fix = f"Make one of pairs: {prepare_command(tokenizer, 'PAIRS.jsonl', options)}"
        return schema.Problem(key, str(file.path), "holds no pairs, which loss.name=dpo compares", fix)
    return None


def _as_typed(problem: schema.Problem, name: str, tokenizer: str, form: str) -> schema.Problem:
    """Return the problem of a held-out set whose only file does not exist: NAME= may be the beginning of its path."""
    typed = f"{name}={problem.value}"
    if os.path.isdir(os.path.dirname(typed)):
        problem = missing_file(problem.key, typed, tokenizer, form)
    rule = f"{GONE}, and none of the name {typed.partition('=')[2]} (NAME= names a held-out set)"
    return dataclasses.replace(problem, value=typed, rule=rule)


def _one_of_each(problems: list[schema.Problem], tokenizer: str) -> list[schema.Problem]:
    """Return the problems, each once: a wrong data.tokenizer or data.seq_len is a problem of every token file of the run."""
    kept: dict[object, schema.Problem] = {}
    for problem in problems:
        own_file = problem.key in ("data.source", "data.source_schedule", "data.eval_source")
        mark = (problem.key, problem.value, problem.rule) if own_file else problem.key
        if own_file and any(problem.remedy == other.remedy and "\n" in other.remedy for other in kept.values()):
            several = problem.remedy.count("\n") > 1
            same = "The same two commands make it." if several else "The same command makes it."
            problem = dataclasses.replace(problem, remedy=same)
        kept.setdefault(mark, problem)
    wrong = kept.get("data.tokenizer")
    if wrong and tokenizer != "byte" and not tokenizer.startswith("hf:") and not os.path.exists(Path(tokenizer).expanduser()):
        remedy = "Name byte, the path of a tokenizer.json, or hf:NAME."
        kept["data.tokenizer"] = schema.Problem("data.tokenizer", tokenizer, "no such file", remedy)
    return list(kept.values())


def with_documents(run: schema.RunConfig, *opened: Any) -> schema.RunConfig:
    """Return the run with `data.max_segments` = 0 replaced by the largest number of documents in a row of any source.

    opened: every source of the run, from `open_source`. A user's own source without `max_segments` counts as
    config.MOST_DOCUMENTS. Raises config.ConfigError if a source has more documents in a row than config.MOST_DOCUMENTS.
    """
    if run.data.max_segments:
        return run
    most = max(getattr(each, "max_segments", schema.MOST_DOCUMENTS) for each in opened)
    if most > schema.MOST_DOCUMENTS:
        rule = f"a data source has {most} documents in a sequence, and up to {schema.MOST_DOCUMENTS} are taken by themselves"
        raise schema.ConfigError([schema.Problem("data.max_segments", 0, rule, f"Set it to {most}.")])
    return dataclasses.replace(run, data=dataclasses.replace(run.data, max_segments=most))


def open_rows(file: TokenFile, data: schema.Data, key: str, seq_len: int, seed: int) -> FileWindows | PackedRows:
    """Return the rows of a token file that config key `key` names, with at most `data.most_documents` documents in each.

    Raises config.ConfigError if the file is damaged, or has no row in which a token counts.
    """
    try:
        windows = open_windows(file, seq_len, data.most_documents if data.masks_documents else None, seed, data.packing)
    except TokenFileError as e:
        remedy = f"Check it with: python -m jaxtrain data verify {shlex.quote(str(file.path))}"
        raise schema.ConfigError([schema.Problem(key, str(file.path), str(e), remedy)]) from e
    if not windows.windows:
        rule = f"{file.path} has no sequence of {seq_len} tokens in which a token counts"
        enough = int(np.diff(file.doc_offsets[:]).max())
        if isinstance(windows, PairRows):
            rule, enough = f"no pair of {file.path} fits into a sequence and one token more", windows.longest
        raise schema.ConfigError([schema.Problem("data.seq_len", seq_len, rule, f"Set {enough}.")])
    return windows


def tokens_per_epoch(data: schema.Data, data_dir: Path | str) -> int:
    """Return `Batches.tokens_per_epoch` of the training data: token files, or stdlib. Imports no jax, and leaves no file.

    Of files that are cut into windows, only headers are read. Raises config.ConfigError if a file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        source = data.source
        if source == "stdlib":
            made = stdlib.paths(data_dir)[0].exists()
            folder = data_dir if made else stack.enter_context(tempfile.TemporaryDirectory())
            source = str(stdlib.stdlib_files(folder)[0])
        windows = 0
        for file in open_mixture(data, source, "data.source", data.seq_len, data.source_schedule)[0]:
            packed = file.loss_bits is not None or data.packing == "best_fit"
            if packed:
                windows += open_rows(file, data, "data.source", data.seq_len, data.seed).windows
            else:
                windows += count_windows(file.header["tokens"], data.seq_len)
    return windows * data.seq_len


def epochs(data: schema.Data, folder: Path, tokens: int) -> float | None:
    """Return the number of epochs in `tokens` tokens; None if the data has none or is not here. folder: paths.data."""
    source, folder = data.source, folder.expanduser()
    if source == "synthetic" or is_custom(source) or (source == "stdlib" and not stdlib.paths(folder)[0].exists()):
        return None
    try:
        return tokens / tokens_per_epoch(data, folder)
    except schema.ConfigError:  # training reports it
        return None


def epochs_in_words(number: float) -> str:
    """Return a number of epochs as text: '273 epochs', '2.5 epochs', '1 epoch', 'less than 0.01 epochs'."""
    if number < 0.01:
        return "less than 0.01 epochs"
    text = f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
    return f"{text} epoch{'' if text == '1' else 's'}"


def open_source(
    data: schema.Data,
    source: str,
    *,
    split: str,
    global_batch: int,
    data_dir: Path | str,
    seed: int | None = None,
    seq_len: int | None = None,
    own: schema.Own = schema.NO_SETTINGS,
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
      own: the settings of the config's section `own`, for a user's own source.
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
    asked, data = data.max_segments, dataclasses.replace(data, max_segments=data.most_documents)
    if is_custom(source):
        function = own_parts.load(key, source)
        with own_parts.calling(key, source, "name(data, split, global_batch, own)"):
            made = function(data, split, global_batch, own)
        wrapped: Any = OwnSource(key, source, made, NEEDED[split], global_batch, seq_len, vocab_size)
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
        common["max_segments"] = asked or rows.documents
        vocab, eot = synthetic.VOCAB, synthetic.EOT
        info = {"name": "synthetic", "sha256": "", "vocab_size": vocab, "eot": eot}
        how = {"tokenizer": info, "text": TextFormat(eot=eot), "fingerprint": fingerprint, "synthetic": True}
        return Batches([rows], [(0, [1.0])], **how, **common)
    if source == "stdlib":
        source = str(stdlib.stdlib_files(data_dir)[split == "validation"])
    schedule = data.source_schedule if split == "train" else ""
    if schedule:
        fingerprint["source_schedule"] = schedule
    files, phases = open_mixture(data, source, key, seq_len, schedule)
    sources: list[Windows] = []
    masked_by_source = []
    densities = []
    most = 1
    for file in files:
        header = file.header
        loss = header["loss"] or {"tokens": header["tokens"], "bytes": header["source_bytes"], "first": header["documents"]}
        masked = 0.0
        windows = open_rows(file, data, key, seq_len, seed)
        if not data.masks_documents:
            pass
        elif isinstance(windows, PackedRows):
            most = max(most, windows.documents)
        else:
            found, count = windows.borders(data.max_segments)
            most = max(most, min(found, data.max_segments))
            masked = count / (windows.windows * seq_len)
        sources.append(windows)
        masked_by_source.append(masked)
        # The sums are per token read from the mixture: bytes and number of the predictions that count. Rows of conversations
        # contain padding, but no truncated tokens.
        held = header["tokens"]
        if isinstance(windows, PackedRows):
            held *= windows.windows * seq_len / (header["tokens"] - windows.truncated_tokens)
        predicted = loss["tokens"] - (loss["first"] if data.masks_documents else 0)
        densities.append((loss["bytes"] / held, predicted / held))
    common["max_segments"] = asked or most
    fingerprint["tokenizer"] = files[0].header["tokenizer"]
    fingerprint["files"] = [
        {"name": f.path.name, "weight": w, **{k: f.header[k] for k in ("content_sha256", "tokens", "documents")}}
        | ({"rows": windows.windows} if isinstance(windows, PackedRows) else {})
        for f, w, windows in zip(files, phases[0][1], sources, strict=True)
    ]
    return Batches(
        sources,
        phases,
        tokenizer=files[0].header["tokenizer"],
        text=text_format.of_token_files([file.header for file in files]),
        templates=text_format.other_templates([file.header for file in files]),
        fingerprint=fingerprint,
        densities=densities,
        masked_fraction=max(float(np.dot(weights, masked_by_source)) for _, weights in phases),
        **common,
    )
