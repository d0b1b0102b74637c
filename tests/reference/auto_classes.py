"""Open Hugging Face folders with transformers: `python auto_classes.py TEXT DIR...` prints a line of JSON for each."""

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

torch.set_grad_enabled(False)
text, *folders = sys.argv[1:]
for folder in folders:
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    made = model.eval().generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    found = {
        "architectures": config.architectures,
        "class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype),
        "unexpected": sorted(report["unexpected_keys"]) + sorted(report["missing_keys"]),
        "ids": ids,
        "decoded": tokenizer.decode(ids),
        "eos": tokenizer.eos_token_id,
        "chat": chat,
        "made": made[0, len(ids) :].tolist(),
    }
    print(json.dumps(found))
