"""Compute logits of a Hugging Face folder by transformers, in float32 on a CPU: `torch_logits.py DIR TOKENS.npy OUT.npy`.

This program is separate: it imports nothing from jaxtrain, and runs in any Python that has transformers and torch.
"""

import sys


def main():
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    folder, tokens, out = sys.argv[1:]
    torch.set_grad_enabled(False)
    # sdpa would be wrong for some models: its kernels have no soft cap, and transformers only warns about that.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    rows = torch.from_numpy(np.load(tokens).astype(np.int64))
    np.save(out, np.concatenate([model(row[None], use_cache=False).logits.float().numpy() for row in rows]))


if __name__ == "__main__":
    main()
