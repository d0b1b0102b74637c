"""Rows of JSON lines, Parquet and data sets as documents: one or several columns of text, or a conversation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtrain.data.template import ChatTemplate, Part, RowError

# Names of roles, as templates know them, by the names that data sets give them. Others are refused: a template may write the
# role between `<|` and `|>`, so a role that anybody may choose could name any control token.
ROLES = {
    name: role
    for role, names in {
        "system": ("system",),
        "developer": ("developer",),
        "user": ("user", "human"),
        "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"),
        "tool": ("tool",),
        "function": ("function",),
        "ipython": ("ipython",),
        "environment": ("environment",),
    }.items()
    for name in names
}
# What a row or a message may hold that would change its text: left out silently, the model would learn something else.
NOT_READ = ("tool_calls", "function_call", "reasoning_content", "thinking", "tools", "functions")
CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", "response", "instruction", "input", "output", "system")


@dataclass(frozen=True)
class Piece:
    """Text of a document, and whether the document ends with it. `parts`: of a conversation, cut for encoding."""

    text: str
    num_bytes: int
    end: bool = True
    parts: tuple[Part, ...] | None = None


class Rows(Protocol):
    """How a row becomes a document."""

    def columns(self, names: Iterable[str]) -> list[str]:
        """Which of a table's columns are read. Raises RowError where they do not do."""
        ...

    def piece(self, row: dict[str, Any]) -> Piece | None:
        """None where the row holds no text. Raises RowError."""
        ...


class TextRows:
    """The text of one column, or of several with `separator` between those that are not empty."""

    def __init__(self, keys: list[str], separator: str):
        self.keys = keys
        self.separator = separator

    def columns(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        if missing := [key for key in self.keys if key not in names]:
            raise RowError(f"no column {missing[0]!r}; it has {', '.join(names)}. Name one with --text-key=NAME.")
        return self.keys

    def piece(self, row: dict[str, Any]) -> Piece | None:
        texts = []
        for key in self.keys:
            if key not in row:
                hint = ". A conversation is read with --chat" if form(row) else ""
                raise RowError(f"no key {key!r} (has: {', '.join(map(repr, list(row)[:8]))}){hint}")
            texts.append(_text(row[key], repr(key)))
        text = self.separator.join(filter(None, texts))
        return Piece(text, len(text.encode())) if text else None


class ChatRows:
    """A conversation, written by a chat template. `loss`: which of it counts (template.LOSSES)."""

    def __init__(self, template: ChatTemplate, loss: str):
        self.template = template
        self.loss = loss

    def columns(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        found = [name for name in names if name in (*CHAT_COLUMNS, *NOT_READ)]
        if form(found) is None:
            raise RowError(f"no conversation in its columns {', '.join(names)}. {FORMS}")
        return found

    def piece(self, row: dict[str, Any]) -> Piece | None:
        text, parts = self.template.parts(conversation(row), self.loss)
        size = sum(len(part.text.encode()) for part in parts if part.control < 0)
        return Piece(text, size, parts=tuple(parts))


FORMS = (
    "A conversation is `messages` (role, content), `conversations` (from, value), `prompt` with `completion` or `response`, or "
    "`instruction` (with `input`) and `output`"
)


def form(names: Iterable[str]) -> str | None:
    """Which kind of conversation a row with these keys is; the first that it can be."""
    names = set(names)
    for key in ("messages", "conversations"):
        if key in names:
            return key
    for key in ("completion", "response"):
        if {"prompt", key} <= names:
            return key
    return "output" if {"instruction", "output"} <= names else None


def conversation(row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages (role, content) of a row of any of the forms. Raises RowError."""
    _refuse_unread(row, "the row")
    row = {k: v for k, v in row.items() if v is not None}  # Parquet has every column in every row
    kind = form(row)
    if kind is None:
        raise RowError(f"not a conversation (has: {', '.join(map(repr, list(row)[:8]))}). {FORMS}")
    if kind in ("messages", "conversations"):
        messages = _messages(row[kind], kind)
    elif kind == "output":
        asked = _text(row["instruction"], "'instruction'")
        given = _text(row.get("input", ""), "'input'")
        messages = [_message("user", f"{asked}\n\n{given}" if given else asked)]
        messages.append(_message("assistant", _text(row["output"], "'output'")))
    elif isinstance(row["prompt"], list) and isinstance(row[kind], list):
        messages = _messages(row["prompt"], "prompt") + _messages(row[kind], kind)
    else:
        messages = [_message("user", _text(row["prompt"], "'prompt'")), _message("assistant", _text(row[kind], repr(kind)))]
    if system := _text(row.get("system", ""), "'system'"):
        messages.insert(0, _message("system", system))
    if not messages:
        raise RowError(f"{kind!r} is empty")
    return messages


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(value: Any, key: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {type(value).__name__}, not a list of messages")
    messages = []
    for i, item in enumerate(value, 1):
        what = f"message {i} of {key!r}"
        if not isinstance(item, dict):
            raise RowError(f"{what} is {type(item).__name__}, not an object")
        _refuse_unread(item, what)
        role, content = ("role", "content") if "role" in item else ("from", "value")
        if missing := [k for k in (role, content) if k not in item]:
            raise RowError(f"{what} has no {missing[0]!r} (has: {', '.join(map(repr, list(item)[:8]))})")
        name = item[role]
        if name not in ROLES:
            raise RowError(f"{what} has the role {name!r}; known are {', '.join(ROLES)}")
        messages.append(_message(ROLES[name], _text(item[content], f"{content!r} of {what}")))
    return messages


def _refuse_unread(item: dict[str, Any], what: str) -> None:
    if found := [key for key in NOT_READ if item.get(key)]:
        raise RowError(f"{what} has {found[0]!r}, which is not read: write it into the content, or leave it out")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise RowError(f"{what} has half a surrogate pair at character {e.start + 1}") from e
    return value
