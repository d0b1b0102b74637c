"""How texts of a model end, and the chat template that writes its conversations.

`data prepare` records both in a token file's header. A run merges them with the files of its tokenizer and with the record of
the model that it begins from, and stores the result in the meta.json of every checkpoint (key `text`). Samples, evaluations and
exports read this record, or for a Hugging Face folder its files.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.chat_template import ChatTemplate, tokenizer_template
from jaxtrain.data.tokenizer import ControlToken, Tokenizer, model_eos, read_json, special_tokens, to_ids

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json
GENERATION = "generation_config.json"
MESSAGE = "a message"


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """The tokens that end texts of a model, and its chat template.

    Attributes:
      tokenizer_sha256: hash of the tokenizer whose ids these are; "" if there is none.
      eot: the id that ends a document of the training data; None if unknown.
      taught: ids at which training taught the model to end: of turns, or of documents if all their tokens count in the loss.
      eos: the eos of the files that the model came with.
      special: the SPECIAL of its config.json; {} without a config.json.
      generation: its generation_config.json; None if there was none.
      template: the source of the chat template; "" if there is none.
      template_name: where the template is from.
      tokens: variables of the template such as `bos_token`.
      names: id, as text -> the text of its token, for the ids above; {} if the tokenizer was not read.
    """

    tokenizer_sha256: str = ""
    eot: int | None = None
    taught: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    special: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    generation: Mapping[str, Any] | None = None
    template: str = ""
    template_name: str = ""
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the format that `record` has returned as JSON."""
        fields: dict[str, Any] = {**record, "taught": tuple(record["taught"]), "eos": tuple(record["eos"])}
        return cls(**fields)

    def record(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        return dataclasses.asdict(self)

    @property
    def stops(self) -> tuple[int, ...]:
        """Return the ids that end a generated text."""
        return tuple(dict.fromkeys([*([] if self.eot is None else [self.eot]), *self.taught, *self.eos]))

    def with_names(self, tokenizer: Tokenizer) -> Self:
        """Return the format with the texts of its tokens. tokenizer: the one whose ids these are."""
        ids = [*self.stops, *(i for value in self.special.values() for i in to_ids(value))]
        ids += to_ids((self.generation or {}).get("eos_token_id"))
        texts = {str(i): tokenizer.text_of(i) for i in ids}
        return dataclasses.replace(self, names={i: text for i, text in texts.items() if text})

    def translate(self, tokenizer: Tokenizer) -> Self:
        """Return the format with the ids of another tokenizer: those of the tokens with the same text. Other ids are left out.

        A format without a tokenizer, as of a folder that has none, keeps its ids.
        """
        if self.tokenizer_sha256 in ("", tokenizer.sha256):
            return dataclasses.replace(self, tokenizer_sha256=tokenizer.sha256).with_names(tokenizer)

        def translate_ids(value: Any) -> Any:
            new_ids = [tokenizer.id_of(self.names.get(str(i), "")) for i in to_ids(value)]
            known_ids = [i for i in new_ids if i is not None]
            return (known_ids or None) if isinstance(value, list) else known_ids[0] if known_ids else None

        def translate_fields(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: translate_ids(value) if key.endswith("_token_id") else value for key, value in values.items()}

        result = dataclasses.replace(
            self,
            tokenizer_sha256=tokenizer.sha256,
            eot=translate_ids(self.eot),
            taught=tuple(translate_ids(list(self.taught)) or ()),
            eos=tuple(translate_ids(list(self.eos)) or ()),
            special=translate_fields(self.special),
            generation=None if self.generation is None else translate_fields(self.generation),
        )
        return result.with_names(tokenizer)

    def lost_tokens(self, tokenizer: Tokenizer) -> list[str]:
        """Return the tokens that end texts, and that another tokenizer does not have."""
        if self.tokenizer_sha256 in ("", tokenizer.sha256):
            return []
        names = [self.names.get(str(i), str(i)) for i in self.stops]
        return [name for name in names if tokenizer.id_of(name) is None]

    def chat_template(self, control: Sequence[ControlToken], date: str) -> ChatTemplate | None:
        """Return the chat template, None if there is none. control: the tokenizer's control tokens. date: of ChatTemplate."""
        return ChatTemplate(self.template_name, self.template, dict(self.tokens), control, date) if self.template else None

    def ids_to_write(self, bos: Sequence[int]) -> dict[str, Any]:
        """Return SPECIAL for the config.json of an export: those that the model came with, and the ids that were taught.

        bos: the tokenizer's, for a model that came without a config.json.
        """
        defaults = dict.fromkeys(SPECIAL) | ({"bos_token_id": bos[-1]} if bos else {})
        fields = defaults | dict(self.special)
        if not self.special and not self.taught and self.stops:  # of a tokenizer's files alone
            fields["eos_token_id"] = self.stops[0] if len(self.stops) == 1 else list(self.stops)
        return fields | {"eos_token_id": self._with_taught(fields["eos_token_id"])}

    def generation_to_write(self, ids: Mapping[str, Any]) -> dict[str, Any]:
        """Return generation_config.json of an export. ids: the result of `ids_to_write`."""
        if self.generation is None:
            return {"_from_model_config": True, **{key: value for key, value in ids.items() if value is not None}}
        eos = self.generation.get("eos_token_id")
        new_eos = self._with_taught(eos if to_ids(eos) else self.special.get("eos_token_id"))
        return {**self.generation} if set(self.taught) <= set(to_ids(eos)) else {**self.generation, "eos_token_id": new_eos}

    def _with_taught(self, eos: Any) -> Any:
        """Return an eos_token_id that includes the ids that were taught: unchanged if it does, else a number or a list."""
        ids = to_ids(eos)
        added = [each for each in self.taught if each not in ids]
        if not added:
            return eos
        return [*ids, *added] if len(ids) + len(added) > 1 else added[0]


def read_text_format(spec: str) -> TextFormat:
    """Return the text format of a tokenizer's files, and of config.json and generation_config.json beside them.

    Of a folder without a tokenizer.json only the ids are read. Reads only files on this machine. Raises TokenizerError if a
    file cannot be read.

    spec: the tokenizer, as data.tokenizer.
    """
    settings, generation = (read_json(spec, file, offline=True) for file in ("config.json", GENERATION))
    special = {key: settings.get(key) for key in SPECIAL} if "model_type" in settings else {}
    text_format = TextFormat(special=special, generation=generation or None)
    if tokenizers.is_bare(spec):
        return dataclasses.replace(text_format, eos=tuple(model_eos(spec, lambda text: None, offline=True)))
    tokenizer = tokenizers.load_tokenizer(spec)
    name, source = tokenizer_template(spec, offline=True)
    return dataclasses.replace(
        text_format,
        tokenizer_sha256=tokenizer.sha256,
        eot=tokenizer.eot,
        eos=tuple(model_eos(spec, tokenizer.id_of, offline=True)),
        template=source,
        template_name=name if source else "",
        tokens=special_tokens(spec, offline=True),
    ).with_names(tokenizer)


def format_from_headers(headers: Sequence[Mapping[str, Any]]) -> TextFormat:
    """Return the text format of token files' data. headers: of all files; the template is that of the first that has one."""
    first, taught = headers[0]["tokenizer"], []
    for header in headers:
        taught += header["turn_ends"] if header["loss"] else [header["tokenizer"]["eot"]]
    chat = next((header["made"]["chat"] for header in headers if "chat" in header["made"]), None)
    text_format = TextFormat(first["sha256"], first["eot"], tuple(dict.fromkeys(taught)))
    if chat is None:
        return text_format
    return dataclasses.replace(text_format, template=chat["template"], template_name=chat["name"], tokens=chat["tokens"])


def other_templates(headers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the chat templates in token files' headers that differ from the first one."""
    chats = [header["made"]["chat"] for header in headers if "chat" in header["made"]]
    return list(dict.fromkeys(chat["name"] for chat in chats if chat["template"] != chats[0]["template"]))


def merge_formats(data: TextFormat, tokenizer: Tokenizer | None, *models: TextFormat) -> TextFormat:
    """Return the text format of a run.

    Args:
      data: that of the training data.
      tokenizer: the data's tokenizer; None if it is not on this machine.
      models: of the model that the run began from, and of the tokenizer's files. One of another tokenizer is translated, or
        without `tokenizer` ignored: its ids have other meanings.
    """
    out = data
    for model in models:
        if tokenizer is None and model.tokenizer_sha256 != data.tokenizer_sha256:
            continue
        translated = model.translate(tokenizer) if tokenizer else model
        changes: dict[str, Any] = {"taught": _union(out.taught, translated.taught), "eos": _union(out.eos, translated.eos)}
        changes |= {"special": out.special or translated.special, "generation": out.generation or translated.generation}
        changes["names"] = {**translated.names, **out.names}
        if not out.template:
            changes |= {"template": translated.template, "template_name": translated.template_name, "tokens": translated.tokens}
        out = dataclasses.replace(out, **changes)
    return out.with_names(tokenizer) if tokenizer else out


def _union(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*first, *second]))


