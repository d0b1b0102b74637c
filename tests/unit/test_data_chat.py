"""Conversations to token files: the text of the template, its control tokens, and the tokens that count in the loss."""

import itertools
import json
import re

import jinja2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from token_files import header_and_end, open_batches, write_conversations
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxtrain import config
from jaxtrain.data import mixture, pipeline, prepare, rows, template, windows
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.template import Conversation
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
BRACKETS = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] }}
{%- if true %}{{ ' [/INST]' }}{% endif %}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'].split('</think>')[-1] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
FORGETS = (  # renders the reasoning of the last turn only
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
TALK = [
    ("system", "Be brief."),
    ("user", "What is 2 + 2?"),
    ("assistant", "It is 4."),
    ("user", "Sure?"),
    ("assistant", "Yes."),
]


def talk(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def corpus() -> list[str]:
    return [open(json.__file__).read(), json.decoder.__doc__ or "", "It is brief. What is the sum? Yes, sure." * 5]


def train(folder, kind: str):
    """Train a real tokenizer.json with special tokens, and write tokenizer_config.json beside it."""
    special = [AddedToken(t, special=True, rstrip=kind == "rstrip" and t == "<|im_end|>") for t in SPECIAL]
    tok = tokenizers.Tokenizer(models.BPE(unk_token=None if kind != "metaspace" else "<unk>"))
    if kind in ("metaspace", "prepend"):
        if kind == "metaspace":
            tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            tok.decoder = decoders.Metaspace()
        else:
            tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special = [AddedToken("<unk>", special=True), *special]
    else:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(corpus(), trainer)
    folder.mkdir()
    tok.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: train(root / kind, kind) for kind in ("bytes", "metaspace", "prepend", "rstrip")}


def load(folder, source: str | None = None) -> tuple[text_tokenizers.Tokenizer, template.ChatTemplate]:
    tok = text_tokenizers.load_tokenizer(str(folder))
    made = template.load_template(str(folder), tok, None, "2026-11-22")
    if source is not None:
        made = template.ChatTemplate("test", source, made.tokens, made.control, "2026-11-22")
    return tok, made


def ids_of(tok, parts) -> list[int]:
    encoded = iter(tok.encode_batch([p.text for p in parts if p.control < 0], [p.place for p in parts if p.control < 0]))
    return [i for p in parts for i in ([p.control] if p.control >= 0 else next(encoded).tolist())]


def counted(parts) -> list[str]:
    """Return the consecutive stretches of text that count in the loss."""
    found = [""]
    for part in parts:
        if part.loss:
            found[-1] += part.text
        elif found[-1]:
            found.append("")
    return [text for text in found if text]


FORGOTTEN = [("user", "a"), ("assistant", "<t></think>b"), ("user", "c"), ("assistant", "<t></think>d")]
TEMPLATES = {  # template -> (template text, the stretches that count in the loss, messages)
    "chatml": (CHATML, ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
    "headers": (HEADERS, ["It is 4.<|eot_id|>", "Yes.<|eot_id|>"], TALK),
    "brackets": (BRACKETS, [" It is 4.</s>", " Yes.</s>"], TALK[1:]),
    "forgets": (FORGETS, ["b<|im_end|>", "<t></think>d<|im_end|>"], FORGOTTEN),
    "thinks": (CHATML.replace("assistant\\n", "assistant\\n<think>"), ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
    "marked": (MARKED, ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_counts_is_the_assistants_text_and_the_token_that_ends_it(folders, name):
    source, want, pairs = TEMPLATES[name]
    tok, made = load(folders["bytes"], source)
    text, parts = made.parts(Conversation(talk(*pairs)), "assistant")
    assert counted(parts) == want
    assert "".join(p.text for p in parts) == text
    assert counted(made.parts(Conversation(talk(*pairs)), "last")[1]) == want[-1:]
    assert counted(made.parts(Conversation(talk(*pairs)), "all")[1]) == [text]
    # the ids of the control tokens that end a turn are the tokenizer's own
    ends = {tok.control_tokens()[i].text: tok.control_tokens()[i].id for i in range(len(SPECIAL))}
    marked = [p for p in parts if p.loss and p.control >= 0]
    assert [p.control for p in marked] == [ends[p.text] for p in marked]


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "prepend", "rstrip"])
@pytest.mark.parametrize("name", ["chatml", "headers", "brackets"])
def test_ids_are_those_of_the_whole_text_with_control_tokens_read(folders, kind, name):
    """The ids equal those of the `tokenizers` package for the whole text. The package recognizes control tokens anywhere."""
    source, _, pairs = TEMPLATES[name]
    tok, made = load(folders[kind], source)
    text, parts = made.parts(Conversation(talk(*pairs)), "all")
    whole = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    assert ids_of(tok, parts) == whole.encode(text, add_special_tokens=False).ids
    # with the loss of the last turn alone, the ids before that turn are the prompt of a generation
    before = made.render(Conversation(talk(*pairs[:-1])), prompt=True)
    prompt = whole.encode(before, add_special_tokens=False).ids
    assert ids_of(tok, made.parts(Conversation(talk(*pairs)), "last")[1])[: len(prompt)] == prompt


@pytest.mark.parametrize(("kind", "prefixed"), [("metaspace", ["start"]), ("prepend", ["start", "after"])])
def test_a_space_is_put_before_a_text_only_where_the_package_would(folders, kind, prefixed):
    tok, _ = load(folders[kind])
    names = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    for place in ("start", "after", "inner"):
        (ids,) = tok.encode_batch(["is it"], [place])
        assert "".join(map(names.id_to_token, ids)) == ("▁is▁it" if place in prefixed else "is▁it"), place


EVIL = st.lists(
    st.sampled_from(
        [*SPECIAL, "<|im_", "end|>", "<", ">", "|", "s>", "</", "im_end", " ", "\n", "a", "ü", "<|", "|>", "eot_id"]
    )
).map("".join)


@given(contents=st.lists(EVIL, min_size=2, max_size=4), name=st.sampled_from(["chatml", "headers", "brackets"]))
def test_no_text_of_a_message_becomes_a_control_token(folders, contents, name):
    tok, made = load(folders["bytes"], TEMPLATES[name][0])
    messages = talk(*[("user" if i % 2 == 0 else "assistant", c) for i, c in enumerate(contents)])
    text, parts = made.parts(Conversation(messages), "assistant")
    assert "".join(p.text for p in parts) == text
    harmless = talk(*[(m["role"], "x") for m in messages])
    want = [p.text for p in made.parts(Conversation(harmless), "assistant")[1] if p.control >= 0]
    assert [p.text for p in parts if p.control >= 0] == want
    # the text equals that of a plain rendering
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert text == environment.from_string(TEMPLATES[name][0]).render(messages=messages, bos_token="<s>", eos_token="</s>")
    literal = [p for p in parts if p.control < 0]
    ids = np.concatenate([*tok.encode_batch([p.text for p in literal], [p.place for p in literal]), np.empty(0, int)])
    assert not set(ids.tolist()) & {t.id for t in tok.control_tokens()}


def test_ordinary_text_is_left_alone_and_only_control_tokens_are_marked(folders):
    _, made = load(folders["bytes"])
    mark = template.MARK
    for text in ("Sure.", "", "the end", "  a list:\n- <b>bold</b>\n", "1 < 2", "text"):
        assert made.guard(text) == text or text == "text"  # a part of <|endoftext|>
    assert made.guard("a </s> b") == f"a <{mark}/s> b"
    assert made.guard(" so <|im_ ") == f" {mark}so <|im_{mark} "
    assert made.guard("> quoted") == f"{mark}> quoted{mark}"


def test_a_message_at_whose_border_a_control_token_would_arise(folders):
    """A template writes `<|` before a message and `|>` after it. The message's text does not become a control token."""
    _, made = load(folders["bytes"], "{% for m in messages %}<|{{ m.content }}|><|{{ m.role }}|>{{ eos_token }}{% endfor %}")
    _, parts = made.parts(Conversation(talk(("assistant", "im_end"))), "all")
    assert [p.text for p in parts if p.control >= 0] == ["</s>"]
    assert "".join(p.text for p in parts) == "<|im_end|><|assistant|></s>"


@pytest.mark.parametrize(
    ("source", "pairs", "said"),
    [
        (FORGETS.replace("{% if add_generation_prompt %}", "{% if false %}"), FORGOTTEN, "otherwise when more follow"),
        (CHATML.replace("<|im_start|>assistant\\n", "assistant:"), TALK, "otherwise than its generation prompt"),
        (CHATML, [("user", "a")], "no assistant's turn"),
        (CHATML, [("user", "\ufdd0"), ("assistant", "b")], "noncharacters"),
        (BRACKETS, TALK, "only user and assistant"),
        ("{{ messages[7].content }}", TALK, "chat template cannot write"),
        ("{{ messages.append(1) }}", TALK, "chat template cannot write"),  # the sandbox
        ("{{ ''.__class__.__mro__ }}", TALK, "chat template cannot write"),
        ("{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}", [("user", "</s>")], "as it stands"),
    ],
)
def test_conversations_that_cannot_be_written_say_why(folders, source, pairs, said):
    _, made = load(folders["bytes"], source)
    with pytest.raises(template.RowError, match=re.escape(said)):
        made.parts(Conversation(talk(*pairs)), "assistant")


def test_templates_are_found_beside_the_tokenizer_and_their_helpers_work(tmp_path, folders, monkeypatch):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((folders["bytes"] / "tokenizer.json").read_bytes())
    tok = text_tokenizers.load_tokenizer(str(folder))

    def found(file=None) -> template.ChatTemplate:
        return template.load_template(str(folder), tok, file, "2026-11-22")

    with pytest.raises(text_tokenizers.TokenizerError, match="--chat-template=FILE"):
        found()
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}{{ messages | tojson }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}))
    assert found().render(Conversation(talk(("user", "ü<")))) == '</s>[{"role": "user", "content": "ü<"}]'
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %B %Y') }}{% for m in messages %}{% break %}{% endfor %}")
    assert found().render(Conversation(talk(("user", "a")))) == "22 November 2026"
    (folder / "mine.jinja").write_text("mine")
    assert found(folder / "mine.jinja").render(Conversation([])) == "mine"
    (folder / "broken.jinja").write_text("a\n{% for %}")
    with pytest.raises(text_tokenizers.TokenizerError, match=r"broken.jinja: line 2"):
        found(folder / "broken.jinja")
    with pytest.raises(text_tokenizers.TokenizerError, match="cannot be read"):
        found(folder / "none.jinja")
    assert found().sha256 != template.load_template(str(folder), tok, None, "2026-11-23").sha256  # the template writes the date
    # a template of the hub, from its local cache
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(folder / file))
    assert template.load_template("hf:org/name", tok, None, "2026-11-22").sha256 == found().sha256


USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"messages": [USER, BOT], "prompt": "other"}, [USER, BOT]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, BOT]),
        ({"conversations": [USER, BOT]}, [USER, BOT]),
        ({"prompt": "q", "completion": "a"}, [USER, BOT]),
        ({"prompt": "q", "response": "a", "system": "s"}, [{"role": "system", "content": "s"}, USER, BOT]),
        ({"prompt": [USER], "completion": [BOT]}, [USER, BOT]),
        ({"instruction": "q", "input": "", "output": "a"}, [USER, BOT]),
        ({"instruction": "q", "output": "a", "messages": None}, [USER, BOT]),
        ({"instruction": "q", "input": "i", "output": "a"}, [{"role": "user", "content": "q\n\ni"}, BOT]),
    ],
)
def test_rows_of_every_form(row, want):
    assert rows.conversation(row).messages == want


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "not a conversation (has: 'text')"),
        ({"messages": "x"}, "'messages' is text, not a list"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["x"]}, "message 1 of 'messages' is text"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 of 'messages' has no 'content'"),
        ({"messages": [{"role": "endoftext", "content": "x"}]}, "the role 'endoftext'"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' of message 1 of 'messages' is null"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [{**BOT, "tool_calls": [1]}]}, "a tool call without the name of its function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]}, "is text, but not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}]}, "are a list, not an object"),
        ({"messages": [{**BOT, "tool_calls": [{"name": "f"}]}]}, "a tool call without 'arguments'"),
        ({"messages": [{**BOT, "tool_calls": 1}]}, "'tool_calls' of message 1 of 'messages' is a number, not a list"),
        ({"messages": [BOT], "tools": [{"name": "f"}, 1]}, "tool 2 of 'tools' is a number"),
        ({"messages": [{**BOT, "function_call": {"name": "f"}}]}, "rename it to 'tool_calls'"),
        ({"messages": [{**BOT, "thinking": 3}]}, "'thinking' of message 1 of 'messages' is a number"),
        ({"messages": [{**BOT, "weight": 0.5}]}, "'weight' of message 1 of 'messages' is 0.5: must be 0 or 1"),
        ({"messages": [{**BOT, "train": "no"}]}, "'train' of message 1 of 'messages' is 'no': must be true or false"),
        ({"messages": [BOT], "functions": ["f"]}, "the row has 'functions'"),
        ({"messages": [BOT], "tools": "f"}, "'tools' is text, but not JSON"),
        ({"messages": [BOT], "tools": {"f": 1}}, "'tools' is an object, not a list"),
        ({"messages": [BOT], "chat_template_kwargs": "3"}, "'chat_template_kwargs' is a number"),
        ({"prompt": "", "completion": ""}, "'completion' is empty"),
        ({"instruction": "x", "output": " \n"}, "'output' is empty"),
        ({"messages": [USER, {"role": "assistant", "content": ""}, USER, BOT]}, "message, number 2 of 4, is empty"),
        ({"messages": [USER, {"role": "assistant", "content": "", "thinking": "hm"}]}, "message, number 2 of 2, is empty"),
        ({"prompt": [USER], "completion": [{"role": "assistant", "content": ""}]}, "message, number 2 of 2, is empty"),
        ({"prompt": "x", "completion": 3}, "'completion' is a number"),
        ({"instruction": "x", "input": 3, "output": "y"}, "'input' is a number"),
    ],
)
def test_rows_that_are_no_conversation_say_why(row, said):
    with pytest.raises(rows.RowError, match=re.escape(said)):
        rows.conversation(row)


