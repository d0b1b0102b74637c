"""Rows of other trainers: what of a row reaches the tokens, and what is refused or said."""

import gzip
import itertools
import json
import shlex

import hugging_face
import pyarrow
import pyarrow.parquet
import pytest
from token_files import command

from jaxtrain.data import show
from jaxtrain.data.chat_template import Conversation, load_template
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.tokenizer import load_tokenizer

END, IM_END = "<|endoftext|>", "<|im_end|>"
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
TEMPLATES = {
    # Branches for user, system, assistant and tool, and thoughts of the last turn alone, cut out of the content.
    "branches": (
        "{% if tools %}{{ '<|im_start|>tools' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endif %}"
        "{% for m in messages %}{% if m.role in ('user', 'system') %}" + TURN + "{% elif m.role == 'tool' %}" + TURN + ""
        "{% elif m.role == 'assistant' %}{% set text = m.content %}{{ '<|im_start|>assistant\\n' }}"
        "{% if '</think>' in text %}{% if loop.last %}{{ '<think>' + text.split('</think>')[0].split('<think>')[-1] }}</think>"
        "{% endif %}{% set text = text.split('</think>')[-1] %}{% endif %}{{ text }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # No branch for system or tool; a call hides the content beside it, and there is room for one call.
    "brackets": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %} {{ m.content }}{% endif %}"
        "{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    ),
    # Writes names alone of functions and of calls.
    "names": (
        "{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}"
        "{% for m in messages %}" + TURN + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Forgets the thoughts of all turns, and everything after the first line of a user's message.
    "cuts": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'user' %}{{ m.content.split('\\n')[0] }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def bot(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    of = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": of}}


TALK = [user("hi"), bot("ok")]
SAID = f"⟦<|im_start|>user\nhi{IM_END}<|im_start|>assistant\n⟧ok{IM_END}⟦{END}⟧"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a tokenizer of bytes and the control tokens of ChatML, and the templates."""
    folder = hugging_face.write_base(tmp_path_factory.mktemp("base"), ("<|im_start|>", IM_END))
    for name, source in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(source)
    return folder


def prepared(folder, base, rows, template="branches", *options):
    """Prepare rows, a text of lines or an Arrow table. Return (exit code, output, documents, ⟦⟧ around what has no loss)."""
    kind = "parquet" if isinstance(rows, pyarrow.Table) else "jsonl"
    if kind == "parquet":
        pyarrow.parquet.write_table(rows, folder / "a.parquet")
    else:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / "a.jsonl").write_text(text, encoding="utf-8")
    chat = ["--chat", f"--chat-template={base}/{template}.jinja"] if template else []
    given = [f"--input=a.{kind}", f"--tokenizer={base}", "--output=a.tok", "--force", "--processes=1", *chat, *options]
    code, out = command(folder, "prepare", *given)
    if code:
        return code, out, []
    file, tokenizer = TokenFile.open(folder / "a.tok"), load_tokenizer(str(base))
    return code, out, [show.render_tokens(file, a, b, tokenizer) for a, b in itertools.pairwise(file.doc_offsets[:].tolist())]


def turn(question, answer):
    return f"⟦<|im_start|>user\n{question}{IM_END}<|im_start|>assistant\n⟧{answer}{IM_END}"


REFUSED = {  # name -> (template, row)
    "developer": ("branches", {"messages": [{"role": "developer", "content": "Answer in French."}, *TALK]}),
    "function": ("branches", {"messages": [user("hi"), {"role": "function", "name": "f", "content": "4"}, bot("ok")]}),
    "environment": ("branches", {"messages": [user("hi"), {"role": "environment", "content": "4"}, bot("ok")]}),
    "a message that another repeats": ("branches", {"messages": [{"role": "ipython", "content": "hi"}, *TALK]}),
    "system": ("brackets", {"messages": [{"role": "system", "content": "Be brief."}, *TALK]}),
    "the column system": ("brackets", {"system": "Be brief.", "messages": TALK}),
    "the column system_prompt": ("brackets", {"system_prompt": "Be brief.", "messages": TALK}),
    "content beside a call": ("brackets", {"messages": [user("hi"), bot("Wait.", tool_calls=[call("f", {})])]}),
    "the second call": ("brackets", {"messages": [user("hi"), bot("", tool_calls=[call("f", {}), call("g", {})])]}),
    "the result of a tool": ("brackets", {"messages": [*TALK, {"role": "tool", "content": "4"}, bot("so")]}),
    "thoughts inside the content": ("cuts", {"messages": [user("hi"), bot("<think>hm</think>ok")]}),
    "thoughts that no turn writes": ("cuts", {"messages": [user("hi"), bot("<think>hm</think>ok"), *TALK]}),
    "the end of a message": ("cuts", {"messages": [user("hi\nthere"), bot("ok")]}),
    "history beside messages": ("branches", {"messages": TALK, "history": [["a", "b"]]}),
    "images": ("branches", {"messages": TALK, "images": ["cat.png"]}),
    "the image of a message": ("branches", {"messages": [user("hi", image="cat.png"), bot("ok")]}),
    "audio": ("branches", {"messages": TALK, "audio": {"path": "a.wav"}}),
    "a part with an image": ("branches", {"messages": [user([{"type": "image_url", "image_url": "x"}]), bot("ok")]}),
    "a part of thoughts": ("branches", {"messages": [user("hi"), bot([{"type": "thinking", "thinking": "hm"}])]}),
    "the loss of parts of a message": ("branches", {"messages": [user("hi"), bot("ok", train_detail=[{"train": False}])]}),
    "a wrong flag": ("branches", {"messages": [user("hi"), bot("ok", loss=0.5)]}),
    "the loss of a row's messages": ("branches", {"messages": TALK, "loss_mask": [0, 1]}),
    "the weight of a row": ("branches", {"messages": TALK, "weight": 0}),
    "an answer labelled bad": ("branches", {"prompt": "hi", "completion": "ok", "label": False}),
    "documents": ("branches", {"messages": TALK, "documents": [{"title": "a", "text": "b"}]}),
    "two system columns": ("branches", {"messages": TALK, "system": "a", "system_prompt": "b"}),
    "an empty answer": ("branches", {"messages": [user("hi"), bot(" ")]}),
    "an answer that is null": ("branches", {"messages": [user("hi"), bot(None)]}),
    "an empty answer in the history": ("branches", {"instruction": "b", "output": "c", "history": [["a", ""]]}),
    "a history of three columns": ("branches", {"instruction": "b", "output": "c", "history": [["a", "b", "c"]]}),
    "a role that is a list": ("branches", {"messages": [{"role": ["user"], "content": "hi"}, bot("ok")]}),
    "arguments with a key twice": ("branches", {"messages": [user("hi"), bot("", tool_calls=[call("f", '{"a":1,"a":2}')])]}),
    "a tool without a name": ("brackets", {"messages": TALK, "tools": [{"type": "web_search"}]}),
    "the parameters of a tool": ("names", {"messages": TALK, "tools": [tool("f", a="number")]}),
    "numbers of a call": ("names", {"messages": [user("hi"), bot("", tool_calls=[call("f", {"a": 1})])]}),
    "a call without a name": ("branches", {"messages": [user("hi"), bot("", tool_calls=[call(" ", {})])]}),
    "an input beside a prompt": ("branches", {"prompt": "Translate:", "input": "hi", "completion": "ok"}),
    "the context of an instruction": ("branches", {"instruction": "Sum up.", "context": "hi", "output": "ok"}),
    "a question that is repeated behind others": ("branches", {"prompt": [user("hi")], "completion": [user("a"), *TALK]}),
    "an answer with a thumb down": ("branches", {"prompt": "hi", "completion": "ok", "kto_tag": False}),
    "an answer with the label 0": ("branches", {"prompt": "hi", "completion": "ok", "label": 0}),
    "a part that is a string": ("branches", {"messages": [user(["hi"]), bot("ok")]}),
    "two thoughts": ("branches", {"messages": [user("hi"), bot("ok", thinking="a", reasoning="b")]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_a_bad_line(tmp_path, base, name):
    template, row = REFUSED[name]
    good = {"prompt": "hi", "response": "ok"}
    code, out, _ = prepared(tmp_path, base, [good, row], template)
    assert code == 2
    assert "a.jsonl:2: " in out and "a.jsonl:1: " not in out
    code, out, documents = prepared(tmp_path, base, [good, row], template, "--skip-bad-lines")
    assert (code, len(documents)) == (0, 1)


READ = {  # name -> (row, its document)
    "history": (
        {"instruction": "third", "input": "", "output": "c", "history": [["first", "a"], ["second", "b"]]},
        turn("first", "a") + turn("second", "b") + turn("third", "c") + f"⟦{END}⟧",
    ),
    "history of messages": (
        {"prompt": "second", "response": "b", "history": [user("first"), bot("a")]},
        turn("first", "a") + turn("second", "b") + f"⟦{END}⟧",
    ),
    "no images": ({"messages": TALK, "images": []}, SAID),
    "a weight of one": ({"messages": TALK, "weight": 1.0}, SAID),
    "lists of nothing": ({"messages": TALK, "loss_mask": [], "images": [None], "chat_template_kwargs": ""}, SAID),
    "NeMo's mask of the user": ({"messages": TALK, "mask": "User"}, SAID),
    "an empty answer without loss": (
        {"messages": [user("a"), bot("", train=False), *TALK]},
        f"⟦<|im_start|>user\na{IM_END}<|im_start|>assistant\n{IM_END}" + SAID[1:],
    ),
    "a completion with a system message before the prompt": (
        {"prompt": [user("hi")], "completion": [{"role": "system", "content": "s"}, *TALK]},
        f"⟦<|im_start|>system\ns{IM_END}" + SAID[1:],
    ),
    "more keys of a call": (
        {"messages": [user("hi"), bot("", tool_calls=[{"index": 0, **call("f", {"x": 1})}])]},
        turn("hi", '{"name": "f", "arguments": {"x": 1}}') + f"⟦{END}⟧",
    ),
    "a measured loss": ({"messages": TALK, "loss": 2.5}, SAID),
    "parts of text": ({"messages": [user([{"type": "text", "text": "h"}, {"text": "i"}]), bot([{"text": "ok"}])]}, SAID),
    "parts in ShareGPT's form": (
        {"conversations": [{"from": "human", "value": [{"type": "text", "text": "hi"}]}, {"from": "gpt", "value": "ok"}]},
        SAID,
    ),
    "a prompt that the completion repeats": ({"prompt": [user("hi")], "completion": TALK}, SAID),
    "messages and a text": ({"prompt": [user("hi")], "completion": "ok"}, SAID),
    "a system column that the messages repeat": (
        {"system": "s", "messages": [{"role": "system", "content": "s"}, *TALK]},
        f"⟦<|im_start|>system\ns{IM_END}" + SAID[1:],
    ),
    "system_message": ({"system_message": "s", "messages": TALK}, f"⟦<|im_start|>system\ns{IM_END}" + SAID[1:]),
    "thoughts of the last turn": (
        {"messages": [*TALK, user("so"), bot("<think>hm</think>yes")]},
        turn("hi", "ok") + turn("so", "<think>hm</think>yes") + f"⟦{END}⟧",
    ),
    "null arguments": (
        {"messages": [user("hi"), bot("", tool_calls=[call("f", {"x": None})])]},
        turn("hi", '{"name": "f", "arguments": {"x": null}}') + f"⟦{END}⟧",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_rows_of_other_trainers_are_read(tmp_path, base, name):
    row, want = READ[name]
    code, out, documents = prepared(tmp_path, base, [row])
    assert code == 0, out
    assert [x.replace("⟧⟦", "") for x in documents] == [want.replace("⟧⟦", "")]


@pytest.mark.parametrize(
    "flag", [{"loss": False}, {"loss_mask": 0}, {"trainable": False}, {"masked": True}, {"weight": 0.0}, {"train": False}]
)
def test_a_message_that_is_to_have_no_loss_has_none(tmp_path, base, flag):
    other = {key: 1 - value for key, value in flag.items()}
    row = {"messages": [user("a"), bot("bad", **flag), user("b"), bot("good", **other)]}
    _, _, (document,) = prepared(tmp_path, base, [row])
    assert "⟧good<|im_end|>⟦" in document and "⟧bad" not in document


def test_what_of_rows_is_not_used_is_said(tmp_path, base):
    thoughts = [user("hi"), bot("<think>hm</think>ok"), user("so"), bot("yes")]
    rows = [
        {"messages": [user("hi", name="ann"), bot("ok")], "id": 7, "source": "x"},
        {"messages": thoughts, "id": 8, "chat_template_kwargs": {"enable_thinkng": False}},
        {"messages": [user(f"what is {END}"), bot("ok")], "note": ""},
        {"prompt": "2+2", "completion": "2+2=4"},
        {"messages": [user("hi", train=True), bot("ok")]},
    ]
    code, out, documents = prepared(tmp_path, base, rows)
    assert (code, len(documents)) == (0, 5)
    notes = [line for line in out.splitlines() if line.split(" ", 1)[1].startswith("row")]
    of = {word: [int(line.split()[0]) for line in notes if word in line] for word in ("'id'", "'source'", "'name'", "thoughts")}
    assert of == {"'id'": [2], "'source'": [1], "'name'": [1], "thoughts": [1]}
    assert any("'enable_thinkng'" in line for line in notes) and any(END in line for line in notes)
    assert any("begin with the text of the prompt" in line for line in notes) and any("`train`" in line for line in notes)
    assert not any("'note'" in line for line in notes)
    _, again, _ = prepared(tmp_path, base, rows, "branches", "--processes=2", "--shard-mb=0.0002")
    assert sorted(notes) == sorted(line for line in again.splitlines() if line.split(" ", 1)[1].startswith("row"))


def test_structs_that_arrow_has_aligned(tmp_path, base):
    """Calls and tools of a Parquet file have the keys that their rows had, and no nulls of the keys of other rows."""
    calls = [call("weather", {"city": "Paris"}), call("add", {"a": 1, "b": 2})]
    tools = [tool("weather", city="string"), tool("add", a="number", b="number")]
    rows = [{"messages": [user("hi"), bot("", tool_calls=[c])], "tools": [t]} for c, t in zip(calls, tools, strict=True)]
    code, out, documents = prepared(tmp_path, base, pyarrow.Table.from_pylist(rows))
    assert code == 0, out
    for document, c, t in zip(documents, calls, tools, strict=True):
        assert document.startswith(f"⟦<|im_start|>tools{json.dumps(t)}{IM_END}<|im_start|>user\n")
        assert f"⟧{json.dumps(c['function'])}{IM_END}⟦" in document
    assert any(line.startswith("2 rows") and "null" in line for line in out.splitlines())


def test_nulls_are_counted_by_rows_at_any_depth(tmp_path, base):
    calls = [call("f", {"q": {"a": 1}}), call("g", {"q": {"b": 2}}), call("h", {"c": {"d": 3}})]
    rows = [{"messages": [user("hi"), bot("", tool_calls=calls)]}, {"messages": TALK}]
    _, out, _ = prepared(tmp_path, base, pyarrow.Table.from_pylist(rows))
    assert [line.split(":")[0] for line in out.splitlines() if "null" in line] == ["1 row"]
    row = {"messages": [user("hi"), bot("", tool_calls=[call("f", {"a": None})])], "tools": [tool("f", a="number")]}
    row["tools"][0]["function"]["parameters"]["properties"]["b"] = None
    _, out, (document,) = prepared(tmp_path, base, [row])
    assert {word for word in ("arguments", "properties") for line in out.splitlines() if "null" in line and word in line}
    assert '"b"' not in document and '{"a": null}' in document


def test_a_schema_that_is_written_in_part_is_no_bad_line(tmp_path, base):
    """Descriptions of parameters that a template leaves out are said, since the model sees the same text in use."""
    (base / "schema.jinja").write_text(
        TEMPLATES["names"].replace(
            "t.function.description", "t.function.description + t.function.parameters.properties.keys() | join"
        )
    )
    described = tool("f", a="number")
    described["function"]["parameters"]["properties"]["a"] |= {"description": "a number", "default": {"name": "x"}}
    described["function"]["return"] = {"type": "string", "description": "a text"}
    code, out, documents = prepared(tmp_path, base, [{"messages": TALK, "tools": [described]}], "schema")
    assert code == 0 and documents[0].startswith("⟦fdoes fa<|im_start|>")
    assert any("descriptions" in line and "tools" in line for line in out.splitlines())


def test_a_conversation_is_rendered_a_few_times(base):
    """However many tags its thoughts have, and however many turns there are."""
    tokenizer = load_tokenizer(str(base))
    made = load_template(str(base), tokenizer, f"{base}/branches.jinja", "2026-01-01")
    thoughts = "<think>" + "".join(f"<b>{i}</b>" for i in range(50)) + "</think>"
    messages = [message for i in range(8) for message in (user(f"{i}"), bot(f"{thoughts}{i}"))]
    renders, render = [], made.render
    made.render = lambda *args: (renders.append(1), render(*args))[1]
    assert made.check(Conversation(messages))
    assert len(renders) < 20


def test_maps_parts_and_flags_of_arrow(tmp_path, base):
    part = pyarrow.struct([("type", pyarrow.string()), ("text", pyarrow.string()), ("image", pyarrow.string())])
    function = pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.map_(pyarrow.string(), pyarrow.string()))])
    message = pyarrow.struct(
        [
            ("role", pyarrow.string()),
            ("content", pyarrow.list_(part)),
            ("weight", pyarrow.float64()),
            ("tool_calls", pyarrow.list_(pyarrow.struct([("function", function)]))),
        ]
    )
    hi = [{"type": "text", "text": "hi"}]
    calls = [{"function": {"name": "f", "arguments": [("city", "Paris")]}}]
    rows = [[{"role": "user", "content": hi}, {"role": "assistant", "content": [], "tool_calls": calls, "weight": 1.0}]]
    code, out, documents = prepared(tmp_path, base, pyarrow.table({"messages": pyarrow.array(rows, pyarrow.list_(message))}))
    assert code == 0, out
    assert documents == [turn("hi", '{"name": "f", "arguments": {"city": "Paris"}}') + f"⟦{END}⟧"]


PAIRS = {  # name -> (template, row, prompt); the completions are "good" and "bad"
    "lists repeat the prompt": (
        "branches",
        {"prompt": [user("Q")], "chosen": [user("Q"), bot("good")], "rejected": [user("Q"), bot("bad")]},
        "Q",
    ),
    "one list repeats the prompt": (
        "branches",
        {"prompt": [user("Q")], "chosen": [user("Q"), bot("good")], "rejected": [bot("bad")]},
        "Q",
    ),
    "messages with other ids": (
        "branches",
        {"chosen": [user("Q", id=1), bot("good")], "rejected": [user("Q", id=2), bot("bad")]},
        "Q",
    ),
    "conversations with two answers": (
        "branches",
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        "Q",
    ),
    "a text and lists of answers": ("branches", {"prompt": "Q", "chosen": [bot("good")], "rejected": [bot("bad")]}, "Q"),
    "messages that end with the chosen answer": (
        "branches",
        {"messages": [user("Q"), bot("good")], "chosen": "good", "rejected": "bad"},
        "Q",
    ),
    "an instruction": ("branches", {"instruction": "Q", "chosen": "good", "rejected": "bad"}, "Q"),
    "the repeated end of a prompt": (
        "branches",
        {
            "prompt": [user("P"), bot("a"), user("Q")],
            "chosen": [user("Q"), bot("good")],
            "rejected": [user("Q"), bot("bad")],
        },
        f"P{IM_END}<|im_start|>assistant\na{IM_END}<|im_start|>user\nQ",
    ),
    "texts repeat the prompt": ("", {"prompt": "Q: A:", "chosen": "Q: A:good", "rejected": "Q: A:bad"}, "Q: A:"),
    "an echo of one text": ("", {"prompt": "go", "chosen": "good", "rejected": "bad"}, "go"),
    "Chinese": ("", {"chosen": "问题：你好。回答：good", "rejected": "问题：你好。回答：bad"}, "问题：你好。回答："),
    "Japanese": ("", {"chosen": "質問です。はいgood", "rejected": "質問です。はいbad"}, "質問です。はい"),
    "Thai": ("", {"chosen": "คำถามgood", "rejected": "คำถามbad"}, "คำถาม"),
    "words": ("", {"chosen": "Q: is it\ngood", "rejected": "Q: is it\nbad"}, "Q: is it\n"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_prompt_of_a_pair_is_written_once(tmp_path, base, name):
    template, row, prompt = PAIRS[name]
    code, out, documents = prepared(tmp_path, base, [row], template, "--preference")
    assert code == 0, out
    if template:
        assert documents == [turn(prompt, answer) + f"⟦{END}⟧" for answer in ("good", "bad")]
    else:
        completions = [row[key].removeprefix(prompt) for key in ("chosen", "rejected")]
        completions = completions if name != "an echo of one text" else ["good", "bad"]
        assert documents == [f"⟦{prompt}⟧{completion}{END}" for completion in completions]


def test_a_cut_of_a_pair_is_before_no_accent_and_in_no_word(tmp_path, base):
    """Vowel signs stay with their consonant, and a shared half of a word belongs to the completions."""
    for chosen, rejected, prompt in (
        ("ถามดี", "ถามดา", "ถาม"),  # the consonant is shared, its vowel is not
        ("ខ្មែរល្អ", "ខ្មែរល្មម", "ខ្មែរ"),  # stacked consonants
        ("ถามเก", "ถามเข", "ถาม"),  # a vowel that is written before its consonant
        ("Q: good", "Q: goof", "Q:"),
        ("你好 hello", "你好 help", "你好"),
    ):
        _, _, documents = prepared(tmp_path, base, [{"chosen": chosen, "rejected": rejected}], "", "--preference")
        assert documents == [f"⟦{prompt}⟧{text.removeprefix(prompt)}{END}" for text in (chosen, rejected)]


@pytest.mark.parametrize(
    ("template", "row"),
    [
        ("", {"instruction": "Q", "chosen": "It is good", "rejected": "It is bad"}),
        ("", {"question": "Q", "chosen": "It is good", "rejected": "It is bad"}),
        ("", {"prompt": "", "input": "Q", "chosen": "It is good", "rejected": "It is bad"}),
        ("", {"prompt": "Q ", "chosen": "", "rejected": "bad"}),
        ("", {"prompt": "Q ", "chosen": "good", "rejected": "bad", "images": ["a.png"]}),
        ("branches", {"question": "Q", "chosen": "good", "rejected": "bad"}),
        ("branches", {"prompt": "Q", "chosen": "", "rejected": "bad"}),
        ("branches", {"messages": [user("Q"), bot("fine")], "chosen": "good", "rejected": "bad"}),
        ("branches", {"prompt": "Translate:", "input": "hi", "chosen": "good", "rejected": "bad"}),
        ("branches", {"prompt": "Q", "chosen": "good", "rejected": "bad", "images": ["a.png"]}),
        ("brackets", {"system": "s", "prompt": "Q", "chosen": "good", "rejected": "bad"}),
    ],
)
def test_pairs_that_would_lose_something_are_bad_lines(tmp_path, base, template, row):
    for rows, file in (([row], "a.jsonl"), (pyarrow.Table.from_pylist([row]), "a.parquet")):
        code, out, _ = prepared(tmp_path, base, rows, template, "--preference")
        assert code == 2 and f"{file}:1: " in out


DIGITS, DEEP = "9" * 5000, "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "line",
    [
        f'{{"text": "b", "n": {DIGITS}}}',
        f'{{"text": "b", "n": {DEEP}}}',
        '{"text": "b", "text": "c"}',
        '{"text": "b\\ud800"}',
        '{"text": ["b"]}',
        "null",
    ],
)
def test_whatever_one_line_raises_is_one_bad_line(tmp_path, base, line):
    text = f'{{"text": "a"}}\n{line}\n{{"text": "c"}}\n'
    code, out, _ = prepared(tmp_path, base, text, "")
    assert code == 2 and "a.jsonl:2: " in out
    code, out, documents = prepared(tmp_path, base, text, "", "--skip-bad-lines")
    assert (code, documents) == (0, [f"a{END}", f"c{END}"])


@pytest.mark.parametrize("arguments", [f'{{"n": {DIGITS}}}', f'{{"n": {DEEP}}}'])
def test_whatever_one_conversation_raises_is_one_bad_line(tmp_path, base, arguments):
    bad = {"messages": [user("hi"), bot("", tool_calls=[call("f", arguments)])]}
    code, out, documents = prepared(tmp_path, base, [{"messages": TALK}, bad], "branches", "--skip-bad-lines")
    assert (code, documents) == (0, [SAID]) and "a.jsonl:2: " in out


def test_values_that_python_cannot_represent_are_bad_lines(tmp_path, base):
    """A date of the year 30,000 in a column that is read is one bad row of a Parquet file."""
    days = pyarrow.array([0, 10_000_000], pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table({"messages": pyarrow.array([TALK] * 2), "system": pyarrow.array([None, "s"]), "label": days})
    code, out, documents = prepared(tmp_path, base, table, "branches", "--skip-bad-lines")
    assert (code, len(documents)) == (0, 1) and "a.parquet:2: " in out


def test_a_byte_order_mark_is_no_text(tmp_path, base):
    mark = "\ufeff"
    _, _, documents = prepared(tmp_path, base, f'{mark}{{"text": "a"}}\n{mark}{{"text": "b"}}\n', "")
    assert documents == [f"a{END}", f"b{END}"]
    (tmp_path / "a.txt").write_text(f"{mark}abc", encoding="utf-8")
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=t.tok")[0] == 0
    assert TokenFile.open(tmp_path / "t.tok").header["source_bytes"] == 3


@pytest.mark.parametrize(
    ("pattern", "rows", "others"),
    [
        ("*", ["a.parquet"], ["README.md"]),
        ("**", ["sub/a.jsonl"], ["README.md"]),
        ("train.*", ["train.jsonl"], ["train.md", "test.jsonl"]),
        ("*", ["A.JSONL"], ["LICENSE"]),
        ("*", ["a.jsonl.gz", "b.parquet"], ["x.py"]),
    ],
)
def test_a_readme_is_no_document_of_a_data_set(tmp_path, pattern, rows, others):
    for name in rows + others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n' if name in rows or name == "test.jsonl" else "# Read me")
        if name.endswith(".gz"):
            (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n'))
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / name)
    code, out = command(tmp_path, "prepare", f"--input={tmp_path}/{pattern}", "--output=a.tok")
    assert code == 2
    fix = shlex.split(out.split("Fix: ")[1])
    assert command(tmp_path, "prepare", *fix, "--output=a.tok")[0] == 0
    assert TokenFile.open(tmp_path / "a.tok").header["documents"] == len(rows)
