"""Convert rows of JSON lines, Parquet and data sets to documents: columns of text, a conversation, or a pair."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.template import THOUGHTS, ChatTemplate, Conversation, Part, RowError

# Name of a role in data sets -> its name in templates. Other names are errors: a template may write the role between `<|` and
# `|>`, so an arbitrary role could name any control token.
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
# Older keys for function calls -> the keys that templates read. Rows with older keys are errors: the text would lack the calls.
NOT_READ = {"function_call": "tool_calls", "functions": "tools"}
TEMPLATE_COLUMNS = ("system", "tools", "chat_template_kwargs")
PAIR_COLUMNS = ("prompt", "chosen", "rejected", *TEMPLATE_COLUMNS)
CHAT_COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "response", "instruction", "input", "output"),
    *TEMPLATE_COLUMNS,
)


@dataclass(frozen=True)
class Piece:
    """A document, or a piece of a document that is too long to encode at once.

    Attributes:
      text: the text. Each member of a pair has the text of both members, so that --validation puts both into one file.
      num_bytes: UTF-8 bytes of the text, without control tokens and without the other member of a pair.
      end: whether the document ends with this piece.
      parts: the parts of a conversation or of a member of a pair, each encoded by itself; None: `text` is encoded.
      rejected: for the chosen member of a pair, the rejected member, which is the next document.
    """

    text: str
    num_bytes: int
    end: bool = True
    parts: tuple[Part, ...] | None = None
    rejected: "Piece | None" = None


class TextRows:
    """Rows of text, in one column, or in several columns. `separator` joins the columns that are not empty.

    `columns` returns the columns to read from a table, and raises RowError if a column is missing. `piece` returns the
    document of a row, or None if the row has no text, and raises RowError for a bad row. ChatRows and PairRows have the same
    methods.
    """

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
    """Rows of conversations, written by a chat template. loss: the tokens that count in the loss (template.LOSSES)."""

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
        talk = conversation(row)
        text, parts = self.template.parts(talk, self.loss)
        size = sum(len(part.text.encode()) for part in parts if part.control < 0)
        return Piece(text, size, parts=tuple(parts))


class PairRows:
    """Rows of pairs: two completions of one prompt, `chosen` preferred to `rejected`.

    A pair has two documents, each the prompt with one completion. Only the completions count in the loss.

    Args:
      template: writes rows of messages; None: rows are plain text.
      bos: ids that begin each document of plain text.
    """

    def __init__(self, template: ChatTemplate | None, bos: Sequence[int]):
        self.template = template
        self.bos = bos

    def columns(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        if not {"chosen", "rejected"} <= {*names}:
            raise RowError(f"no pair in its columns {', '.join(names)}. {PAIRS}")
        return [name for name in names if name in (*PAIR_COLUMNS, *NOT_READ)]

    def piece(self, row: dict[str, Any]) -> Piece | None:
        _refuse_unread(row, "the row")
        row = {k: v for k, v in row.items() if v is not None}  # Parquet has every column in every row
        if not {"chosen", "rejected"} <= row.keys():
            raise RowError(f"not a pair (has: {', '.join(map(repr, list(row)[:8]))}). {PAIRS}")
        members = self._texts(row) if self.template is None else self._conversations(row, self.template)
        if members[0][0] == members[1][0]:
            raise RowError("'chosen' and 'rejected' are the same")
        text = "\0".join(text for text, _ in members)
        sizes = [sum(len(part.text.encode()) for part in parts if part.control < 0) for _, parts in members]
        chosen, rejected = (Piece(text, n, parts=tuple(parts)) for (_, parts), n in zip(members, sizes, strict=True))
        return dataclasses.replace(chosen, rejected=rejected)

    def _texts(self, row: dict[str, Any]) -> list[tuple[str, list[Part]]]:
        if any(isinstance(row.get(name), list) for name in PAIR_COLUMNS) or row.get("tools"):
            raise RowError("the row holds messages or tools, which a chat template writes: give --chat too")
        chosen, rejected = (_text(row[name], repr(name)) for name in ("chosen", "rejected"))
        if "prompt" in row:
            prompt = _text(row["prompt"], "'prompt'")
        else:
            prompt = _shared_words(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not (prompt or self.bos):
            raise RowError("the prompt is empty, and the first token of a text has nothing that predicts it")
        begin = [*(Part("", control=token) for token in self.bos), Part(prompt)]
        place = "inner" if prompt else "start"
        return [(prompt + text, [*begin, Part(text, loss=True, place=place)]) for text in (chosen, rejected)]

    def _conversations(self, row: dict[str, Any], template: ChatTemplate) -> list[tuple[str, list[Part]]]:
        prompt, chosen, rejected = _pair_of_messages(row)
        tools, variables = _template_columns(row)
        if system := _text(row.get("system", ""), "'system'"):
            prompt = [_message("system", system), *prompt]
        talks = [Conversation(prompt + completion, tools, variables, len(prompt)) for completion in (chosen, rejected)]
        return [template.parts(talk, "assistant") for talk in talks]


Rows = TextRows | ChatRows | PairRows
PAIRS = (
    "A pair is `prompt`, `chosen` and `rejected`, texts or lists of messages; or `chosen` and `rejected` alone, which then "
    "begin with the same prompt"
)


def _shared_words(chosen: str, rejected: str) -> str:
    """Return the beginning that two texts share, up to its last complete word, so that no token spans prompt and completion."""
    if chosen == rejected:
        raise RowError("'chosen' and 'rejected' are the same, and without a 'prompt' nothing is left of either")
    shared = os.path.commonprefix([chosen, rejected])
    if shared and not shared[-1].isspace():
        shared = shared.removesuffix(shared.split()[-1])
    return shared.removesuffix(" ")  # tokens of words begin with their space


def _pair_of_messages(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages of the prompt, of the chosen and of the rejected completion. Raises RowError."""
    given = row.get("prompt")
    if isinstance(row["chosen"], str) and isinstance(row["rejected"], str) and isinstance(given, str):
        chosen, rejected = ([_message("assistant", _text(row[name], repr(name)))] for name in ("chosen", "rejected"))
        return [_message("user", _text(given, "'prompt'"))], chosen, rejected
    chosen, rejected = (_messages(row[name], name) for name in ("chosen", "rejected"))
    if isinstance(given, list):
        return _messages(given, "prompt"), chosen, rejected
    # Both members are complete conversations: the prompt is their common beginning.
    if chosen == rejected:
        raise RowError("'chosen' and 'rejected' are the same conversation")
    most = max(0, min(len(chosen), len(rejected)) - 1)
    count = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    prompt = chosen[:count]
    if given is not None and not any(message.get("content") == given for message in prompt):
        raise RowError("'prompt' is text, and none of the messages that 'chosen' and 'rejected' share has it")
    if not prompt:
        raise RowError("'chosen' and 'rejected' share no message, so there is no prompt")
    return prompt, chosen[count:], rejected[count:]


