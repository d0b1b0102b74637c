"""`python -m jaxtrain data`: make, check and show token files."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import FAILED, Args, Parser, path, whole
from jaxtrain.config.schema import Data
from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.prepare import SHARD_MB, PrepareFailed, prepare, validation_path
from jaxtrain.data.readers import FORMATS, PrepareError
from jaxtrain.data.template import LOSSES, NAMED
from jaxtrain.data.windows import PackedRows, PairRows, make_batch, open_windows

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
ROW_TOKENS = 1 << 20  # tokens of the rows that are built at a time
EXAMPLES = (
    "prepare --input='books/*.txt' --output=books.tok --validation=0.01",
    "prepare --input='corpus/**/*.parquet' --tokenizer=hf:NAME --output=corpus.tok --validation=0.001",
    "verify corpus.tok corpus.val.tok",
)


def parser() -> Parser:
    """Return the parser of the command line."""
    top = Parser("data", "Make, check and show token files.", examples=EXAMPLES)
    p = top.command(
        "prepare",
        "Write a token file from text, JSON lines or Parquet. The file gets its name only when it is complete. After an "
        "interruption, the same command resumes from the finished parts.",
    )
    p.option(
        "input",
        "files to read, ** for subfolders, or a data set hf:DATASET[:CONFIG][:SPLIT]; repeatable",
        "GLOB",
        required=True,
        repeat=True,
    )
    p.option("output", "the token file to write", "NAME.tok", type=path, required=True)
    p.option("tokenizer", "byte (default) | path of a tokenizer.json | hf:NAME (from the hub)", "SPEC")
    p.option("eot", "the token that ends a document, if it is not a well-known one", "TOKEN")
    p.option(
        "text-key",
        "JSON key or Parquet column of the text (default: text); several are joined by --separator",
        "KEY[,KEY]",
    )
    p.option(
        "separator",
        r"text between the values of several keys; \n and \t are understood (default: a blank line, \n\n)",
        "TEXT",
        type=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
        may_be_empty=True,
    )
    p.option(
        "chat", "rows are conversations: messages, conversations, prompt with completion or response, instruction and output"
    )
    p.option("preference", "rows are pairs for loss.name=dpo: prompt, chosen, rejected; with --chat lists of messages")
    p.option(
        "chat-template",
        f"writes conversations: {', '.join(NAMED)}, or a Jinja template (default: the tokenizer's own)",
        "NAME|FILE",
    )
    p.option(
        "loss",
        "tokens of a conversation that count in the loss: of the assistant's turns (default), all, of its last turn",
        "|".join(LOSSES),
        choices=LOSSES,
    )
    p.option(
        "format",
        "auto: .jsonl .ndjson a document a line, .parquet a document a row, others a document each; .gz .bz2 .xz .zst "
        "are unpacked",
        "|".join(FORMATS),
        choices=FORMATS,
    )
    p.option("validation", "put this fraction of the documents into NAME.val.tok (default 0)", "F", type=float, example="0.01")
    p.option("skip-bad-lines", "leave out lines that cannot be read, and count them")
    p.option("force", "replace an existing output")
    p.option(
        "processes",
        "number of processes that tokenize (default: one a core); the file does not depend on it",
        "N",
        type=int,
        example="8",
    )
    p.option(
        "shard-mb",
        f"input of a part; an interrupted run repeats unfinished parts (default {SHARD_MB})",
        "MB",
        type=float,
        example=str(SHARD_MB),
    )
    p = top.command("verify", "Read token files completely and check them. Exit code 0: all files are intact.")
    p.argument("files", "a token file", "FILE", several=True, type=path)
    p = top.command("show", "figures and the first documents of a token file")
    p.argument("file", "a token file", "FILE", type=path)
    p.option("documents", "show the beginning of N documents (default 2)", "N", 2, type=whole(0))
    p.option("seq-len", "also show how full training's rows are with this data.seq_len", "T", 0, type=whole(0))
    p.option("max-segments", "data.max_segments (default: 0, at most 32)", "M", 0, type=whole(0))
    return top


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe(path: Path, header: dict) -> str:
    tokenizer = header["tokenizer"]
    pairs = " in pairs" if header["made"].get(tokenfile.PAIRS) else ""
    return (
        f"{path}: {counted(header['tokens'], 'token')} ({header['dtype'].replace('<u2', 'uint16').replace('<u4', 'uint32')}), "
        f"{counted(header['documents'], 'document')}{pairs}, {header['source_bytes']:,} bytes of text, "
        f"tokenizer {tokenizer['name']} ({tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256'][:12]})"
    )


def counted_tokens(header: dict) -> str:
    tokens = header["loss"]["tokens"]
    return f"{tokens:,} tokens ({tokens / max(1, header['tokens']):.2%}) count in the loss"


def rows_in_words(file: tokenfile.TokenFile, seq_len: int, max_segments: int) -> Iterator[str]:
    """Yield lines with figures of the rows that training with data.packing=documents reads. Builds all rows."""
    windows = open_windows(file, seq_len, max_segments, Data().seed)
    if not windows.windows:
        yield f"packed into rows of {seq_len:,}: no row"
        return
    counted = segments = full = 0
    step = max(1, ROW_TOKENS // seq_len)
    for first in range(0, windows.windows, step):
        batch = make_batch(*windows.rows(np.arange(first, min(first + step, windows.windows))), True, max_segments)
        counted += np.count_nonzero(batch["weights"])
        segments += batch["segments"].max(axis=1).sum()
        full += np.count_nonzero(batch["segments"])
    rows, total = windows.windows, windows.windows * seq_len
    of = f"{rows:,} rows, {segments / rows:.2f} documents a row, {counted / total:.2%} of the targets count"
    if not isinstance(windows, PackedRows):
        masked = f"{1 - full / total:.2%} of the tokens masked beyond {max_segments} documents"
        yield f"packed into rows of {seq_len:,}: {of}, {masked}"
        return
    most = f"{max_segments // 2} pairs" if file.pairs else f"{max_segments} conversations"
    yield f"packed into rows of {seq_len:,}: {of}, rows are {full / total:.2%} full (at most {most} each)"
    if isinstance(windows, PairRows):
        yield f"pairs of more than {seq_len + 1:,} tokens, which are left out: {windows.left_out:,}"
    else:
        lost = f"{windows.truncated:,}, which lose {windows.truncated_tokens:,} tokens"
        yield f"conversations cut to fit {seq_len + 1:,} tokens: {lost}"


def run_prepare(args: Args) -> int:
    given = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in args.given - {"input", "output"}}
    for key in ("text_key", "separator"):
        if key in given and ("chat" in given or "preference" in given):
            kind, option = ("--chat" if "chat" in given else "--preference"), f"--{key.replace('_', '-')}"
            raise PrepareError(f"{option} = {given[key]!r}: {kind} does not use it. Fix: leave {option} out")
    headers = prepare(args.input, args.output, **{"processes": 0, **given})
    for file, header in zip((args.output, validation_path(args.output)), headers, strict=False):
        print(describe(file, header))
        if header["loss"]:
            print(f"{file}: {counted_tokens(header)}")
    return 0


def run_verify(args: Args) -> int:
    for file in args.files:
        if not file.is_file():
            raise PrepareError(f"{file}: {'is a folder' if file.is_dir() else 'no such file'}")
    damaged = False
    for file in args.files:
        faults = tokenfile.verify(file)
        damaged |= bool(faults)
        for fault in faults or [f"{describe(file, tokenfile.TokenFile.open(file).header)}: intact"]:
            print(fault)
    return int(damaged)


def written(file: tokenfile.TokenFile, first: int, last: int, tokenizer: tokenizers.Tokenizer | None) -> str:
    """Return tokens first..last-1 as text, as ids if `tokenizer` is None. ⟦ and ⟧ enclose tokens that the loss leaves out."""

    def decode(ids: np.ndarray) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))

    tokens = file.tokens[first:last]
    if file.loss_bits is None:
        return decode(tokens)
    flags = file.loss_flags(first, last)
    borders = np.flatnonzero(np.diff(flags)) + 1
    runs = zip(np.split(tokens, borders), np.split(flags, borders), strict=True)
    texts = [(decode(run), counts[0]) for run, counts in runs if run.size]
    return "".join(text if counts else f"⟦{text}⟧" for text, counts in texts)


def tokenizer_of(file: tokenfile.TokenFile) -> tuple[tokenizers.Tokenizer | None, str]:
    """Return (tokenizer that made the file, ""), or (None, the reason) if the tokenizer cannot be loaded or has changed."""
    recorded = file.header["tokenizer"]
    try:
        tokenizer = tokenizers.load_tokenizer(recorded["name"], recorded["eot"])
    except tokenizers.TokenizerError as e:
        return None, f"{e}; ids are shown"
    if tokenizer.sha256 != recorded["sha256"]:
        return None, "the tokenizer of that name is another one now; ids are shown"
    return tokenizer, ""


def show_document(file: tokenfile.TokenFile, i: int, tokenizer: tokenizers.Tokenizer | None) -> None:
    first, last = int(file.doc_offsets[i]), int(file.doc_offsets[i + 1])
    pair = f", {('chosen', 'rejected')[i % 2]} of pair {i // 2}" if file.pairs else ""
    print(f"--- document {i}{pair}: tokens {first:,} to {last:,}")
    print(written(file, first, min(last, first + 200), tokenizer))


def run_show(args: Args) -> int:
    file = tokenfile.TokenFile.open(args.file)
    if file.pairs and args.max_segments == 1:
        rule = "the two members of a pair are documents of one sequence"
        raise PrepareError(f"--max-segments = 1: {rule}. Fix: give 2 or more, or leave it out")
    print(describe(args.file, file.header))
    print("made from: " + ", ".join(file.header["sources"]))
    if file.header["loss"]:
        print(f"{counted_tokens(file.header)}; the others are shown between ⟦ and ⟧")
    if count := file.header["documents"]:
        sizes = np.percentile(np.diff(file.doc_offsets[:]), PERCENTILES, method="inverted_cdf").tolist()
        shown = ", ".join(f"{p}%: {size:,}" for p, size in zip(PERCENTILES, sizes, strict=True))
        print(f"document length in tokens: mean {file.header['tokens'] / count:,.1f}; percentiles {shown}")
    if args.seq_len:
        print(*rows_in_words(file, args.seq_len, Data(max_segments=args.max_segments).most_documents), sep="\n")
    tokenizer, note = tokenizer_of(file)
    if note:
        print(note)
    if chat := file.header["made"].get("chat"):
        ends = [tokenizer.decode([i]) or str(i) if tokenizer else str(i) for i in file.header["turn_ends"]]
        print(f"chat template: {chat['name']}; the turns that count end with {', '.join(ends) or 'no token'}")
    for i in range(min(args.documents, file.header["documents"])):
        show_document(file, i, tokenizer)
    return 0


ACTS = {"prepare": run_prepare, "verify": run_verify, "show": run_show}


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    0: success. 1: a file is damaged, or the disk or a process failed. 2: the command or its input is wrong. 130: Ctrl-C.
    """

    def act(args: Args) -> int:
        try:
            return ACTS[args.command](args)
        except FileNotFoundError as e:
            raise PrepareError(f"{e.filename}: no such file") from e
        except PermissionError as e:
            raise PrepareError(f"{e.filename}: not permitted") from e
        except PrepareFailed as e:
            print(f"error: {e}", file=sys.stderr)
            return FAILED

    return run_command(parser(), argv, act, errors=(PrepareError, tokenizers.TokenizerError, tokenfile.TokenFileError))
