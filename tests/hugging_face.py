"""Helpers of the jaxtrain.hf tests: folders with configs of reference/golden and random weights, and transformers' Python."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import packages
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from jaxtrain.hf import exporting
from jaxtrain.hf.folder import model_of, open_folder, write_byte_tokenizer
from jaxtrain.hf.importing import import_folder
from jaxtrain.hf.names import model_entries

HERE = Path(__file__).parent / "reference"
sys.path.insert(0, str(HERE))
from weights import DOCUMENTS, YARN, random_tokens, random_weight  # noqa: E402, F401

GOLDEN = {name: x for file in sorted((HERE / "golden").glob("*.npz")) for name, x in np.load(file).items()}
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "qwen2_moe", "dots1", "minimax_m2", "olmoe", "flex_olmo")
EXPERTS += ("solar_open", "glm4_moe_lite")
FAMILIES = ("llama", "llama2", "mistral", "qwen2", "qwen3", "qwen3_yarn", "gemma2", "gemma3", "gpt_oss", *EXPERTS)
FAMILIES += ("llama_biased", "qwen3_biased", "gemma", "olmo2", "olmo3", "exaone4", "smollm3", "cwm", "vaultgemma")
FAMILIES += ("granite", "granitemoe", "granitemoeshared", "phi3", "glm", "glm4", "seed_oss", "ernie4_5", *DELTA_NETS)
FAMILIES += ("ministral", "helium", "hyperclovax", "youtu")
GRADIENTS = tuple(name for name in FAMILIES if f"{name}_gradients" in GOLDEN)
TOKENS = random_tokens(128)


def settings(name: str, version: int = 5) -> dict[str, Any]:
    """Return config.json as this major version of transformers writes it."""
    return json.loads((HERE / "golden" / f"{name}.{version}.json").read_text())


def write(
    folder: Path,
    name: str,
    *,
    version: int = 5,
    scale: float = 1.0,
    vocab: int = 128,
    mtp: int = 0,
    sizes: Mapping[str, int] | None = None,
    **changes: Any,
) -> Path:
    """Write a Hugging Face folder of a model in reference/golden, with its random weights.

    sizes: keys of config.json that change shapes of tensors. changes: other keys; None removes a key.

    mtp: the number of multi-token prediction modules. transformers never writes weights of such modules.
    """
    described = settings(name, version) | {"vocab_size": vocab} | dict(sizes or {})
    tensors = {}
    for entry in model_entries(dataclasses.replace(model_of(described), mtp_layers=mtp)).values():
        for one in entry.hf_names:
            of = entry.hf_names[0] if one in entry.copies else one
            tensors[one] = random_weight(of, entry.hf_shape) * np.float32(1.0 if "norm" in one else scale)
    described = {k: v for k, v in (described | changes).items() if not (k in changes and v is None)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_base(folder: Path, special: Sequence[str] = (), eos: str = "<|endoftext|>", **changes: Any) -> Path:
    """Write a Llama with a tokenizer of bytes (ids 0 to 255), <|endoftext|> (256), `special` (257 on), and no chat template.

    eos: eos_token of tokenizer_config.json. changes: keys of config.json, by default with eos_token_id 256.
    """
    write(folder, "llama", **{"vocab": 320, "eos_token_id": 256, **changes})
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def write_mxfp4(folder: Path, **how: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a GPT-OSS whose experts are in MXFP4, with random blocks and scales. Return the folder and all values by name."""
    write(folder, "gpt_oss", quantization_config={"quant_method": "mxfp4"}, **how)
    packed, rng = tensors_of(folder), np.random.default_rng(0)
    plain = dict(packed)
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    numbers = np.concatenate([magnitudes, -magnitudes])
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 129, (experts, outputs, inputs // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], axis=-1)  # the low half of a byte comes first
        values = pairs.reshape(experts, outputs, inputs // 32, 32) * 2.0 ** (scales[..., None].astype(np.float32) - 127)
        plain[name] = values.reshape(experts, outputs, inputs).swapaxes(1, 2)
    save_file(packed, folder / "model.safetensors")
    return folder, plain


SAME = 1e-4  # golden logits


def off(logits: np.ndarray, name: str) -> float:
    """Return the largest absolute difference between `logits` and transformers' stored logits of the model `name`."""
    return float(np.abs(logits - GOLDEN[name]).max())


def imported(place: Path, name: str, dtype: str = "auto", **changes: Any) -> tuple[Path, Path, list[str]]:
    """Write a Hugging Face folder as `write` does, and import it. Returns (folder, run's folder, messages)."""
    folder, said = write(place / "theirs", name, **changes), []
    import_folder(open_folder(folder), place / "ours", dtype, said.append)
    return folder, place / "ours", said


def exported(checkpoint: Path, out: Path, base: str = "", **how: Any) -> list[str]:
    """Export a checkpoint to a Hugging Face folder, and return the command's messages."""
    said: list[str] = []
    exporting.export_model(str(checkpoint), out, base=base, **{"shard_size": 10**9} | how, say=said.append)
    return said


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of all safetensors files in a folder."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def ask(script: Path, *args: Any) -> str:
    """Return the output of a script that the Python of `reference` runs."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ended = subprocess.run([packages.reference(), script, *map(str, args)], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
