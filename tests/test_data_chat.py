"""Conversations to token files: what the template writes, which tokens are control tokens, and which count in the loss."""

import json
import re

import jinja2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxtrain import config
from jaxtrain.data import pipeline, prepare, rows, template, tokenfile
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.tokenfile import TokenFile, TokenWriter
from jaxtrain.data.verify import verify

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
FORGETS = (  # writes only the last turn's thoughts
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
    """A real tokenizer.json with special tokens, and tokenizer_config.json beside it."""
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
    encoded = iter(tok.encode_places([p.text for p in parts if p.control < 0], [p.place for p in parts if p.control < 0]))
    return [i for p in parts for i in ([p.control] if p.control >= 0 else next(encoded).tolist())]


def counted(parts) -> list[str]:
    """The runs of text that count."""
    found = [""]
    for part in parts:
        if part.loss:
            found[-1] += part.text
        elif found[-1]:
            found.append("")
    return [text for text in found if text]


TEMPLATES = {  # template -> (what follows the text of an assistant's turn and still counts, messages)
    "chatml": (CHATML, ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
    "headers": (HEADERS, ["It is 4.<|eot_id|>", "Yes.<|eot_id|>"], TALK),
    "brackets": (BRACKETS, [" It is 4.</s>", " Yes.</s>"], TALK[1:]),
    "marked": (MARKED, ["It is 4.<|im_end|>", "Yes.<|im_end|>"], TALK),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_counts_is_the_assistants_text_and_the_token_that_ends_it(folders, name):
    source, want, pairs = TEMPLATES[name]
    tok, made = load(folders["bytes"], source)
    text, parts = made.parts(talk(*pairs), "assistant")
    assert counted(parts) == want
    assert "".join(p.text for p in parts) == text
    assert counted(made.parts(talk(*pairs), "last")[1]) == want[-1:]
    assert counted(made.parts(talk(*pairs), "all")[1]) == [text]
    # the turn's tokens are those that the model would be asked for after the prompt
    ends = {tok.control_tokens()[i].text: tok.control_tokens()[i].id for i in range(len(SPECIAL))}
    marked = [p for p in parts if p.loss and p.control >= 0]
    assert [p.control for p in marked] == [ends[p.text] for p in marked]


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "prepend", "rstrip"])
@pytest.mark.parametrize("name", ["chatml", "headers", "brackets"])
def test_ids_are_those_of_the_whole_text_with_control_tokens_read(folders, kind, name):
    """Against the package itself, which reads control tokens wherever they stand."""
    source, _, pairs = TEMPLATES[name]
    tok, made = load(folders[kind], source)
    text, parts = made.parts(talk(*pairs), "all")
    whole = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    assert ids_of(tok, parts) == whole.encode(text, add_special_tokens=False).ids
    # with the loss of the last turn alone: what stands before it is what a generation would be given
    before = made.render(talk(*pairs[:-1]), prompt=True)
    prompt = whole.encode(before, add_special_tokens=False).ids
    assert ids_of(tok, made.parts(talk(*pairs), "last")[1])[: len(prompt)] == prompt


@pytest.mark.parametrize(("kind", "prefixed"), [("metaspace", ["start"]), ("prepend", ["start", "after"])])
def test_a_space_is_put_before_a_text_only_where_the_package_would(folders, kind, prefixed):
    tok, _ = load(folders[kind])
    names = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    for place in ("start", "after", "inner"):
        (ids,) = tok.encode_places(["is it"], [place])
        assert "".join(map(names.id_to_token, ids)) == ("▁is▁it" if place in prefixed else "is▁it"), place


EVIL = st.lists(
    st.sampled_from(
        [*SPECIAL, "<|im_", "end|>", "<", ">", "|", "s>", "</", "im_end", " ", "\n", "a", "ü", "<|", "|>", "eot_id"]
    )
).map("".join)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(EVIL, min_size=2, max_size=4), name=st.sampled_from(["chatml", "headers", "brackets"]))
def test_no_text_of_a_message_becomes_a_control_token(folders, contents, name):
    tok, made = load(folders["bytes"], TEMPLATES[name][0])
    messages = talk(*[("user" if i % 2 == 0 else "assistant", c) for i, c in enumerate(contents)])
    text, parts = made.parts(messages, "assistant")
    assert "".join(p.text for p in parts) == text
    harmless = talk(*[(m["role"], "x") for m in messages])
    want = [p.text for p in made.parts(harmless, "assistant")[1] if p.control >= 0]
    assert [p.text for p in parts if p.control >= 0] == want
    # and the text is the one that a plain rendering gives
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert text == environment.from_string(made_source(name)).render(messages=messages, bos_token="<s>", eos_token="</s>")
    literal = [p for p in parts if p.control < 0]
    ids = np.concatenate([*tok.encode_places([p.text for p in literal], [p.place for p in literal]), np.empty(0, int)])
    assert not set(ids.tolist()) & {t.id for t in tok.control_tokens()}


def made_source(name: str) -> str:
    return TEMPLATES[name][0]


def test_ordinary_text_is_left_alone_and_only_control_tokens_are_marked(folders):
    _, made = load(folders["bytes"])
    mark = template.MARK
    for text in ("Sure.", "", "the end", "  a list:\n- <b>bold</b>\n", "1 < 2", "text"):
        assert made.guard(text) == text or text == "text"  # of <|endoftext|>
    assert made.guard("a </s> b") == f"a <{mark}/s> b"
    assert made.guard(" so <|im_ ") == f" {mark}so <|im_{mark} "
    assert made.guard("> quoted") == f"{mark}> quoted{mark}"


