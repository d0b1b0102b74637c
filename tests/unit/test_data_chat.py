"""Conversations to token files: the text of the template, its control tokens, and the tokens that count in the loss."""

import itertools
import json
import operator

import jinja2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from token_files import command, open_batches, train_bpe, write_conversations
from tokenizers import AddedToken, normalizers, pre_tokenizers

from jaxtrain.config import schema
from jaxtrain.data import chat_template, mixture, opening, prepare, rows, windows
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.chat_template import Conversation
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify_file

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BRACKETS = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] }}
{%- if true %}{{ ' [/INST]' }}{% endif %}{% elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] | trim + eos_token }}{% else %}
{{- raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
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
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
TALK = [
    *(("system", "Be brief."), ("user", "What is 2 + 2?"), ("assistant", "It is 4.")),
    *(("user", "Sure?"), ("assistant", "Yes.")),
]


def talk(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


PARTS = {  # kind of tokenizer -> its parts, beside byte-level ones
    "metaspace": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "prepend": {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}
    for kind in ("bytes", "metaspace", "prepend", "rstrip"):
        special = [AddedToken(t, special=True, rstrip=kind == "rstrip" and t == "<|im_end|>") for t in SPECIAL]
        train_bpe(root / kind, ["<unk>", *special] if kind == "metaspace" else special, **PARTS.get(kind, {}))
        (root / kind / "tokenizer_config.json").write_text(json.dumps(settings))
    return {path.name: path for path in root.iterdir()}


def load(folder, source: str | None = None) -> tuple[text_tokenizers.Tokenizer, chat_template.ChatTemplate]:
    tok = text_tokenizers.load_tokenizer(str(folder))
    made = chat_template.load_template(str(folder), tok, "", "2026-11-22")
    if source is not None:
        made = chat_template.ChatTemplate("test", source, made.tokens, made.control, "2026-11-22")
    return tok, made


def ids_of(tok, parts) -> list[int]:
    encoded = iter(tok.encode_batch([p.text for p in parts if p.control < 0], [p.position for p in parts if p.control < 0]))
    return [i for p in parts for i in ([p.control] if p.control >= 0 else next(encoded).tolist())]


def counted(parts) -> list[str]:
    """Return the consecutive stretches of text that count in the loss."""
    groups = itertools.groupby(parts, operator.attrgetter("loss"))
    stretches = ["".join(part.text for part in group) for loss, group in groups if loss]
    return [text for text in stretches if text]


FORGOTTEN = [("user", "a"), ("assistant", "<t></think>b"), ("user", "c"), ("assistant", "<t></think>d")]
TEMPLATES = {  # template -> (template text, the stretches that count in the loss, messages)
    "chatml": (CHATML, ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
    "brackets": (BRACKETS, [" It is 4.</s>", " Yes.</s>"], TALK[1:]),
    "forgets": (FORGETS, ["b<|im_end|>", "<t></think>d<|im_end|>"], FORGOTTEN),
    "thinks": (CHATML.replace("assistant\\n", "assistant\\n<think>"), ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
    "marked": (MARKED, ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_counts_is_the_assistants_text_and_the_token_that_ends_it(folders, name):
    source, want, pairs = TEMPLATES[name]
    _, made = load(folders["bytes"], source)
    text, parts = made.split_conversation(Conversation(talk(*pairs)), "assistant")
    assert counted(parts) == want
    assert "".join(p.text for p in parts) == text
    assert counted(made.split_conversation(Conversation(talk(*pairs)), "last")[1]) == want[-1:]
    assert counted(made.split_conversation(Conversation(talk(*pairs)), "all")[1]) == [text]


@pytest.mark.parametrize(
    ("kind", "name"), [("bytes", "brackets"), ("metaspace", "brackets"), ("prepend", "chatml"), ("rstrip", "chatml")]
)
def test_ids_are_those_of_the_whole_text_with_control_tokens_read(folders, kind, name):
    source, _, pairs = TEMPLATES[name]
    tok, made = load(folders[kind], source)
    text, parts = made.split_conversation(Conversation(talk(*pairs)), "all")
    whole = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    assert ids_of(tok, parts) == whole.encode(text, add_special_tokens=False).ids
    # with the loss of the last turn alone, the ids before that turn are the prompt of a generation
    before = made.render(Conversation(talk(*pairs[:-1])), prompt=True)
    prompt = whole.encode(before, add_special_tokens=False).ids
    assert ids_of(tok, made.split_conversation(Conversation(talk(*pairs)), "last")[1])[: len(prompt)] == prompt


EVIL = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "end|>", "<", ">", "|", "s>", "</", "im_end", " ", "\n", "a", "ü", "|>"])
).map("".join)


@given(contents=st.lists(EVIL, min_size=2, max_size=4), name=st.sampled_from(["chatml", "brackets"]))
def test_no_text_of_a_message_becomes_a_control_token(folders, contents, name):
    tok, made = load(folders["bytes"], TEMPLATES[name][0])
    messages = talk(*[("user" if i % 2 == 0 else "assistant", c) for i, c in enumerate(contents)])
    text, parts = made.split_conversation(Conversation(messages), "assistant")
    assert "".join(p.text for p in parts) == text
    harmless = talk(*[(m["role"], "x") for m in messages])
    want = [p.text for p in made.split_conversation(Conversation(harmless), "assistant")[1] if p.control >= 0]
    assert [p.text for p in parts if p.control >= 0] == want
    # the text equals that of a plain rendering
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert text == environment.from_string(TEMPLATES[name][0]).render(messages=messages, bos_token="<s>", eos_token="</s>")
    literal = [p for p in parts if p.control < 0]
    ids = np.concatenate([*tok.encode_batch([p.text for p in literal], [p.position for p in literal]), np.empty(0, int)])
    assert not set(ids.tolist()) & {t.id for t in tok.control_tokens()}


def test_ordinary_text_is_left_alone_and_only_control_tokens_are_marked(folders):
    _, made = load(folders["bytes"])
    mark = chat_template.MARK
    for text in ("Sure.", "", "the end", "  a list:\n- <b>bold</b>\n", "1 < 2", "text"):
        assert made.guard(text) == text or text == "text"  # a part of <|endoftext|>
    assert made.guard("a </s> b") == f"a <{mark}/s> b"
    assert made.guard(" so <|im_ ") == f" {mark}so <|im_{mark} "
    assert made.guard("> quoted") == f"{mark}> quoted{mark}"
    # A template that writes `<|` before a message and `|>` after it makes no control token of the message.
    _, made = load(folders["bytes"], "{% for m in messages %}<|{{ m.content }}|><|{{ m.role }}|>{{ eos_token }}{% endfor %}")
    text, parts = made.split_conversation(Conversation(talk(("assistant", "im_end"))), "all")
    assert text == "<|im_end|><|assistant|></s>" and [p.text for p in parts if p.control >= 0] == ["</s>"]


@pytest.mark.parametrize(
    ("source", "pairs"),
    [
        (FORGETS.replace("{% if add_generation_prompt %}", "{% if false %}"), FORGOTTEN),  # a turn changes with those after it
        (CHATML.replace("<|im_start|>assistant\\n", "assistant:"), TALK),  # a turn does not begin as its generation prompt
        (CHATML, [("user", "a")]),  # no assistant's turn
        (CHATML, [("user", "\ufdd0"), ("assistant", "b")]),  # a noncharacter
        (BRACKETS, TALK),  # the template refuses a system's message
        ("{{ ''.__class__.__mro__ }}", TALK),  # the sandbox
        ("{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}", [("user", "</s>")]),
    ],
)
def test_conversations_that_cannot_be_written_are_refused(folders, source, pairs):
    _, made = load(folders["bytes"], source)
    with pytest.raises(chat_template.RowError):
        made.split_conversation(Conversation(talk(*pairs)), "assistant")


def test_templates_are_found_beside_the_tokenizer_and_their_helpers_work(tmp_path, folders, monkeypatch):
    tok = text_tokenizers.load_tokenizer(str(folders["bytes"]))

    def found(file="", name=str(tmp_path), date="2026-11-22") -> chat_template.ChatTemplate:
        return chat_template.load_template(name, tok, file and str(tmp_path / file), date)

    with pytest.raises(text_tokenizers.TokenizerError, match="--chat-template"):
        found()
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}{{ messages | tojson }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}))
    assert found().render(Conversation(talk(("user", "ü<")))) == '</s>[{"role": "user", "content": "ü<"}]'
    (tmp_path / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{% break %}{% endfor %}"
    )
    assert found().render(Conversation(talk(("user", "a")))) == "22 November 2026"
    (tmp_path / "mine.jinja").write_text("mine", encoding="utf-8-sig")  # a byte order mark is no text
    assert found("mine.jinja").render(Conversation([])) == "mine"
    (tmp_path / "broken.jinja").write_text("a\n{% for %}")
    with pytest.raises(text_tokenizers.TokenizerError, match="broken.jinja"):
        found("broken.jinja")
    assert found().sha256 != found(date="2026-11-23").sha256  # the template writes the date
    # a template of the hub, from its local cache
    (tmp_path / "special_tokens_map.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert found(name="hf:org/name").sha256 == found().sha256


USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"messages": [USER, BOT], "prompt": "other"}, [USER, BOT]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, BOT]),
        ({"prompt": "q", "completion": "a"}, [USER, BOT]),
        ({"prompt": "q", "response": "a", "system": "s"}, [{"role": "system", "content": "s"}, USER, BOT]),
        ({"prompt": [USER], "completion": [BOT]}, [USER, BOT]),
        ({"instruction": "q", "input": "i", "output": "a", "messages": None}, [{"role": "user", "content": "q\n\ni"}, BOT]),
    ],
)
def test_rows_of_every_form(row, want):
    assert rows.parse_conversation(row).messages == want


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"text": "x"}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 .*content"),
        ({"messages": [{"role": "endoftext", "content": "x"}]}, "endoftext"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{**BOT, "tool_calls": [1]}]}, "tool call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]}, "JSON"),
        ({"messages": [{**BOT, "function_call": {"name": "f"}}]}, "tool_calls"),
        ({"messages": [{**BOT, "weight": 0.5}]}, "weight"),
        ({"instruction": "x", "output": " \n"}, "output"),
        ({"messages": [USER, {"role": "assistant", "content": ""}, USER, BOT]}, "number 2"),
    ],
)
def test_rows_that_are_no_conversation_name_the_field(row, field):
    with pytest.raises(rows.RowError, match=field):
        rows.parse_conversation(row)