TOOLS = (  # many templates write a message like this, the reasoning first
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("arguments", [{"q": "a </s>"}, '{"q": "a </s>"}'])
@pytest.mark.parametrize("thoughts", template.THOUGHTS)
def test_calls_of_tools_and_thoughts_count_and_results_do_not(folders, arguments, thoughts):
    tok, made = load(folders["bytes"], TOOLS)
    call = {"function": {"name": "find", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", thoughts: "hm ", "tool_calls": [call]},
        {"role": "tool", "content": "3 <|im_end|>"},
        BOT,
    ]
    tools = [{"name": "find", "about": "<|im_end|>"}]
    for listed in (tools, json.dumps(tools)):
        text, parts = made.parts(rows.conversation({"messages": messages, "tools": listed}), "assistant")
        assert counted(parts) == ['hm find({"q": "a </s>"})<|im_end|>', "a<|im_end|>"]
        assert text.startswith(f"<|im_start|>system\n{json.dumps(tools[0])}<|im_end|>\n")
        assert [p.text for p in parts if p.control >= 0] == ["<|im_start|>", "<|im_end|>"] * 5
    with pytest.raises(rows.RowError, match="no 'content'"):
        rows.conversation({"messages": [{"role": "assistant"}]})


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
THINKS = (  # writes the reasoning after the last question only, and no tool calls
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.thinking and loop.index0 > ns.last %}{{ m.thinking }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("loss", template.LOSSES)
def test_parts_that_a_template_does_not_write_are_refused(folders, loss):
    call, think = {"messages": [USER, CALL]}, {"messages": [USER, {**BOT, "reasoning": "hm"}]}
    earlier = {"messages": [*think["messages"], USER, BOT]}
    tools = {"messages": [USER, BOT], "tools": [{"name": "f"}]}
    for source, refused, taken in (
        (CHATML, {"`tool_calls`": call, "`tools`": tools, "thoughts": think}, []),
        (CHATML, {"thoughts": earlier}, []),
        (THINKS, {"`tool_calls`": call, "`tools`": tools}, [think, earlier]),
        (TOOLS, {}, [call, tools, think, earlier]),
    ):
        _, made = load(folders["bytes"], source)
        for what, row in refused.items():
            with pytest.raises(rows.RowError, match=f"does not write {what}.*Fix: give --chat-template=FILE"):
                made.parts(rows.conversation(row), loss)
        for row in taken:
            assert counted(made.parts(rows.conversation(row), loss)[1])


def test_a_null_beside_calls_of_tools_is_an_empty_content():
    for content in ({"content": None}, {"content": ""}, {}):
        row = {"messages": [USER, {"role": "assistant", **content, "tool_calls": CALL["tool_calls"]}]}
        assert rows.conversation(row).messages[1]["content"] == ""


@pytest.mark.parametrize("source", [CHATML, FORGETS, MARKED])
def test_of_a_prompt_with_a_completion_the_completion_counts_alone(folders, source):
    _, made = load(folders["bytes"], source)
    more = {"role": "assistant", "content": "b"}
    for prompt in ([USER], [USER, BOT, USER]):
        for system in ({}, {"system": "s"}):
            talk = rows.conversation({"prompt": prompt, "completion": [more], **system})
            assert counted(made.parts(talk, "assistant")[1]) == ["b<|im_end|>"]


@pytest.mark.parametrize("field", [{"train": False}, {"weight": 0}])
@pytest.mark.parametrize("source", [CHATML, FORGETS, MARKED])
def test_messages_that_a_row_takes_out_of_the_loss(folders, source, field):
    _, made = load(folders["bytes"], source)
    first, second = ({"role": "assistant", "content": text} for text in ("one", "two"))

    def found(*answers, loss="assistant"):
        messages = [message for answer in answers for message in ({**USER, "weight": None}, answer)]
        return counted(made.parts(rows.conversation({"messages": messages}), loss)[1])

    assert found({**first, **field}, second) == ["two<|im_end|>"]
    assert found({**first, "train": True, "weight": 1}, {**second, **field}) == ["one<|im_end|>"]
    text = "".join(found(first, second, loss="all"))
    assert found({**first, **field}, second, loss="all") == text.split("one<|im_end|>")
    for loss in ("assistant", "last"):
        with pytest.raises(rows.RowError, match="no turn counts in the loss"):
            found({**first, **field}, {**second, **field}, loss=loss)
    talk = rows.conversation({"prompt": [USER, {**first, **field}, USER], "completion": [second]})
    assert counted(made.parts(talk, "assistant")[1]) == ["two<|im_end|>"]


def test_turns_that_cannot_be_told_apart_are_refused(folders):
    _, made = load(folders["bytes"], MARKED.replace("{% generation %}", "{% generation %}x{% endgeneration %}{% generation %}"))
    row = {"messages": [USER, {**BOT, "train": False}, USER, BOT]}
    with pytest.raises(rows.RowError, match="marks 4 turns for 2 messages"):
        made.parts(rows.conversation(row), "assistant")


def test_the_end_of_a_document_that_a_row_takes_out_of_the_loss(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"  # does not end a turn
    )
    answers = [{"role": "assistant", "content": "ab"}, {"role": "assistant", "content": "cd", "train": False}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [USER, answers[0], USER, answers[1]]}) + "\n")
    for loss, want in (("assistant", "0110000"), ("all", "1111000")):
        prepare.prepare(
            [f"{tmp_path}/c.jsonl"], tmp_path / "c.tok", chat=True, loss=loss, chat_template=tmp_path / "t.jinja", force=True
        )
        assert TokenFile.open(tmp_path / "c.tok").loss_flags(0, 7).tolist() == [flag == "1" for flag in want]


def test_variables_of_a_template_are_those_of_the_row(folders):
    _, made = load(folders["bytes"], "{% for m in messages %}{{ m.content }}{{ effort }}{% endfor %}")
    for variables in ({"effort": "low </s>"}, '{"effort": "low </s>"}'):
        text, parts = made.parts(rows.conversation({"messages": [USER, BOT], "chat_template_kwargs": variables}), "all")
        assert text == "qlow </s>alow </s>" and all(part.control < 0 for part in parts)


def test_chat_files_end_to_end(tmp_path, folders, capsys):
    talks = [talk(*TALK), talk(("user", "Say </s> twice"), ("assistant", "</s></s>"))]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    pyarrow.parquet.write_table(pyarrow.table({"messages": talks, "id": [1, 2]}), tmp_path / "c.parquet")
    command = ["prepare", "--chat", f"--tokenizer={folders['bytes']}", "--eot=<|endoftext|>"]
    for name in ("jsonl", "parquet"):
        assert main([*command, f"--input={tmp_path}/c.{name}", f"--output={tmp_path}/{name}.tok"]) == 0
    file, other = (TokenFile.open(tmp_path / f"{name}.tok") for name in ("jsonl", "parquet"))
    assert file.header["content_sha256"] == other.header["content_sha256"]
    assert verify(file.path) == []
    tok = text_tokenizers.load_tokenizer(str(folders["bytes"]))
    flags = file.loss_flags(0, file.header["tokens"])
    parts = [p for t in talks for p in load(folders["bytes"])[1].parts(Conversation(t), "assistant")[1]]
    assert tok.decode(file.tokens[:][flags]) == "It is 4.<|im_end|>Yes.<|im_end|></s></s><|im_end|>"
    assert file.header["loss"]["bytes"] == len("It is 4.Yes.</s></s>")
    assert file.header["source_bytes"] == sum(len(p.text.encode()) for p in parts if p.control < 0)
    assert (file.tokens[:] == tok.eot).sum() == 2  # only the ends of documents count
    capsys.readouterr()
    assert main(["show", str(file.path), "--documents=2"]) == 0
    assert "<|im_start|>assistant\n⟧It is 4.<|im_end|>⟦" in capsys.readouterr().out
    # the data pipeline: both conversations are whole, and the weight is 1 where the target counts
    parts = [slice(first, last) for first, last in itertools.pairwise(file.doc_offsets[:].tolist())]
    longest = max(part.stop - part.start for part in parts)
    data = config.Data(source=str(file.path), seq_len=longest, tokenizer=str(folders["bytes"]))
    batches = pipeline.open_source(data, data.source, split="train", global_batch=2, data_dir=tmp_path)
    batch = batches.batch(0)
    found = {tuple(t): w for t, w in zip(batch["tokens"].tolist(), batch["weights"].tolist(), strict=True)}
    for part in parts:
        rest = longest - (part.stop - part.start)
        want = flags[part][1:].astype(float)
        assert found[*file.tokens[part].tolist(), *[tok.eot] * rest] == [*want, *[0.0] * (rest + 1)]
    assert batches.bytes_per_token == pytest.approx(len("It is 4.Yes.</s></s>") / flags.sum())


def test_the_byte_tokenizers_template_and_the_end_of_text(tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "2+2 <|endoftext|>", "response": "4"}) + "\n")
    for loss, want in (("assistant", "4$"), ("last", "4$"), ("all", "### user\n2+2 <|endoftext|>\n\n### assistant\n4$")):
        prepare.prepare([f"{tmp_path}/c.jsonl"], tmp_path / "c.tok", chat=True, loss=loss, force=True)
        file = TokenFile.open(tmp_path / "c.tok")
        assert (file.tokens[:] == 256).sum() == 1
        assert file.header["loss"]["first"] == (loss == "all")
        flagged = file.tokens[:][file.loss_flags(0, len(file.tokens))]
        assert "".join("$" if t == 256 else chr(t) for t in flagged) == want
    # with a template that ends no turn, end-of-text is added and counts
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    for loss, want in (("assistant", [False] * 18 + [True] * 3), ("all", [True] * 21)):
        prepare.prepare(
            [f"{tmp_path}/c.jsonl"], tmp_path / "c.tok", chat=True, loss=loss, chat_template=tmp_path / "t.jinja", force=True
        )
        file = TokenFile.open(tmp_path / "c.tok")
        assert file.loss_flags(0, len(file.tokens)).tolist() == want