def test_a_message_at_whose_border_a_control_token_would_arise(folders):
    """A template that writes `<|` before a message and `|>` after it: the message names no token all the same."""
    _, made = load(folders["bytes"], "{% for m in messages %}<|{{ m.content }}|><|{{ m.role }}|>{{ eos_token }}{% endfor %}")
    _, parts = made.parts(talk(("assistant", "im_end")), "all")
    assert [p.text for p in parts if p.control >= 0] == ["</s>"]
    assert "".join(p.text for p in parts) == "<|im_end|><|assistant|></s>"


@pytest.mark.parametrize(
    ("source", "pairs", "said"),
    [
        (
            FORGETS,
            [("user", "a"), ("assistant", "<t></think>b"), ("user", "c"), ("assistant", "d")],
            "otherwise when more follow",
        ),
        (CHATML.replace("assistant\\n", "assistant\\n<think>"), TALK, "otherwise than its generation prompt"),
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
        made.parts(talk(*pairs), "assistant")


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
    assert found().render(talk(("user", "ü<"))) == '</s>[{"role": "user", "content": "ü<"}]'
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %B %Y') }}{% for m in messages %}{% break %}{% endfor %}")
    assert found().render(talk(("user", "a"))) == "22 November 2026"
    (folder / "mine.jinja").write_text("mine")
    assert found(folder / "mine.jinja").render([]) == "mine"
    (folder / "broken.jinja").write_text("a\n{% for %}")
    with pytest.raises(text_tokenizers.TokenizerError, match=r"broken.jinja: line 2"):
        found(folder / "broken.jinja")
    with pytest.raises(text_tokenizers.TokenizerError, match="cannot be read"):
        found(folder / "none.jinja")
    assert found().sha256 != template.load_template(str(folder), tok, None, "2026-11-23").sha256  # it writes the date
    # of the hub, from its cache
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
    assert rows.conversation(row) == want


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "not a conversation (has: 'text')"),
        ({"messages": "x"}, "'messages' is str, not a list"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["x"]}, "message 1 of 'messages' is str"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 of 'messages' has no 'content'"),
        ({"messages": [{"role": "endoftext", "content": "x"}]}, "the role 'endoftext'"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' of message 1 of 'messages' is NoneType"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [{**BOT, "tool_calls": [1]}]}, "'tool_calls', which is not read"),
        ({"messages": [BOT], "tools": ["f"]}, "the row has 'tools'"),
        ({"prompt": "x", "completion": 3}, "'completion' is int"),
        ({"instruction": "x", "input": 3, "output": "y"}, "'input' is int"),
    ],
)
def test_rows_that_are_no_conversation_say_why(row, said):
    with pytest.raises(rows.RowError, match=re.escape(said)):
        rows.conversation(row)


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
    parts = [p for t in talks for p in load(folders["bytes"])[1].parts(t, "assistant")[1]]
    assert tok.decode(file.tokens[:][flags]) == "It is 4.<|im_end|>Yes.<|im_end|></s></s><|im_end|>"
    assert file.header["loss"]["bytes"] == len("It is 4.Yes.</s></s>")
    assert file.header["source_bytes"] == sum(len(p.text.encode()) for p in parts if p.control < 0)
    assert (file.tokens[:] == tok.eot).sum() == 2  # nothing but the ends of the documents
    capsys.readouterr()
    assert main(["show", str(file.path), "--documents=2"]) == 0
    assert "<|im_start|>assistant\n⟧It is 4.<|im_end|>⟦" in capsys.readouterr().out
    # the pipeline: weight where the target counts
    data = config.Data(source=str(file.path), seq_len=8, tokenizer=str(folders["bytes"]))
    for packing in ("documents", "none"):
        data = config.Data(source=str(file.path), seq_len=8, tokenizer=str(folders["bytes"]), packing=packing)
        batches = pipeline.open_source(data, data.source, split="train", global_batch=4, data_dir=tmp_path)
        windows = batches.window_numbers(0, np.arange(4))
        for w, weights in zip(windows, batches.batch(0)["weights"], strict=True):
            assert weights.tolist() == flags[w * 8 + 1 : w * 8 + 9].astype(float).tolist()
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
    # a template that ends no turn: end-of-text does, and counts
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    for loss, want in (("assistant", [False] * 18 + [True] * 3), ("all", [True] * 21)):
        prepare.prepare(
            [f"{tmp_path}/c.jsonl"], tmp_path / "c.tok", chat=True, loss=loss, chat_template=tmp_path / "t.jinja", force=True
        )
        file = TokenFile.open(tmp_path / "c.tok")
        assert file.loss_flags(0, len(file.tokens)).tolist() == want


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
    """Whatever the lengths: bits that end within a byte, documents in pieces, files appended to each other."""
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
    if len(want) > 9:
        view = pipeline.FileWindows(file, 3)
        index = np.arange(view.windows)
        loss = view.rows(index)[3]
        assert loss.tolist() == [want[w * 3 + 1 : w * 3 + 4] for w in index]


def test_damaged_loss_bits_are_found(tmp_path):
    info = text_tokenizers.info(text_tokenizers.ByteTokenizer())
    with TokenWriter(tmp_path / "a.tok", info, loss=True) as writer:
        writer.write([1] * 100, 100, np.arange(100) % 3 == 0, 34)
        writer.end_document()
    header, end = tokenfile.read_header(tmp_path / "a.tok")
    data = bytearray((tmp_path / "a.tok").read_bytes())
    data[end - 16 - 12] ^= 1  # among the bits: two offsets follow, and three bytes of padding
    (tmp_path / "b.tok").write_bytes(data)
    (fault,) = verify(tmp_path / "b.tok")
    assert "checksum" in fault and "loss bits of tokens 0 to 101" in fault
    with TokenWriter(tmp_path / "c.tok", info) as writer, pytest.raises(ValueError, match="loss flags"):
        writer.write([1], 1, np.asarray([True]), 1)
