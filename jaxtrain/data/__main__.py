"""`python -m jaxtrain.data`: make, check, show, mix, count and time token files."""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from jaxtrain.command_line import FAILED, ArgumentParser, run_action
from jaxtrain.commands import spelled
from jaxtrain.config import Data
from jaxtrain.data import mixture, tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.prepare import SHARD_MB, prepare, validation_path
from jaxtrain.data.readers import FORMATS, PrepareError
from jaxtrain.data.shards import WorkerDied
from jaxtrain.data.template import LOSSES
from jaxtrain.data.verify import verify

EXAMPLES = """examples:
  python -m jaxtrain.data prepare --input='books/*.txt' --output=books.tok --validation=0.01
  python -m jaxtrain.data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NAME --output=corpus.tok --validation=0.001
  python -m jaxtrain.data verify corpus.tok corpus.val.tok
"""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = ArgumentParser(
        spelled("python -m jaxtrain.data"),
        description="Make, check, show, mix, count and time token files.",
        epilog=spelled(EXAMPLES),
        formatter_class=raw,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    p = commands.add_parser(
        "prepare",
        help="text, JSON lines or Parquet to a token file",
        description="Writes a token file. It appears under its name only when it is whole; the same command goes on with a run "
        "that was cut off, from its finished parts.",
        epilog=spelled(EXAMPLES),
        formatter_class=raw,
    )
    p.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="GLOB",
        help="files to read, ** for subfolders, or a data set hf:DATASET[:CONFIG][:SPLIT]; repeatable",
    )
    top.may_be_empty = p.may_be_empty = ("--separator",)
    p.add_argument("--output", type=Path, required=True, metavar="NAME.tok", help="the token file to write")
    p.add_argument(
        "--tokenizer", default="byte", metavar="SPEC", help="byte (default) | path of a tokenizer.json | hf:NAME (from the hub)"
    )
    p.add_argument(
        "--eot", default="", metavar="TOKEN", help="the token that ends a document, where it is not a well-known one"
    )
    p.add_argument(
        "--text-key",
        default="text",
        metavar="KEY[,KEY]",
        help="JSON key or Parquet column of the text (default: text); several are joined by --separator",
    )
    p.add_argument(
        "--separator",
        type=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
        default="\n\n",
        metavar="TEXT",
        help=r"what stands between the texts of several keys; \n and \t are understood (default: a blank line, \n\n)",
    )
    p.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations: messages, conversations, prompt with completion or response, instruction and output",
    )
    p.add_argument(
        "--chat-template",
        default="",
        metavar="FILE",
        help="the Jinja template that writes them (default: the tokenizer's own)",
    )
    p.add_argument(
        "--loss",
        choices=LOSSES,
        default=LOSSES[0],
        help="tokens of a conversation that count in the loss: of the assistant's turns (default), all, of its last turn",
    )
    p.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="auto: .jsonl .ndjson a document a line, .parquet a document a row, all else a document a file; .gz .bz2 .xz .zst "
        "are unpacked",
    )
    p.add_argument(
        "--validation",
        type=float,
        default=0.0,
        metavar="F",
        help="put this part of the documents into NAME.val.tok (default 0)",
    )
    p.add_argument("--skip-bad-lines", action="store_true", help="leave out lines that cannot be read, and count them")
    p.add_argument("--force", action="store_true", help="replace an existing output")
    p.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="how many to work with (default: one a core); the file is the same",
    )
    p.add_argument(
        "--shard-mb",
        type=float,
        default=SHARD_MB,
        metavar="MB",
        help=f"input that a process takes at a time, and that is lost where a run is cut off (default {SHARD_MB})",
    )
    v = commands.add_parser("verify", help="read token files whole and check them", description="Exit code 0: all are intact.")
    v.add_argument("files", nargs="+", type=Path, metavar="FILE")
    s = commands.add_parser("show", help="the header and the first documents of a token file")
    s.add_argument("file", type=Path, metavar="FILE")
    s.add_argument("--documents", type=int, default=2, metavar="N", help="documents to show the start of (default 2)")
    m = commands.add_parser(
        "mix",
        help="write a mixture: token files with weights, and what they hold now",
        description="data.source=NAME.mix reads it. A file that no longer holds what it held when the mixture was written is "
        "refused.",
    )
    m.add_argument("files", nargs="+", metavar="FILE.tok[=WEIGHT]", help="token files made with the same tokenizer")
    m.add_argument("--output", type=Path, required=True, metavar="NAME.mix", help="the mixture to write")
    m.add_argument(
        "--by",
        choices=("weight", "tokens"),
        default="weight",
        help="tokens: in proportion to what the files hold, times a weight where one is given",
    )
    m.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="weights to the power 1/T: above 1 nearer to each other"
    )
    m.add_argument(
        "--tokens", type=float, default=0.0, metavar="N", help="count the epochs in N tokens, 10e9 say (default: all there are)"
    )
    m.add_argument("--force", action="store_true", help="replace an existing mixture")
    c = commands.add_parser("stats", help="documents, lengths, packing, duplicates of token files; some documents")
    c.add_argument("files", nargs="+", type=Path, metavar="FILE")
    c.add_argument("--seq-len", type=int, default=4096, metavar="T", help="data.seq_len to pack for (default 4096)")
    c.add_argument("--max-segments", type=int, default=0, metavar="M", help="data.max_segments (default: 0, at most 32)")
    c.add_argument("--documents", type=int, default=3, metavar="N", help="documents to show the start of (default 3)")
    c.add_argument("--json", action="store_true", help="figures as JSON, one object a file and line")
    b = commands.add_parser("bench", help="batches per second from a token file in the page cache, on one core")
    b.add_argument("--batch", type=int, default=8, metavar="B", help="sequences in a batch (default 8)")
    b.add_argument("--seq-len", type=int, default=4096, metavar="T", help="tokens in a sequence (default 4096)")
    b.add_argument("--seconds", type=float, default=3.0, metavar="S", help="how long to measure (default 3)")
    return top


