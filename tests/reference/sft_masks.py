"""Tokens and loss masks of conversations by TRL's SFTTrainer and transformers.

`sft_masks.py OUT` writes a folder OUT/NAME for each chat template of the TRL package: tokenizer.json, tokenizer_config.json,
original.jinja (the model's template) and training.jinja (with `{% generation %}` marks, as SFTTrainer uses it). It also writes
rows and their results: KIND.jsonl (rows) and KIND.theirs.jsonl (`ids` and `counts` by SFTTrainer, which equal those of
apply_chat_template). KIND is `messages`, with assistant_only_loss, or `completion`, with prompt and completion. Rows that a
template cannot write are left out.
"""

import importlib.resources
import json
import pydoc_data.topics
import random
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from trl.chat_template_utils import get_training_chat_template

# Splits text as the tokenizers of Llama 3 and Qwen do.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = re.compile(
    r"<[|｜][^<>{}'\"\s|｜]+[|｜]>|<(?:start|end)_of_turn>|<(?:bos|eos|s|/s|turn\||\|turn)>|\[/?INST\]|\[gMASK\]|<sop>"
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # not control tokens
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|return|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<turn|>",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look for a {name} of the language.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer", "description": "results at most"},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("topic", "statement")
]  # fmt: skip


def sentences() -> list[str]:
    """Return texts of one to four lines, from Python's own documentation."""
    found = [line for text in pydoc_data.topics.topics.values() for line in re.split(r"\n\n+", text)]
    return [re.sub(r" *\n *", "\n", text).strip() for text in found if 20 < len(text) < 400]


def conversation(kind: str, draw: random.Random, texts: list[str]) -> dict[str, Any]:
    """Return a row of messages of one of KINDS."""

    def say(role: str, text: str = "", **more: Any) -> dict[str, Any]:
        return {"role": role, "content": text or draw.choice(texts), **more}

    def ask(number: int) -> dict[str, Any]:
        call = {"name": draw.choice(("topic", "statement")), "arguments": {"query": draw.choice(texts)[:30], "limit": number}}
        return {"type": "function", "function": call}

    if kind == "one turn":
        return {"messages": [say("user"), say("assistant")]}
    if kind == "several turns":
        return {"messages": [say(role) for _ in range(draw.randint(2, 4)) for role in ("user", "assistant")]}
    if kind == "system":
        return {"messages": [say("system"), *(say(role) for _ in range(2) for role in ("user", "assistant"))]}
    if kind == "user last":
        return {"messages": [say("user"), say("assistant"), say("user")]}
    if kind == "thoughts":
        first, second = (say("assistant", reasoning_content=draw.choice(texts)) for _ in range(2))
        return {"messages": [say("user"), first, say("user"), second]}
    if kind == "thoughts in the text":
        text = f"<think>\n{draw.choice(texts)}\n</think>\n\n{draw.choice(texts)}"
        return {"messages": [say("user"), say("assistant"), say("user"), say("assistant", text)]}
    if kind == "white space":
        return {
            "messages": [say("user"), say("assistant", f"\n  {draw.choice(texts)}"), say("user"), say("assistant", "  x\n\n")]
        }
    called = {"role": "assistant", "content": "", "tool_calls": [ask(1)]}
    answered = [called, say("tool", '{"found": 1}', name=called["tool_calls"][0]["function"]["name"]), say("assistant")]
    if kind == "tools":
        return {"messages": [say("user"), *answered], "tools": TOOLS}
    if kind == "tools, several turns":
        return {
            "messages": [say("system"), say("user"), say("assistant"), say("user"), *answered, say("user"), say("assistant")],
            "tools": TOOLS,
        }
    raise ValueError(kind)


KINDS = (
    *("one turn", "several turns", "system", "user last", "thoughts", "thoughts in the text", "white space"),
    *("tools", "tools, several turns"),
)


def make_tokenizer(template: str, texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE with the control tokens that a template writes, trained on texts with paragraphs."""
    control = sorted(set(CONTROL.findall(template)) | {"<|endoftext|>"})
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in control]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pages = ["\n\n".join(texts[i : i + 5]) for i in range(0, len(texts), 5)]
    tok.train_from_iterator(pages, trainers.BpeTrainer(vocab_size=2500, special_tokens=special, initial_alphabet=alphabet))
    tok.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    end = next((text for text in ENDS if text in control), "<|endoftext|>")
    begin = next((text for text in ("<|begin_of_text|>", "<bos>", "<s>", "<｜begin▁of▁sentence｜>") if text in control), end)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=end, bos_token=begin, pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def by_trainer(tokenizer: Any, rows: list[dict[str, Any]], folder: Path, **loss: bool) -> list[dict[str, Any]]:
    """Return `ids` and `counts` of each row, as SFTTrainer prepares its training data."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=3000,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    config = trl.SFTConfig(str(folder), max_length=None, report_to=[], use_cpu=True, bf16=False, packing=False, **loss)
    texts = [row | {"tools": json.dumps(row.get("tools"))} for row in rows]  # a Dataset has the columns of its first row
    trainer = trl.SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(texts), processing_class=tokenizer)
    data = trainer.train_dataset
    return [{"ids": row["input_ids"], "counts": [label != -100 for label in row["labels"]]} for row in data]