def test_the_share_that_counts_is_printed_and_none_is_refused(tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "q", "response": "four"}) + "\n")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    command = ["prepare", "--chat", f"--input={tmp_path}/c.jsonl", f"--output={tmp_path}/c.tok", "--processes=1"]
    assert main([*command, f"--chat-template={tmp_path}/t.jinja"]) == 2
    error = capsys.readouterr().err
    assert "c.tok: no token counts in the loss" in error and "t.jinja marks no answers" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "t.jinja"]
    assert main(command) == 0
    file = TokenFile.open(tmp_path / "c.tok")
    assert f"c.tok: 5 tokens ({5 / len(file.tokens):.2%}) count in the loss" in capsys.readouterr().out


def test_bad_conversations_are_named_and_options_checked(tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text(
        '{"text": "a"}\n{"messages": [{"role": "user", "content": "q"}]}\n{"prompt": "a", "response": "b"}\n'
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "c.parquet")
    source, out = f"--input={tmp_path}/c.jsonl", f"--output={tmp_path}/c.tok"
    for args, said in (
        ([source, "--chat"], ["c.jsonl:1: not a conversation", "c.jsonl:2: no assistant's turn", "2 bad lines"]),
        ([source, "--loss=all"], ["give --chat too"]),
        ([source, "--chat-template=x"], ["give --chat too"]),
        ([f"--input={tmp_path}/c.parquet", "--chat"], ["no conversation in its columns text"]),
    ):
        assert main(["prepare", out, *args]) == 2
        error = capsys.readouterr().err
        assert all(s in error for s in said), error
    assert main(["prepare", out, source, "--chat", "--skip-bad-lines"]) == 0
    assert TokenFile.open(tmp_path / "c.tok").header["documents"] == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_loss_bits_round_trip(tmp_path_factory, data):
    """Loss bits are read back as written, for all lengths: bits that end within a byte, documents in pieces, appended files."""
    folder = tmp_path_factory.mktemp("bits")
    info = text_tokenizers.info(text_tokenizers.ByteTokenizer())
    documents = data.draw(st.lists(st.lists(st.tuples(st.integers(0, 255), st.booleans()), max_size=20), max_size=6))
    want, parts = [], []
    for name, docs in (("a", documents[:2]), ("b", documents[2:])):
        with TokenWriter(folder / f"{name}.tok", info, loss=True) as writer:
            for pairs in docs:
                half = len(pairs) // 2
                for piece in (pairs[:half], pairs[half:]):
                    writer.write([t for t, _ in piece], len(piece), np.asarray([f for _, f in piece], bool), 1)
                writer.end_document(loss=len(pairs) % 2 == 0)
                want += [f for _, f in pairs] + [len(pairs) % 2 == 0]
        parts.append(TokenFile.open(folder / f"{name}.tok"))
    with TokenWriter(folder / "c.tok", info, loss=True) as writer:
        for part in parts:
            writer.append(part)
    file = TokenFile.open(folder / "c.tok")
    assert file.loss_flags(0, len(want)).tolist() == want
    first = data.draw(st.integers(0, len(want)))
    assert file.loss_flags(first, len(want)).tolist() == want[first:]
    assert file.header["loss"]["tokens"] == sum(want)
    starts = np.asarray(file.doc_offsets[:-1])
    assert file.header["loss"]["first"] == sum(want[s] for s in starts)
    assert verify(file.path) == []


def test_damaged_loss_bits_are_found(tmp_path):
    info = text_tokenizers.info(text_tokenizers.ByteTokenizer())
    with TokenWriter(tmp_path / "a.tok", info, loss=True) as writer:
        writer.write([1] * 100, 100, np.arange(100) % 3 == 0, 34)
        writer.end_document()
    header, end = header_and_end(tmp_path / "a.tok")
    data = bytearray((tmp_path / "a.tok").read_bytes())
    data[end - 16 - 12] ^= 1  # the bits are followed by two offsets and three bytes of padding
    (tmp_path / "b.tok").write_bytes(data)
    (fault,) = verify(tmp_path / "b.tok")
    assert "checksum" in fault
    with TokenWriter(tmp_path / "c.tok", info) as writer, pytest.raises(ValueError, match="loss flags"):
        writer.write([1], 1, np.asarray([True]), 1)


# ---- Rows of whole conversations


def best_fit(lengths, size):
    """Return the tokens in each row of best-fit packing: longest document first, into the fullest row that has space for it."""
    rows = []
    for n in sorted(lengths, reverse=True):
        fits = [k for k, held in enumerate(rows) if held + n <= size]
        if fits:
            rows[max(fits, key=rows.__getitem__)] += n
        else:
            rows.append(n)
    return rows


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=70),
    size=st.integers(20, 60),
    most=st.sampled_from([None, 1, 2, 3]),
)
def test_packing_is_best_fit(lengths, size, most):
    row = windows.pack(np.asarray(lengths, np.int64), size, most)
    held, items = np.bincount(row, lengths), np.bincount(row)
    assert len(row) == len(lengths) and held.max(initial=0) <= size and items.max(initial=0) <= (most or len(lengths))
    assert (items > 0).all(), "no row is empty"
    if most is None:
        assert sorted(held) == sorted(best_fit(lengths, size))
    elif most == 1:
        assert len(items) == len(lengths)


