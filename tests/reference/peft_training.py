"""An adapter that PEFT trains further with AdamW, in float32: `python peft_training.py make|train BASE ADAPTER ...`.

make BASE ADAPTER SETTINGS.json                write an adapter with random matrices; SETTINGS are those of LoraConfig
train BASE ADAPTER ROWS.npy OUT                train it on rows (steps, B, T + 1); OUT has the adapter and losses.json
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

what, base, adapter, given, *rest = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
if what == "make":
    made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **json.loads(Path(given).read_text())))
    with torch.no_grad():
        for name, matrix in made.named_parameters():
            if "lora_B" in name:
                matrix.normal_(0, 0.05)
    made.save_pretrained(adapter)
    sys.exit()
model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
learnt = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(learnt, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
losses = []
for rows in torch.from_numpy(np.load(given).astype(np.int64)):
    logits = model(rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.save_pretrained(rest[0])
(Path(rest[0]) / "losses.json").write_text(json.dumps(losses))
