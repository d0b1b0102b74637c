"""Logits of bases with PEFT adapters, and of both merged: `python peft_logits.py TOKENS.npy (BASE ADAPTER OUT.npz)...`."""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

torch.set_grad_enabled(False)
tokens, *triples = sys.argv[1:]
rows = torch.from_numpy(np.load(tokens).astype(np.int64))
for base, adapter, out in zip(*(triples[i::3] for i in range(3)), strict=True):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    beside = PeftModel.from_pretrained(model, adapter).eval()
    logits = beside(rows, use_cache=False).logits.numpy()
    merged = beside.merge_and_unload()
    np.savez(
        out,
        logits=logits,
        merged=merged(rows, use_cache=False).logits.numpy(),
        **{f"weight.{name}": p.numpy() for name, p in merged.named_parameters() if "proj" in name},
    )
