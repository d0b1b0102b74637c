"""`python -m jaxtrain data`: make, check and show token files."""

import sys
from collections.abc import Sequence

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import FAILED, Args, Parser, at_least, path
from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.chat_template import BUILTIN_TEMPLATES, LOSSES
from jaxtrain.data.documents import FORMATS, PrepareError
from jaxtrain.data.prepare import SHARD_MB, PrepareFailed, prepare_corpus, validation_path
from jaxtrain.data.seen import NGRAM, NGRAM_BYTES, SeenError
from jaxtrain.data.show import describe, describe_loss_tokens, show_file

EXAMPLES = (
    "prepare --input='books/*.txt' --output=books.tok --validation=0.01",
    "prepare --input='corpus/**/*.parquet' --tokenizer=hf:NAME --output=corpus.tok --validation=0.001",
    "verify corpus.tok corpus.val.tok",
    "seen --workdir=runs/tiny --step=100",
)


def parser() -> Parser:
    """Return the parser of the command line."""
    codes = "Exit codes: 0 done; 1 a file is damaged, or the disk or a process failed; 2 the command or its input is wrong."
    top = Parser("data", "Make, check and show token files.", examples=EXAMPLES, notes=codes)
    cli = top.command(
        "prepare",
        "Write a token file from text, JSON lines or Parquet. The file gets its name only when it is complete. After an "
        "interruption, the same command resumes from the finished parts.",
    )
    cli.option(
        "input",
        "files to read, ** for subfolders, or a data set hf:DATASET[:CONFIG][:SPLIT]; repeatable",
        "GLOB",
        required=True,
        repeat=True,
    )
    cli.option("output", "the token file to write", "NAME.tok", type=path, required=True)
    cli.option("tokenizer", "byte (default) | path of a tokenizer.json | hf:NAME (from the hub)", "SPEC")
    cli.option("eot", "the token that ends a document, if it is not a well-known one", "TOKEN")
    cli.option(
        "text-key",
        "JSON key or Parquet column of the text (default: text); several are joined by --separator",
        "KEY[,KEY]",
    )
    cli.option(
        "separator",
        r"text between the values of several keys; \n and \t are understood (default: a blank line, \n\n)",
        "TEXT",
        type=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
        may_be_empty=True,
    )
    cli.option(
        "chat", "rows are conversations: messages, conversations, prompt with completion or response, instruction and output"
    )
    cli.option("preference", "rows are pairs for loss.name=dpo: prompt, chosen, rejected; with --chat lists of messages")
    cli.option(
        "chat-template",
        f"writes conversations: {', '.join(BUILTIN_TEMPLATES)}, or a Jinja template (default: the tokenizer's own)",
        "NAME|FILE",
    )
    cli.option(
        "loss",
        "tokens of a conversation that count in the loss: of the assistant's turns (default), all, of its last turn",
        "|".join(LOSSES),
        choices=LOSSES,
    )
    cli.option(
        "format",
        "auto: .jsonl .ndjson a document a line, .parquet a document a row, others a document each; .gz .bz2 .xz .zst "
        "are unpacked",
        "|".join(FORMATS),
        choices=FORMATS,
    )
    cli.option(
        "validation", "put this fraction of the documents into NAME.val.tok (default 0)", "F", type=float, example="0.01"
    )
    cli.option("skip-bad-lines", "leave out lines that cannot be read, and count them")
    cli.option("force", "replace an existing output")
    cli.option(
        "processes",
        "number of processes that tokenize (default: one a core); the file does not depend on it",
        "N",
        type=int,
        example="8",
    )
    cli.option(
        "shard-mb",
        f"input of a part; an interrupted run repeats unfinished parts (default {SHARD_MB})",
        "MB",
        type=float,
        example=str(SHARD_MB),
    )
    cli = top.command("verify", "Read token files completely and check them.")
    cli.argument("files", "a token file", "FILE", several=True, type=path)
    cli = top.command("show", "figures and the first documents of a token file")
    cli.argument("file", "a token file", "FILE", type=path)
    cli.option("documents", "show the beginning of N documents (default 2)", "N", 2, type=at_least(0))
    cli.option("seq-len", "also show how full training's rows are with this data.seq_len", "T", 0, type=at_least(0))
    cli.option("max-segments", "data.max_segments (default: 0, at most 32)", "M", 0, type=at_least(0))
    cli = top.command(
        "seen",
        "Which documents a run reads at a step, when it reads a document, and which held-out documents are in its data. Give "
        "one of --step, --document, --text and --validation. Nothing is trained or written.",
    )
    cli.option("workdir", "a run's folder", "DIR", type=path, required=True, example="runs/tiny")
    cli.option(
        "step",
        "the documents of step N; with --validation: compare with steps 1 to N (default: all until now)",
        "N",
        type=at_least(1),
        example="100",
    )
    cli.option("document", "when document N, from 0, of a token file is read", "FILE:N")
    cli.option("text", "when the places of a text are read, found by its tokens", "TEXT")
    cli.option("validation", "how many documents of a held-out token file were read, exactly and by n-grams", "FILE", type=path)
    cli.option("ngram", f"tokens of an n-gram (default {NGRAM}, or {NGRAM_BYTES} of one byte)", "K", type=at_least(2))
    cli.option("show-text", "with --step: also print the tokens as text")
    return top


