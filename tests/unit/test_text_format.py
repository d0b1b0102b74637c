"""How texts end, and the chat template: from a model's files and the training data to exports."""

import json

import hugging_face
import pytest
from token_files import command, open_batches

from jaxtrain.data import text_format, tokenizer
from jaxtrain.data.chat_template import BUILTIN_TEMPLATES, Conversation, load_template
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.hf.exporting import export_model
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import import_folder, open_origin
from jaxtrain.train.evaluate import first_questions

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")  # ids 257 to 260
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "9"}] * 2}
WRITES = {  # what a template writes, and the same template with blocks; the turn's end is 258
    "plain": "{% for m in messages %}<|im_start|>{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}",
    "blocks": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "text": "{% for m in messages %}{{ '### ' + m.role + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant{% endif %}",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hugging_face.write_base(tmp_path_factory.mktemp("base") / "base", SPECIAL)


@pytest.mark.parametrize("loss", ["assistant", "all", "last"])
def test_a_token_file_knows_what_ends_its_turns(tmp_path, base, loss):
    """A part of several processes is joined. A template that ends a turn by no token leaves the end to end-of-text."""
    (tmp_path / "a.jsonl").write_text((json.dumps(CHAT) + "\n") * 40)
    for name, source in WRITES.items():
        (tmp_path / f"{name}.jinja").write_text(source)
        made = [f"--chat-template={name}.jinja", f"--tokenizer={base}", f"--loss={loss}", "--shard-mb=0.001"]
        assert command(tmp_path, "prepare", "--chat", "--input=a.jsonl", f"--output={name}.tok", *made)[0] == 0
        file = TokenFile.open(tmp_path / f"{name}.tok")
        ends = {"text": [256], "blocks": [256, 258]}.get(name, [256, 258] if loss == "all" else [258])
        assert file.header["turn_ends"] == ends, name
        found = text_format.format_from_headers([file.header])
        assert (found.eot, found.taught, found.template) == (256, tuple(ends), source)
        batches = open_batches(tmp_path / f"{name}.tok", 64, tokenizer=str(base))
        assert batches.text == found and not batches.templates
        questions = first_questions({"": batches}, 3, 64)
        if loss == "all":  # everything counts: nothing is asked
            assert questions == []
        else:
            decode = load_tokenizer(str(base)).decode
            prompt, answer = map(decode, questions[0])
            assert len(questions) == 3 and prompt.count("9") == 1 and answer.startswith("9"), name
            assert first_questions({"": batches}, 3, len(questions[0][0]) - 1) == []
    mixed = open_batches(f"{tmp_path}/plain.tok,{tmp_path}/blocks.tok,{tmp_path}/text.tok", 64, tokenizer=str(base))
    assert mixed.text.template == WRITES["plain"] and len(mixed.templates) == 2
    assert set(mixed.text.taught) == {256, 258}


HARMONY = (  # thoughts end with <|im_end|>, as earlier answers do; the last answer ends with </s>
    "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}{% else %}{% generation %}"
    "{% if m.thinking %}{{ m.thinking }}<|im_end|>{% endif %}{{ m.content }}"
    "{% if loop.last %}</s>{% else %}<|im_end|>{% endif %}{% endgeneration %}{% endif %}{% endfor %}"
)


def test_a_token_inside_of_turns_is_no_end(tmp_path, base):
    thinks = [*CHAT["messages"][:3], {"role": "assistant", "content": "9", "thinking": "hm"}]
    (tmp_path / "a.jsonl").write_text((json.dumps(CHAT) + "\n") * 9 + json.dumps({"messages": thinks}) + "\n")
    (tmp_path / "h.jinja").write_text(HARMONY)
    made = ["--chat-template=h.jinja", f"--tokenizer={base}", "--shard-mb=0.0003"]
    assert command(tmp_path, "prepare", "--chat", "--input=a.jsonl", "--output=a.tok", *made)[0] == 0
    assert TokenFile.open(tmp_path / "a.tok").header["turn_ends"] == [260]


def test_ids_follow_their_tokens_to_another_tokenizer(tmp_path):
    """A base's tokenizer with more tokens, and an export with the same one written in another way."""
    ids = {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256}
    base = hugging_face.write_base(tmp_path / "base", ["<s>", "</s>"], **ids)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256], "top_p": 0.9}))
    more = hugging_face.write_base(tmp_path / "more", ["<new>", "<s>", "</s>"], eos="<new>")
    for name in ("config.json", "model.safetensors"):
        (more / name).unlink()
    origin, tokenizer = open_origin(str(base)), load_tokenizer(str(more))
    data = TextFormat(tokenizer.sha256, 256, (257,))
    made = text_format.merge_formats(data, tokenizer, origin.text(), text_format.read_text_format(str(more)))
    assert made.special == {"bos_token_id": 258, "eos_token_id": 259, "pad_token_id": 256}
    assert made.ids_to_write(()) == {"bos_token_id": 258, "eos_token_id": [259, 257], "pad_token_id": 256}
    assert made.generation_to_write(made.special) == {"eos_token_id": [259, 256, 257], "top_p": 0.9}
    import_folder(open_folder(base), tmp_path / "ours", "auto", lambda line: None)
    (tmp_path / "spaced").mkdir()
    spaced = json.dumps(json.loads((base / "tokenizer.json").read_text()), indent=1)
    (tmp_path / "spaced" / "tokenizer.json").write_text(spaced)
    export_model(str(tmp_path / "ours"), tmp_path / "out", tokenizer=str(tmp_path / "spaced"), say=lambda line: None)
    assert json.loads((tmp_path / "out" / "config.json").read_text()).items() >= ids.items()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["top_p"] == 0.9
    assert text_format.read_text_format(str(tmp_path / "spaced")).ids_to_write(()) == dict.fromkeys(ids) | {"eos_token_id": 256}


