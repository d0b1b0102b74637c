"""Open the files that a config names as data, and report what is wrong with them. Imports no jax."""

import contextlib
import dataclasses
import difflib
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxtrain.config import installed, own_parts, schema
from jaxtrain.config.schema import split_paths
from jaxtrain.config.synonyms import MOST, did_you_mean
from jaxtrain.data import stdlib, synthetic
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.mixture import WeightedFile, all_exist, is_file, normalize_weights, parse_files
from jaxtrain.data.tokenfile import CHECKED_BYTES, TokenFile, TokenFileError, validation_share
from jaxtrain.data.windows import FileWindows, PackedRows, PairRows, count_windows, open_windows

CROSS_ENTROPY = schema.Loss()
# Forms of data, and the options of `prepare` for each
FORMS = {"text": "", "chat": "--chat ", "pairs": "--preference --chat ", "plain pairs": "--preference "}
VALIDATION = {"text": "0.001", "chat": "0.02", "pairs": "0.05"}  # --validation in the commands for each form
NO_SUCH_FILE = "no such file"  # the rule of a token file that does not exist
MAX_WINDOWS = 1 << 32  # grain's index_shuffle counts in 32 bits


def parse_sets(text: str) -> tuple[dict[str, str], list[schema.Problem]]:
    """Parse `web=web.val.tok;code=code.val.tok`: return (name -> source, problems).

    A single source may have no name; its key is then "". A name has only letters, digits, _ and -. If a number follows
    the `=`, or if the text begins with the path of a file, the text before the `=` is a file, not a name.
    """
    sets: dict[str, str] = {}
    items = split_paths(text, ";", lambda item: all_exist(item) or all_exist(item.partition("=")[2]))
    for item in items:
        name, _, source = (field.strip() for field in item.partition("="))
        begins_with_file = any(is_file(each.path) for each in parse_files(item)[0][:1])
        begins_with_file |= os.path.isdir(os.path.expanduser(os.path.dirname(item)))  # of a file that is missing in it
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
    name, _, source = (field.strip() for field in item.partition("="))
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


def find_similar_files(path: str) -> list[str]:
    """Return a similar built-in source, or up to three similar data files in the path's folder.

    A held-out file (.val.) is similar to held-out files only, and a training file to training files only.
    """
    if close := difflib.get_close_matches(path, ("stdlib", "synthetic"), 1, 0.75):
        return close
    wanted = Path(path).expanduser()
    held_out = ".val." in wanted.name
    names_by_stem = {
        p.stem.removesuffix(".val"): p.name
        for p in sorted(wanted.parent.glob("*"))
        if p.suffix == ".tok" and (".val." in p.name) == held_out
    }
    close = difflib.get_close_matches(wanted.stem.removesuffix(".val"), names_by_stem, MOST, 0.7)
    return [str(Path(path).parent / names_by_stem[stem]) for stem in close]


def missing_file(key: str, path: str, tokenizer: str, form: str = "text") -> schema.Problem:
    """Return the problem of a missing file. Its remedy names similar files; without any, the commands that make the file.

    A missing NAME.val.tok is made with NAME.tok by one command. If NAME.tok exists, the command makes both again.

    Args:
      form: the form of the data that the run needs, a key of FORMS.
    """
    if similar := find_similar_files(path):
        return schema.Problem(key, path, NO_SUCH_FILE, did_you_mean(similar))
    held_out = path.endswith(".val.tok")
    output = path.removesuffix(".val.tok") + ".tok" if held_out else str(token_file_path(path))
    if held_out and (options := _prepare_options(output)):
        command = f"{options} --force --output={shlex.quote(output)}"
        without = ", or set data.eval_source='' and eval.every_steps=0" if key == "data.eval_source" else ""
        remedy = f"This command makes both again{without}:\n    python -m jaxtrain data prepare {command}"
        return schema.Problem(key, path, f"no such file, although {output} is there", remedy)
    share = "" if key == "data.eval_source" and not held_out else f"--validation={VALIDATION[form]} "
    ending = f"--tokenizer={shlex.quote(tokenizer)} {share}--output={shlex.quote(output)}"
    if form == "text":
        remedy = (
            "Two commands make it of 10 billion tokens of FineWeb-Edu, and the second alone of your own --input:\n"
            f"    {installed.script('hf')} download HuggingFaceFW/fineweb-edu --repo-type=dataset "
            "--include 'sample/10BT/*' --local-dir=corpus\n"
            f"    python -m jaxtrain data prepare --input='corpus/**/*.parquet' {ending}"
        )
    else:
        kind = "pairs" if form == "pairs" else "conversations"
        remedy = (
            f"This command makes it of {kind} in JSON lines (plain texts: without --chat):\n"
            f"    python -m jaxtrain data prepare {FORMS[form]}--input=YOUR.jsonl {ending}"
        )
    return schema.Problem(key, path, NO_SUCH_FILE, remedy)


