"""Answer a question by transformers, as a server does: `python chat.py QUESTION FOLDER...` prints a line of JSON for each."""

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

question, *folders = sys.argv[1:]
for folder in folders:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.eval().generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    ids = {key: getattr(model.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    print(json.dumps({"answer": tokenizer.decode(made), "generation": model.generation_config.eos_token_id} | ids))