TOOLS = (  # many templates write a message like this, the reasoning first
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("arguments", [{"q": "a </s>"}, '{"q": "a </s>"}'])
@pytest.mark.parametrize("thoughts", chat_template.THOUGHTS)
def test_calls_of_tools_and_thoughts_count_and_results_do_not(folders, arguments, thoughts):
    _, made = load(folders["bytes"], TOOLS)
    call = {"function": {"name": "find", "arguments": arguments}}
    answer = {"role": "assistant", thoughts: "hm ", "tool_calls": [call]}
    messages = [USER, answer, {"role": "tool", "content": "3 <|im_end|>"}, BOT]
    tools = [{"name": "find", "about": "<|im_end|>"}]
    for listed in (tools, json.dumps(tools)):
        text, parts = made.split_conversation(rows.parse_conversation({"messages": messages, "tools": listed}), "assistant")
        assert counted(parts) == ['hm find({"q": "a </s>"})<|im_end|>', "a<|im_end|>"]
        assert text.startswith(f"<|im_start|>system\n{json.dumps(tools[0])}<|im_end|>\n")
        assert [p.text for p in parts if p.control >= 0] == ["<|im_start|>", "<|im_end|>"] * 5


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
THINKS = (  # writes the reasoning after the last question only, and no tool calls
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.thinking and loop.index0 > ns.last %}{{ m.thinking }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("loss", chat_template.LOSSES)
def test_parts_that_a_template_does_not_write_are_refused(folders, loss):
    call, think = {"messages": [USER, CALL]}, {"messages": [USER, {**BOT, "reasoning": "hm"}]}
    earlier = {"messages": [*think["messages"], USER, BOT]}
    tools = {"messages": [USER, BOT], "tools": [{"name": "f"}]}
    for source, refused, taken in (
        (CHATML, {"`tool_calls`": call, "`tools`": tools, "thoughts": earlier}, []),
        (THINKS, {"`tool_calls`": call, "`tools`": tools}, [think, earlier]),
        (TOOLS, {}, [call, tools, think, earlier]),
    ):
        _, made = load(folders["bytes"], source)
        for what, row in refused.items():
            with pytest.raises(rows.RowError, match=f"{what}.*--chat-template"):
                made.check(rows.parse_conversation(row))
        for row in taken:
            made.check(rows.parse_conversation(row))
            assert counted(made.split_conversation(rows.parse_conversation(row), loss)[1])


@pytest.mark.parametrize("source", [CHATML, FORGETS, MARKED])
def test_of_a_prompt_with_a_completion_the_completion_counts_alone(folders, source):
    _, made = load(folders["bytes"], source)
    for more in ({"prompt": [USER]}, {"prompt": [USER, BOT, USER], "system": "s"}):
        talk = rows.parse_conversation({"completion": [{"role": "assistant", "content": "b"}], **more})
        assert counted(made.split_conversation(talk, "assistant")[1]) == ["b<|im_end|>"]


@pytest.mark.parametrize("field", [{"train": False}, {"weight": 0}])
@pytest.mark.parametrize("source", [CHATML, FORGETS, MARKED])
def test_messages_that_a_row_takes_out_of_the_loss(folders, source, field):
    _, made = load(folders["bytes"], source)
    first, second = ({"role": "assistant", "content": text} for text in ("one", "two"))

    def found(*answers, loss="assistant"):
        messages = [message for answer in answers for message in ({**USER, "weight": None}, answer)]
        return counted(made.split_conversation(rows.parse_conversation({"messages": messages}), loss)[1])

    assert found({**first, **field}, second) == ["two<|im_end|>"]
    assert found({**first, "train": True, "weight": 1}, {**second, **field}) == ["one<|im_end|>"]
    text = "".join(found(first, second, loss="all"))
    assert found({**first, **field}, second, loss="all") == text.split("one<|im_end|>")
    for loss in ("assistant", "last"):
        with pytest.raises(rows.RowError):
            found({**first, **field}, {**second, **field}, loss=loss)


def test_variables_of_a_template_are_those_of_the_row(folders):
    _, made = load(folders["bytes"], "{% for m in messages %}{{ m.content }}{{ effort }}{% endfor %}")
    row = {"messages": [USER, BOT], "chat_template_kwargs": '{"effort": "low </s>"}'}
    text, parts = made.split_conversation(rows.parse_conversation(row), "all")
    assert text == "qlow </s>alow </s>" and all(part.control < 0 for part in parts)


def test_chat_files_end_to_end(tmp_path, folders):
    talks = [talk(*TALK), talk(("user", "Say </s> twice"), ("assistant", "</s></s>"))]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    pyarrow.parquet.write_table(pyarrow.table({"messages": talks, "id": [1, 2]}), tmp_path / "c.parquet")
    how = ("prepare", "--chat", f"--tokenizer={folders['bytes']}", "--eot=<|endoftext|>")
    for name in ("jsonl", "parquet"):
        assert command(tmp_path, *how, f"--input=c.{name}", f"--output={name}.tok")[0] == 0
    file, other = (TokenFile.open(tmp_path / f"{name}.tok") for name in ("jsonl", "parquet"))
    assert file.header["content_sha256"] == other.header["content_sha256"]
    assert verify_file(file.path) == ""
    tok, _ = load(folders["bytes"])
    flags = file.loss_flags(0, file.header["tokens"])
    assert tok.decode(file.tokens[:][flags]) == "It is 4.<|im_end|>Yes.<|im_end|></s></s><|im_end|>"
    assert file.header["loss"]["bytes"] == len("It is 4.Yes.</s></s>")
    assert (file.tokens[:] == tok.eot).sum() == 2  # only the ends of documents count
    assert "<|im_start|>assistant\n⟧It is 4.<|im_end|>⟦" in command(tmp_path, "show", "jsonl.tok")[1]


def test_the_byte_tokenizers_template_and_the_end_of_text(tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "2+2 <|endoftext|>", "response": "4"}) + "\n")
    for loss, want in (("assistant", "4$"), ("all", "### user\n2+2 <|endoftext|>\n\n### assistant\n4$")):
        prepare.prepare_corpus([f"{tmp_path}/c.jsonl"], tmp_path / "c.tok", chat=True, loss=loss, force=True)
        file = TokenFile.open(tmp_path / "c.tok")
        assert (file.tokens[:] == 256).sum() == 1
        assert file.header["loss"]["first"] == file.header["first_bytes"] == (loss == "all")
        flagged = file.tokens[:][file.loss_flags(0, len(file.tokens))]
        assert "".join("$" if t == 256 else chr(t) for t in flagged) == want
    # with a template that ends no turn, end-of-text is added and counts
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    prepare.prepare_corpus(
        [f"{tmp_path}/c.jsonl"], tmp_path / "c.tok", chat=True, chat_template=f"{tmp_path}/t.jinja", force=True
    )
    assert TokenFile.open(tmp_path / "c.tok").loss_flags(0, 21).tolist() == [False] * 18 + [True] * 3