FORMS = (
    "A conversation is `messages` (role, content), `conversations` (from, value), `prompt` with `completion` or `response`, or "
    "`instruction` (with `input`) and `output`"
)


def form(names: Iterable[str]) -> str | None:
    """Return the key that decides how a row's conversation is read; None if the keys `names` have no form of FORMS."""
    names = set(names)
    for key in ("messages", "conversations"):
        if key in names:
            return key
    for key in ("completion", "response"):
        if {"prompt", key} <= names:
            return key
    return "output" if {"instruction", "output"} <= names else None


def conversation(row: dict[str, Any]) -> Conversation:
    """Return the conversation of a row in any form of FORMS. Raises RowError.

    If prompt and completion are both lists of messages, only the completion counts in the loss.
    """
    _refuse_unread(row, "the row")
    row = {k: v for k, v in row.items() if v is not None}  # Parquet has every column in every row
    kind, prompt = form(row), 0
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
        messages = _messages(row["prompt"], "prompt")
        prompt = len(messages)
        messages += _messages(row[kind], kind)
    else:
        messages = [_message("user", _text(row["prompt"], "'prompt'")), _message("assistant", _text(row[kind], repr(kind)))]
    if system := _text(row.get("system", ""), "'system'"):
        messages.insert(0, _message("system", system))
        prompt += prompt > 0
    if not messages:
        raise RowError(f"{kind!r} is empty")
    for i, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
            what = f"the assistant's message, number {i} of {len(messages)}," if isinstance(row[kind], list) else repr(kind)
            raise RowError(f"{what} is empty, and the model would learn to answer nothing. Fix: leave the row out")
    return Conversation(messages, *_template_columns(row), prompt)


def question(row: dict[str, Any]) -> tuple[Conversation, str]:
    """Return (a row's conversation up to its last answer, that answer). The answer is "" if the row ends with a question.

    A row may also have a `prompt` alone, as text or messages, or be a pair: then the chosen answer is the reference. Raises
    RowError.
    """
    if {"chosen", "rejected"} <= row.keys():
        prompt, chosen, _ = _pair_of_messages(row)
        row = {key: x for key, x in row.items() if key in (*TEMPLATE_COLUMNS, *NOT_READ)} | {"messages": prompt + chosen}
    if form(row) is None and row.get("prompt"):
        given = row["prompt"]
        row = {**row, "messages": given if isinstance(given, list) else [_message("user", _text(given, "'prompt'"))]}
    talk = conversation(row)
    last = talk.messages[-1]
    if last["role"] != "assistant":
        return talk, ""
    if len(talk.messages) == 1:
        raise RowError("the row has only an answer, and asks nothing")
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in last.get("tool_calls", ())]
    return talk.first(len(talk.messages) - 1), "\n".join(filter(None, [last["content"], *calls]))