def test_packing_evenly_keeps_to_tokens_and_documents():
    """Seven documents fill three rows of at most three. If a number of rows cannot hold the documents, the result is None."""
    ones = np.ones(7, np.int64)
    assert windows.pack_evenly(ones, 9, 3, 2) is None
    row = windows.pack_evenly(ones, 9, 3, 3)
    assert row is not None and sorted(np.bincount(row)) == [2, 2, 3]
    assert windows.pack_evenly(np.asarray([6, 6, 1]), 10, 3, 1) is None
    # Four long and four short documents: best fit packs the short ones together, and needs one more row.
    lengths = np.asarray([5, 5, 5, 5, 1, 1, 1, 1])
    assert windows.pack_best_fit(lengths, 10, 3).max() + 1 == 4
    row = windows.pack(lengths, 10, 3)
    assert sorted(np.bincount(row, lengths)) == [7, 7, 10]


def test_packing_fills_up_to_the_limit_of_documents():
    """Short documents fill the space beside long ones before they share a row of their own."""
    row = windows.pack(np.asarray([9, 1, 1, 1, 1, 1, 8]), 10, 3)
    assert sorted(np.bincount(row, [9, 1, 1, 1, 1, 1, 8]).tolist()) == [2, 10, 10]


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("0110110", 6),  # the second turn ends at the end of the row
        ("0110111", 3),  # the second turn continues after the row
        ("0110000", 3),
        ("0000111", 6),  # the first turn does not fit
        ("0000001", 0),  # the first turn starts after the row
        ("1000000", 1),
    ],
)
def test_a_long_conversation_is_cut_behind_a_turn(flags, kept):
    """The row has 6 tokens; the last flag belongs to the token after the row."""
    assert windows.whole_turns(np.asarray([f == "1" for f in flags])) == kept


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), T=st.integers(1, 20))
def test_each_token_of_a_long_text_is_a_target_once(lengths, T):
    ends = np.cumsum([0, *lengths])
    begin, length = windows.cut_text(ends[:-1], np.asarray(lengths), T)
    assert (length >= 1).all() and (length <= T + 1).all()
    targets = [t for b, n in zip(begin.tolist(), length.tolist(), strict=True) for t in range(b + 1, b + n)]
    assert targets == sorted(set(range(ends[-1])) - set(ends[:-1].tolist()))


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=40),
    T=st.integers(1, 40),
    seed=st.integers(0, 3),
    max_segments=st.sampled_from([0, 1, 2, 5]),
    packing=st.sampled_from(["documents", "best_fit", "none"]),
)
def test_every_conversation_is_in_one_row_of_an_epoch_and_whole(tmp_path_factory, lengths, T, seed, max_segments, packing):
    """Checks token by token: the row's text, each conversation's segment and positions, the targets that count, and the
    padding.
    """
    file = TokenFile.open(write_conversations(tmp_path_factory.mktemp("packed") / "a.tok", lengths))
    tokens, flags, ends = file.tokens[:], file.loss_flags(0, file.header["tokens"]), file.doc_offsets[:]

    def kept(k):
        """Return the number of tokens of conversation k up to the last turn that fits."""
        if lengths[k] <= T + 1:
            return lengths[k]
        return windows.whole_turns(flags[ends[k] : ends[k] + T + 2])

    assume(any(kept(k) for k in range(len(lengths))))  # a file without any conversation that fits is refused
    batches = open_batches(file.path, T, global_batch=1, seed=seed, max_segments=max_segments, packing=packing)
    apart, count = packing != "none", batches.sources[0].windows
    for epoch in range(2):
        seen = []
        for step in range(epoch * count, (epoch + 1) * count):
            got = {k: x[0].tolist() for k, x in batches.batch(step).items()}
            text = [*got["tokens"], got["targets"][-1]]
            want = {k: [] for k in ("text", "weights", "segments", "positions")}
            held = 0
            while (at := len(want["text"])) <= T and (k := text[at]) != 256:  # a conversation's first token is its number
                part = slice(ends[k], ends[k] + kept(k))
                n, held = part.stop - part.start, held + 1
                seen.append(k)
                want["text"] += tokens[part].tolist()
                want["weights"] += [0.0 if apart else float(flags[part.start]), *flags[part][1:].astype(float)]
                want["segments"] += [held if apart else 1] * n
                want["positions"] += range(n) if apart else range(at, at + n)
            assert held <= ((max_segments or 32) if apart else len(lengths))
            rest = T + 1 - len(want["text"])
            assert text == want["text"] + [256] * rest
            assert got["weights"] == [*want["weights"], *[0.0] * rest][1:]
            assert got["segments"] == [*want["segments"], *[0] * rest][:T]
            assert got["positions"] == [*want["positions"], *[0] * rest][:T]
        assert sorted(seen) == [k for k in range(len(lengths)) if kept(k)]
    packed = windows.PackedRows(file, T, max_segments or None, 0)
    assert packed.truncated == sum(kept(k) < n for k, n in enumerate(lengths))
    assert packed.truncated_tokens == sum(n - kept(k) for k, n in enumerate(lengths))


