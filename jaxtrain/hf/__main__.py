"""`python -m jaxtrain.hf`: Hugging Face checkpoints in and out, and logits to check them by."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import hardware, stores
from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.command_line import ArgumentParser, run_action
from jaxtrain.commands import spelled
from jaxtrain.hf.folder import locate
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.startup import start_jax

EXAMPLES = """examples:
  python -m jaxtrain.hf import meta-llama/Llama-3.2-1B --out=runs/llama32-1b
  python -m jaxtrain.hf export runs/finetuned --out=served --dtype=bf16
  python -m jaxtrain.hf check runs/finetuned served
  python -m jaxtrain.hf logits served --tokens=tokens.npy --out=logits.npy
"""
SCRIPT = Path(__file__).parent / "torch_logits.py"
PYTHON = "JAXTRAIN_REFERENCE_PYTHON"
SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size(text: str) -> int:
    """5GB or 500MiB in bytes."""
    for unit, scale in sorted(SIZES.items(), key=lambda item: -len(item[0])):
        if text.endswith(unit):
            try:
                return int(float(text.removesuffix(unit)) * scale)
            except ValueError:
                break
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number with one of {', '.join(SIZES)}, as 5GB")


def place(text: str) -> Path:
    """A path, also as --out=~/x, which shells leave as it is."""
    return Path(text).expanduser()


def setting(text: str) -> tuple[str, Any]:
    """rope_theta=10000.0 as a key of config.json and its value."""
    key, given, value = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE, as rope_theta=10000.0")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = ArgumentParser(
        spelled("python -m jaxtrain.hf"),
        description="Hugging Face checkpoints in and out.",
        epilog=spelled(EXAMPLES),
        formatter_class=raw,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    p = commands.add_parser("import", help="a Hugging Face folder to a checkpoint that training and sampling start from")
    p.add_argument("folder", metavar="DIR", help="a model's folder, or its name in the hub's cache on this machine")
    p.add_argument("--out", type=place, required=True, metavar="CKPT", help="the folder to write, as a run's folder")
    p.add_argument(
        "--dtype", choices=("auto", "f32", "bf16"), default="auto", help="auto: one that holds all tensors as they are"
    )
    p.add_argument("--list", action="store_true", help="say what becomes of each tensor")
    p.add_argument(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="a key of config.json that is not there"
    )
    p = commands.add_parser("config", help="what a config file has to say of the model in a Hugging Face folder")
    p.add_argument("folder", metavar="DIR", help="a model's folder, or its name in the hub's cache on this machine")
    p = commands.add_parser("export", help="a checkpoint to a Hugging Face folder, for transformers and vLLM")
    p.add_argument("checkpoint", metavar="CKPT", help="a run's folder, or one of its checkpoints/<step>")
    p.add_argument("--out", type=place, required=True, metavar="DIR", help="the folder to write")
    p.add_argument(
        "--dtype",
        choices=("auto", "f32", "bf16"),
        default="auto",
        help="auto: that of the matrices, as stored; bf16 rounds float32 weights",
    )
    p.add_argument("--shard-size", type=size, default=size("5GB"), metavar="SIZE", help="of a safetensors file, at most (5GB)")
    p.add_argument("--tokenizer", default="", metavar="DIR", help="where the tokenizer is now, if it moved since training")
    p.add_argument("--base", default="", metavar="DIR", help="of a run with adapters, where its base is now, if it moved")
    p.add_argument("--force", action="store_true", help="replace an existing folder")
    p = commands.add_parser("export-adapter", help="the adapters of a LoRA run in PEFT's format")
    p.add_argument("checkpoint", metavar="CKPT", help="a run's folder, or one of its checkpoints/<step>")
    p.add_argument("--out", type=place, required=True, metavar="DIR", help="the folder to write; it may hold no adapter yet")
    p.add_argument("--base", default="", metavar="NAME", help="what PEFT's users load it beside (default: the base's place)")
    p = commands.add_parser("import-adapter", help="PEFT's adapters to a checkpoint that samples, evaluates and exports")
    p.add_argument("folder", metavar="DIR", help="with adapter_config.json and adapter_model.safetensors")
    p.add_argument("--base", required=True, metavar="CKPT_OR_DIR", help="the model that they stand beside")
    p.add_argument("--out", type=place, required=True, metavar="CKPT", help="the folder to write, as a run's folder")
    p = commands.add_parser("check", help="logits of a checkpoint and of a Hugging Face folder, compared through transformers")
    p.add_argument(
        "checkpoint", metavar="CKPT_OR_DIR", help="what jaxtrain computes: a run, a checkpoint, a Hugging Face folder"
    )
    p.add_argument("folder", metavar="DIR", help="what transformers computes: a Hugging Face folder")
    p.add_argument("--base", default="", metavar="DIR", help="of a run with adapters, where its base is now, if it moved")
    p.add_argument("--tokens", type=place, metavar="T.npy", help="ids [B, T]; without, 2 x 64 drawn at random")
    p.add_argument("--tolerance", type=float, default=1e-3, metavar="X", help="exit code 1 above this difference (1e-3)")
    p.add_argument(
        "--python", default="", metavar="PYTHON", help=f"an interpreter that has transformers and torch (or set {PYTHON})"
    )
    p = commands.add_parser("logits", help="f32 logits of given tokens")
    p.add_argument("checkpoint", metavar="CKPT_OR_DIR", help="a run, a checkpoint, or a Hugging Face folder")
    p.add_argument("--base", default="", metavar="DIR", help="of a run with adapters, where its base is now, if it moved")
    p.add_argument("--tokens", type=place, required=True, metavar="T.npy", help="ids, integers [B, T] or [T]")
    p.add_argument(
        "--segments", type=place, metavar="S.npy", help="documents, from 1, as the tokens; 0: padding. Without: one a row"
    )
    p.add_argument("--out", type=place, required=True, metavar="L.npy", help="f32 [B, T, V]")
    p.add_argument("--precision", choices=("f32", "bf16"), default="f32", help="of the arithmetic (f32)")
    return top


def say(line: str) -> None:
    print(line, flush=True)


def run_import(args: argparse.Namespace) -> int:
    from jaxtrain.hf.folder import open_folder
    from jaxtrain.hf.importing import import_folder

    import_folder(open_folder(args.folder, dict(args.set)), args.out, args.dtype, say, args.list)
    return 0


def run_config(args: argparse.Namespace) -> int:
    from jaxtrain.hf.folder import open_folder

    for key, value in dataclasses.asdict(open_folder(args.folder).model).items():
        say(f"config.model.{key} = {value!r}")
    return 0


def run_export(args: argparse.Namespace) -> int:
    from jaxtrain.hf.exporting import export, open_source

    source = open_source(args.checkpoint, args.base)
    how = {"dtype": args.dtype, "shard_bytes": args.shard_size, "tokenizer": args.tokenizer, "force": args.force}
    export(source, args.out, **how, say=say)
    return 0


def run_export_adapter(args: argparse.Namespace) -> int:
    from jaxtrain.hf import adapters

    step, names = adapters.export(args.checkpoint, args.out, args.base)
    say(f"{args.out}: {len(names)} tensors of step {step}")
    return 0


def run_import_adapter(args: argparse.Namespace) -> int:
    from jaxtrain.hf import adapters

    run, notes = adapters.import_adapter(Path(args.folder), args.base, args.out)
    say(
        f"{args.out}: adapters of rank {run.lora.rank}, alpha {run.lora.alpha:g}, of {run.lora.targets} beside {run.init.from_}"
    )
    for note in notes:
        say(f"  {note}")
    return 0


def run_logits(args: argparse.Namespace) -> int:
    import numpy as np

    from jaxtrain.hf.logits import model_logits, read_tokens
    from jaxtrain.metrics import replacing

    run, logits = model_logits(args.checkpoint, args.precision, args.base)
    tokens_BT, segments_BT = read_tokens(args.tokens, args.segments, run.model.vocab_size)
    out = logits(tokens_BT, segments_BT)
    with replacing(args.out) as file:
        np.save(file, out)
    say(f"{args.out}: float32 {list(out.shape)}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    import numpy as np

    from jaxtrain.hf.logits import largest_differences, model_logits, read_tokens

    python = args.python or os.environ.get(PYTHON, "") or sys.executable
    run, logits = model_logits(args.checkpoint, "f32", args.base)
    if args.tokens:
        tokens_BT, segments_BT = read_tokens(args.tokens, None, run.model.vocab_size)
    else:
        tokens_BT = np.random.default_rng(0).integers(0, run.model.vocab_size, (2, 64), np.int32)
        segments_BT = np.ones_like(tokens_BT)
    with tempfile.TemporaryDirectory() as scratch:
        tokens, theirs = Path(scratch, "tokens.npy"), Path(scratch, "logits.npy")
        np.save(tokens, tokens_BT)
        ended = subprocess.run([python, SCRIPT, locate(args.folder), tokens, theirs], capture_output=True, text=True)
        if ended.returncode or not theirs.exists():
            words = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            hint = (
                f"Name an interpreter that has transformers and torch: --python, or {PYTHON}."
                if "No module" in words[0]
                else ""
            )
            raise HuggingFaceError(f"transformers in {python} did not compute {args.folder}: {words[0]}. {hint}".strip())
        theirs_BTV = np.load(theirs)
    ours_BTV = logits(tokens_BT, segments_BT)
    if ours_BTV.shape != theirs_BTV.shape:
        raise HuggingFaceError(f"{args.folder}: logits are {list(theirs_BTV.shape)}, those here {list(ours_BTV.shape)}.")
    by_position = largest_differences(ours_BTV, theirs_BTV)
    say("position  largest difference")
    for t, difference in enumerate(by_position):
        say(f"{t:8d}  {difference:.3g}")
    same = float((ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).mean())
    worst = float(by_position.max())
    say(
        f"largest difference {worst:.3g} of logits up to {float(np.abs(theirs_BTV).max()):.3g}; "
        f"the likeliest token is the same at {same:.1%} of {tokens_BT.size} positions"
    )
    if worst > args.tolerance:
        say(f"above --tolerance={args.tolerance:g}: these are not the same model")
    return int(not worst <= args.tolerance)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "import": run_import,
    "config": run_config,
    "export": run_export,
    "export-adapter": run_export_adapter,
    "import-adapter": run_import_adapter,
    "check": run_check,
    "logits": run_logits,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 `check` found a difference, or the disk failed; 2 what was asked is wrong, nothing was written."""
    args = parser().parse_args(argv)

    def act() -> int:
        if hasattr(args, "folder"):
            locate(args.folder)
        if hasattr(args, "checkpoint") and (missing := stores.missing(args.checkpoint)):
            raise HuggingFaceError(f"{args.checkpoint}: {missing}")
        start_jax(hardware.probe())
        return COMMANDS[args.command](args)

    # A HuggingFaceError is a ValueError, as is that of a layout, a config or an adapter that cannot be.
    return run_action(act, (CheckpointError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