def describe(path: Path, header: dict) -> str:
    tokenizer = header["tokenizer"]
    return (
        f"{path}: {header['tokens']:,} tokens ({header['dtype'].replace('<u2', 'uint16').replace('<u4', 'uint32')}), "
        f"{header['documents']:,} documents, {header['source_bytes']:,} bytes of text, "
        f"tokenizer {tokenizer['name']} ({tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256'][:12]})"
    )


def run_prepare(args: argparse.Namespace) -> int:
    keys = ("tokenizer", "eot", "text_key", "separator", "format", "chat", "chat_template", "loss", "validation")
    keys += ("skip_bad_lines", "force", "processes", "shard_mb")
    headers = prepare(args.input, args.output, **{k: getattr(args, k) for k in keys})
    for path, header in zip((args.output, validation_path(args.output)), headers, strict=False):
        print(describe(path, header))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    damaged = False
    files = [(path, mixture.verify(path) if path.suffix == mixture.SUFFIX else None) for path in args.files]
    for path, wrong in files:
        if wrong is not None:
            damaged |= bool(wrong)
            names = "" if wrong else ", ".join(str(entry["path"]) for entry in mixture.read(path))
            for line in wrong or [f"{path}: its files are intact, and hold what they held when it was written: {names}"]:
                print(line)
            continue
        faults = verify(path)
        damaged |= bool(faults)
        for fault in faults or [f"{describe(path, tokenfile.TokenFile.open(path).header)}: intact"]:
            print(fault)
    return int(damaged)


def written(file: tokenfile.TokenFile, first: int, last: int, tokenizer: tokenizers.Tokenizer | None) -> str:
    """Tokens as text (as ids without a tokenizer); what does not count in the loss stands between ⟦ and ⟧."""

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
    """The tokenizer that made the file, or None and why it is not here."""
    recorded = file.header["tokenizer"]
    try:
        tokenizer = tokenizers.load_tokenizer(recorded["name"])
    except tokenizers.TokenizerError as e:
        return None, f"{e}; ids are shown"
    if tokenizer.sha256 != recorded["sha256"]:
        return None, "the tokenizer of that name is another one now; ids are shown"
    return tokenizer, ""


def show_document(file: tokenfile.TokenFile, i: int, tokenizer: tokenizers.Tokenizer | None) -> None:
    first, last = int(file.doc_offsets[i]), int(file.doc_offsets[i + 1])
    print(f"--- document {i}: tokens {first:,} to {last:,}")
    print(written(file, first, min(last, first + 200), tokenizer))