def test_no_answer_is_learnt_without_its_prompt(tmp_path, capsys):
    """The file has 2,000 conversations of 200 to 1,500 tokens. If conversations stay whole, no target lacks its prompt. If
    they are cut at row borders like text, a quarter of the targets lack it.
    """
    lengths = np.random.default_rng(0).integers(200, 1501, 2000).tolist()
    lacking, full = {}, {}
    for loss in (True, False):
        with TokenWriter(tmp_path / "a.tok", text_tokenizers.info(text_tokenizers.ByteTokenizer()), loss=loss) as writer:
            for n in lengths:
                flags = np.ones(n - 1, bool) if loss else None
                writer.write([255] + [1] * (n - 2), n - 1, flags, (n - 1) * loss)
                writer.end_document(loss=loss)
        batches = open_batches(tmp_path / "a.tok", 2048, global_batch=1)
        counted = without = padding = 0
        for step in range(batches.sources[0].windows):
            batch = {k: x[0] for k, x in batches.batch(step).items()}
            first = np.arange(2048) - batch["positions"]  # the column at which each token's segment starts
            counts = batch["weights"] > 0
            counted += counts.sum()
            without += (counts & (batch["tokens"][first] != 255)).sum()
            padding += (batch["segments"] == 0).sum()
        lacking[loss], full[loss] = without / counted, 1 - padding / (batches.sources[0].windows * 2048)
        assert main(["show", str(tmp_path / "a.tok"), "--seq-len=1024", "--documents=0"]) == 0
    assert lacking == {True: 0.0, False: pytest.approx(0.25, abs=0.02)}
    assert full == {True: pytest.approx(0.993, abs=0.003), False: 1.0}
    out = capsys.readouterr().out
    cut = [n - 1025 for n in lengths if n > 1025]
    assert f"conversations cut to fit 1,025 tokens: {len(cut):,}, which lose {sum(cut):,} tokens" in out
    assert re.search(r"rows are [89]\d\.\d\d% full", out)


