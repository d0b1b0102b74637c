"""`python -m jaxtrain hf`: import and export of Hugging Face checkpoints, their logits, and the published sizes."""

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware, stores
from jaxtrain.config.command_line import Args, Invalid, Parser, output_file, path
from jaxtrain.config.schema import LOW_BITS, OWN, Model
from jaxtrain.hf.check import PYTHON
from jaxtrain.hf.folder import locate_folder, open_folder
from jaxtrain.metrics.files import write_output
from jaxtrain.models import flops, presets
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.runtime.startup import start_jax

say = functools.partial(print, flush=True)


def parse_size(text: str) -> str:
    """Return the text of a size such as 5GB, after a check that huggingface_hub can parse it."""
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", text):
        raise Invalid("must be a number with KB, MB, GB or TB")
    return text


def parse_setting(text: str) -> tuple[str, Any]:
    """Return (key, value) of a setting of config.json such as rope_theta=10000.0. A value that is not JSON is text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise Invalid("must be KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parser() -> Parser:
    """Return the parser of the command line."""
    top = Parser(
        "hf",
        "Hugging Face checkpoints in and out.",
        examples=(
            "import meta-llama/Llama-3.2-1B --out=runs/llama32-1b",
            "export runs/finetuned --out=served --dtype=bf16",
            "check runs/finetuned served",
            "logits served --tokens=tokens.npy --out=logits.npy",
        ),
        notes="Exit codes: 0 done; 1 check found a difference, or the disk failed; 2 the command or its input is "
        "wrong, nothing "
        "was written.",
    )
    folder = "a model's folder, or its name in the hub's cache on this machine"
    run, any_model = "a run's folder, or one of its checkpoints/<step>", "a run, a checkpoint, or a Hugging Face folder"
    dtypes, base = ("auto", "f32", "bf16"), "for a run with adapters: the folder of its base, if it was moved"
    average = "the average of the weights (train.ema_decay), not the weights of the last step"

    cli = top.command("import", "a Hugging Face folder to a checkpoint that training and sampling start from")
    cli.argument("folder", folder, "DIR")
    cli.option("out", "the folder to write, as a run's folder", "CKPT", type=path, required=True)
    text = "auto: the smaller type that stores all tensors without rounding; fp8, nf4, mxfp4: matrices as lora.base stores them"
    cli.option("dtype", text, "DTYPE", "auto", choices=(*dtypes, *LOW_BITS))
    cli.option(
        "set",
        "a key of config.json to add or replace",
        "KEY=VALUE",
        type=parse_setting,
        repeat=True,
        example="rope_theta=10000.0",
    )

    cli = top.command("config", "lines for a config file: the model of a Hugging Face folder")
    cli.argument("folder", folder, "DIR")

    cli = top.command("export", "a checkpoint to a Hugging Face folder, for transformers and vLLM")
    cli.argument("checkpoint", run, "CKPT")
    cli.option("out", "the folder to write", "DIR", type=path, required=True)
    cli.option("dtype", "auto: the dtype of the stored matrices; bf16 rounds float32 weights", "DTYPE", "auto", choices=dtypes)
    cli.option("shard-size", "largest size of a safetensors file (default 5GB)", "SIZE", "5GB", type=parse_size)
    cli.option("raw", "jaxtrain's own names and settings, for a model of any family")
    cli.option("tokenizer", "the tokenizer's folder, if it was moved", "DIR")
    cli.option("base", base, "DIR")
    cli.option("ema", average)
    cli.option("force", "replace an existing folder")

    cli = top.command("export-adapter", "the adapters of a LoRA run in PEFT's format")
    cli.argument("checkpoint", run, "CKPT")
    cli.option("out", "the folder to write; it must hold no adapter yet", "DIR", type=path, required=True)
    cli.option("base", "the base's name for PEFT (default: the model that the base was imported from)", "NAME")
    cli.option("ema", average)

    cli = top.command("import-adapter", "PEFT's adapters to a checkpoint that samples, evaluates and exports")
    cli.argument("folder", "a folder with adapter_config.json and adapter_model.safetensors", "DIR")
    cli.option("base", "the model of the adapters", "CKPT_OR_DIR", required=True)
    cli.option("out", "the folder to write, as a run's folder", "CKPT", type=path, required=True)

    cli = top.command("check", "the first layer that differs from transformers, in activations or gradients")
    cli.argument("checkpoint", f"what jaxtrain computes: {any_model}", "CKPT_OR_DIR")
    cli.argument("folder", "what transformers computes: a Hugging Face folder", "DIR")
    cli.option("base", base, "DIR")
    cli.option("ema", average)
    cli.option("tokens", "ids [B, T]; default: two rows of random ones", "T.npy", type=path)
    text = "exit code 1 above this relative difference of a part, or ten times it of all logits (default 1e-4)"
    cli.option("tolerance", text, "X", 1e-4, type=float)
    cli.option("json", "all differences, for programs", "FILE", type=output_file)
    cli.option("python", f"an interpreter that has transformers and torch (or set {PYTHON})", "PYTHON")

    cli = top.command("logits", "logits of given tokens, in float32")
    cli.argument("checkpoint", any_model, "CKPT_OR_DIR")
    cli.option("base", base, "DIR")
    cli.option("ema", average)
    cli.option("tokens", "ids, integers [B, T] or [T]", "T.npy", type=path, required=True)
    text = "the document of each token, from 1, in the shape of the tokens; 0: padding. Default: one document a row"
    cli.option("segments", text, "S.npy", type=path)
    cli.option("out", "f32 [B, T, V]", "L.npy", type=path, required=True)
    cli.option("precision", "precision of the arithmetic (default f32)", "PRECISION", "f32", choices=("f32", "bf16"))

    top.command("presets", "the published sizes that a config file can start from")
    return top


def run_import(args: Args) -> int:
    """Import a Hugging Face folder. Return the exit code."""
    from jaxtrain.hf.importing import import_folder, origin_of
    from jaxtrain.hf.in_bits import InBits
    from jaxtrain.hf.model import check_built

    folder = open_folder(args.folder, dict(args.set or ()))
    check_built(origin_of(folder))
    in_bits = InBits(folder, args.dtype) if args.dtype in LOW_BITS else None
    import_folder(folder, args.out, "auto" if in_bits else args.dtype, say, in_bits)
    return 0


def run_config(args: Args) -> int:
    """Print the model of a Hugging Face folder as keys of config.Model. Return the exit code."""
    folder = open_folder(args.folder)
    for key, value in dataclasses.asdict(folder.model).items():
        say(f"config.model.{key} = {value!r}")
    for key, value in folder.run().own if folder.raw else ():
        say(f"config.{OWN}.{key} = {value!r}")
    for note in folder.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def run_export(args: Args) -> int:
    """Export a checkpoint as a Hugging Face folder. Return the exit code."""
    from jaxtrain.hf.exporting import export_model

    options = {name: getattr(args, name) for name in ("dtype", "shard_size", "tokenizer", "base", "ema", "force", "raw")}
    export_model(args.checkpoint, args.out, **options, say=say)
    return 0


def run_export_adapter(args: Args) -> int:
    """Export a checkpoint's adapters for PEFT. Return the exit code."""
    from jaxtrain.hf.peft import export_adapter

    step, names, notes = export_adapter(args.checkpoint, args.out, args.base, args.ema)
    say(f"{args.out}: {len(names)} tensors of step {step}")
    for note in notes:
        say(f"  {note}")
    return 0