def run_show(args: argparse.Namespace) -> int:
    file = tokenfile.TokenFile.open(args.file)
    header = file.header
    print(describe(args.file, header))
    print("made from: " + ", ".join(header["sources"]))
    if header["loss"]:
        print(f"{header['loss']['tokens']:,} tokens count in the loss; the others stand between ⟦ and ⟧")
    tokenizer, note = tokenizer_of(file)
    if note:
        print(note)
    for i in range(min(args.documents, header["documents"])):
        show_document(file, i, tokenizer)
    return 0


def run_mix(args: argparse.Namespace) -> int:
    named: list[tuple[str, float | None]] = []
    for item in args.files:
        path, given, text = (item, "", "") if item.endswith(".tok") else item.rpartition("=")
        try:
            named.append((path if given else item, float(text) if given else None))
        except ValueError:
            raise mixture.MixtureError(f"{item}: a weight is a number above 0, as in {path}=0.5") from None
    if args.output.exists() and not args.force:
        raise mixture.MixtureError(f"--output={args.output}: exists. Choose another name, or replace it with --force.")
    if not 0 <= args.tokens < math.inf:
        raise mixture.MixtureError(f"--tokens={args.tokens}: is a count of tokens")
    weighed = mixture.weigh(named, args.by, args.temperature)
    mixture.write(args.output, weighed)
    tokens = int(args.tokens) or sum(file.header["tokens"] for file, _ in weighed)
    print(f"{'weight':>10} {'tokens':>18} {'epochs':>10}   in {tokens:,} tokens")
    for path, held, weight, epochs in mixture.table(weighed, tokens):
        print(f"{weight:10.4f} {held:18,} {epochs:10.3f}   {path}")
    return 0


def run_stats(args: argparse.Namespace) -> int:
    for name, least in (("seq_len", 1), ("max_segments", 0)):
        if getattr(args, name) < least:
            raise PrepareError(f"--{name.replace('_', '-')}={getattr(args, name)}: must be at least {least}")
    from jaxtrain.data import stats

    for path in args.files:
        found = stats.stats(path, args.seq_len, Data(max_segments=args.max_segments).most_documents)
        if args.json:
            print(json.dumps(found))
            continue
        file = tokenfile.TokenFile.open(path)
        print(describe(path, file.header))
        print("\n".join(stats.lines(found)))
        tokenizer, note = tokenizer_of(file)
        if note:
            print(note)
        for i in stats.sample(file, args.documents):
            show_document(file, i, tokenizer)
    return 0


def run_bench(args: argparse.Namespace) -> int:
    for name in ("batch", "seq_len", "seconds"):
        if getattr(args, name) <= 0:
            raise PrepareError(f"--{name.replace('_', '-')}={getattr(args, name)}: must be above 0")
    from jaxtrain.data.bench import bench

    result = bench(args.batch, args.seq_len, args.seconds)
    print(
        f"{result['tokens_per_s'] / 1e6:,.0f} million tokens/s at {args.batch} x {args.seq_len} on one thread, no prefetch "
        f"({result['batch_us']:,.0f} us a batch; {result['tokens_per_cpu_s'] / 1e6:,.0f} million per second of CPU time; "
        f"opened in {result['open_s']:.2f} s)"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 damaged file, failing disk or process; 2 wrong command or input; 130 Ctrl-C. Only 0 means written."""
    args = parser().parse_args(argv)
    command = {
        "prepare": run_prepare,
        "verify": run_verify,
        "show": run_show,
        "mix": run_mix,
        "stats": run_stats,
        "bench": run_bench,
    }[args.command]

    def act() -> int:
        try:
            return command(args)
        except FileNotFoundError as e:
            raise PrepareError(f"{e.filename}: no such file") from e
        except PermissionError as e:
            raise PrepareError(f"{e.filename}: not permitted") from e
        except WorkerDied as e:
            print(f"error: {e}", file=sys.stderr)
            return FAILED

    return run_action(act, (PrepareError, tokenizers.TokenizerError, tokenfile.TokenFileError, mixture.MixtureError))


if __name__ == "__main__":
    sys.exit(main())
