"""Loss and rewards of each step of TRL's DPOTrainer: `python dpo.py MODEL PAIRS.jsonl SETTINGS.json OUT.json`.

MODEL also holds a tokenizer. The pairs are taken in the file's order, each once. SETTINGS are those of DPOConfig; with
`adapter`, the adapter in that folder is trained.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

folder, pairs, settings, out = map(Path, sys.argv[1:])
given = json.loads(settings.read_text())
adapter = given.pop("adapter", None)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
if adapter:
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
rows = [json.loads(line) for line in pairs.read_text().splitlines()]
config = DPOConfig(
    output_dir=str(out.parent / "trl"),
    num_train_epochs=1,
    max_length=None,
    disable_dropout=True,
    lr_scheduler_type="constant",
    warmup_steps=0,
    train_sampling_strategy="sequential",
    logging_steps=1,
    logging_first_step=True,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    **given,
)
trainer = DPOTrainer(
    model, args=config, train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(folder)
)
first = trainer.train_dataset[0]
trainer.train()
names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
found = {name: [line[name] for line in trainer.state.log_history if "loss" in line] for name in names}
found["first"] = {name: list(first[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
out.write_text(json.dumps(found))