def by_transformers(tokenizer: Any, row: dict[str, Any], template: str) -> dict[str, Any]:
    """Return `ids` and `counts` of a row of messages, as apply_chat_template makes them."""
    how = {"tools": row.get("tools"), "chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    made = tokenizer.apply_chat_template(row["messages"], **how)
    return {"ids": made["input_ids"], "counts": [bool(x) for x in made["assistant_masks"]]}


def writable(tokenizer: Any, row: dict[str, Any], template: str) -> bool:
    """Return whether transformers can write a row with a template, and a turn counts in the loss."""
    messages = row.get("messages") or row["prompt"] + row["completion"]
    try:
        return any(by_transformers(tokenizer, row | {"messages": messages}, template)["counts"])
    except Exception:  # a template may raise anything: TemplateError, UndefinedError, TypeError
        return False


def is_whole(tokenizer: Any, row: dict[str, Any], template: str) -> bool:
    """Return whether a template writes a row's reasoning, tool calls and tools. `data prepare` refuses other rows."""
    less = [row | {"tools": None}] if row.get("tools") else []
    for field in ("reasoning_content", "tool_calls"):
        if any(field in message for message in row["messages"]):
            kept = [{key: x for key, x in message.items() if key != field} for message in row["messages"]]
            less.append(row | {"messages": kept})
    ids = by_transformers(tokenizer, row, template)["ids"]
    return not any(
        writable(tokenizer, other, template) and by_transformers(tokenizer, other, template)["ids"] == ids for other in less
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(out: Path) -> None:
    """Write a folder for each chat template that TRL has with {% generation %} marks."""
    torch.manual_seed(0)
    datasets.disable_progress_bars()
    texts = sentences()
    folder = importlib.resources.files(trl) / "chat_templates"
    for path in sorted(Path(str(folder)).glob("*.jinja")):
        name, source = path.stem, path.read_text()
        if name.endswith("_training") or any(word in name for word in ("vl", "idefics", "llava", "diffusion")):
            continue  # templates with pictures need a processor
        tokenizer = make_tokenizer(source, texts)
        marked = "{% generation" in source or "{%- generation" in source
        training = source if marked else None
        if training is None:
            try:
                training = get_training_chat_template(tokenizer)
            except ValueError:
                continue  # TRL has no template with marks for it
        assert training is not None
        draw = random.Random(name)
        rows = [(kind, conversation(kind, draw, texts)) for kind in KINDS for _ in range(6)]
        rows = [(kind, row) for kind, row in rows if writable(tokenizer, row, training) and is_whole(tokenizer, row, training)]
        answers = [
            conversation(kind, draw, texts)["messages"] for kind in ("one turn", "several turns", "system") for _ in range(6)
        ]
        pairs = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in answers]
        pairs = [row for row in pairs if writable(tokenizer, row, training)]
        to = out / name
        to.mkdir(parents=True)
        tokenizer.save_pretrained(to)
        (to / "chat_template.jinja").unlink(missing_ok=True)
        (to / "original.jinja").write_text(source)
        (to / "training.jinja").write_text(training)
        plain = [row for _, row in rows]
        theirs = by_trainer(tokenizer, plain, to / "trainer", assistant_only_loss=True)
        if theirs != [by_transformers(tokenizer, row, training) for row in plain]:
            raise SystemExit(f"{name}: SFTTrainer and apply_chat_template differ")
        write_rows(to / "messages.jsonl", plain)
        write_rows(to / "messages.kinds.jsonl", [{"kind": kind} for kind, _ in rows])
        write_rows(to / "messages.theirs.jsonl", theirs)
        tokenizer.chat_template = training  # with this setting TRL's completions equal its messages
        write_rows(to / "completion.jsonl", pairs)
        write_rows(to / "completion.theirs.jsonl", by_trainer(tokenizer, pairs, to / "trainer"))
        print(f"{name}: {len(plain)} conversations, {len(pairs)} completions", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
