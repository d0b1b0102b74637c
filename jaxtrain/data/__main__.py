"""`python -m jaxtrain.data`: make, check, show and time token files."""

import argparse
import sys
from pathlib import Path

from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.prepare import SHARD_MB, prepare, validation_path
from jaxtrain.data.readers import FORMATS, PrepareError
from jaxtrain.data.shards import WorkerDied
from jaxtrain.data.template import LOSSES

EXAMPLES = """examples:
  python -m jaxtrain.data prepare --input='books/*.txt' --output=books.tok --validation=0.01
  python -m jaxtrain.data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NAME --output=corpus.tok --validation=0.001
  python -m jaxtrain.data verify corpus.tok corpus.val.tok
"""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "python -m jaxtrain.data", description="Make, check, show and time token files.", epilog=EXAMPLES, formatter_class=raw
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    p = commands.add_parser(
        "prepare",
        help="text, JSON lines or Parquet to a token file",
        description="Writes a token file. It appears under its name only when it is whole; the same command goes on with a run "
        "that was cut off, from its finished parts.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    p.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="GLOB",
        help="files to read, ** for subfolders, or a data set hf:DATASET[:CONFIG][:SPLIT]; repeatable",
    )
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
    for path in args.files:
        faults = tokenfile.verify(path)
        damaged |= bool(faults)
        for fault in faults or [f"{describe(path, tokenfile.TokenFile.open(path).header)}: intact"]:
            print(fault)
    return int(damaged)


def run_show(args: argparse.Namespace) -> int:
    file = tokenfile.TokenFile.open(args.file)
    header = file.header
    print(describe(args.file, header))
    print("made from: " + ", ".join(header["sources"]))
    try:
        tokenizer = tokenizers.load_tokenizer(header["tokenizer"]["name"])
        same = tokenizer.sha256 == header["tokenizer"]["sha256"]
        note = "" if same else "the tokenizer of that name is another one now; ids are shown"
    except tokenizers.TokenizerError as e:
        tokenizer, same, note = None, False, f"{e}; ids are shown"
    if note:
        print(note)
    for i in range(min(args.documents, header["documents"])):
        first, last = int(file.doc_offsets[i]), int(file.doc_offsets[i + 1])
        ids = file.tokens[first : min(last, first + 200)]
        print(f"--- document {i}: tokens {first:,} to {last:,}")
        print(tokenizer.decode(ids) if tokenizer and same else " ".join(map(str, ids)))
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
    command = {"prepare": run_prepare, "verify": run_verify, "show": run_show, "bench": run_bench}[args.command]
    try:
        return command(args)
    except (PrepareError, tokenizers.TokenizerError, tokenfile.TokenFileError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except FileNotFoundError as e:
        print(f"error: {e.filename}: no such file", file=sys.stderr)
        return 2
    except PermissionError as e:
        print(f"error: {e.filename}: not permitted", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except WorkerDied as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no token file was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