def test_a_file_in_which_nothing_counts_is_refused(tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "q", "response": "four"}) + "\n")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    code, said = command(tmp_path, "prepare", "--chat", "--input=c.jsonl", "--output=c.tok", "--chat-template=t.jinja")
    assert code == 2 and "t.jinja" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "t.jinja"]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_loss_bits_round_trip(tmp_path_factory, data):
    """Bits that end within a byte, documents in pieces, and appended files."""
    folder = tmp_path_factory.mktemp("bits")
    info = text_tokenizers.tokenizer_info(text_tokenizers.ByteTokenizer())
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
    assert verify_file(file.path) == ""


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


@settings(max_examples=50, deadline=None)
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


def test_packing_evenly_keeps_to_tokens_and_documents():
    ones = np.ones(7, np.int64)
    assert windows.pack_evenly(ones, 9, 3, 2) is None, "three rows are needed"
    row = windows.pack_evenly(ones, 9, 3, 3)
    assert row is not None and sorted(np.bincount(row)) == [2, 2, 3]
    # Four long and four short documents: best fit packs the short ones together, and needs one more row.
    lengths = np.asarray([5, 5, 5, 5, 1, 1, 1, 1])
    row = windows.pack(lengths, 10, 3)
    assert sorted(np.bincount(row, lengths)) == [7, 7, 10]


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("0110110", 6),  # the second turn ends at the end of the row
        ("0110111", 3),  # the second turn continues after the row
        ("0000111", 6),  # the first turn does not fit
        ("0000001", 0),  # the first turn starts after the row
    ],
)
def test_a_long_conversation_is_cut_behind_a_turn(flags, kept):
    """The row has 6 tokens; the last flag belongs to the token after the row."""
    assert windows.fit_turns(np.asarray([f == "1" for f in flags])) == kept


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=40),
    T=st.integers(1, 40),
    seed=st.integers(0, 3),
    max_segments=st.sampled_from([0, 1, 2, 5]),
    packing=st.sampled_from(["documents", "best_fit", "none"]),
)
def test_every_conversation_is_in_one_row_of_an_epoch_and_whole(tmp_path_factory, lengths, T, seed, max_segments, packing):
    file = TokenFile.open(write_conversations(tmp_path_factory.mktemp("packed") / "a.tok", lengths))
    tokens, flags, ends = file.tokens[:], file.loss_flags(0, file.header["tokens"]), file.doc_offsets[:]

    def kept(k):  # the tokens of conversation k up to the last turn that fits
        if lengths[k] <= T + 1:
            return lengths[k]
        return windows.fit_turns(flags[ends[k] : ends[k] + T + 2])

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


