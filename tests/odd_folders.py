"""Hugging Face folders with something odd, made from a good one: read as transformers reads them, told about, or refused."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hugging_face
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING, NORM, UP = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
Change = Callable[[Path], Any]


def base(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """Write the folder that `changed` copies: a model in `tests/reference/golden`, with a tokenizer of bytes."""
    hugging_face.write_base(folder.with_name(f"{folder.name}.llama"), ("<|im_start|>", "<|im_end|>"))
    hugging_face.write(folder, name, vocab=320, **changes)
    for file in folder.with_name(f"{folder.name}.llama").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def changed(good: Path, folder: Path, change: Change) -> Path:
    """Write a copy of the folder `good`, changed. Returns the copy, or the path that `change` returns."""
    shutil.copytree(good, folder, symlinks=True)
    return change(folder) or folder


def tensors(change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Change:
    return lambda folder: save_file(dict(change(load_file(folder / SINGLE))), folder / SINGLE, {"format": "pt"})


def keys(**values: Any) -> Change:
    def change(folder: Path) -> None:
        described = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(described))

    return change


def without(key: str) -> Change:
    def change(folder: Path) -> None:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: value for k, value in described.items() if k != key}))

    return change


def content(file: str, text: str | bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(text.encode() if isinstance(text, str) else text) and None


def text(change: Callable[[str], str | bytes], file: str = "config.json") -> Change:
    def write(folder: Path) -> None:
        made = change((folder / file).read_text())
        (folder / file).write_bytes(made.encode() if isinstance(made, str) else made)

    return write


def renamed(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new) and None


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def sharded(
    times: float = 1.0,
    single: bool = False,
    index: Callable[[dict[str, str]], Mapping[str, str] | None] = lambda named: named,
    second: Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda part, whole: part,
) -> Change:
    """Return a change to two shards and their index, which hold the tensors times a number.

    Args:
      single: whether model.safetensors stays.
      index: returns the weight_map; None: no index.
      second: returns the tensors of the second shard, from those that it would have and from all.
    """

    def change(folder: Path) -> None:
        whole = {name: x * np.float32(times) for name, x in load_file(folder / SINGLE).items()}
        names = sorted(whole)
        parts = [{name: whole[name] for name in some} for some in (names[:9], names[9:])]
        named = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
        save_file(parts[0], folder / SHARDS[0], {"format": "pt"})
        save_file(second(parts[1], whole), folder / SHARDS[1], {"format": "pt"})
        if (wanted := index(named)) is not None:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": wanted}))
        if not single:
            (folder / SINGLE).unlink()

    return change


def adapter(folder: Path) -> None:
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "elsewhere"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file({"x": np.ones(2, np.float32)}, folder / "adapter_model.safetensors")


def adapter_alone(folder: Path) -> None:
    adapter(folder)
    for name in ("config.json", SINGLE):
        (folder / name).unlink()


def linked(folder: Path) -> None:
    """Put the files into another folder and link them, as the hub's cache does."""
    blobs = folder.with_name(f"{folder.name}.blobs")
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(os.path.relpath(blobs / file.name, folder))


def header(change: Callable[[str], str], after: bytes = b"") -> Change:
    """Return a change of the header of model.safetensors, and of what follows the tensors."""

    def write(folder: Path) -> None:
        old = (folder / SINGLE).read_bytes()
        size = 8 + int.from_bytes(old[:8], "little")
        new = change(old[8:size].decode().rstrip()).encode()
        (folder / SINGLE).write_bytes(len(new).to_bytes(8, "little") + new + old[size:] + after)

    return write


def twice(header: str) -> str:
    """Return a header in which the final norm stands twice, the second time with the bytes of another norm."""
    other = json.loads(header)["model.layers.0.input_layernorm.weight"]
    return f'{header[:-1]},"{NORM}":{json.dumps(other)}}}'


def overlapping(header: str) -> str:
    """Return a header in which the final norm has the bytes of another norm."""
    described = json.loads(header)
    return json.dumps(described | {NORM: described["model.layers.0.input_layernorm.weight"]})


