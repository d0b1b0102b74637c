"""Continue a text with a trained model: `python -m jaxtrain.sample --workdir=runs/tiny --prompt="def "`."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from jaxtrain import config, hardware, stores
from jaxtrain.commands import spelled
from jaxtrain.startup import start_jax


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 2 where the question is wrong."""
    parser = argparse.ArgumentParser(
        prog=spelled("python -m jaxtrain.sample"), description="Continue a text with a trained model.", allow_abbrev=False
    )
    parser.add_argument("--workdir", required=True, help="a run's folder, or one of its checkpoints/<step>")
    own = "default: as in the run's config"
    parser.add_argument("--prompt", help=f"text to continue; several are separated by || ({own})")
    parser.add_argument("--max-tokens", type=int, help=f"tokens to write at most ({own})")
    parser.add_argument("--temperature", type=float, help=f"0: the likeliest token ({own})")
    parser.add_argument("--top-p", type=float, help=f"share of probability to draw from ({own})")
    parser.add_argument("--seed", type=int, help=f"of the draws ({own})")
    parser.add_argument("--tokenizer", default="", help="where the tokenizer is now, if it moved since training")
    parser.add_argument("--base", default="", help="of a run with adapters: where the model is now that they stand beside")
    args = parser.parse_args(argv)
    asked = ((f.name, getattr(args, f.name, None)) for f in dataclasses.fields(config.Sample))
    given = {name: value for name, value in asked if value is not None}
    for name, allowed, rule in (
        ("max_tokens", lambda n: n > 0, "must be at least 1"),
        ("temperature", lambda t: t >= 0, "must be 0 or more"),
        ("top_p", lambda p: 0 < p <= 1, "must be above 0 and at most 1"),
    ):
        if name in given and not allowed(given[name]):
            print(f"--{name.replace('_', '-')} = {given[name]}: {rule}.", file=sys.stderr)
            return 2
    if missing := stores.missing(args.workdir):
        print(f"--workdir = {args.workdir!r}: {missing}", file=sys.stderr)
        return 2
    start_jax(hardware.probe())
    # Imported here: `--help` and wrong options answer in a moment, and the platform must be named before jax is imported.
    import jax

    from jaxtrain.checkpoint import CheckpointError
    from jaxtrain.data.tokenizer import TokenizerError, load_tokenizer
    from jaxtrain.generate import continue_all, load

    try:
        run, sampler, params, step = load(args.workdir, jax.local_devices(), args.base)
        tokenizer = load_tokenizer(args.tokenizer or run.data.tokenizer)
    except (CheckpointError, TokenizerError, ValueError) as error:  # ValueError: a layout these devices cannot hold
        print(error, file=sys.stderr)
        return 2
    print(f"[{args.workdir.rstrip('/')}, step {step}]", file=sys.stderr)
    # A run that writes no samples says max_tokens = 0.
    ask = dataclasses.replace(run.sample, **{"max_tokens": run.sample.max_tokens or config.Sample().max_tokens, **given})
    try:
        texts = continue_all(sampler, params, tokenizer, ask)
    except TokenizerError as error:
        print(error, file=sys.stderr)
        return 2
    print(*texts, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
