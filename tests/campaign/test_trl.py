"""Direct preference optimisation compared with TRL's DPOTrainer: same pairs in the same order, same AdamW, float32."""

import dataclasses
import json
from pathlib import Path

import hugging_face
import numpy as np
import packages
import pytest
import tokenizers
from token_files import read_windows
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from jaxtrain import main
from jaxtrain.commands import data as data_command
from jaxtrain.commands import hf as command
from jaxtrain.config.shapes import REWARD_METRICS
from jaxtrain.data.loading import load_config
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.windows import PairRows
from jaxtrain.hf.folder import open_folder
from jaxtrain.train.initial_state import open_data

ROOT = Path(__file__).resolve().parents[2]
VOCAB, STEPS, ROWS, EACH = 400, 20, 2, 2  # pairs of a step: ROWS x EACH
WORDS = (
    "red", "green", "blue", "seven", "three", "many", "small", "old", "stone", "river", "house", "bird", "sings", "falls",
    "runs", "sleeps", "under", "over", "beside",
)  # fmt: skip
# TRL counts the line break that ChatML has after a turn; jaxtrain's turns end with their control token.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OURS = {
    "precision": "f32",
    "loss.name": "dpo",
    "loss.beta": 0.3,
    "data.seq_len": 160,
    "data.max_segments": 2 * EACH,
    "train.global_batch": ROWS,
    "train.steps": STEPS,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.0,
    "eval.every_steps": 0,
    "sample.max_tokens": 0,
    "log.every_steps": 1,
    "paths.cache": "",
    "mesh.fsdp": 2,
    "mesh.seq": 2,
    "mesh.tensor": 2,
}
THEIRS = {
    "per_device_train_batch_size": ROWS * EACH,
    "beta": 0.3,
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}


def write_model(folder: Path) -> None:
    """Write a Llama with random weights and a word tokenizer."""
    hugging_face.write(folder, "llama2", scale=0.3, vocab=VOCAB)
    special = [AddedToken(t, special=True) for t in ("</s>", "<|im_start|>", "<|im_end|>")]
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tok.train_from_iterator([" ".join(WORDS)] * 2, trainer)
    tok.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def made_pairs(form: str) -> list[dict]:
    rng = np.random.default_rng(3)
    text = lambda most: " ".join(rng.choice(WORDS, rng.integers(1, most)))  # noqa: E731
    rows = [{"prompt": text(8), "chosen": " " + text(9), "rejected": " " + text(12)} for _ in range(40)]
    if form == "texts":
        return rows
    say = lambda role, key, row: [{"role": role, "content": row[key].strip()}]  # noqa: E731
    return [{"prompt": say("user", "prompt", r), **{k: say("assistant", k, r) for k in ("chosen", "rejected")}} for r in rows]


def arguments(folder: Path, model: Path, run: str, **more: object) -> list[str]:
    """Return the command line of a jaxtrain run."""
    shape = {f"model.{k}": v for k, v in dataclasses.asdict(open_folder(model).model).items()}
    keys = shape | OURS | {"data.source": folder / "pairs.tok", "data.tokenizer": model, "init.from": model} | more
    values = (f"--config.{k}={v}" for k, v in keys.items())
    return [f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={folder / run}", *values]


def order(args: list[str]) -> list[int]:
    """Return the numbers of the pairs that a run reads, in its order."""
    data, _ = open_data(load_config(args).run)
    (source,) = data.sources
    assert isinstance(source, PairRows)
    rows = [row for step in range(STEPS) for row in read_windows(data, step)[source.name]]
    documents = [source.documents_of(row) for row in rows]
    assert {len(each) for each in documents} == {2 * EACH}
    return [int(number) // 2 for each in documents for number in each[::2]]


@pytest.mark.parametrize("form", ["texts", "messages", "adapters", "adapters further"])
def test_twenty_steps_follow_trl(tmp_path, form):
    """Losses, rewards and gradient norms of each step agree, and so do tokens and loss masks of the first pair.

    The reference of adapters that are trained further is the base with these adapters, in TRL and here.
    """
    packages.reference()
    model = tmp_path / "model"
    write_model(model)
    rows = made_pairs("messages" if form == "messages" else "texts")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ["--preference", *(["--chat"] if form == "messages" else ["--eot=</s>"]), f"--tokenizer={model}"]
    files = [f"--input={tmp_path / 'pairs.jsonl'}", f"--output={tmp_path / 'pairs.tok'}"]
    assert data_command.main(["prepare", *files, *how]) == 0

    more, theirs = {}, dict(THEIRS)
    if form.startswith("adapters"):
        more = {"lora.rank": 3, "lora.alpha": 6.0, "optimizer.lr": 1e-2}
        # The run's initial adapters, as PEFT reads them: after one step at a learning rate of 0, or after a first training.
        before = {"optimizer.lr": 0.0, "optimizer.lr_min": 0.0, "train.steps": 1} if form == "adapters" else {"train.steps": 8}
        assert main.main(arguments(tmp_path, model, "first", **(more | before))) == 0
        assert command.main(["export-adapter", str(tmp_path / "first"), f"--out={tmp_path / 'adapter'}"]) == 0
        theirs |= {"adapter": str(tmp_path / "adapter"), "learning_rate": 1e-2}
        more |= {"init.from": tmp_path / "first"} if form == "adapters further" else {}
    args = arguments(tmp_path, model, "run", **more)
    assert main.main(args) == 0
    ours = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = [line for line in ours if line["kind"] == "train"]

    numbers = order(args)
    (tmp_path / "ordered.jsonl").write_text("".join(json.dumps(rows[n]) + "\n" for n in numbers))
    (tmp_path / "settings.json").write_text(json.dumps(theirs))
    script = ROOT / "tests" / "reference" / "dpo.py"
    hugging_face.ask(script, model, tmp_path / "ordered.jsonl", tmp_path / "settings.json", tmp_path / "trl.json")
    trl = json.loads((tmp_path / "trl.json").read_text())

    file, first = TokenFile.open(tmp_path / "pairs.tok"), trl["first"]
    for member, name in enumerate(("chosen_ids", "rejected_ids")):
        begin, end = file.doc_offsets[2 * numbers[0] + member : 2 * numbers[0] + member + 2].tolist()
        ids, counted = file.tokens[begin:end], file.loss_flags(begin, end)
        if form == "messages":  # jaxtrain's documents end with end-of-text, which counts if no control token ends the turn
            assert not counted[-1]
            ids, counted = ids[:-1], counted[:-1]
        assert (ids[~counted].tolist(), ids[counted].tolist()) == (first["prompt_ids"], first[name])

    assert len(ours) == len(trl["loss"]) == STEPS
    far = {
        name: max(abs(line[name] - x) for line, x in zip(ours, trl[name], strict=True)) for name in ("loss", *REWARD_METRICS)
    }
    norms = max(abs(line["grad_norm"] / x - 1) for line, x in zip(ours, trl["grad_norm"], strict=True))
    print({**far, "grad_norm, relative": norms})
    assert max(trl["loss"]) - min(trl["loss"]) > 0.1, "the curve goes down"
    assert max(far.values()) < 1e-4 and norms < 1e-3, (far, norms)
