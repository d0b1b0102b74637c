"""Convert text to token ids and back, by bytes or by any Hugging Face `tokenizer.json`."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Tokens that end a document, in the order of the search: tokens of base models before tokens of chat templates.
EOT_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<|endofdocument|>", "[EOS]", "<|im_end|>")


DEFINITION = "tokenizer.json"
OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")  # of a tokenizer, in its folder
# Keys of tokenizer.json that change no ids: documents are never cut or padded by the tokenizer.
NO_EFFECT = ("truncation", "padding")
# Keys of a BPE model that mean the same if they are null, false or missing.
BPE_OFF = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
SPEC_FORMS = "Give byte, the path of a tokenizer.json, or hf:NAME (--tokenizer=, data.tokenizer of a run)."
NOT_FETCHED = (
    "could not be fetched from the Hugging Face hub. Check the name and the network, or fetch the tokenizer's files elsewhere "
    "and give their folder"
)


class TokenizerError(ValueError):
    """An error: a tokenizer cannot be loaded or used. The message names the tokenizer and a remedy."""


@dataclass(frozen=True)
class ControlToken:
    """A token that only a template writes. lstrip, rstrip: the token absorbs the white space before it, or after it."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class ByteTokenizer:
    """UTF-8 bytes are ids 0-255; 256 ends a document.

    Attributes (of every tokenizer):
      name: the spec from which the tokenizer was loaded.
      vocab_size: one more than the largest id.
      bos: ids before every document of plain text, mostly one or none. Chat templates write the first tokens themselves.
      eot: the id that ends every document; None if no token is known to.
      sha256: hash of the tokenizer's definition (`content_sha256`). Equal hashes give equal ids.
    """

    name = "byte"
    vocab_size = 257
    bos: tuple[int, ...] = ()
    eot: int | None = 256
    sha256 = hashlib.sha256(b"jaxtrain byte tokenizer: ids 0-255 are bytes, 256 ends a document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], positions: Sequence[str] = ()) -> list[np.ndarray]:
        """Return a uint16 array of ids for each text. `positions` has no effect on bytes."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def control_tokens(self) -> tuple[ControlToken, ...]:
        """Return the only control token, end-of-text, with the text that templates write for it."""
        return (ControlToken("<|endoftext|>", 256),)

    def id_of(self, token: str) -> int | None:
        """Return the id of a control token by its text; None if there is none of this text."""
        return 256 if token == "<|endoftext|>" else None

    def text_of(self, i: int) -> str:
        """Return the text of a control token by its id; "" for any other id."""
        return "<|endoftext|>" if i == 256 else ""

    def first_bytes(self, text: str, first: int) -> int:
        """Return how many bytes of a text its first token stands for. first: the id of this token."""
        return 1

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids. Bytes that are not UTF-8 become U+FFFD; end-of-text ids are left out."""
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer defined by a `tokenizer.json`, run by the `tokenizers` package.

    Control tokens are never read from text: `</s>` in a corpus is encoded as ordinary characters.
    """

    def __init__(self, name: str, definition: bytes, eot: str | int = ""):
        import tokenizers

        self.name = name
        self.sha256 = content_sha256(name, definition)

        def make_tokenizer(text: str) -> "tokenizers.Tokenizer":
            tokenizer = tokenizers.Tokenizer.from_str(text)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = True
            return tokenizer

        self._make_tokenizer = make_tokenizer
        self._definition = definition
        try:
            self._tokenizer = make_tokenizer(definition.decode())
        except Exception as e:  # the package raises plain Exception for everything that it cannot parse
            raise TokenizerError(f"tokenizer {name!r}: not a tokenizer.json that the tokenizers package can read ({e})") from e
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        control = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        self.eot: int | None = eot if isinstance(eot, int) else find_eot(name, vocab, eot, control)
        self.bos = self._find_bos(vocab)

    def _find_bos(self, vocab: dict[str, int]) -> tuple[int, ...]:
        """Return the ids that the tokenizer's post-processor puts before a text, taken from an encoded example."""
        for text in ("a", *vocab):
            encoding = self._tokenizer.encode(text, add_special_tokens=True)
            text_indices = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if text_indices:
                return tuple(encoding.ids[: text_indices[0]])
        return ()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], positions: Sequence[str] = ()) -> list[np.ndarray]:
        """Return a uint32 array of ids for each text. The package `tokenizers` uses all cores.

        Args:
          positions: the position of each text: start (of a document), after (a control token), or inner (after other text).
            (): all texts are at the start. With the true positions, the ids are those of the complete document, except that no
            token spans two texts.
        """
        out: list[np.ndarray] = [np.empty(0, np.uint32)] * len(texts)
        for position, tokenizer in (self._tokenizer_by_position if positions else {"start": self._tokenizer}).items():
            indices = [i for i in range(len(texts)) if not positions or positions[i] == position]
            encodings = tokenizer.encode_batch_fast([texts[i] for i in indices], add_special_tokens=False)
            for i, encoding in zip(indices, encodings, strict=True):
                out[i] = np.asarray(encoding.ids, np.uint32)
        return out

    @functools.cached_property
    def _tokenizer_by_position(self) -> dict[str, Any]:
        """Return position -> tokenizer, for `encode_batch`. Some put a space before a text at some positions only."""
        definition = json.loads(self._definition)
        return {
            "start": self._tokenizer,
            "after": self._make_tokenizer(json.dumps(_without_prefix(definition, ("first",)))),
            "inner": self._make_tokenizer(json.dumps(_without_prefix(definition, ("first", "always"), everywhere=True))),
        }

    def control_tokens(self) -> tuple[ControlToken, ...]:
        """Return the special tokens among the tokenizer's added tokens, the longest first."""
        tokens = []
        for token in json.loads(self._definition).get("added_tokens", []):
            if not token["special"]:
                continue
            if token["single_word"]:
                raise TokenizerError(
                    f"tokenizer {self.name!r}: its control token {token['content']!r} is read only as a whole word, which "
                    "chat templates are not supported with"
                )
            tokens.append(ControlToken(token["content"], token["id"], token["lstrip"], token["rstrip"]))
        return tuple(sorted(tokens, key=lambda token: -len(token.text)))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None if there is none of this text."""
        return self._tokenizer.token_to_id(token)

    def text_of(self, i: int) -> str:
        """Return the text of a token by its id; "" if there is no such id."""
        return "" if i < 0 else self._tokenizer.id_to_token(i) or ""

    def first_bytes(self, text: str, first: int) -> int:
        """Return how many bytes of a text its first token stands for. first: the id of this token.

        A character that the token only begins counts as the next token's, and so does one that the tokenizer replaces.
        """
        return len(os.path.commonprefix([self.decode([first]), text]).encode())

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


@functools.lru_cache(maxsize=4)
def content_sha256(name: str, definition: bytes) -> str:
    """Return a hash of a tokenizer.json that does not depend on its formatting. Raises TokenizerError if it is not JSON.

    The packages tokenizers and transformers write a file anew with the truncation and padding of its last use, with merges as
    pairs instead of texts, with defaults that older versions left out, and with a post-processor that adds no token. All of
    these give the same ids here.
    """
    try:
        content = json.loads(definition)
    except (ValueError, RecursionError) as e:
        raise TokenizerError(f"tokenizer {name!r}: not a tokenizer.json ({e})") from e
    if isinstance(content, dict):
        content = {key: _plain_section(x) for key, x in content.items() if x is not None and key not in NO_EFFECT}
        model, added = content.get("model"), content.get("added_tokens")
        if isinstance(model, dict) and model.get("type", "BPE") == "BPE" and isinstance(model.get("merges"), list):
            merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model_keys = {key: value for key, value in model.items() if key not in BPE_OFF or value not in (None, False)}
            content["model"] = {**model_keys, "type": "BPE", "merges": merges}
        if isinstance(added, list) and all(isinstance(token, dict) for token in added):
            content["added_tokens"] = sorted(added, key=lambda token: str(token.get("id")))
        content = {key: x for key, x in content.items() if x is not None}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain_section(section: Any) -> Any:
    """Return a part of a tokenizer.json without what its type does by default; None for a post-processor that adds no token."""
    if not isinstance(section, dict) or not isinstance(kind := section.get("type"), str):
        return section
    if kind == "Sequence":
        list_keys = ("normalizers", "pretokenizers", "decoders", "processors")
        return {key: [_plain_section(x) for x in value] if key in list_keys else value for key, value in section.items()}
    if kind == "TemplateProcessing" and not section.get("special_tokens"):
        return None
    if kind == "ByteLevel":
        return {key: x for key, x in section.items() if (key, x) != ("use_regex", True)}
    if kind == "Metaspace":
        scheme = section.get("prepend_scheme", "always" if section.get("add_prefix_space", True) else "never")
        settings = {
            key: x for key, x in section.items() if key not in ("add_prefix_space", "str_rep") and (key, x) != ("split", True)
        }
        return {**settings, "prepend_scheme": scheme}
    if kind == "Unigram":
        return {key: x for key, x in section.items() if (key, x) != ("byte_fallback", False)}
    return section


def _without_prefix(section: Any, schemes: tuple[str, ...], everywhere: bool = False) -> Any:
    """Return a part of a tokenizer.json, changed so that the tokenizer puts no space before a text.

    A `prepend_scheme` with a value in `schemes` becomes "never". With `everywhere`, all other settings that put a space change
    too.
    """
    if isinstance(section, list):
        return [_without_prefix(p, schemes, everywhere) for p in section]
    if not isinstance(section, dict):
        return section
    out = {
        k: v if k in ("model", "decoder", "post_processor") else _without_prefix(v, schemes, everywhere)
        for k, v in section.items()
    }
    if out.get("prepend_scheme") in schemes:
        out["prepend_scheme"] = "never"
    if everywhere and out.get("type") in ("ByteLevel", "Metaspace") and "add_prefix_space" in out:
        out["add_prefix_space"] = False
    if everywhere and out.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    return out


def find_eot(name: str, vocab: dict[str, int], eot: str, control: Container[str] = ()) -> int | None:
    """Return the id of the token that ends a document: the token `eot`; or the first of EOT_NAMES among the control tokens; or
    the eos of the model's files (`model_eos`); or the first of EOT_NAMES in the vocabulary; else None.

    A control token comes first: in the vocabulary of Gemma, `</s>` is an ordinary token for HTML.
    """
    if eot:
        if eot not in vocab:
            raise TokenizerError(f"tokenizer {name!r}: --eot={eot!r} is not in its vocabulary of {len(vocab)} tokens")
        return vocab[eot]
    if control_ids := [vocab[each] for each in EOT_NAMES if each in control and each in vocab]:
        return control_ids[0]
    if model_ids := [each for each in model_eos(name, vocab.get) if each in vocab.values()]:
        return model_ids[0]
    return next((vocab[each] for each in EOT_NAMES if each in vocab), None)


def cached_hub_path(name: str, file: str = DEFINITION) -> Path | None:
    """Return the path of the local copy of a file of `hf:NAME`, without network; None if there is no copy."""
    import huggingface_hub

    cached: Any = huggingface_hub.try_to_load_from_cache(name, file)
    return Path(cached) if isinstance(cached, str) else None


def find_file(spec: str, file: str = "", offline: bool = False) -> Path | None:
    """Return the path of the tokenizer.json of `spec`, or of another file of its folder; None if there is no such file.

    A file of the hub is fetched unless it is on this machine or `offline`. Raises TokenizerError if it cannot be fetched, and
    OSError for a path that cannot be.
    """
    if spec == "byte":
        return None
    if not spec.startswith("hf:"):
        path = Path(spec).expanduser()
        if file or path.is_dir():
            path = (path if path.is_dir() else path.parent) / (file or DEFINITION)
        return path if path.is_file() else None
    name, file = spec.removeprefix("hf:"), file or DEFINITION
    cached = cached_hub_path(name, file)
    if cached or offline:
        return cached
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(name, file))
    except EntryNotFoundError:  # no such file on the hub; or, by a subclass, no network and no local copy
        return None
    except Exception as e:  # no network, no such name, gated: many classes
        raise TokenizerError(f"tokenizer {spec!r}: {file} {NOT_FETCHED} ({type(e).__name__}: {e})") from e


def read_beside(spec: str, file: str = "", offline: bool = False) -> bytes | None:
    """Return the bytes of the file that `find_file` finds; None if there is none. Raises TokenizerError."""
    try:
        path = find_file(spec, file, offline)
        return path.read_bytes() if path else None
    except OSError as e:
        raise TokenizerError(f"tokenizer {spec!r}: cannot read {e.filename}: {e.strerror}. {SPEC_FORMS}") from e


def read_json(spec: str, file: str, offline: bool = False) -> dict[str, Any]:
    """Return the contents of a JSON file beside the tokenizer.json of `spec`; {} if there is none. Raises TokenizerError."""
    try:
        content = read_beside(spec, file, offline)
        parsed = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as e:
        raise TokenizerError(f"tokenizer {spec!r}: its {file} is not JSON ({e}). Fetch it again") from e
    if not isinstance(parsed, dict):
        raise TokenizerError(f"tokenizer {spec!r}: its {file} is no JSON object. Fetch it again")
    return parsed


# Special tokens that transformers' tokenizer classes have without being told.
CLASSES = {
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>"},
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "GPTNeoXTokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>"},
}


def special_tokens(spec: str, offline: bool = False) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the like, as transformers 5 reads them.

    special_tokens_map.json goes before tokenizer_config.json, and is not read if that file has `added_tokens_decoder`.

    offline: read only files on this machine.
    """
    if spec == "byte":
        return {"eos_token": "<|endoftext|>", "bos_token": ""}
    settings = read_json(spec, "tokenizer_config.json", offline)
    out: dict[str, Any] = dict(CLASSES.get(str(settings.get("tokenizer_class")).removesuffix("Fast"), {})) | settings
    if "added_tokens_decoder" not in settings:
        out |= read_json(spec, "special_tokens_map.json", offline)
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in out.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def find_missing_tokens(spec: str) -> list[str]:
    """Return the tokens that other files of a tokenizer name and its tokenizer.json does not have. transformers adds them.

    Reads only files on this machine. Raises TokenizerError.
    """
    settings, added = (read_json(spec, file, offline=True) for file in ("tokenizer_config.json", "added_tokens.json"))
    token_map = read_json(spec, "special_tokens_map.json", offline=True)
    tokens: list[Any] = [*special_tokens(spec, offline=True).values(), *added]
    lists = [settings.get("added_tokens_decoder")]
    lists += [file.get(key) for file in (settings, token_map) for key in ("additional_special_tokens", "extra_special_tokens")]
    for entry in lists:
        tokens += entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    tokenizer = load_tokenizer(spec)
    return [text for text in dict.fromkeys(texts) if isinstance(text, str) and text and tokenizer.id_of(text) is None]