def test_the_format_of_a_run_joins_its_data_and_its_model():
    data = TextFormat("x", 3, (7,), template="new", tokens={"eos_token": "</s>"})
    model = TextFormat("x", 1, (5,), (1, 2), {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None}, None, "old")
    other = TextFormat("y", 9, (9,), (9,), {"eos_token_id": 9}, {}, "other")
    made = text_format.merge_formats(data, None, other, model)
    assert (made.stops, made.template, made.special) == ((3, 7, 5, 1, 2), "new", model.special)
    assert text_format.merge_formats(TextFormat("x", 3), None, model).template == "old"
    assert TextFormat.from_record(json.loads(json.dumps(made.record()))) == made
    assert made.ids_to_write([8]) == {"bos_token_id": 0, "eos_token_id": [1, 7, 5], "pad_token_id": None}
    assert TextFormat(taught=(7,)).ids_to_write([8]) == {"bos_token_id": 8, "eos_token_id": 7, "pad_token_id": None}


@pytest.mark.parametrize(
    ("generation", "taught", "want"),
    [
        (None, (), {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1}),
        ({"eos_token_id": [1, 2], "temperature": 0.6}, (2,), {"eos_token_id": [1, 2], "temperature": 0.6}),
        ({"eos_token_id": 1}, (7,), {"eos_token_id": [1, 7]}),
        ({"temperature": 0.6}, (7,), {"temperature": 0.6, "eos_token_id": [1, 7]}),
        ({"temperature": 0.6}, (), {"temperature": 0.6}),
    ],
)
def test_generation_config_gets_what_was_taught(generation, taught, want):
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    text = TextFormat(taught=taught, special=special, generation=generation)
    assert text.generation_to_write(text.ids_to_write(())) == want


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("settings", "map", "want"),  # what transformers 5.23 reads
    [
        (CONFIG, BOTH, BOTH),
        (CONFIG | {"bos_token": None}, BOTH, BOTH),
        (CONFIG | {"bos_token": "<s>", "eos_token": "<|im_end|>"}, BOTH, BOTH),
        (CONFIG, {key: {"content": text} for key, text in BOTH.items()}, BOTH),
        (CONFIG | {"eos_token": "</s>", "added_tokens_decoder": {}}, {"bos_token": "<s>"}, {"eos_token": "</s>"}),
        ({"tokenizer_class": "Qwen2TokenizerFast"}, None, {"eos_token": "<|endoftext|>"}),
        ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}, None, {"eos_token": "<|im_end|>"}),
        ({"tokenizer_class": "GPT2Tokenizer"}, None, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
        ({}, None, {}),
    ],
)
def test_special_tokens_are_those_of_transformers(tmp_path, settings, map, want):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(map))
    assert tokenizer.special_tokens(str(tmp_path)) == want