def _prepare_options(path: str) -> str:
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
    return " ".join([*words, f"--validation={validation_share(documents)}"])


def open_files(
    data: schema.Data, named_files: Sequence[WeightedFile], key: str, seq_len: int, form: str = "text"
) -> list[TokenFile]:
    """Open the token files that config key `key` names. Raises ConfigError with the problems of all files.

    form: the form of the data that the run needs, a key of FORMS, for the commands that the problems name.
    """
    files: list[TokenFile] = []
    problems = []
    for path in (each.path for each in named_files):
        try:
            files.append(TokenFile.open(path))
        except (FileNotFoundError, NotADirectoryError):
            problems.append(missing_file(key, path, data.tokenizer, form))
            continue
        except (TokenFileError, OSError) as e:
            if found := _folder_problem(key, Path(path)):
                problems.append(found)
            elif Path(path).suffix == ".tok":
                problems.append(
                    schema.Problem(key, path, str(e), f"Check it with: python -m jaxtrain data verify {shlex.quote(path)}")
                )
            else:
                note = "with --chat for conversations" if form == "text" else "without --chat for plain texts"
                fix = f"Make one: {prepare_command(data.tokenizer, path, FORMS[form])} ({note})."
                problems.append(schema.Problem(key, path, "is no token file", fix))
            continue
        header = files[-1].header
        if reason := tokenizers.find_difference(data.tokenizer, header["tokenizer"]):
            former = header["tokenizer"]["name"]
            redo = f"prepare the text again with --tokenizer={shlex.quote(data.tokenizer)}"
            # The tokenizer at the file's own path may be gone, or be another one now.
            changed = tokenizers.find_difference(former, header["tokenizer"])
            restore = (
                f"Set data.tokenizer to a folder with the former {former}"
                if changed
                else f"Set data.tokenizer={shlex.quote(former)}"
            )
            fix = f"{restore} or {redo}"  # no stop behind what is typed
            if data.tokenizer == "byte" or tokenizers.is_bare(data.tokenizer):  # the default, or it can prepare no text
                fix = restore
            elif former == "byte":  # the config is for another model, and --tokenizer was forgotten
                fix = f"{redo[0].upper()}{redo[1:]}"
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


def _folder_problem(key: str, folder: Path) -> schema.Problem | None:
    """Return the problem of a source that is a folder with token files, or that of a run; None for any other."""
    token_files = [path for path in sorted(folder.glob("*.tok")) if (".val." in path.name) == (key == "data.eval_source")]
    if token_files:
        return schema.Problem(key, str(folder), "is a folder of token files", f"Set {','.join(map(str, token_files))}")
    if (folder / "receipt.json").exists():
        return schema.Problem(key, str(folder), "is the folder of a run, whose weights init.from takes", "Name token files.")
    return None


def open_mixture(
    data: schema.Data, source: str, key: str, seq_len: int, form: str = "text"
) -> tuple[list[TokenFile], list[float]]:
    """Return (the token files of a source, their weights, whose sum is 1). form: as for `open_files`.

    Raises ConfigError, with all problems, if a file or the text of `source` is wrong.
    """
    named_files, problems = parse_files(source, key)
    try:
        files = open_files(data, named_files, key, seq_len, form)
    except schema.ConfigError as e:
        raise schema.ConfigError([*problems, *e.problems]) from e
    if problems:
        raise schema.ConfigError(problems)
    return files, normalize_weights(named_files, [file.header["tokens"] for file in files])


