"""`python -m jaxtrain hf`: import and export of Hugging Face checkpoints, their logits, and the published sizes."""

import argparse
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands.command import run_action
from jaxtrain.config import hardware, stores
from jaxtrain.config.command_line import ArgumentParser
from jaxtrain.config.commands import spelled
from jaxtrain.config.schema import OWN, Model
from jaxtrain.hf.folder import is_raw, locate, open_folder
from jaxtrain.models import flops, presets
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.runtime.startup import start_jax

EXAMPLES = """examples:
  python -m jaxtrain hf import meta-llama/Llama-3.2-1B --out=runs/llama32-1b
  python -m jaxtrain hf export runs/finetuned --out=served --dtype=bf16
  python -m jaxtrain hf check runs/finetuned served
  python -m jaxtrain hf logits served --tokens=tokens.npy --out=logits.npy
"""
say = functools.partial(print, flush=True)
SCRIPT = Path(__file__).parents[1] / "hf" / "torch_logits.py"
PYTHON = "JAXTRAIN_REFERENCE_PYTHON"


def size(text: str) -> str:
    """Return the text of a size such as 5GB, after a check that huggingface_hub can parse it."""
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number with KB, MB, GB or TB, as 5GB")
    return text


def path(text: str) -> Path:
    """Return a path with ~ expanded, because shells do not expand the ~ in --out=~/x."""
    return Path(text).expanduser()