def test_rows_of_conversations_are_a_function_of_seed_and_step(tmp_path):
    path = write_conversations(tmp_path / "a.tok", np.random.default_rng(1).integers(2, 40, 300).tolist())
    one, two = open_batches(path, 64, seed=5), open_batches(path, 64, seed=5)
    wanted = {s: two.batch(s) for s in (90, 3, 41)}
    for step, want in sorted(wanted.items()):
        for part in (slice(None), slice(1, 3), np.asarray([3, 0])):
            got = one.batch(step, part)
            assert all(np.array_equal(got[k], want[k][part]) for k in want)
    other = open_batches(path, 64, seed=6)
    assert not all(np.array_equal(other.batch(s)["tokens"], one.batch(s)["tokens"]) for s in range(4))


def test_a_file_with_less_than_a_row_is_padded_and_an_empty_one_refused(tmp_path):
    path = write_conversations(tmp_path / "a.tok", [5, 4])
    assert pipeline.check(config.Data(source=str(path), seq_len=64), 264, False) == []
    batch = open_batches(path, 64, global_batch=2).batch(0)
    assert (batch["segments"] > 0).sum(1).tolist() == [9, 9]
    assert batch["weights"].sum(1).tolist() == [5.0, 5.0]
    empty = write_conversations(tmp_path / "none.tok", [])
    (problem,) = pipeline.check(config.Data(source=str(empty), seq_len=64), 264, False)
    assert "0 sequences" in problem.rule
    (problem,) = pipeline.check(  # text without loss bits is cut into full rows
        config.Data(source=str(write_conversations(tmp_path / "b.tok", [5, 4], loss=False)), seq_len=64), 264, False
    )
    assert "0 sequences" in problem.rule