def is_local(spec: str) -> bool:
    """Return whether a tokenizer's definition is on this machine."""
    return spec == "byte" or tokenizers.find_file(spec, offline=True) is not None


def load_with_tokenizer(text: TextFormat, spec: str) -> tuple[Tokenizer, TextFormat]:
    """Return (tokenizer, text format) to generate text with.

    Args:
      text: the model's text format.
      spec: the tokenizer to read. If it is another than that of `text`, the result has its ids, and what its files say besides.

    Raises:
      TokenizerError: the tokenizer cannot be read.
    """
    tokenizer = tokenizers.load_tokenizer(spec)
    if tokenizer.sha256 != text.tokenizer_sha256:
        text = merge_formats(text.translate(tokenizer), tokenizer, read_text_format(spec))
        text = text if text.eot is not None else dataclasses.replace(text, eot=tokenizer.eot)
    return (tokenizers.load_tokenizer(spec, text.eot) if text.eot not in (None, tokenizer.eot) else tokenizer), text


def note_control_tokens(text: str, tokenizer: Tokenizer, label: str = "the prompt") -> str:
    """Return a note on a text that has the text of control tokens, which are encoded as characters; "" if it has none.

    label: names the text in the note.
    """
    control_texts = [token.text for token in tokenizer.control_tokens() if token.text in text]
    if not control_texts:
        return ""
    fix = "" if label == MESSAGE else ". A chat template writes control tokens: sample --chat, or messages of jaxtrain.generate"
    return (
        f"{label} has {', '.join(control_texts)}: the model gets the characters, since text is never read as control tokens"
        f"{fix}"
    )