def test_every_eos_of_a_model_ends_a_text_and_comes_back(tmp_path):
    """Each file names another one; bos, eos and pad go through import and export unchanged."""
    ids = {"bos_token_id": 259, "eos_token_id": 257, "pad_token_id": 256}
    folder = hugging_face.write_base(tmp_path / "theirs", SPECIAL, eos="<|im_end|>", **ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [260, 300], "top_p": 0.9}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert set(open_origin(str(folder)).text().stops) == {256, 257, 260, 300}
    import_folder(open_folder(folder), tmp_path / "ours", "auto", lambda line: None)
    assert open_origin(str(tmp_path / "ours")).text() == open_origin(str(folder)).text()
    export_model(str(tmp_path / "ours"), tmp_path / "back", say=lambda line: None)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        before, after = (json.loads((place / name).read_text()) for place in (folder, tmp_path / "back"))
        assert after == before if name != "config.json" else ids.items() <= after.items(), name
    import_folder(open_folder(folder, {"eos_token_id": 258}), tmp_path / "set", "auto", lambda line: None)
    assert 258 in open_origin(str(tmp_path / "set")).text().stops
    (folder / "tokenizer.json").unlink()  # then the ids of the other files are left
    assert open_origin(str(folder)).text().stops == (260, 300, 257)


def test_an_eos_of_the_models_files_ends_documents_if_no_known_token_does(tmp_path, base):
    fresh = hugging_face.write_base(tmp_path / "fresh", ["<fin>", "<stop>"], eos="<stop>")
    definition = (fresh / "tokenizer.json").read_text().replace("<|endoftext|>", "<pad>")
    (fresh / "tokenizer.json").write_text(definition)
    assert load_tokenizer(str(fresh)).eot == 258
    assert load_tokenizer(str(base)).eot == 256  # a known one goes before
    assert load_tokenizer(str(base), 258).eot == 258


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_templates_by_name_write_what_they_should(tmp_path, name):
    """Turns end with a token that counts; a tokenizer without the tokens is told of one that fits."""
    special = [*BUILTIN_TEMPLATES[name], "<s>"]
    spec = str(hugging_face.write_base(tmp_path / "base", special))
    made = load_template(spec, load_tokenizer(spec), name, "2026-01-01")
    talk = Conversation([{"role": "system", "content": "s"}, *CHAT["messages"]])
    text, parts = made.split_conversation(talk, "assistant")
    prompt = "".join(part.text for part in made.split_prompt(talk.first(4)))
    end = next(part.text for part in parts if part.turn == "end")
    assert (
        text.startswith(prompt) and text[len(prompt) :].strip() == f"9{end}" and sum(part.turn == "end" for part in parts) == 2
    )
    assert not made.unnamed
    bare = str(hugging_face.write_base(tmp_path / "bare", eos="</s>"))  # which is no token of it
    if name == "alpaca":
        assert (
            "</s>" not in load_template(bare, load_tokenizer(bare), name, "2026-01-01").split_conversation(talk, "assistant")[0]
        )
    if BUILTIN_TEMPLATES[name]:
        with pytest.raises(tokenizer.TokenizerError, match="--chat-template=alpaca"):
            load_template(bare, load_tokenizer(bare), name, "2026-01-01")