def to_ids(value: Any) -> list[int]:
    """Return the ids of a value such as `eos_token_id`: a number, a list of numbers, or null."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def model_eos(spec: str, id_of: Callable[[str], int | None], offline: bool = False) -> list[int]:
    """Return all ids that end a text by the files beside a tokenizer.json, those of the tokenizer first.

    The files are those of `special_tokens`, generation_config.json and config.json. id_of: the id of a token's text.
    """
    if spec == "byte":
        return []
    names = [
        special_tokens(spec, offline).get("eos_token"),
        read_json(spec, "special_tokens_map.json", offline).get("eos_token"),
    ]
    texts = [name.get("content") if isinstance(name, dict) else name for name in names]
    ids: list[Any] = [id_of(text) for text in texts if isinstance(text, str)]
    ids += [read_json(spec, file, offline).get("eos_token_id") for file in ("generation_config.json", "config.json")]
    return list(dict.fromkeys(each for value in ids for each in to_ids(value)))


def read_definition(spec: str) -> bytes:
    """Return the bytes of the tokenizer.json of `spec`. Raises TokenizerError if it cannot be read."""
    if (content := read_beside(spec)) is not None:
        return content
    path = Path(spec).expanduser() / DEFINITION if is_bare(spec) else Path(spec).expanduser()
    other_files = [name for name in OTHER_FORMS if path.name == DEFINITION and (path.parent / name).is_file()]
    if spec.startswith("hf:"):
        reason = f"{DEFINITION} {NOT_FETCHED}"
    elif other_files:
        reason = f"there is {other_files[0]} and no {DEFINITION}, which alone is read. Fix: {save_command(path.parent)}."
    else:
        reason = f"cannot read {path}: no such file. {SPEC_FORMS}"
    raise TokenizerError(f"tokenizer {spec!r}: {reason}")


def is_bare(spec: str) -> bool:
    """Return whether `spec` is a folder without a tokenizer.json, as some models are published."""
    folder = os.path.expanduser(spec)
    return os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, DEFINITION))


def save_command(folder: Path) -> str:
    """Return the command by which transformers writes a complete tokenizer.json, as a remedy."""
    code = f"from transformers import AutoTokenizer as T; T.from_pretrained({str(folder)!r}).save_pretrained('NEW')"
    return f'python -c "{code}", then --tokenizer=NEW (data.tokenizer=NEW of a run)'


@functools.lru_cache(maxsize=4)
def load_tokenizer(spec: str, eot: str | int = "") -> Tokenizer:
    """Load `byte`, the path of a tokenizer.json (or its folder), or `hf:NAME`. Raises TokenizerError.

    `eot` names the token that ends a document, or is its id; "": `find_eot` decides.
    """
    if spec == "byte":
        if eot and eot != ByteTokenizer.eot:
            raise TokenizerError("tokenizer 'byte': --eot does not apply, id 256 ends a document")
        return ByteTokenizer()
    return HuggingFaceTokenizer(spec, read_definition(spec), eot)


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return name, sha256, vocab_size and eot of a tokenizer, which token files and receipts record."""
    return {k: getattr(tokenizer, k) for k in ("name", "sha256", "vocab_size", "eot")}