def run_import_adapter(args: Args) -> int:
    """Import PEFT's adapters as a checkpoint. Return the exit code."""
    from jaxtrain.hf.peft import import_adapter

    run, notes = import_adapter(Path(args.folder), args.base, args.out)
    lora = run.lora
    scale = f"alpha {lora.alpha:g}{' (rslora)' * lora.rslora}"
    say(f"{args.out}: adapters of rank {lora.rank}, {scale}, of {lora.targets} beside {run.init.from_}")
    for note in notes:
        say(f"  {note}")
    return 0


def run_logits(args: Args) -> int:
    """Write a model's logits to an .npy file. Return the exit code."""
    import numpy as np

    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.model import logits_function, read_tokens
    from jaxtrain.metrics.files import replacing

    source = open_origin(args.checkpoint).choose(args.ema)
    source.announce(say)
    tokens_BT, segments_BT = read_tokens(args.tokens, args.segments or None, source.run().model.vocab_size)
    out_BTV = logits_function(source, args.precision, args.base)(tokens_BT, segments_BT)
    with replacing(args.out) as file:
        np.save(file, out_BTV)
    say(f"{args.out}: float32 {list(out_BTV.shape)}")
    return 0


def run_check(args: Args) -> int:
    """Compare a checkpoint with transformers, part by part. Return 1 if a difference is above --tolerance, else 0."""
    from jaxtrain.hf.check import compare_with_transformers

    python = args.python or os.environ.get(PYTHON, "") or sys.executable
    comparison = compare_with_transformers(args.checkpoint, args.folder, python, args.tokens or None, args.base, args.ema, say)
    first = comparison.first(args.tolerance)
    if args.json:
        text = json.dumps({"first": first, **dataclasses.asdict(comparison)})
        finite = json.loads(text, parse_constant=lambda _: None)  # JSON has no NaN
        write_output(args.json, json.dumps(finite, indent=1) + "\n")
    if comparison.parts:
        say("part                  activations  gradients  gradient of a weight (the most different)")
        for part in comparison.parts:
            say(f"{part.part:20}  {part.activations:11.1e}  {part.gradients:9.1e}  {part.weights:.1e} {part.worst}")
    else:
        say(f"logits alone are compared, not parts: {comparison.alone}")
    say(
        f"logits of the whole model: {comparison.logits:.1e}; largest difference {comparison.absolute:.3g} of logits up to "
        f"{comparison.range:.3g}; the likeliest token is the same at {comparison.likeliest:.1%} of the positions"
    )
    if comparison.unused:
        say(f"not compared, because these tokens or transformers do not use it: {'; '.join(comparison.unused)}")
    say(f"{f'first difference: {first}' if first else 'the same'} (--tolerance={args.tolerance:g})")
    return 1 if first else 0


