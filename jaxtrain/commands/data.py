"""`python -m jaxtrain data`: make, check and show token files."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxtrain.commands.command import run_action
from jaxtrain.config.command_line import FAILED, ArgumentParser
from jaxtrain.config.commands import spelled
from jaxtrain.config.schema import Data
from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.prepare import SHARD_MB, PrepareFailed, prepare, validation_path
from jaxtrain.data.readers import FORMATS, PrepareError
from jaxtrain.data.template import LOSSES, NAMED
from jaxtrain.data.windows import PackedRows, PairRows, make_batch, open_windows

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
ROW_TOKENS = 1 << 20  # tokens of the rows that are built at a time
EXAMPLES = """examples:
  python -m jaxtrain data prepare --input='books/*.txt' --output=books.tok --validation=0.01
  python -m jaxtrain data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NAME --output=corpus.tok --validation=0.001
  python -m jaxtrain data verify corpus.tok corpus.val.tok
"""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = ArgumentParser(
        spelled("python -m jaxtrain data"),
        description="Make, check and show token files.",
        epilog=spelled(EXAMPLES),
        formatter_class=raw,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    p = commands.add_parser(
        "prepare",
        help="text, JSON lines or Parquet to a token file",
        description="Writes a token file. The file gets its name only when it is complete. After an interruption, the same "
        "command resumes from the finished parts.",
        epilog=spelled(EXAMPLES),
        formatter_class=raw,
        argument_default=argparse.SUPPRESS,  # `prepare` has the defaults
    )
    p.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="GLOB",
        help="files to read, ** for subfolders, or a data set hf:DATASET[:CONFIG][:SPLIT]; repeatable",
    )
    top.may_be_empty = p.may_be_empty = ("--separator",)
    p.add_argument(
        "--output", type=lambda text: Path(text).expanduser(), required=True, metavar="NAME.tok", help="the token file to write"
    )
    p.add_argument("--tokenizer", metavar="SPEC", help="byte (default) | path of a tokenizer.json | hf:NAME (from the hub)")
    p.add_argument("--eot", metavar="TOKEN", help="the token that ends a document, if it is not a well-known one")
    p.add_argument(
        "--text-key",
        metavar="KEY[,KEY]",
        help="JSON key or Parquet column of the text (default: text); several are joined by --separator",
    )
    p.add_argument(
        "--separator",
        type=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
        metavar="TEXT",
        help=r"text between the values of several keys; \n and \t are understood (default: a blank line, \n\n)",
    )
    p.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations: messages, conversations, prompt with completion or response, instruction and output",
    )
    p.add_argument(
        "--preference",
        action="store_true",
        help="rows are pairs for loss.name=dpo: prompt, chosen, rejected; with --chat lists of messages",
    )
    p.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help=f"writes conversations: {', '.join(NAMED)}, or a Jinja template (default: the tokenizer's own)",
    )
    p.add_argument(
        "--loss",
        choices=LOSSES,
        help="tokens of a conversation that count in the loss: of the assistant's turns (default), all, of its last turn",
    )
    p.add_argument(
        "--format",
        choices=FORMATS,
        help="auto: .jsonl .ndjson a document a line, .parquet a document a row, others a document each; .gz .bz2 .xz .zst "
        "are unpacked",
    )
    p.add_argument(
        "--validation",
        type=float,
        metavar="F",
        help="put this fraction of the documents into NAME.val.tok (default 0)",
    )
    p.add_argument("--skip-bad-lines", action="store_true", help="leave out lines that cannot be read, and count them")
    p.add_argument("--force", action="store_true", help="replace an existing output")
    p.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes that tokenize (default: one a core); the file does not depend on it",
    )
    p.add_argument(
        "--shard-mb",
        type=float,
        metavar="MB",
        help=f"input of a part; an interrupted run repeats unfinished parts (default {SHARD_MB})",
    )
    v = commands.add_parser(
        "verify", help="read token files completely and check them", description="Exit code 0: all files are intact."
    )
    v.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a token file")
    s = commands.add_parser("show", help="figures and the first documents of a token file")
    s.add_argument("file", type=Path, metavar="FILE", help="a token file")
    s.add_argument("--documents", type=int, default=2, metavar="N", help="show the beginning of N documents (default 2)")
    s.add_argument(
        "--seq-len", type=int, default=0, metavar="T", help="also show how full training's rows are with this data.seq_len"
    )
    s.add_argument("--max-segments", type=int, default=0, metavar="M", help="data.max_segments (default: 0, at most 32)")
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


def run_prepare(args: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(args).items() if key not in ("command", "input", "output")}
    for key in ("text_key", "separator"):
        if key in given and ("chat" in given or "preference" in given):
            kind, option = ("--chat" if "chat" in given else "--preference"), f"--{key.replace('_', '-')}"
            raise PrepareError(f"{option} = {given[key]!r}: {kind} does not use it. Fix: leave {option} out")
    headers = prepare(args.input, args.output, **{"processes": 0, **given})
    for path, header in zip((args.output, validation_path(args.output)), headers, strict=False):
        print(describe(path, header))
        if header["loss"]:
            print(f"{path}: {counted_tokens(header)}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    for path in (file.expanduser() for file in args.files):
        if not path.is_file():
            raise PrepareError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    damaged = False
    for path in args.files:
        faults = tokenfile.verify(path)
        damaged |= bool(faults)
        for fault in faults or [f"{describe(path, tokenfile.TokenFile.open(path).header)}: intact"]:
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


def run_show(args: argparse.Namespace) -> int:
    for name in ("seq_len", "max_segments", "documents"):
        if (value := getattr(args, name)) < 0:
            raise PrepareError(f"--{name.replace('_', '-')} = {value}: must be at least 0. Fix: leave it out")
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


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: a file is damaged, or the disk or a process failed. 2: the command or its input is wrong. 130: Ctrl-C.
    """
    args = parser().parse_args(argv)
    command = {
        "prepare": run_prepare,
        "verify": run_verify,
        "show": run_show,
    }[args.command]

    def act() -> int:
        try:
            return command(args)
        except FileNotFoundError as e:
            raise PrepareError(f"{e.filename}: no such file") from e
        except PermissionError as e:
            raise PrepareError(f"{e.filename}: not permitted") from e
        except PrepareFailed as e:
            print(f"error: {e}", file=sys.stderr)
            return FAILED

    return run_action(act, (PrepareError, tokenizers.TokenizerError, tokenfile.TokenFileError))
