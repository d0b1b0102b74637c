"""Text to token ids and back: bytes, or any Hugging Face `tokenizer.json`."""

import functools
import hashlib
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Tokens that end a document, in the order they are looked for: a base model's own before those of chat templates.
EOT_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<|endofdocument|>", "[EOS]", "<|im_end|>")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or used; the message names it and says what to do."""


@dataclass(frozen=True)
class ControlToken:
    """A token that only a template writes. `lstrip`, `rstrip`: it takes the white space on that side with it."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer."""

    @property
    def name(self) -> str:
        """The spec it was loaded from."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos(self) -> tuple[int, ...]:
        """The ids that it puts before every text; most have one or none. A chat template writes its own."""
        ...

    @property
    def eot(self) -> int:
        """The id that ends every document."""
        ...

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer's definition: equal hashes give equal ids."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def control_tokens(self) -> tuple[ControlToken, ...]:
        """Those that a chat template may write, the longest first."""
        ...

    def encode_places(self, texts: Sequence[str], places: Sequence[str]) -> list[np.ndarray]:
        """Texts that stand at the start of a document, after a control token, or inner (after other text)."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0-255; 256 ends a document."""

    name = "byte"
    vocab_size = 257
    bos = ()
    eot = 256
    sha256 = hashlib.sha256(b"jaxtrain byte tokenizer: ids 0-255 are bytes, 256 ends a document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint16 array per text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def control_tokens(self) -> tuple[ControlToken, ...]:
        """End-of-text, under the name that templates write."""
        return (ControlToken("<|endoftext|>", self.eot),)

    def encode_places(self, texts: Sequence[str], places: Sequence[str]) -> list[np.ndarray]:
        return self.encode_batch(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Bytes that are not UTF-8 (a model may write any) come out as U+FFFD; ends of documents are left out."""
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` run by the `tokenizers` package.

    Control tokens are never read from text: a corpus that happens to contain `</s>` gets it as ordinary characters.
    """

    def __init__(self, name: str, definition: bytes, eot: str = ""):
        import tokenizers

        self.name = name
        self.sha256 = hashlib.sha256(definition).hexdigest()

        def make(text: str) -> "tokenizers.Tokenizer":
            made = tokenizers.Tokenizer.from_str(text)
            made.no_truncation()
            made.no_padding()
            made.encode_special_tokens = True
            return made

        self._make = make
        self._definition = definition
        try:
            self._tokenizer = make(definition.decode())
        except Exception as e:  # the package raises plain Exception for whatever it cannot parse
            raise TokenizerError(f"tokenizer {name!r}: not a tokenizer.json that the tokenizers package can read ({e})") from e
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        control = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        self.eot = find_eot(name, vocab, eot, control)
        self.bos = self._find_bos(vocab)

    def _find_bos(self, vocab: dict[str, int]) -> tuple[int, ...]:
        """What its post-processor writes before a text, seen on the first one that gives any token."""
        for text in ("a", *vocab):
            encoding = self._tokenizer.encode(text, add_special_tokens=True)
            own = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if own:
                return tuple(encoding.ids[: own[0]])
        return ()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One uint32 array per text; the package uses all cores."""
        return self._batch(self._tokenizer, texts)

    def _batch(self, tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.uint32) for e in encodings]

    @functools.cached_property
    def _placed(self) -> dict[str, Any]:
        """Tokenizers for texts that do not start a document: some put a space before a text, and only there."""
        definition = json.loads(self._definition)
        return {
            "start": self._tokenizer,
            "after": self._make(json.dumps(_without_prefix(definition, ("first",)))),
            "inner": self._make(json.dumps(_without_prefix(definition, ("first", "always"), everywhere=True))),
        }

    def control_tokens(self) -> tuple[ControlToken, ...]:
        """The special ones among its added tokens, the longest first."""
        found = []
        for token in json.loads(self._definition).get("added_tokens", []):
            if not token["special"]:
                continue
            if token["single_word"]:
                raise TokenizerError(
                    f"tokenizer {self.name!r}: its control token {token['content']!r} is read only as a whole word, which "
                    "chat templates are not supported with"
                )
            found.append(ControlToken(token["content"], token["id"], token["lstrip"], token["rstrip"]))
        return tuple(sorted(found, key=lambda token: -len(token.text)))

    def encode_places(self, texts: Sequence[str], places: Sequence[str]) -> list[np.ndarray]:
        """As the package encodes the whole, control tokens read as such, except that no token reaches across two texts."""
        out: list[np.ndarray] = [np.empty(0, np.uint32)] * len(texts)
        for place, tokenizer in self._placed.items():
            mine = [i for i, p in enumerate(places) if p == place]
            for i, ids in zip(mine, self._batch(tokenizer, [texts[i] for i in mine]), strict=True):
                out[i] = ids
        return out

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def _without_prefix(part: Any, schemes: tuple[str, ...], everywhere: bool = False) -> Any:
    """A part of a definition in which no space is put before a text under `schemes`; `everywhere`: under no scheme at all."""
    if isinstance(part, list):
        return [_without_prefix(p, schemes, everywhere) for p in part]
    if not isinstance(part, dict):
        return part
    out = {
        k: v if k in ("model", "decoder", "post_processor") else _without_prefix(v, schemes, everywhere)
        for k, v in part.items()
    }
    if out.get("prepend_scheme") in schemes:
        out["prepend_scheme"] = "never"
    if everywhere and out.get("type") == "ByteLevel" and "add_prefix_space" in out:
        out["add_prefix_space"] = False
    if everywhere and out.get("type") == "Metaspace" and "add_prefix_space" in out:
        out["add_prefix_space"] = False
    if everywhere and out.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    return out


def find_eot(name: str, vocab: dict[str, int], eot: str, control: Container[str] = ()) -> int:
    """The id of the token that ends a document: the one asked for, or the first known name in the vocabulary.

    Control tokens go before others: in the vocabulary of Gemma `</s>` is a piece of HTML.
    """
    if eot:
        if eot not in vocab:
            raise TokenizerError(f"tokenizer {name!r}: --eot={eot!r} is not in its vocabulary of {len(vocab)} tokens")
        return vocab[eot]
    for known in (*(name for name in EOT_NAMES if name in control), *EOT_NAMES):
        if known in vocab:
            return vocab[known]
    raise TokenizerError(
        f"tokenizer {name!r}: no token is known to end a document (looked for {', '.join(EOT_NAMES)}). "
        "Name one with --eot=TOKEN."
    )


def cached_hub_path(name: str, file: str = "tokenizer.json") -> Path | None:
    """Where a file of `hf:NAME` lies on this machine already; None where it does not. No network."""
    import huggingface_hub

    found: Any = huggingface_hub.try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def read_beside(spec: str, file: str) -> bytes | None:
    """A file that lies beside the tokenizer.json of `spec`, on this machine or on the hub; None where there is none."""
    if not spec.startswith("hf:"):
        path = Path(spec).expanduser()
        path = (path if path.is_dir() else path.parent) / file
        return path.read_bytes() if path.is_file() else None
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    name = spec.removeprefix("hf:")
    path = cached_hub_path(name, file)
    if path is None:
        try:
            path = Path(huggingface_hub.hf_hub_download(name, file))
        except EntryNotFoundError:  # not there; or, its kin for want of a network, not on this machine
            return None
        except Exception as e:
            reason = next(iter(str(e).splitlines()), "") or type(e).__name__
            raise TokenizerError(f"tokenizer {spec!r}: {file} could not be fetched from the hub ({reason})") from e
    return path.read_bytes()


def read_definition(spec: str) -> bytes:
    """The bytes of a tokenizer.json, from a path or (`hf:NAME`) from the Hugging Face hub. Raises TokenizerError."""
    if not spec.startswith("hf:"):
        path = Path(spec).expanduser()
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            return path.read_bytes()
        except OSError as e:
            raise TokenizerError(
                f"tokenizer {spec!r}: cannot read {path} ({e.strerror}). Give byte, the path of a tokenizer.json, or hf:NAME."
            ) from e
    name = spec.removeprefix("hf:")
    path = cached_hub_path(name)
    if path is None:
        import huggingface_hub

        try:
            path = Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
        except Exception as e:  # no network, no such name, gated, no tokenizer.json: many classes, one remedy
            reason = next(iter(str(e).splitlines()), "") or type(e).__name__
            raise TokenizerError(
                f"tokenizer {spec!r}: could not be fetched from the Hugging Face hub ({type(e).__name__}: {reason}). Check the "
                "name and the network, or fetch its tokenizer.json elsewhere and give the path."
            ) from e
    return path.read_bytes()


@functools.lru_cache(maxsize=4)
def load_tokenizer(spec: str, eot: str = "") -> Tokenizer:
    """`byte`, the path of a tokenizer.json (or its folder), or `hf:NAME`. Raises TokenizerError.

    `eot` names the token that ends a document where it is not one of the known names.
    """
    if spec == "byte":
        if eot:
            raise TokenizerError("tokenizer 'byte': --eot does not apply, id 256 ends a document")
        return ByteTokenizer()
    return HuggingFaceTokenizer(spec, read_definition(spec), eot)


def info(tokenizer: Tokenizer) -> dict[str, Any]:
    """What token files and receipts record of a tokenizer."""
    return {k: getattr(tokenizer, k) for k in ("name", "sha256", "vocab_size", "eot")}


def differs(spec: str, recorded: dict[str, Any]) -> str:
    """Why the tokenizer `spec` is not the one that a token file recorded; "" where it is. No network.

    An `hf:NAME` that is not on this machine is compared by name alone: nodes of a cluster often have no network, and
    training needs only the ids.
    """
    if spec == "byte":
        sha256 = ByteTokenizer.sha256
    elif spec.startswith("hf:") and cached_hub_path(spec.removeprefix("hf:")) is None:
        if spec == recorded["name"]:
            return ""
        return f"the file was made with {recorded['name']!r}, and {spec!r} is not on this machine to be compared"
    else:
        try:
            sha256 = hashlib.sha256(read_definition(spec)).hexdigest()
        except TokenizerError as e:
            return str(e)
    if sha256 == recorded["sha256"]:
        return ""
    return f"the file was made with {recorded['name']!r} (sha256 {recorded['sha256'][:12]}), this one has {sha256[:12]}"
