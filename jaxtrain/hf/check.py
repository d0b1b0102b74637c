"""Compare a model with what transformers computes, in another Python: logits, and each part's activations and gradients."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from jaxtrain.checkpoint.storage import free_bytes
from jaxtrain.hf.folder import is_raw, locate_folder
from jaxtrain.models.hugging_face import HuggingFaceError

if TYPE_CHECKING:
    from jaxtrain.hf.parts import ModelComparison

SCRIPT = Path(__file__).parent / "torch_reference.py"
PYTHON = "JAXTRAIN_REFERENCE_PYTHON"  # names that Python
TOKENS = 64
LONGEST_WINDOW = 1024


def compare_with_transformers(
    checkpoint: str, folder: str, python: str, tokens: Path | None, base: str, ema: bool, say: Callable[[str], None]
) -> "ModelComparison":
    """Return the differences of two models, in float32.

    Args:
        checkpoint: computed by jaxtrain: a run, a checkpoint, or a Hugging Face folder.
        folder: computed by transformers: a Hugging Face folder.
        python: an interpreter that has transformers and torch.
        tokens: file of ids, integers [B, T]; None: 2 x `rows_length` random ones.
        base: for a run with adapters, the folder of the base model if it was moved.
        ema: compute with the average of the checkpoint's weights (train.ema_decay).
        say: called with notes on the checkpoint.

    Raises:
        HuggingFaceError: transformers did not compute the folder, or the two have other weights or other shapes.
        OSError: the disk of temporary files (TMPDIR) has too little space.
    """
    import numpy as np

    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.model import read_tokens
    from jaxtrain.hf.parts import compare_with_outputs, norm_modules, run_on, written_bytes

    if shutil.which(python) is None:
        raise HuggingFaceError(f"--python = {python}: no such program. Name an interpreter that has transformers and torch.")
    if is_raw(locate_folder(folder)):
        rule = "has jaxtrain's own names, which transformers does not read"
        raise HuggingFaceError(f"{folder}: {rule}. Fix: name a folder that hf export wrote without --raw.")
    source = open_origin(checkpoint).choose(ema)
    source.announce(say)
    model = source.run().model
    if tokens:
        tokens_BT, _ = read_tokens(tokens, None, model.vocab_size)
    else:
        shape = 2, rows_length(model.sliding_window)
        tokens_BT = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    run = run_on(source, tokens_BT)
    with tempfile.TemporaryDirectory() as scratch:
        hf_dir = Path(scratch)
        needed, free = written_bytes(run, tokens_BT), free_bytes(hf_dir)
        if free is not None and free < needed:
            rule = f"{decimal(needed)} are needed there for what transformers computes, and {decimal(free)} free"
            raise OSError(f"{scratch}: {rule}. Fix: set TMPDIR to a folder on another disk.")
        np.save(hf_dir / "tokens.npy", tokens_BT)
        run_transformers(python, folder, norm_modules(run), hf_dir)
        return compare_with_outputs(hf_dir, source, base)


def rows_length(window: int) -> int:
    """Return the number of random tokens in a row: TOKENS, after a sliding window if it is at most LONGEST_WINDOW."""
    return TOKENS + window * (TOKENS <= window <= LONGEST_WINDOW)


def run_transformers(python: str, folder: str, norms: Sequence[str], out: Path) -> None:
    """Let transformers compute a folder (torch_reference.py). Raises HuggingFaceError if it did not.

    norms: transformers' names of the modules whose inputs are wanted. out: the folder with tokens.npy, which gets the results.
    """
    (out / "norms.json").write_text(json.dumps(norms), encoding="utf-8")
    process = subprocess.run(
        [python, SCRIPT, locate_folder(folder), out], capture_output=True, encoding="utf-8", errors="replace"
    )
    if process.returncode or not (out / "logits.npy").exists():
        (reason,) = process.stderr.strip().splitlines()[-1:] or ["no error message"]
        if free_bytes(out) == 0:
            raise OSError(f"{out}: its disk is full ({reason}). Fix: set TMPDIR to a folder on another disk.")
        hint = f" Name an interpreter that has transformers and torch: --python, or {PYTHON}." * ("No module" in reason)
        raise HuggingFaceError(f"transformers in {python} did not compute {folder}: {reason}.{hint}")