def run_presets(args: Args) -> int:
    """Print all presets: the published sizes of models. Return the exit code."""
    say("preset              family      parameters   active layers d_model   heads vocabulary")
    for name, keys in presets().items():
        model = Model(**keys)
        total, active = (f"{n / 1e9:.2f} G" for n in (flops.parameters(model)["total"], flops.active_parameters(model)))
        heads = f"{model.num_heads}/{model.num_kv_heads}"
        shape = f"{model.num_layers:6} {model.d_model:7} {heads:>7} {model.vocab_size:10}"
        say(f"{name:19} {model.family:11} {total:>10} {active:>8} {shape}")
    return 0


ACTS = {
    "import": run_import,
    "config": run_config,
    "export": run_export,
    "export-adapter": run_export_adapter,
    "import-adapter": run_import_adapter,
    "check": run_check,
    "logits": run_logits,
    "presets": run_presets,
}


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""

    def act(args: Args) -> int:
        if "folder" in args:
            locate_folder(args.folder)
        if "checkpoint" in args and (problem := stores.missing_folder(args.checkpoint)):
            raise HuggingFaceError(f"{args.checkpoint}: {problem}")
        if args.command not in ("config", "presets"):
            start_jax(hardware.probe())
        return ACTS[args.command](args)

    # HuggingFaceError is a ValueError, as are the errors of a layout and of a config.
    return run_command(parser(), argv, act, errors=(CheckpointError, ValueError))
