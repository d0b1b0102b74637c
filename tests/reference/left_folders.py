"""Save fresh models in odd ways that libraries have: `python left_folders.py CONFIG.json DIR`.

DIR/again: saved in shards, then with other weights in one file, beside the index of the shards.
DIR/shared: a tied model by safetensors' save_model, which writes a shared tensor once.
DIR/plain: a model. DIR/adapted: the same, with an adapter of PEFT for it in the same folder.
"""

import sys
from pathlib import Path

import peft
import torch
from safetensors.torch import save_model
from transformers import AutoConfig, AutoModelForCausalLM

file, out = sys.argv[1], Path(sys.argv[2])
config = AutoConfig.from_pretrained(file)
config.initializer_range = 0.14  # makes logits of several units


def fresh(seed: int, tied: bool) -> torch.nn.Module:
    torch.manual_seed(seed)
    config.tie_word_embeddings = tied
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


fresh(0, False).save_pretrained(out / "again", max_shard_size="100KB")
index = (out / "again" / "model.safetensors.index.json").read_bytes()
fresh(1, False).save_pretrained(out / "again")
(out / "again" / "model.safetensors.index.json").write_bytes(index)  # some versions remove it

tied = fresh(2, True)
tied.config.save_pretrained(out / "shared")
save_model(tied, str(out / "shared" / "model.safetensors"), {"format": "pt"})

model = fresh(3, False)
for name in ("plain", "adapted"):
    model.save_pretrained(out / name)
adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "down_proj"]))
adapted.save_pretrained(out / "adapted")
