"""Run by test_lora.py in a Python that has torch, transformers and peft: what they make of a base and our adapter.

Reads base.npz, merged.npz, adapter/, tokens.npy, names.json and model.json of a folder; writes logits.npy and
merge_difference.npy, the largest difference between PEFT's merged weights and ours.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM


def theirs(tensors, names):
    """Our tensors under their names, with their axes."""
    out = {}
    for name, x in tensors.items():
        number = re.search(r"\.(\d+)\.", name)
        called, mine, their = names[re.sub(r"\.\d+\.", ".{i}.", name, count=1)]
        groups = [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\S+", their)]
        x = x.transpose([mine.split().index(c) for group in groups for c in group])
        sizes = dict(zip([c for group in groups for c in group], x.shape, strict=True))
        x = x.reshape([int(np.prod([sizes[c] for c in group])) for group in groups])
        out[called.replace("{i}", number[1] if number else "")] = torch.tensor(np.ascontiguousarray(x))
    return out


def main(folder):
    names, m = (json.loads((folder / f"{name}.json").read_text()) for name in ("names", "model"))
    config = LlamaConfig(
        vocab_size=m["vocab_size"],
        hidden_size=m["d_model"],
        intermediate_size=m["d_ff"],
        num_hidden_layers=m["num_layers"],
        num_attention_heads=m["num_heads"],
        num_key_value_heads=m["num_kv_heads"],
        head_dim=m["head_dim"],
        rms_norm_eps=m["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": m["rope_base"]},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(theirs(np.load(folder / "base.npz"), names))
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(model, folder / "adapter")
        np.save(folder / "logits.npy", adapted(torch.tensor(np.load(folder / "tokens.npy")).long()).logits.numpy())
        found = adapted.merge_and_unload().state_dict()
    want = theirs(np.load(folder / "merged.npz"), names)
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    np.save(folder / "merge_difference.npy", max(float((found[k] - want[k]).abs().max()) for k in want))


main(Path(sys.argv[1]))