def _template_columns(row: dict[str, Any]) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return (`tools`, `chat_template_kwargs`) of a row. Each may be JSON text in the row. Raises RowError."""
    tools, variables = (
        _json(row.get("tools") or None, "'tools'"),
        _json(row.get("chat_template_kwargs"), "'chat_template_kwargs'"),
    )
    if not isinstance(tools, list | None):
        raise RowError(f"'tools' is {kind_of(tools)}, not a list of functions")
    for i, tool in enumerate(tools or (), 1):
        if not isinstance(tool, dict):
            raise RowError(f"tool {i} of 'tools' is {kind_of(tool)}, not the description of a function")
    if not isinstance(variables, dict | None):
        raise RowError(f"'chat_template_kwargs' is {kind_of(variables)}, not an object")
    return tools or None, variables or {}


def _json(value: Any, what: str) -> Any:
    """Return the value of a JSON text, or any other value unchanged. Raises RowError for bad JSON or a lone surrogate."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise RowError(f"{what} is text, but not JSON ({e})") from e
    _text(json.dumps(value, ensure_ascii=False, default=str), what)
    return value


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {kind_of(value)}, not a list of messages")
    messages = []
    for i, item in enumerate(value, 1):
        what = f"message {i} of {key!r}"
        if not isinstance(item, dict):
            raise RowError(f"{what} is {kind_of(item)}, not an object")
        _refuse_unread(item, what)
        role, content = ("role", "content") if "role" in item else ("from", "value")
        calls = item.get("tool_calls")
        needed = [role] if calls else [role, content]
        if missing := [k for k in needed if k not in item]:
            raise RowError(f"{what} has no {missing[0]!r} (has: {', '.join(map(repr, list(item)[:8]))})")
        name = item[role]
        if name not in ROLES:
            raise RowError(f"{what} has the role {name!r}; known are {', '.join(ROLES)}")
        message: dict[str, Any] = {"role": ROLES[name]}
        # OpenAI writes null, or nothing, beside calls of tools.
        text = "" if calls and item.get(content) is None else item[content]
        message["content"] = _text(text, f"{content!r} of {what}")
        for k in ("name", "tool_call_id"):
            if item.get(k) is not None:
                message[k] = _text(item[k], f"{k!r} of {what}")
        if thoughts := [k for k in THOUGHTS if item.get(k) is not None]:
            message |= dict.fromkeys(THOUGHTS[:2], _text(item[thoughts[0]], f"{thoughts[0]!r} of {what}"))
        if calls:
            if not isinstance(calls, list):
                raise RowError(f"'tool_calls' of {what} is {kind_of(calls)}, not a list of calls")
            message["tool_calls"] = [_tool_call(call, what) for call in calls]
        if not _counts(item, what):
            message["train"] = False
        messages.append(message)
    return messages


def _counts(item: dict[str, Any], what: str) -> bool:
    """Return False if `train` (axolotl) is false or `weight` (OpenAI) is 0, else True. Raises RowError for wrong values."""
    for key, rule in (("train", "true or false"), ("weight", "0 or 1")):
        value = item.get(key)
        if value is not None and not (isinstance(value, bool) if key == "train" else value in (0, 1)):
            raise RowError(f"{key!r} of {what} is {value!r}: must be {rule}")
    return item.get("train") is not False and item.get("weight") != 0


def _tool_call(call: Any, what: str) -> dict[str, Any]:
    """Return a tool call in the form of templates: its arguments are an object, not JSON text. Raises RowError."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{what} has a tool call without the name of its function")
    if "arguments" not in function:
        raise RowError(f"{what} has a tool call without 'arguments'. Fix: give {{}} for a function that takes none")
    arguments = _json(function["arguments"] or {}, f"the arguments of a tool call of {what}")
    if not isinstance(arguments, dict):
        raise RowError(f"the arguments of a tool call of {what} are {kind_of(arguments)}, not an object")
    function = {"name": _text(function["name"], f"the name of a tool call of {what}"), "arguments": arguments}
    more = {k: _text(call[k], f"{k!r} of a tool call of {what}") for k in ("id", "type") if call.get(k) is not None}
    return {"type": "function", **more, "function": function}


def _refuse_unread(item: dict[str, Any], what: str) -> None:
    if found := [key for key in NOT_READ if item.get(key)]:
        raise RowError(f"{what} has {found[0]!r}, which is not read: rename it to {NOT_READ[found[0]]!r}, in its form")


def kind_of(value: Any) -> str:
    """Return the JSON type of a value in words, or the name of its Python type if JSON has no such type."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"of the type {type(value).__name__}")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what} is {kind_of(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise RowError(f"{what} has half a surrogate pair at character {e.start + 1}") from e
    return value
