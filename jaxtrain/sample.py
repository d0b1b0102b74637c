"""Continue a text with a trained model: `python -m jaxtrain.sample --workdir=runs/tiny --prompt="def "`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain import config, hardware
from jaxtrain.startup import start_jax


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 2 where the question is wrong."""
    default = config.Sample()
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.sample", description="Continue a text with a trained model.")
    parser.add_argument("--workdir", required=True, help="a run's folder, or one of its checkpoints/<step>")
    parser.add_argument("--prompt", default=default.prompt, help="text to continue (default: a line break)")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="tokens to write at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0: the likeliest token (%(default)s)")
    parser.add_argument("--top-p", type=float, default=default.top_p, help="share of probability to draw from (%(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the draws (%(default)s)")
    parser.add_argument("--tokenizer", default="", help="where the tokenizer is now, if it moved since training")
    args = parser.parse_args(argv)
    for name, ok, rule in (
        ("max-tokens", args.max_tokens > 0, "must be at least 1"),
        ("temperature", args.temperature >= 0, "must be 0 or more"),
        ("top-p", 0 < args.top_p <= 1, "must be above 0 and at most 1"),
    ):
        if not ok:
            print(f"--{name} = {getattr(args, name.replace('-', '_'))}: {rule}.", file=sys.stderr)
            return 2
    start_jax(hardware.probe())
    # Imported here: `--help` and wrong options answer in a moment, and the platform must be named before jax is imported.
    import jax

    from jaxtrain.checkpoint import CheckpointError
    from jaxtrain.data.tokenizer import TokenizerError, load_tokenizer
    from jaxtrain.generate import continue_text, load

    try:
        run, sampler, params, step = load(args.workdir, jax.local_devices())
        tokenizer = load_tokenizer(args.tokenizer or run.data.tokenizer)
    except (CheckpointError, TokenizerError, ValueError) as error:  # ValueError: a layout these devices cannot hold
        print(error, file=sys.stderr)
        return 2
    print(f"[{Path(args.workdir)}, step {step}]", file=sys.stderr)
    ask = config.Sample(args.prompt, args.max_tokens, args.temperature, args.top_p, args.seed)
    print(continue_text(sampler, params, tokenizer, ask))
    return 0


if __name__ == "__main__":
    sys.exit(main())