def test_a_file_with_less_than_a_row_is_padded_and_an_empty_one_refused(tmp_path):
    path = write_conversations(tmp_path / "a.tok", [5, 4])
    empty = write_conversations(tmp_path / "none.tok", [])
    text = write_conversations(tmp_path / "b.tok", [5, 4], loss=False)  # text is cut into full rows
    for file, keys in ((path, []), (empty, ["data.seq_len"]), (text, ["data.seq_len"])):
        assert [p.key for p in opening.check_data(schema.Data(source=str(file), seq_len=64), 264, False)] == keys
    batch = open_batches(path, 64, global_batch=2).batch(0)
    assert (batch["segments"] > 0).sum(1).tolist() == [9, 9]
    assert batch["weights"].sum(1).tolist() == [5.0, 5.0]


def test_conversations_beside_text(tmp_path):
    """In a mixture, text gives the rows that it gives alone, without padding."""
    chat = write_conversations(tmp_path / "chat.tok", np.random.default_rng(2).integers(2, 30, 100).tolist())
    text = write_conversations(tmp_path / "text.tok", [50] * 40, loss=False, first=100)
    both = open_batches(f"{text}=0.5,{chat}=0.5", 32, global_batch=8)
    only = open_batches(text, 32, global_batch=4)
    for step in range(30):
        batch, alone = both.batch(step), only.batch(step)
        index, _ = mixture.interleave(np.arange(step * 8, step * 8 + 8), both.mixture.phases[0].weights)
        assert all(np.array_equal(batch[k][index == 0], alone[k]) for k in batch)
        assert (batch["segments"][index == 0] > 0).all()