def run_prepare(args: Args) -> int:
    options = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in args.explicit - {"input", "output"}}
    for key in ("text_key", "separator"):
        if key in options and ("chat" in options or "preference" in options):
            kind, option = ("--chat" if "chat" in options else "--preference"), f"--{key.replace('_', '-')}"
            raise PrepareError(f"{option} = {options[key]!r}: {kind} does not use it. Fix: leave {option} out")
    headers = prepare_corpus(args.input, args.output, **{"processes": 0, **options})
    for file, header in zip((args.output, validation_path(args.output)), headers, strict=False):
        print(describe(file, header))
        if header["loss"]:
            print(f"{file}: {describe_loss_tokens(header)}")
    return 0


def run_show(args: Args) -> int:
    show_file(args.file, args.documents, args.seq_len, args.max_segments)
    return 0


def run_verify(args: Args) -> int:
    for file in args.files:
        if not file.is_file():
            raise PrepareError(f"{file}: {'is a folder' if file.is_dir() else 'no such file'}")
    damaged = False
    for file in args.files:
        fault = tokenfile.verify_file(file)
        damaged |= bool(fault)
        print(fault or f"{describe(file, tokenfile.TokenFile.open(file).header)}: intact")
    return int(damaged)


def run_seen(args: Args) -> int:
    """Print what is asked of a run's data. --step asks for a step alone, and ends the steps of --validation."""
    questions = [name for name in ("document", "text", "validation") if name in args.explicit]
    questions += ["step"] * ("step" in args.explicit and questions != ["validation"])
    if len(questions) != 1:
        raise SeenError("give one of --step=N, --document=FILE:N, --text=TEXT and --validation=FILE")
    for option, needed in (("ngram", "validation"), ("show-text", "step")):
        if option in args.explicit and questions != [needed]:
            raise SeenError(f"--{option}: belongs to --{needed}. Fix: leave --{option} out")
    from jaxtrain.report import data_seen  # these import jax, which takes seconds
    from jaxtrain.train.history import open_history

    history = open_history(args.workdir)
    match questions[0]:
        case "step":
            data_seen.print_step(history, args.step, args.show_text)
        case "document":
            data_seen.print_document(history, args.document)
        case "text":
            data_seen.print_text(history, args.text)
        case _:
            data_seen.print_overlap(
                history, args.validation, args.step if "step" in args.explicit else history.done, args.ngram or 0
            )
    return 0


ERRORS = (PrepareError, tokenizers.TokenizerError, tokenfile.TokenFileError, SeenError, CheckpointError)
ACTS = {"prepare": run_prepare, "verify": run_verify, "show": run_show, "seen": run_seen}


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""

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

    return run_command(parser(), argv, act, errors=ERRORS)