def check_data(
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
    pairs = None if ":" in loss.name else loss.is_pairwise
    form = "pairs" if pairs else "chat" if finetunes else "text"
    sources = [("data.source", data.source)]
    builtin = data.source in ("stdlib", "synthetic")
    if data.eval_source:
        sets, set_problems = parse_sets(data.eval_source)
        problems += set_problems
        sources += [("data.eval_source", source) for source in sets.values() if not set_problems]
    elif need_eval and not builtin and not is_custom(data.source):
        paths = [each.path for each in parse_files(data.source)[0] if each.path.endswith(".tok")]
        held_out = [path.removesuffix(".tok") + ".val.tok" for path in paths]
        there = [path for path in held_out if Path(path).expanduser().exists()]
        command = f"prepare --validation={VALIDATION[form]} makes {','.join(held_out) or 'NAME.val.tok'}"
        remedy = f"Set {','.join(there)}" if there else f"Set it to held-out text ({command})"
        remedy += ", or eval.every_steps=0."
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
            problems += filter(None, [own_parts.check_module(key, source)])
        else:
            try:
                files, _ = open_mixture(data, source, key, data.seq_len, form)
                # The largest id decides: Gemma 3's tokenizer has one more id, for images, than its text models.
                vocab = max(f.header["largest_id"] for f in files) + 1
                problems += [p for f in files if (p := _form_problem(key, f, pairs, data.tokenizer))]
            except schema.ConfigError as e:
                problems += e.problems
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
    return _deduplicate(problems, data.tokenizer)


def prepare_command(tokenizer: str, text: str = "FILE.jsonl", options: str = "") -> str:
    """Return the command that makes a token file with this tokenizer. options: of its form, a value of FORMS."""
    options += "" if tokenizer == "byte" else f"--tokenizer={shlex.quote(tokenizer)} "
    suffix = next((suffix for suffix in (".jsonl", ".parquet", ".txt") if any(Path(text).glob(f"*{suffix}"))), ".jsonl")
    inputs = shlex.quote(f"{text}/*{suffix}" if Path(text).is_dir() else text)
    return f"python -m jaxtrain data prepare {options}--input={inputs} --output={shlex.quote(str(token_file_path(text)))}"


def token_file_path(text: str) -> Path:
    """Return the name of the token file that is made from `text`: a text file, which may be compressed, or a folder."""
    path = Path(text)
    if path.is_dir():
        return Path(f"{path.resolve().name}.tok")
    return (path.with_suffix("") if path.suffix in (".gz", ".bz2", ".xz", ".zst") else path).with_suffix(".tok")


def _form_problem(key: str, file: TokenFile, pairs: bool | None, tokenizer: str) -> schema.Problem | None:
    """Return the problem of a file with pairs if `pairs` is False, or without pairs if `pairs` is True; None otherwise."""
    if file.pairs and pairs is False:
        rule = "holds pairs of a preferred and another completion, and loss.name does not compare them"
        return schema.Problem(key, str(file.path), rule, "Set loss.name=dpo.")
    if pairs and not file.pairs:
        options = FORMS["plain pairs" if file.loss_bits is None else "pairs"]
        fix = f"Make one of pairs: {prepare_command(tokenizer, 'PAIRS.jsonl', options)}"
        return schema.Problem(key, str(file.path), "holds no pairs, which loss.name=dpo compares", fix)
    return None


def _deduplicate(problems: list[schema.Problem], tokenizer: str) -> list[schema.Problem]:
    """Return the problems, each once: a wrong data.tokenizer or data.seq_len is a problem of every token file of the run."""
    unique: dict[object, schema.Problem] = {}
    for problem in problems:
        is_source_key = problem.key in ("data.source", "data.eval_source")
        mark = (problem.key, problem.value, problem.rule) if is_source_key else problem.key
        if is_source_key and any(problem.remedy == earlier.remedy and "\n" in earlier.remedy for earlier in unique.values()):
            is_plural = problem.remedy.count("\n") > 1
            remedy_text = "The same two commands make it." if is_plural else "The same command makes it."
            problem = dataclasses.replace(problem, remedy=remedy_text)
        unique.setdefault(mark, problem)
    tokenizer_problem = unique.get("data.tokenizer")
    if (
        tokenizer_problem
        and tokenizer != "byte"
        and not tokenizer.startswith("hf:")
        and not os.path.exists(Path(tokenizer).expanduser())
    ):
        remedy = "Name byte, the path of a tokenizer.json, or hf:NAME."
        unique["data.tokenizer"] = schema.Problem("data.tokenizer", tokenizer, "no such file", remedy)
    return list(unique.values())


def open_rows(file: TokenFile, data: schema.Data, key: str, seq_len: int, seed: int) -> FileWindows | PackedRows:
    """Return the rows of a token file that config key `key` names, with at most `data.most_documents` documents in each.

    Raises config.ConfigError if the file is damaged, or has no row in which a token counts.
    """
    try:
        if file.opened.size < CHECKED_BYTES:
            file.check()
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
            exists = stdlib.token_file_paths(data_dir)[0].exists()
            folder = data_dir if exists else stack.enter_context(tempfile.TemporaryDirectory())
            source = str(stdlib.stdlib_files(folder)[0])
        windows = 0
        for file in open_mixture(data, source, "data.source", data.seq_len)[0]:
            packed = file.loss_bits is not None or data.packing == "best_fit"
            if packed:
                windows += open_rows(file, data, "data.source", data.seq_len, data.seed).windows
            else:
                windows += count_windows(file.header["tokens"], data.seq_len)
    return windows * data.seq_len


def count_epochs(data: schema.Data, folder: Path, tokens: int) -> float | None:
    """Return the number of epochs in `tokens` tokens; None if the data has none or is not here. folder: paths.data."""
    source, folder = data.source, folder.expanduser()
    if source == "synthetic" or is_custom(source) or (source == "stdlib" and not stdlib.token_file_paths(folder)[0].exists()):
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