def test_a_tokenizer_without_control_tokens():
    made = chat_template.ChatTemplate("t", "{{ messages[0]['content'] }}", {}, (), "2026-11-22")
    assert made.guard("a <s> b") == "a <s> b" and made.turn_ends() == set()


WHOLE_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
FUNCTIONS = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "tool"),
    [
        (WHOLE_TOOLS, {"name": "f", "description": "d", "parameters": {"type": "object"}, "function": None}),
        (WHOLE_TOOLS, {"name": "f", "description": "d", "function": "f"}),
        (FUNCTIONS, {"type": "function", "description": "outer", "function": {"name": "f", "description": "d"}}),
    ],
)
def test_tools_in_odd_forms_are_written(source, tool):
    made = chat_template.ChatTemplate("t", source, {}, (), "2026-11-22")
    assert made.check(Conversation([{"role": "user", "content": "q"}], tools=[tool])) == ()


def test_the_end_of_a_turn_is_known_if_every_token_counts_and_the_prompt_cannot_be_written_alone():
    source = (
        "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<e>' }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    made = chat_template.ChatTemplate("t", source, {}, (text_tokenizers.ControlToken("<e>", 7),), "2026-11-22")
    roles = ("system", "user", "assistant")
    talk = Conversation([{"role": role, "content": role} for role in roles], prompt=1)
    assert [part.control for part in made.split_conversation(talk, "all")[1] if part.turn == "end"] == [7]


def test_an_answer_without_messages_is_refused():
    for row in ({"instruction": "hi", "output": []}, {"instruction": "hi", "output": [], "history": [["a", "b"]]}):
        with pytest.raises(chat_template.RowError):
            rows.parse_conversation(row)
