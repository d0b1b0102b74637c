"""The files that a Hugging Face folder has beside the weights: the tokenizer's, and how text is to be generated."""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxtrain.data.template import BYTE_TEMPLATE
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.models.hugging_face import HuggingFaceError

# What tokenizers of any family may consist of; those that are there are taken.
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
GENERATION = "generation_config.json"


def copy_files(source: Path, target: Path) -> list[str]:
    """Copies what is there of TOKENIZER and GENERATION. Returns the names."""
    found = [name for name in (*TOKENIZER, GENERATION) if (source / name).is_file()]
    target.mkdir(parents=True, exist_ok=True)
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def complete(spec: str, eot: int, target: Path) -> None:
    """What a lone tokenizer.json lacks: its own name, and a tokenizer_config.json without which transformers would go by the
    model's type and add tokens of its own."""
    path = Path(spec).expanduser()
    if path.is_file() and path.name != "tokenizer.json":
        shutil.copyfile(path, target / "tokenizer.json")
    if (target / "tokenizer_config.json").is_file():
        return
    import tokenizers

    made: Any = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": made.id_to_token(eot)}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def source_of(spec: str) -> Path | None:
    """The folder of a tokenizer as `data.tokenizer` names it; None for bytes. Raises HuggingFaceError where it is not here."""
    if spec == "byte":
        return None
    if spec.startswith("hf:"):
        from jaxtrain.data.tokenizer import cached_hub_path

        found = cached_hub_path(spec.removeprefix("hf:"))
        if found is None:
            raise HuggingFaceError(f"tokenizer {spec}: is not on this machine. Name its folder: --tokenizer=DIR.")
        return found.parent
    path = Path(spec).expanduser()
    folder = path if path.is_dir() else path.parent
    if not path.is_file() and not (folder / "tokenizer.json").is_file():
        raise HuggingFaceError(f"tokenizer {spec}: there is no {folder / 'tokenizer.json'}. Name its folder: --tokenizer=DIR.")
    return folder


def write_byte_tokenizer(target: Path) -> None:
    """jaxtrain's bytes as a tokenizer.json that gives the same ids, for a model that was trained on them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = _letters_of_bytes()
    end = "<|endoftext|>"
    vocab = {letter: byte for byte, letter in letters.items()} | {end: ByteTokenizer.eot}
    made: Any = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([end])
    target.mkdir(parents=True, exist_ok=True)
    made.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        # As conversations were written in training.
        "chat_template": BYTE_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _letters_of_bytes() -> dict[int, str]:
    """Each byte's letter in byte-level BPE (Radford et al. 2019): itself where it prints, else one from 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {byte: chr(256 + i) for i, byte in enumerate(others)}