def with_value(name: str, value: float) -> Change:
    def spoilt(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found[name].flat[5] = value
        return found

    return tensors(spoilt)


def mixed(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kinds: dict[str, Any] = {"mlp": ml_dtypes.bfloat16, "self_attn": np.float16}
    return {name: x.astype(next((kinds[k] for k in kinds if k in name), np.float32)) for name, x in found.items()}


NEUTRAL = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "is_decoder": False,
    "torchscript": False,
    "pruned_heads": {},
    "tokenizer_class": "LlamaTokenizer",
    "num_labels": 2,
    "do_sample": False,
    "max_length": 20,
    "temperature": 1.0,
    "top_k": 50,
    "num_beams": 1,
    "typical_p": 1.0,
    "quantization_config": None,
    "ep_size": 1,
    "unsloth_fixed": True,
    "unsloth_new": 1,
    "add_cross_attention": False,
    "layer_types": ["full_attention"] * 4,
    "use_qk_norm": False,
    "gradient_checkpointing": False,
    "loss_type": None,
}
# Read, with the values that transformers reads, and without a word.
READ: dict[str, Change] = {
    "an index of model.safetensors": lambda f: (
        (f / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(f / SINGLE), SINGLE)})) and None
    ),
    "shards": sharded(),
    "tensors that the index does not name": sharded(index=lambda named: {k: v for k, v in named.items() if k != EMBEDDING}),
    "a tensor in two shards": sharded(second=lambda part, whole: part | {EMBEDDING: whole[EMBEDDING]}),
    "keys without effect": keys(**NEUTRAL),
    "mixed dtypes": tensors(mixed),
    "links": linked,
    "a name with spaces": lambda f: f.rename(f.with_name("mein Modell ü")),
    "a read-only folder": lambda f: f.chmod(0o555),
    "several architectures": keys(architectures=["LlamaForCausalLM", "LlamaModel"]),
}
# Read as transformers reads them, and a note names these words.
NOTED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a stale index": (sharded(1.5, single=True), (INDEX, *SHARDS)),
    "a stale index without shards": (content(INDEX, json.dumps({"weight_map": {NORM: SHARDS[0]}})), (INDEX,)),
    "Mistral's own file": (lambda f: shutil.copy(f / SINGLE, f / "consolidated.safetensors") and None, ("consolidated",)),
    "an old file beside": (content("pytorch_model.bin", b"x"), ("pytorch_model.bin",)),
    "a shard too many": (
        both(sharded(), content("model-00003-of-00003.safetensors", b"x")),
        ("model-00003-of-00003.safetensors",),
    ),
    "settings for generation": (keys(temperature=0.6, do_sample=True), ("temperature = 0.6", "do_sample")),
    "a token that tokenizer.json lacks": (content("added_tokens.json", '{"<|new|>": 259}'), ("<|new|>", "save_pretrained")),
    "a damaged added_tokens.json": (content("added_tokens.json", "{"), ("added_tokens.json",)),
    "an eos beyond the vocabulary": (keys(eos_token_id=99999), ("eos_token_id", "99999")),
    "no longest sequence": (without("max_position_embeddings"), ("max_position_embeddings",)),
    "an adapter beside": (adapter, ("import-adapter",)),
}
# Refused, and the message names these words.
REFUSED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no safetensors": (renamed(SINGLE, "pytorch_model.bin"), ("pytorch_model.bin",)),
    "upper case": (renamed(SINGLE, "model.SAFETENSORS"), ("model.SAFETENSORS",)),
    "shards without an index": (sharded(index=lambda named: None), (INDEX, SHARDS[0])),
    "an index that names more": (sharded(index=lambda named: named | {"more": SHARDS[0]}), ("more", SHARDS[0])),
    "an index of other shards": (sharded(index=lambda named: dict.fromkeys(named, SHARDS[0])), (SHARDS[0],)),
    "an index that is cut off": (both(sharded(), content(INDEX, '{"weight_map"')), (INDEX,)),
    "an index without a map": (both(sharded(), content(INDEX, '{"weight_map": 3}')), (INDEX,)),
    "two values of a tensor": (
        sharded(second=lambda part, whole: part | {EMBEDDING: whole[EMBEDDING] + 1}),
        (EMBEDDING, *SHARDS),
    ),
    "an empty shard": (both(sharded(), content(SHARDS[1], b"")), (SHARDS[1],)),
    "an empty file": (content(SINGLE, b""), (SINGLE,)),
    "Git LFS": (content(SINGLE, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16\n"), (SINGLE, "git lfs")),
    "a link to nothing": (both(linked, lambda f: (f.with_name(f"{f.name}.blobs") / SINGLE).unlink()), (SINGLE,)),
    "a tensor twice in a file": (header(twice), (SINGLE,)),
    "tensors that overlap": (header(overlapping), (SINGLE,)),
    "bytes behind the tensors": (header(str, b"more"), (SINGLE,)),
    "a header that is a list": (header(lambda old: "[1]"), (SINGLE,)),
    "a header without shapes": (header(lambda old: json.dumps({NORM: {}})), (SINGLE,)),
    "float64": (tensors(lambda found: found | {NORM: found[NORM].astype(np.float64)}), (NORM, "F64")),
    "NaN": (with_value(UP, np.nan), (UP,)),
    "infinity": (with_value(NORM, -np.inf), (NORM,)),
    "a tensor too many": (tensors(lambda found: found | {BIAS: np.ones(64, np.float32)}), (BIAS,)),
    "a tensor too few": (tensors(lambda found: {k: x for k, x in found.items() if k != UP}), (UP,)),
    "a vocabulary that does not fit": (keys(vocab_size=300), (EMBEDDING, "320", "300")),
    "no word on the head": (keys(tie_word_embeddings=None), ("--set tie_word_embeddings=",)),
    "another task": (keys(architectures=["LlamaForSequenceClassification"]), ("LlamaForSequenceClassification",)),
    "quantized": (keys(quantization_config={"quant_method": "gptq", "bits": 4}), ("gptq",)),
    "a key that is not known": (keys(multiplier=3), ("multiplier", "--set multiplier=null")),
    "a sliding window": (keys(sliding_window=4096), ("--set sliding_window=null",)),
    "layers of two kinds": (keys(layer_types=["full_attention", "sliding_attention"]), ("layer_types",)),
    "a window in use": (keys(use_sliding_window=True), ("use_sliding_window",)),
    "a sequence of text": (keys(max_position_embeddings="4096"), ("max_position_embeddings",)),
    "a head of text": (keys(tie_word_embeddings="yes"), ("tie_word_embeddings",)),
    "an infinite number": (
        text(lambda old: re.sub(r'"rms_norm_eps": [^,}]+', '"rms_norm_eps": 1e999', old)),
        ("config.json", "rms_norm_eps"),
    ),
    "a number without a float": (keys(rms_norm_eps=10**400), ("rms_norm_eps",)),
    "a sequence beyond 32 bits": (keys(max_position_embeddings=10**30), ("max_position_embeddings",)),
    "an architecture that is a number": (keys(architectures=3), ("architectures",)),
    "heads that do not divide": (keys(num_key_value_heads=3), ("num_kv_heads",)),
    "a head of odd width": (keys(head_dim=7), ("head_dim",)),
    "a BOM": (text(lambda old: b"\xef\xbb\xbf" + old.encode()), ("config.json",)),
    "a comment": (text(lambda old: f"// a model\n{old}"), ("config.json",)),
    "a config that is cut off": (text(lambda old: old[:100]), ("config.json",)),
    "a config in Latin-1": (text(lambda old: f'{old[:-1]}, "_name_or_path": "é"}}'.encode("latin-1")), ("config.json",)),
    "a config that is a list": (text(lambda old: f"[{old}]"), ("config.json",)),
    "a config that is empty": (content("config.json", ""), ("config.json",)),
    "a config with NaN": (text(lambda old: f'{old[:-1]}, "x": {{"y": NaN}}}}'), ("config.json", "NaN")),
    "a config with brackets": (content("config.json", "[" * 100_000), ("config.json",)),
    "a key twice": (text(lambda old: f'{old[:-1]}, "rms_norm_eps": 1.0}}'), ("config.json", "rms_norm_eps")),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "an adapter alone": (adapter_alone, ("import-adapter",)),
    "a file": (lambda f: f / SINGLE, (SINGLE,)),
}
# Read, but text of these models is refused, and the message names these words.
WITHOUT_TEXT: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "SentencePiece alone": (renamed("tokenizer.json", "tokenizer.model"), ("tokenizer.model", "save_pretrained")),
    "vocabulary and merges": (
        both(renamed("tokenizer.json", "vocab.json"), content("merges.txt", "#version: 0.2\n")),
        ("vocab.json", "save_pretrained"),
    ),
    "a damaged tokenizer_config.json": (content("tokenizer_config.json", "{"), ("tokenizer_config.json",)),
    "an empty tokenizer_config.json": (content("tokenizer_config.json", ""), ("tokenizer_config.json",)),
    "a list in tokenizer_config.json": (content("tokenizer_config.json", "[1]"), ("tokenizer_config.json",)),
    "a damaged generation_config.json": (content("generation_config.json", "{"), ("generation_config.json",)),
    "a damaged special_tokens_map.json": (content("special_tokens_map.json", "\xff"), ("special_tokens_map.json",)),
    "a damaged tokenizer.json": (content("tokenizer.json", "{"), ("tokenizer.json",)),
}