def test_what_conversations_lose_and_leave_empty_is_counted(tmp_path):
    path = write_conversations(tmp_path / "a.tok", [100, 65, 66, 10, *[4] * 40])
    assert open_batches(path, 64, max_segments=3).truncated == (2, 36, 401)
    (name, filled), *more = open_batches(path, 64, max_segments=3).sparse.items()
    assert not more and name == str(path) and filled == pytest.approx((3 * 65 + 10 + 160) / (17 * 65))
    short = write_conversations(tmp_path / "b.tok", [4] * 40)
    assert open_batches(short, 64).sparse == {}, "16 fill a row, and 32 are allowed"


def test_conversations_beside_text(tmp_path):
    """In a mixture, text gives the rows that it gives alone, without padding, and conversations as many rows as alone."""
    chat = write_conversations(tmp_path / "chat.tok", np.random.default_rng(2).integers(2, 30, 100).tolist())
    text = write_conversations(tmp_path / "text.tok", [50] * 40, loss=False, first=100)
    both = open_batches(f"{text}=0.5,{chat}=0.5", 32, global_batch=8)
    rows_of = {path: open_batches(path, 32, global_batch=4) for path in (text, chat)}
    for step in range(30):
        batch = both.batch(step)
        index, _ = mixture.interleave(np.arange(step * 8, step * 8 + 8), both.mixture.phases[0].weights)
        alone = rows_of[text].batch(step)
        assert all(np.array_equal(batch[k][index == 0], alone[k]) for k in batch)
        assert (batch["segments"][index == 0] > 0).all()
        assert both.sources[1].windows == rows_of[chat].sources[0].windows
