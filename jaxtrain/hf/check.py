"""Compare a model's logits with those that transformers computes, in another Python."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from jaxtrain.hf.folder import is_raw, locate
from jaxtrain.models.hugging_face import HuggingFaceError

SCRIPT = Path(__file__).parent / "torch_logits.py"
PYTHON = "JAXTRAIN_REFERENCE_PYTHON"  # names that Python


def difference(
    checkpoint: str, folder: str, python: str, tokens: Path | None, base: str, ema: bool, say: Callable[[str], None]
) -> float:
    """Return the largest difference of two models' logits, and report it by position.

    Args:
        checkpoint: computed by jaxtrain: a run, a checkpoint, or a Hugging Face folder.
        folder: computed by transformers: a Hugging Face folder.
        python: an interpreter that has transformers and torch.
        tokens: file of ids, integers [B, T]; None: 2 x 64 random ones.
        base: for a run with adapters, the folder of the base model if it was moved.
        ema: compute with the average of the checkpoint's weights (train.ema_decay).

    Raises:
        HuggingFaceError: transformers did not compute the folder, or the shapes of the logits differ.
    """
    import numpy as np

    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.model import logits_of, read_tokens

    if shutil.which(python) is None:
        raise HuggingFaceError(f"--python = {python}: no such program. Name an interpreter that has transformers and torch.")
    if is_raw(locate(folder)):
        rule = "has jaxtrain's own names, which transformers does not read"
        raise HuggingFaceError(f"{folder}: {rule}. Fix: name a folder that hf export wrote without --raw.")
    source = open_origin(checkpoint).choose(ema)
    source.announce(say)
    vocab = source.run().model.vocab_size
    if tokens:
        tokens_BT, segments_BT = read_tokens(tokens, None, vocab)
    else:
        tokens_BT = np.random.default_rng(0).integers(0, vocab, (2, 64), np.int32)
        segments_BT = np.ones_like(tokens_BT)
    with tempfile.TemporaryDirectory() as scratch:
        asked, theirs = Path(scratch, "tokens.npy"), Path(scratch, "logits.npy")
        np.save(asked, tokens_BT)
        command = [python, SCRIPT, locate(folder), asked, theirs]
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if ended.returncode or not theirs.exists():
            (reason,) = ended.stderr.strip().splitlines()[-1:] or ["no error message"]
            hint = f" Name an interpreter that has transformers and torch: --python, or {PYTHON}." * ("No module" in reason)
            raise HuggingFaceError(f"transformers in {python} did not compute {folder}: {reason}.{hint}")
        theirs_BTV = np.load(theirs)
    ours_BTV = logits_of(source, base=base)(tokens_BT, segments_BT)
    if ours_BTV.shape != theirs_BTV.shape:
        raise HuggingFaceError(f"{folder}: logits are {list(theirs_BTV.shape)}, those here {list(ours_BTV.shape)}.")
    by_position_T = np.abs(ours_BTV - theirs_BTV).max(axis=(0, 2))
    say("position  largest difference")
    for t, largest in enumerate(by_position_T):
        say(f"{t:8d}  {largest:.3g}")
    same, worst = float((ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).mean()), float(by_position_T.max())
    say(
        f"largest difference {worst:.3g} of logits up to {float(np.abs(theirs_BTV).max()):.3g}; "
        f"the likeliest token is the same at {same:.1%} of {tokens_BT.size} positions"
    )
    return worst
