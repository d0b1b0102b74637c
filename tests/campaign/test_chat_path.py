"""From a base model without a chat template to a served one: prepare, finetune, sample --chat, export, transformers."""

import json
from pathlib import Path

import hugging_face
import packages
import pytest
from token_files import command

from jaxtrain.commands import api, hf, sample
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.hf.importing import open_origin

# template -> (special tokens of the base, the token that ends a turn, eos of the export)
BASES = {
    "chatml": (("<|im_start|>", "<|im_end|>"), "<|im_end|>", [256, 258]),
    "llama3": (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", [256, 259]),
    "alpaca": ((), "<|endoftext|>", 256),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "chat.jsonl"
    talks = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "ok"}] for i in range(40)]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


@pytest.mark.parametrize("name", BASES)
def test_a_base_without_a_template_becomes_a_chat_model(name, tmp_path, monkeypatch, capsys, rows):
    packages.reference()
    special, end, eos = BASES[name]
    hugging_face.write_base(tmp_path / "base", special)
    monkeypatch.chdir(tmp_path)
    prepare = ["prepare", "--chat", f"--input={rows}", "--tokenizer=base", "--output=chat.tok", "--validation=0.1"]
    code, said = command(tmp_path, *prepare)
    assert code == 2 and f"--chat-template={name}" in said
    assert command(tmp_path, *prepare, f"--chat-template={name}")[0] == 0
    run = api.load(
        str(Path(__file__).parents[2] / "configs" / "finetune.py") + ":base=base",
        data={"source": "chat.tok", "eval_source": "chat.val.tok", "seq_len": 64},
        train={"steps": 40},
        optimizer={"lr": 0.01},
        sample={"temperature": 0.0, "every_steps": 0},
        paths={"cache": ""},
    )
    api.train(run, "run")
    written = (tmp_path / "run" / "samples.txt").read_text()
    assert written.count("ok\n[reference] ok\n") == 2  # the first held-out conversations
    capsys.readouterr()
    asked = ["--workdir=run", "--chat", "--prompt=say 3", "--temperature=0", "--max-tokens=30"]
    assert sample.main(asked) == 0 and capsys.readouterr().out == "ok\n"
    talk = [{"role": "user", "content": "say 3"}]
    assert api.generate("run", messages=talk, temperature=0.0, max_tokens=30) == "ok"
    assert hf.main(["export", "run", "--out=served"]) == 0
    (found,) = [json.loads(line) for line in hugging_face.ask(hugging_face.HERE / "chat.py", "say 3", "served").splitlines()]
    assert found == {"answer": f"ok{end}", "generation": eos, "eos_token_id": eos, "bos_token_id": 1, "pad_token_id": None}
    # and from the export, without a template of one's own
    assert TokenFile.open("chat.tok").header["made"]["chat"]["template"] == open_origin("served").text().template
    assert sample.main(["--workdir=served", *asked[1:]]) == 0 and capsys.readouterr().out.endswith("ok\n")
