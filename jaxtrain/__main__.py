"""`python -m jaxtrain` lists the commands."""

import sys

COMMANDS = {
    "main": "train a model, or go on training it",
    "preflight": "is this node fit to train? What is wrong, and how to put it right",
    "plan": "see a run before paying for it: fit, speed, traffic, and the best layout",
    "report": "one page of a run, live or finished, or of several compared",
    "receipt": "what ran, and what differs between two runs",
    "parity": "the same steps on several layouts, compared",
    "bench": "measure steps, kernels, a whole node, and the same steps in PyTorch",
    "data": "turn text into token files, and check them",
    "profile": "where the time of a step went, from a trace",
    "hf": "Hugging Face checkpoints in and out",
    "sample": "generate text from a checkpoint",
    "lm_eval": "evaluate a checkpoint with EleutherAI's lm-evaluation-harness",
    "checkpoint": "list what a run has saved",
}


def main() -> int:
    """Prints the list; a command's name belongs after a dot, as `python -m jaxtrain.main`."""
    wrong = [arg for arg in sys.argv[1:] if arg not in ("-h", "--help")]
    if wrong:
        remedy = f"Write python -m jaxtrain.{wrong[0]}." if wrong[0] in COMMANDS else f"Known: {', '.join(COMMANDS)}."
        print(f"argument {wrong[0]!r}: python -m jaxtrain takes none. {remedy}", file=sys.stderr)
        return 2
    print("jaxtrain trains transformer language models on NVIDIA GPUs.\n")
    for name, line in COMMANDS.items():
        print(f"  {f'python -m jaxtrain.{name}':<28}{line}")
    print("\nEach has its own --help.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
