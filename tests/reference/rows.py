"""Rows as `datasets` writes them, and their ids by transformers and TRL: `python rows.py BASE OUT`.

BASE is a folder with a tokenizer that has the control tokens of ChatML. Writes OUT/tokenizer (saved by transformers),
OUT/NAME.parquet and OUT/NAME.json for each kind of rows. The JSON has a list for each row: the ids of its conversation, or
of pairs [prompt, chosen, rejected].
"""

import json
import sys
from pathlib import Path

import datasets
from transformers import AutoTokenizer
from trl.data_utils import extract_prompt

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def bot(content, *calls):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    of = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": f"It does {name}.", "parameters": of}}


CONVERSATIONS = {
    "calls": [
        {
            "messages": [
                user("Paris?"),
                bot("I look.", call("weather", city="Paris")),
                {"role": "tool", "content": "sun"},
                bot("Sun."),
            ]
        },
        {"messages": [user("1+2?"), bot("", call("add", a=1, b=2), call("show", what={"base": 10}))]},
        {"messages": [user("Hello"), bot("Hi.")]},
    ],
    "tools": [
        {"tools": [tool("weather", city="string")], "messages": [user("a"), bot("b")]},
        {"tools": [tool("add", a="number", b="number"), tool("stop")], "messages": [user("c"), bot("d")]},
    ],
    "parts": [{"messages": [user([{"type": "text", "text": "What?"}]), bot([{"type": "text", "text": "A cat."}])]}],
}
PAIRS = {
    "lists": [{"chosen": [user("Q"), bot("good")], "rejected": [user("Q"), bot("bad")]}],
    "turns": [
        {"chosen": [user("P"), bot("a"), user("Q"), bot("good")], "rejected": [user("P"), bot("a"), user("Q"), bot("bad")]},
    ],
}
TEXTS = {
    "Chinese": {"chosen": "问题：你好。回答：很好", "rejected": "问题：你好。回答：不好"},
    "Japanese": {"chosen": "質問です。はい、そうです", "rejected": "質問です。いいえ"},
    "words": {"chosen": "Q: is it?\nA: yes", "rejected": "Q: is it?\nA: no"},
}

base, out = sys.argv[1], Path(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained(out / "tokenizer")


def ids(messages, tools=None, prompt=False):
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=True)["input_ids"]


def write(name, rows, answers):
    datasets.Dataset.from_list(rows).to_parquet(out / f"{name}.parquet")
    (out / f"{name}.json").write_text(json.dumps(answers))


for name, rows in CONVERSATIONS.items():
    write(name, rows, [ids(row["messages"], row.get("tools")) for row in rows])
for name, rows in PAIRS.items():
    apart, answers = [extract_prompt(row) for row in rows], []
    for row in apart:
        prompt = ids(row["prompt"], prompt=True)
        answers.append([prompt, *(ids(row["prompt"] + row[key])[len(prompt) :] for key in ("chosen", "rejected"))])
    # Rows as many people write them: the completions repeat the prompt that is given beside them.
    write(name, [{**row, "prompt": each["prompt"]} for row, each in zip(rows, apart, strict=True)], answers)
for name, row in TEXTS.items():
    apart = extract_prompt(row)
    write(name, [row], [[tokenizer.encode(apart[key]) for key in ("prompt", "chosen", "rejected")]])
