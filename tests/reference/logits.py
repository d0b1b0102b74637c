"""Logits of several Hugging Face folders by transformers: `python logits.py TOKENS.npy DIR...` writes DIR/logits.npy."""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

torch.set_grad_enabled(False)
rows = torch.from_numpy(np.load(sys.argv[1]).astype(np.int64))
for folder in map(Path, sys.argv[2:]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    np.save(folder / "logits.npy", model(rows, use_cache=False).logits.numpy())