def setting(text: str) -> tuple[str, Any]:
    """Return (key, value) of a setting of config.json such as rope_theta=10000.0. A value that is not JSON is text."""
    key, given, value = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE, as rope_theta=10000.0")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `python -m jaxtrain hf`."""
    top = ArgumentParser(
        spelled("python -m jaxtrain hf"),
        description="Hugging Face checkpoints in and out.",
        epilog=spelled(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    folder = "a model's folder, or its name in the hub's cache on this machine"
    run, any_model = "a run's folder, or one of its checkpoints/<step>", "a run, a checkpoint, or a Hugging Face folder"
    dtypes: dict[str, Any] = {"choices": ("auto", "f32", "bf16"), "default": "auto"}
    base: dict[str, Any] = {"default": "", "metavar": "DIR"}
    base["help"] = "for a run with adapters: the folder of its base, if it was moved"

    p = commands.add_parser("import", help="a Hugging Face folder to a checkpoint that training and sampling start from")
    p.set_defaults(act=run_import)
    p.add_argument("folder", metavar="DIR", help=folder)
    p.add_argument("--out", type=path, required=True, metavar="CKPT", help="the folder to write, as a run's folder")
    p.add_argument("--dtype", **dtypes, help="auto: the smaller type that stores all tensors without rounding")
    text = "a key of config.json to add or replace"
    p.add_argument("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help=text)

    p = commands.add_parser("config", help="lines for a config file: the model of a Hugging Face folder")
    p.set_defaults(act=run_config)
    p.add_argument("folder", metavar="DIR", help=folder)

    p = commands.add_parser("export", help="a checkpoint to a Hugging Face folder, for transformers and vLLM")
    p.set_defaults(act=run_export)
    p.add_argument("checkpoint", metavar="CKPT", help=run)
    p.add_argument("--out", type=path, required=True, metavar="DIR", help="the folder to write")
    p.add_argument("--dtype", **dtypes, help="auto: the dtype of the stored matrices; bf16 rounds float32 weights")
    p.add_argument(
        "--shard-size", type=size, default="5GB", metavar="SIZE", help="largest size of a safetensors file (default 5GB)"
    )
    text = "jaxtrain's own names and settings, for a model of any family"
    p.add_argument("--raw", action="store_true", help=text)
    p.add_argument("--tokenizer", default="", metavar="DIR", help="the tokenizer's folder, if it was moved")
    p.add_argument("--base", **base)
    p.add_argument("--force", action="store_true", help="replace an existing folder")

    p = commands.add_parser("export-adapter", help="the adapters of a LoRA run in PEFT's format")
    p.set_defaults(act=run_export_adapter)
    p.add_argument("checkpoint", metavar="CKPT", help=run)
    p.add_argument("--out", type=path, required=True, metavar="DIR", help="the folder to write; it must hold no adapter yet")
    text = "the base's name for PEFT (default: the model that the base was imported from)"
    p.add_argument("--base", default="", metavar="NAME", help=text)

    p = commands.add_parser("import-adapter", help="PEFT's adapters to a checkpoint that samples, evaluates and exports")
    p.set_defaults(act=run_import_adapter)
    p.add_argument("folder", metavar="DIR", help="a folder with adapter_config.json and adapter_model.safetensors")
    p.add_argument("--base", required=True, metavar="CKPT_OR_DIR", help="the model of the adapters")
    p.add_argument("--out", type=path, required=True, metavar="CKPT", help="the folder to write, as a run's folder")

    p = commands.add_parser("check", help="logits of a checkpoint and of a Hugging Face folder, compared through transformers")
    p.set_defaults(act=run_check)
    p.add_argument("checkpoint", metavar="CKPT_OR_DIR", help=f"computed by jaxtrain: {any_model}")
    p.add_argument("folder", metavar="DIR", help="computed by transformers: a Hugging Face folder")
    p.add_argument("--base", **base)
    p.add_argument("--tokens", type=path, metavar="T.npy", help="ids [B, T]; default: 2 x 64 random ones")
    p.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="exit code 1 above this difference (default 1e-3)"
    )
    text = f"an interpreter that has transformers and torch (or set {PYTHON})"
    p.add_argument("--python", default="", metavar="PYTHON", help=text)

    p = commands.add_parser("logits", help="logits of given tokens, in float32")
    p.set_defaults(act=run_logits)
    p.add_argument("checkpoint", metavar="CKPT_OR_DIR", help=any_model)
    p.add_argument("--base", **base)
    p.add_argument("--tokens", type=path, required=True, metavar="T.npy", help="ids, integers [B, T] or [T]")
    text = "the document of each token, from 1, in the shape of the tokens; 0: padding. Default: one document a row"
    p.add_argument("--segments", type=path, metavar="S.npy", help=text)
    p.add_argument("--out", type=path, required=True, metavar="L.npy", help="f32 [B, T, V]")
    p.add_argument("--precision", choices=("f32", "bf16"), default="f32", help="precision of the arithmetic (default f32)")

    p = commands.add_parser("presets", help="the published sizes that a config file can start from")
    p.set_defaults(act=run_presets)
    return top


def run_import(args: argparse.Namespace) -> int:
    """Import a Hugging Face folder. Return the exit code."""
    from jaxtrain.hf.importing import import_folder, origin_of
    from jaxtrain.hf.model import check_built

    folder = open_folder(args.folder, dict(args.set))
    check_built(origin_of(folder))
    import_folder(folder, args.out, args.dtype, say)
    return 0


def run_config(args: argparse.Namespace) -> int:
    """Print the model of a Hugging Face folder as keys of config.Model. Return the exit code."""
    folder = open_folder(args.folder)
    for key, value in dataclasses.asdict(folder.model).items():
        say(f"config.model.{key} = {value!r}")
    for key, value in folder.run().own if folder.raw else ():
        say(f"config.{OWN}.{key} = {value!r}")
    for note in folder.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Export a checkpoint as a Hugging Face folder. Return the exit code."""
    from jaxtrain.hf.exporting import export

    how = {name: getattr(args, name) for name in ("dtype", "shard_size", "tokenizer", "base", "force", "raw")}
    export(args.checkpoint, args.out, **how, say=say)
    return 0


def run_export_adapter(args: argparse.Namespace) -> int:
    """Export a checkpoint's adapters for PEFT. Return the exit code."""
    from jaxtrain.hf.peft import export_adapter

    step, names = export_adapter(args.checkpoint, args.out, args.base)
    say(f"{args.out}: {len(names)} tensors of step {step}")
    return 0


def run_import_adapter(args: argparse.Namespace) -> int:
    """Import PEFT's adapters as a checkpoint. Return the exit code."""
    from jaxtrain.hf.peft import import_adapter

    run, notes = import_adapter(Path(args.folder), args.base, args.out)
    lora = run.lora
    say(f"{args.out}: adapters of rank {lora.rank}, alpha {lora.alpha:g}, of {lora.targets} beside {run.init.from_}")
    for note in notes:
        say(f"  {note}")
    return 0


def run_logits(args: argparse.Namespace) -> int:
    """Write a model's logits to an .npy file. Return the exit code."""
    import numpy as np

    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.model import logits_of, read_tokens
    from jaxtrain.metrics.files import replacing

    source = open_origin(args.checkpoint)
    source.announce(say)
    tokens_BT, segments_BT = read_tokens(args.tokens, args.segments, source.run().model.vocab_size)
    out_BTV = logits_of(source, args.precision, args.base)(tokens_BT, segments_BT)
    with replacing(args.out) as file:
        np.save(file, out_BTV)
    say(f"{args.out}: float32 {list(out_BTV.shape)}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Compare a checkpoint's logits with those of transformers. Return 1 if they differ by more than --tolerance, else 0."""
    import numpy as np

    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.model import logits_of, read_tokens

    python = args.python or os.environ.get(PYTHON, "") or sys.executable
    if shutil.which(python) is None:
        raise HuggingFaceError(f"--python = {python}: no such program. Name an interpreter that has transformers and torch.")
    if is_raw(locate(args.folder)):
        rule = "has jaxtrain's own names, which transformers does not read"
        raise HuggingFaceError(f"{args.folder}: {rule}. Fix: name a folder that hf export wrote without --raw.")
    source = open_origin(args.checkpoint)
    source.announce(say)
    vocab = source.run().model.vocab_size
    if args.tokens:
        tokens_BT, segments_BT = read_tokens(args.tokens, None, vocab)
    else:
        tokens_BT = np.random.default_rng(0).integers(0, vocab, (2, 64), np.int32)
        segments_BT = np.ones_like(tokens_BT)
    with tempfile.TemporaryDirectory() as scratch:
        tokens, theirs = Path(scratch, "tokens.npy"), Path(scratch, "logits.npy")
        np.save(tokens, tokens_BT)
        command = [python, SCRIPT, locate(args.folder), tokens, theirs]
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if ended.returncode or not theirs.exists():
            (reason,) = ended.stderr.strip().splitlines()[-1:] or ["no error message"]
            hint = f" Name an interpreter that has transformers and torch: --python, or {PYTHON}." * ("No module" in reason)
            raise HuggingFaceError(f"transformers in {python} did not compute {args.folder}: {reason}.{hint}")
        theirs_BTV = np.load(theirs)
    ours_BTV = logits_of(source, base=args.base)(tokens_BT, segments_BT)
    if ours_BTV.shape != theirs_BTV.shape:
        raise HuggingFaceError(f"{args.folder}: logits are {list(theirs_BTV.shape)}, those here {list(ours_BTV.shape)}.")
    by_position_T = np.abs(ours_BTV - theirs_BTV).max(axis=(0, 2))
    say("position  largest difference")
    for t, difference in enumerate(by_position_T):
        say(f"{t:8d}  {difference:.3g}")
    same, worst = float((ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).mean()), float(by_position_T.max())
    say(
        f"largest difference {worst:.3g} of logits up to {float(np.abs(theirs_BTV).max()):.3g}; "
        f"the likeliest token is the same at {same:.1%} of {tokens_BT.size} positions"
    )
    if worst <= args.tolerance:
        return 0
    say(f"above --tolerance={args.tolerance:g}: these are not the same model")
    return 1


def run_presets(args: argparse.Namespace) -> int:
    """Print all presets: the published sizes of models. Return the exit code."""
    say("preset            family     parameters   active layers d_model   heads vocabulary")
    for name, keys in presets().items():
        model = Model(**keys)
        total, active = (f"{n / 1e9:.2f} G" for n in (flops.parameters(model)["total"], flops.active_parameters(model)))
        heads = f"{model.num_heads}/{model.num_kv_heads}"
        shape = f"{model.num_layers:6} {model.d_model:7} {heads:>7} {model.vocab_size:10}"
        say(f"{name:17} {model.family:10} {total:>10} {active:>8} {shape}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: `check` found a difference, or the disk failed. 2: wrong command or input, nothing was written.
    """
    args = parser().parse_args(argv)

    def act() -> int:
        if hasattr(args, "folder"):
            locate(args.folder)
        if hasattr(args, "checkpoint") and (missing := stores.missing(args.checkpoint)):
            raise HuggingFaceError(f"{args.checkpoint}: {missing}")
        if args.act not in (run_config, run_presets):
            start_jax(hardware.probe())
        return args.act(args)

    # HuggingFaceError is a ValueError, as are the errors of a layout and of a config.
    return run_action(act, (CheckpointError, ValueError))