def tokenizer_sha256(spec: str) -> str:
    """Return the `sha256` of the tokenizer `spec`, without network; "" for an `hf:NAME` that is not on this machine.

    Raises TokenizerError if it cannot be read.
    """
    if spec == "byte":
        return ByteTokenizer.sha256
    if spec.startswith("hf:") and cached_hub_path(spec.removeprefix("hf:")) is None:
        return ""
    return content_sha256(spec, read_definition(spec))


def tokenizer_hashes(meta: Mapping[str, Any], spec: str) -> dict[str, tuple[str, str]]:
    """Return the hashes of data.tokenizer in a checkpoint and now, for resume.compare_configs; {} unless both are known."""
    old_hash = meta.get("data", {}).get("fingerprint", {}).get("tokenizer", {}).get("sha256", "")
    try:
        new_hash = tokenizer_sha256(spec) if old_hash else ""
    except TokenizerError:  # another check reports it
        new_hash = ""
    return {"data.tokenizer": (old_hash, new_hash)} if new_hash else {}


def find_difference(spec: str, recorded: dict[str, Any]) -> str:
    """Return how the tokenizer `spec` differs from the tokenizer in a token file's header; "" if they are equal.

    No network is used, since nodes of a cluster often have none. An `hf:NAME` that is not on this machine is compared by name
    alone, since training needs only the ids.
    """
    try:
        sha256 = tokenizer_sha256(spec)
    except TokenizerError as e:
        return str(e).rstrip(".")
    if not sha256 and spec != recorded["name"]:
        return f"the file was made with {recorded['name']!r}, and {spec!r} is not on this machine to be compared"
    if sha256 in ("", recorded["sha256"]):
        return ""
    return f"the file was made with {recorded['name']!r} (sha256 {recorded['sha256'][:12]}), this one has {sha256[:12]}"
