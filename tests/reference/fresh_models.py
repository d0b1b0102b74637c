"""Save fresh transformers models: `python fresh_models.py CONFIG.json DIR [CONFIG.json DIR ...]`."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

configs, folders = sys.argv[1::2], sys.argv[2::2]
for file, folder in zip(configs, folders, strict=True):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(file)
    config.initializer_range = 0.14  # makes logits of several units
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
