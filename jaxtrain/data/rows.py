"""Convert rows of JSON lines, Parquet and data sets to documents: columns of text, a conversation, or a pair."""

import dataclasses
import json
import os
import re
import unicodedata
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.chat_template import THOUGHTS, ChatTemplate, Chunk, Conversation, RowError

# Name of a role in data sets -> its name in templates. Other names are errors: a template may write the role between `<|` and
# `|>`, so an arbitrary role could name any control token.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
}
SYSTEM = ("system", "system_prompt", "system_message")  # columns with the text of a first message
TEMPLATE_COLUMNS = (*SYSTEM, "tools", "chat_template_kwargs")
# Keys of rows and of messages that other trainers read and jaxtrain does not -> what to do. Without these keys the model would
# learn something else, so they are errors unless they are empty.
TEXT_ALONE = "the models here read text alone. Fix: leave the row out"
UNREAD_KEYS = {
    "function_call": "templates read newer forms. Fix: rename it to 'tool_calls', in its form",
    "functions": "templates read newer forms. Fix: rename it to 'tools', in its form",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), TEXT_ALONE),
    "documents": "columns are no variables of the template. Fix: give it in 'chat_template_kwargs'",
    "history": "it is read beside 'instruction' and 'output', or 'prompt' and its answer. Fix: put it into the messages",
    **dict.fromkeys(("train_detail", "training_detail"), "a message counts as a whole. Fix: give it 'train' true or false"),
}
# Keys of a message that say whether it counts in the loss -> the value of those that count, 1 or 0.
COUNTS = {
    **dict.fromkeys(("train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale", "weight"), 1),
    **dict.fromkeys(("mask", "masked"), 0),
}
# Keys of a row for the loss of all its messages, of which none are read.
ROW_COUNTS = COUNTS | {"weights": 1, "masks": 0}
LABELS = ("label", "kto_tag")  # whether the answer is a good one
# Columns of a table that are fetched: those of conversations and pairs, and those that a row may be refused for.
COLUMNS = {
    *("messages", "conversations", "prompt", "completion", "response", "instruction", "input", "output", "history"),
    *("chosen", "rejected", "query", "question", "context"),
    *(*TEMPLATE_COLUMNS, *UNREAD_KEYS, *ROW_COUNTS, *LABELS),
}


@dataclass(frozen=True)
class Piece:
    """A document, or a piece of a document that is too long to encode at once.

    Attributes:
      text: the text. Each member of a pair has the text of both members, so that --validation puts both into one file.
      num_bytes: UTF-8 bytes of the text, without control tokens and without the other member of a pair.
      end: whether the document ends with this piece.
      chunks: those of a conversation or of a member of a pair, each encoded by itself; None: `text` is encoded.
      notes: what of the row is not used, though the model learns nothing else without it.
    """

    text: str
    num_bytes: int
    end: bool = True
    chunks: tuple[Chunk, ...] | None = None
    notes: tuple[str, ...] = ()


class TextRows:
    """Rows of text, in one column, or in several columns. `separator` joins the columns that are not empty.

    `columns` returns the columns to read from a table, and raises RowError if a column is missing. `pieces` returns the
    documents of a row, none if the row has no text, and raises RowError for a bad row. ChatRows and PreferenceRows have the
    same methods.
    """

    def __init__(self, keys: list[str], separator: str):
        self.keys = keys
        self.separator = separator

    def columns(self, names: list[str]) -> list[str]:
        if missing := [key for key in self.keys if key not in names]:
            raise RowError(f"no column {missing[0]!r}; it has {', '.join(names)}. Name one with --text-key=NAME.")
        return self.keys

    def pieces(self, row: dict[str, Any]) -> list[Piece]:
        texts = []
        for key in self.keys:
            if key not in row:
                hint = ". A conversation is read with --chat" if conversation_key(row) else ""
                raise RowError(f"no key {key!r} (has: {shown_keys(row)}){hint}")
            texts.append(_check_text(row[key], repr(key)))
        text = self.separator.join(filter(None, texts))
        return [Piece(text, len(text.encode()), notes=note_unread(row, self.keys))] if text else []


class ChatRows:
    """Rows of conversations, written by a chat template. loss: the tokens that count in the loss (template.LOSSES)."""

    def __init__(self, template: ChatTemplate, loss: str):
        self.template = template
        self.loss = loss

    def columns(self, names: list[str]) -> list[str]:
        if conversation_key(names) is None:
            raise RowError(f"no conversation in its columns {', '.join(names)}. {FORMS}")
        return [name for name in names if name in COLUMNS]

    def pieces(self, row: dict[str, Any]) -> list[Piece]:
        chat = parse_conversation(row)
        notes = (*chat.notes, *self.template.check(chat))
        text, chunks = self.template.split_conversation(chat, self.loss)
        return [_make_piece(text, chunks, notes)]


class PreferenceRows:
    """Rows of pairs: two completions of one prompt, `chosen` preferred to `rejected`.

    A pair has two documents, each the prompt with one completion. Only the completions count in the loss.

    Args:
      template: writes rows of messages; None: rows are plain text.
      bos: ids that begin each document of plain text.
    """

    def __init__(self, template: ChatTemplate | None, bos: Sequence[int]):
        self.template = template
        self.bos = bos

    def columns(self, names: list[str]) -> list[str]:
        if not {*PAIR_MEMBERS} <= {*names}:
            raise RowError(f"no pair in its columns {', '.join(names)}. {PAIRS}")
        return [name for name in names if name in COLUMNS]

    def pieces(self, row: dict[str, Any]) -> list[Piece]:
        if any(row.get(key) is None for key in PAIR_MEMBERS):
            raise RowError(f"not a pair (has: {shown_keys(row)}). {PAIRS}")
        if self.template is None:
            (chosen, rejected), notes = self._texts(row)
        else:
            chats = parse_pair(row)
            notes = (*chats[0].notes, *(note for chat in chats for note in self.template.check(chat)))
            chosen, rejected = (self.template.split_conversation(chat, "assistant") for chat in chats)
        if chosen[0] == rejected[0]:
            raise RowError("'chosen' and 'rejected' are the same")
        text = f"{chosen[0]}\0{rejected[0]}"
        return [_make_piece(text, chosen[1], tuple(dict.fromkeys(notes))), _make_piece(text, rejected[1])]

    def _texts(self, row: dict[str, Any]) -> tuple[list[tuple[str, list[Chunk]]], tuple[str, ...]]:
        """Return (text, parts) of both members of a pair of texts, and notes."""
        remaining = non_null_fields(row)
        list_keys = [name for name in ("prompt", *PAIR_MEMBERS) if isinstance(remaining.get(name), list | dict)]
        if refused := [name for name in (*list_keys, *PROMPT_KEYS[1:], "history", *TEMPLATE_COLUMNS) if remaining.get(name)]:
            raise RowError(f"the row has {refused[0]!r}, which a chat template writes. Fix: give --chat too")
        chosen, rejected = (_check_text(remaining.pop(name), repr(name)) for name in PAIR_MEMBERS)
        prompt = prompt_text = _check_text(remaining.pop("prompt", ""), "'prompt'")
        _refuse_other_questions(remaining, [_make_message("user", prompt_text)] if prompt_text else [])
        if not prompt:
            prompt = _shared_beginning(chosen, rejected)
        notes = ()
        if prompt and chosen.startswith(prompt) and rejected.startswith(prompt):
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
            notes = ("the completions repeat the prompt, which is written once",) * bool(prompt_text)
        elif prompt_text and (chosen.startswith(prompt_text) or rejected.startswith(prompt_text)):
            notes = (REPEATED,)
        if not (prompt or self.bos):
            raise RowError("the prompt is empty, and the first token of a text has nothing that predicts it")
        if not chosen.strip():
            raise RowError("'chosen' has no completion, and the model would learn to answer nothing. Fix: leave the row out")
        begin = [*(Chunk("", control=token) for token in self.bos), Chunk(prompt)]
        position = "inner" if prompt else "start"
        members = [(prompt + text, [*begin, Chunk(text, loss=True, position=position)]) for text in (chosen, rejected)]
        return members, (*notes, *_unread_notes(remaining))


def _make_piece(text: str, chunks: Sequence[Chunk], notes: tuple[str, ...] = ()) -> Piece:
    return Piece(
        text, sum(len(chunk.text.encode()) for chunk in chunks if chunk.control < 0), chunks=tuple(chunks), notes=notes
    )


Rows = TextRows | ChatRows | PreferenceRows
PAIR_MEMBERS = ("chosen", "rejected")
PAIRS = (
    "A pair is `prompt`, `chosen` and `rejected`, texts or lists of messages; or `chosen` and `rejected` alone, which then "
    "begin with the same prompt"
)
FORMS = (
    "A conversation is `messages` (role, content), `conversations` (from, value), `prompt` with `completion` or `response`, or "
    "`instruction` (with `input`) and `output`"
)
ANSWERS = {"completion": "prompt", "response": "prompt", "output": "instruction"}  # key of an answer -> that of its question
PROMPT_KEYS = ("prompt", "messages", "conversations", "instruction")  # keys with the question of a pair
# Keys with the question of a row that has none under the keys of its form, or with more of it.
QUESTIONS = ("question", "query", "input", "context", "instruction")
REPEATED = "the answers begin with the text of the prompt, and are learnt as they stand"
Message = dict[str, Any]
TEXT_PART_KEYS = {"type", "text"}  # keys of a part of a text


# Characters of scripts without spaces between words, and their punctuation: text may be cut after any of them.
WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    "\uff00-\uffef\U00020000-\U0003ffff]"
)
# Letters that belong to the one behind them: vowels of Thai and Lao, and signs that stack consonants of Burmese and Khmer.
LEADING = re.compile("[\u0e40-\u0e44\u0ec0-\u0ec4\u1039\u17d2]")
JOINED = ("Mn", "Mc", "Me", "Cf")  # categories of characters that belong to the one before: accents, vowel signs, joiners


def _shared_beginning(chosen: str, rejected: str) -> str:
    """Return the beginning that two texts share, up to its last complete word, so that no token spans prompt and completion."""
    if chosen == rejected:
        raise RowError("'chosen' and 'rejected' are the same, and without a 'prompt' nothing is left of either")
    size = len(os.path.commonprefix([chosen, rejected]))

    def ends_word(at: int) -> bool:
        behind = [text[at] for text in (chosen, rejected) if at < len(text)]
        joined = LEADING.match(chosen[at - 1]) or any(unicodedata.category(c) in JOINED for c in behind)
        return chosen[at - 1].isspace() or (WITHOUT_SPACES.match(chosen[at - 1]) is not None and not joined)

    size = next((at for at in range(size, 0, -1) if ends_word(at)), 0)
    return chosen[:size].removesuffix(" ")  # tokens of words begin with their space


# ---- Conversations: messages of a prompt, and one completion or two


def conversation_key(names: Container[str]) -> str | None:
    """Return the key that decides how a row's conversation is read; None if the keys `names` have no form of FORMS."""
    list_keys = [key for key in ("messages", "conversations") if key in names]
    answer_keys = [answer for answer, question in ANSWERS.items() if question in names and answer in names]
    return next(iter([*list_keys, *answer_keys]), None)


def parse_conversation(row: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row in any form of FORMS. Raises RowError.

    If prompt and completion are both lists of messages, only the completion counts in the loss.
    """
    remaining, prompt, notes = non_null_fields(row), [], ()
    kind = conversation_key(remaining)
    if kind is None:
        raise RowError(f"not a conversation (has: {shown_keys(row)}). {FORMS}")
    both_lists = kind in ANSWERS and isinstance(remaining.get("prompt"), list) and isinstance(remaining[kind], list)
    if kind == "completion":  # with one answer, a number is a label too
        remaining |= {key: bool(remaining[key]) for key in LABELS if remaining.get(key) in (0, 1)}
    if kind in ANSWERS:
        prompt, (completion,), notes = _split_answers(
            remaining, ANSWERS[kind], {kind: _to_messages(remaining.pop(kind), kind, "assistant")}
        )
    else:
        completion = _messages(remaining.pop(kind), kind)
    if not completion:
        raise RowError(f"{kind!r} is empty")
    _refuse_empty(prompt + completion, kind)
    (chat,) = _make_conversations(remaining, prompt, [completion], notes)
    return chat if both_lists else dataclasses.replace(chat, prompt=0)


def parse_pair(row: Mapping[str, Any]) -> list[Conversation]:
    """Return the conversations of a row with `chosen` and `rejected`. Raises RowError."""
    remaining = non_null_fields(row)
    value, question_key = remaining.get("prompt"), next((key for key in PROMPT_KEYS if key in remaining), None)
    answers = {key: _to_messages(remaining.pop(key, None), key, "assistant") for key in PAIR_MEMBERS}
    if all(messages and messages[0]["role"] != "assistant" for messages in answers.values()) and not isinstance(value, list):
        prompt, *completions = _shared_messages(*answers.values())
        if isinstance(value, str) and not any(message["content"].strip() == value.strip() for message in prompt):
            rule = "'prompt' is text, and none of the messages that 'chosen' and 'rejected' share has it"
            raise RowError(f"{rule}. Fix: give the text of the message, or leave 'prompt' out")
        if not prompt:
            raise RowError("'chosen' and 'rejected' share no message, so there is no prompt")
        remaining.pop("prompt", None)
        notes = ()
    elif question_key:
        prompt, completions, notes = _split_answers(remaining, question_key, answers)
    else:
        _refuse_other_questions(remaining, [])
        raise RowError(f"the pair has no prompt. {PAIRS}")
    _refuse_empty(completions[0], "chosen")
    return _make_conversations(remaining, prompt, completions, notes)


def _make_conversations(
    remaining: dict[str, Any], prompt: list[Message], completions: list[list[Message]], notes: tuple[str, ...]
) -> list[Conversation]:
    """Return the prompt with each completion, the system's column, tools and variables, and notes on the rest of the row."""
    texts = {key: text for key in SYSTEM if (text := _content(remaining.pop(key, ""), repr(key)))}
    if len({*texts.values()}) > 1:
        raise RowError(f"{' and '.join(map(repr, texts))} are different texts. Fix: leave one of them out")
    system = [_make_message("system", text) for text in texts.values()][:1]
    if system and (prompt + completions[0])[:1] == system:
        system, notes = [], (*notes, "the system column repeats the first message, and is written once")
    tools, variables, column_notes = _template_columns(remaining)
    message_lists = [[*system, *prompt, *completion] for completion in completions]
    notes = (
        *notes,
        *column_notes,
        *(note for messages in message_lists for note in _notes_on(messages)),
        *_unread_notes(remaining),
    )
    return [
        Conversation(messages, tools, variables, len(system) + len(prompt), tuple(dict.fromkeys(notes)))
        for messages in message_lists
    ]


def _split_answers(
    remaining: dict[str, Any], question_key: str, answers: Mapping[str, list[Message]]
) -> tuple[list[Message], list[list[Message]], tuple[str, ...]]:
    """Return (messages of the question under `question_key`, those of each answer, notes). Raises RowError.

    answers: key -> messages, which may repeat the question.
    """
    if question_key in ("messages", "conversations"):
        prompt = _messages(remaining.pop(question_key), question_key)
    else:
        history, value = _history(remaining), remaining.pop(question_key)
        if question_key == "instruction":
            question_text, input_text = _content(value, "'instruction'"), _content(remaining.pop("input", ""), "'input'")
            value = f"{question_text}\n\n{input_text}" if input_text else question_text
        prompt = history + _to_messages(value, question_key, "user")
    if len(answers) > 1 and question_key != "prompt" and prompt and prompt[-1]["role"] == "assistant":
        if all(_message_contents(prompt[-1:]) != _message_contents(completion) for completion in answers.values()):
            raise RowError(
                f"{question_key!r} ends with an answer, which is neither 'chosen' nor 'rejected'. Fix: leave the answer out"
            )
        prompt = prompt[:-1]
    _refuse_other_questions(remaining, prompt)
    prompts, completions = zip(*(_drop_repeated(prompt, completion, key) for key, completion in answers.items()), strict=True)
    if _message_contents(prompts[0]) != _message_contents(prompts[-1]):
        raise RowError("'chosen' and 'rejected' begin with different messages before the prompt. Fix: give both the same")
    question_text = prompts[0][-1]["content"].strip() if prompts[0] else ""
    echoes = [
        bool(question_text and completion) and completion[0]["content"].startswith(question_text) for completion in completions
    ]
    return prompts[-1], [*completions], (REPEATED,) * any(echoes)


def _refuse_other_questions(remaining: Mapping[str, Any], messages: list[Message]) -> None:
    """Raise RowError for a text under QUESTIONS that is in none of the messages."""
    for key in QUESTIONS:
        text = remaining.get(key)
        if isinstance(text, str) and text.strip() and not any(text.strip() in message["content"] for message in messages):
            fix = "put it into 'prompt' or the messages" if messages else "rename it to 'prompt'"
            raise RowError(f"the row has {key!r}, which is not read. Fix: {fix}")


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return (common beginning, rest, rest) of two conversations. The rest of each has at least one message."""
    if _message_contents(chosen) == _message_contents(rejected):
        raise RowError("'chosen' and 'rejected' are the same conversation")
    limit = max(0, min(len(chosen), len(rejected)) - 1)
    count = next((i for i in range(limit) if _message_contents(chosen[: i + 1]) != _message_contents(rejected[: i + 1])), limit)
    return chosen[:count], chosen[count:], rejected[count:]


def _drop_repeated(prompt: list[Message], completion: list[Message], key: str) -> tuple[list[Message], list[Message]]:
    """Return (prompt, completion) without the messages that the completion repeats at its beginning.

    A completion may repeat the whole prompt or its end, and it may have a system message before the prompt. Raises RowError if
    it repeats the question otherwise.
    """
    heads = next((i for i, message in enumerate(completion) if message["role"] not in ("system", "developer")), 0)
    if heads and _message_contents(completion[heads : heads + len(prompt)]) == _message_contents(prompt):
        return completion[: heads + len(prompt)], completion[heads + len(prompt) :]
    limit = min(len(prompt), len(completion))
    repeated = next((n for n in range(limit, 0, -1) if _message_contents(prompt[-n:]) == _message_contents(completion[:n])), 0)
    if any(message["role"] != "assistant" for message in completion[:repeated]):
        return prompt, completion[repeated:]
    before = next((i for i, message in enumerate(completion) if message["role"] == "assistant"), len(completion))
    if any(_message_contents([message]) == _message_contents(prompt[-1:]) for message in completion[:before]):
        raise RowError(f"{key!r} repeats the question after other messages. Fix: give the answer alone")
    return prompt, completion


def _message_contents(messages: list[Message]) -> list[Any]:
    """Return what messages say, without their ids and other keys, so that equal messages are found."""
    calls = [[call["function"] for call in message.get("tool_calls", ())] for message in messages]
    return [[(m["role"], m["content"], m.get(THOUGHTS[0])) for m in messages], calls]


def _refuse_empty(messages: list[Message], key: str) -> None:
    """Raise RowError for an empty answer. key: the row's key with the last answer."""
    for i, message in enumerate(messages, 1):
        has_text = message["content"].strip() or "tool_calls" in message or message.get("train") is False
        if message["role"] == "assistant" and not has_text:
            label = f"{key!r}: the assistant's message, number {i} of {len(messages)},"
            raise RowError(f"{label} is empty, and the model would learn to answer nothing. Fix: leave the row out")


def _notes_on(messages: list[Message]) -> tuple[str, ...]:
    """Return notes on messages that ask for a loss they cannot have, and on null arguments of calls."""
    roles = {message["role"] for message in messages if message["role"] != "assistant" and message.get("train")}
    notes = [f"messages of the role {role} do not count in the loss, whatever `train` says" for role in sorted(roles)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if any(None in call["function"]["arguments"].values() for call in calls):
        notes.append("null arguments of tool calls, written as null, which data sets add to rows")
    return tuple(notes)


def parse_question(row: Mapping[str, Any]) -> tuple[Conversation, str]:
    """Return (a row's conversation up to its last answer, that answer). The answer is "" if the row ends with a question.

    A row may also have a `prompt` alone, as text or messages, or be a pair: then the chosen answer is the reference. Raises
    RowError.
    """
    if {*PAIR_MEMBERS} <= row.keys():
        chat = parse_pair(row)[0]
    elif conversation_key(row) is None and row.get("prompt"):
        chat = parse_conversation({**row, "messages": _to_messages(row["prompt"], "prompt", "user")})
    else:
        chat = parse_conversation(row)
    last = chat.messages[-1]
    if last["role"] != "assistant":
        return chat, ""
    if len(chat.messages) == 1:
        raise RowError("the row has only an answer, and asks nothing")
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in last.get("tool_calls", ())]
    return chat.first(len(chat.messages) - 1), "\n".join(filter(None, [last["content"], *calls]))


# ---- The values of a row


def non_null_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row that are not null. Those that are read are removed, and `_unread_notes` notes the others."""
    return {key: value for key, value in row.items() if value is not None}


def _unread_notes(remaining: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on each value that was not read. Raises RowError for a value that changes what is learnt."""
    for key, value in remaining.items():
        _refuse_unread(key, value, "the row")
        if key in ROW_COUNTS and not is_empty(value) and value != ROW_COUNTS[key]:
            for_users = key == "mask" and value in ("User", "user", "human")  # NeMo's, for what holds here anyway
            is_flag = isinstance(value, bool | list | str) or value in (0, 1) or key.startswith("weight")  # not a measured loss
            if is_flag and not for_users:
                fix = "Fix: give each message of the assistant 'train' true or false"
                raise RowError(f"the row has {key!r} = {value!r}, which is not read. {fix}")
        if key in LABELS and value is False:
            raise RowError(f"the row has {key!r} = {value!r}, so its answer is a bad one. Fix: leave the row out")
    return note_unread(remaining)


def is_empty(value: Any) -> bool:
    """Return whether a value of a row says nothing: null, "", {}, [] or a list of such."""
    if isinstance(value, list):
        return all(is_empty(x) for x in value)
    return value is None or value in ("", {})


def note_unread(values: Mapping[str, Any], read: Container[str] = ()) -> tuple[str, ...]:
    """Return a note on each value that says something, and whose key is not read."""
    return tuple([f"not read: {key!r}" for key, value in values.items() if key not in read and not is_empty(value)])


def shown_keys(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8]))


def _refuse_unread(key: str, value: Any, label: str) -> None:
    if key in UNREAD_KEYS and value and not is_empty(value):
        raise RowError(f"{label} has {key!r}, which is not read: {UNREAD_KEYS[key]}")


def _history(remaining: dict[str, Any]) -> list[Message]:
    """Return the messages of `history`: a list of [question, answer], or of messages."""
    history = remaining.pop("history", [])
    if isinstance(history, list) and all(isinstance(item, dict) for item in history):
        return _messages(history, "history")
    if not isinstance(history, list) or not all(isinstance(item, list) and len(item) == 2 for item in history):
        raise RowError("'history' is no list of [question, answer]")
    return [
        _make_message(role, _content(text, f"{role} {i} of 'history'"))
        for i, item in enumerate(history, 1)
        for role, text in zip(("user", "assistant"), item, strict=True)
    ]


def _to_messages(value: Any, key: str, role: str) -> list[Message]:
    """Return the messages of a value: a text of `role`, a message, or a list of messages or of parts of a text."""
    if isinstance(value, dict):
        value = [value]
    is_parts = (
        isinstance(value, list) and value and all(isinstance(x, dict) and {"text"} <= x.keys() <= TEXT_PART_KEYS for x in value)
    )
    return (
        _messages(value, key) if isinstance(value, list) and not is_parts else [_make_message(role, _content(value, repr(key)))]
    )


def _template_columns(remaining: dict[str, Any]) -> tuple[list[Any] | None, dict[str, Any], tuple[str, ...]]:
    """Return (`tools`, `chat_template_kwargs`, notes) of a row. Each may be JSON text in the row. Raises RowError."""
    tools, variables = (_parse_json(remaining.pop(key, None) or None, repr(key)) for key in ("tools", "chat_template_kwargs"))
    if not isinstance(tools, list | None):
        raise RowError(f"'tools' is {json_type(tools)}, not a list of functions")
    for i, tool in enumerate(tools or (), 1):
        if not isinstance(tool, dict):
            raise RowError(f"tool {i} of 'tools' is {json_type(tool)}, not the description of a function")
    if not isinstance(variables, dict | None):
        raise RowError(f"'chat_template_kwargs' is {json_type(variables)}, not an object")
    descriptions = [_drop_null_properties(tool) for tool in tools or ()]
    notes = ("null properties of tools, which data sets add to rows, read as absent",) * (descriptions != (tools or []))
    return descriptions or None, variables or {}, notes


def _drop_null_properties(value: Any) -> Any:
    """Return a JSON schema without properties that are null, which no schema can be."""
    if isinstance(value, dict):
        properties = value.get("properties")
        cleaned = {"properties": {k: x for k, x in properties.items() if x is not None}} if isinstance(properties, dict) else {}
        return {key: _drop_null_properties(x) for key, x in (value | cleaned).items()}
    return [_drop_null_properties(x) for x in value] if isinstance(value, list) else value


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON (`object_pairs_hook`). Raises ValueError for a key that it has twice: Python drops the first."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice in one object")
    return result


def load_json(text: str) -> Any:
    """Return the value of a JSON text. Raises RowError for text that is not JSON, or has a key twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except json.JSONDecodeError as e:
        raise RowError(f"{e.msg}, column {e.colno}") from e
    except RecursionError as e:
        raise RowError("nested too deeply to be read") from e
    except ValueError as e:  # a number with more digits than Python reads, or a key twice
        raise RowError(str(e).partition(";")[0]) from e


def _parse_json(value: Any, label: str) -> Any:
    """Return the value of a JSON text, or any other value unchanged. Raises RowError for bad JSON."""
    try:
        return load_json(value) if isinstance(value, str) else value
    except RowError as e:
        raise RowError(f"{label} is text, but not JSON ({e})") from e


def _make_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise RowError(f"{key!r} is {json_type(value)}, not a list of messages")
    return [_message(item, f"message {i} of {key!r}") for i, item in enumerate(value, 1)]


def _message(raw: Any, label: str) -> Message:
    """Return a message in the form of templates. Raises RowError."""
    if not isinstance(raw, dict):
        raise RowError(f"{label} is {json_type(raw)}, not an object")
    item = non_null_fields(raw)
    for key, value in item.items():
        _refuse_unread(key, value, label)
    role, content = ("role", "content") if "role" in item else ("from", "value")
    calls = item.pop("tool_calls", None)
    if missing := [key for key in ((role,) if calls else (role, content)) if key not in item]:
        has = f"'{missing[0]}' is null" if missing[0] in raw else f"has: {shown_keys(item)}"
        raise RowError(f"{label} has no {missing[0]!r} ({has})")
    name = item.pop(role)
    if not isinstance(name, str) or name not in ROLES:
        raise RowError(f"{label} has the role {name!r}; known are {', '.join(ROLES)}")
    # OpenAI writes null, or nothing, beside calls of tools.
    message = _make_message(ROLES[name], _content(item.pop(content, ""), f"{content!r} of {label}"))
    thoughts = {_content(item.pop(key), f"the thoughts of {label}") for key in THOUGHTS if key in item}
    if len(thoughts) > 1:
        raise RowError(f"{label} has several thoughts under {', '.join(THOUGHTS)}. Fix: leave all but one out")
    message |= {key: text for text in thoughts for key in THOUGHTS[:2]}
    if calls:
        if not isinstance(calls, list):
            raise RowError(f"'tool_calls' of {label} is {json_type(calls)}, not a list of calls")
        message["tool_calls"] = [_tool_call(call, label) for call in calls]
    counts = {key: item.pop(key) for key in COUNTS if key in item}
    for key, value in counts.items():
        if value not in (0, 1):
            raise RowError(f"{key!r} of {label} is {value!r}: must be 0 or 1, false or true")
    if counts:
        message["train"] = all(value == COUNTS[key] for key, value in counts.items())
    for key in ("name", "tool_call_id"):
        if key in item:
            _check_text(item[key], f"{key!r} of {label}")
    return message | item


def _content(value: Any, label: str) -> str:
    """Return a text, or the texts of a list of parts `{"type": "text", "text": ...}`, joined. Raises RowError."""
    if not isinstance(value, list):
        return _check_text(value, label)
    texts = []
    for i, item in enumerate(value, 1):
        item = non_null_fields(item) if isinstance(item, dict) else item
        if not isinstance(item, dict) or item.get("type", "text") != "text" or item.keys() - TEXT_PART_KEYS:
            has = f"{json_type(item)}, not an object"
            if isinstance(item, dict):
                has = f"of the type {item.get('type', 'text')!r} with {', '.join(map(repr, item)) or 'nothing'}"
            fix = 'Fix: give {"type": "text", "text": ...}, or leave the row out'
            raise RowError(f"part {i} of {label} is {has}, and only objects of the type text are read. {fix}")
        texts.append(_check_text(item.get("text"), f"part {i} of {label}"))
    return "".join(texts)


def _tool_call(call: Any, label: str) -> dict[str, Any]:
    """Return a tool call in the form of templates: its arguments are an object, not JSON text. Raises RowError."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise RowError(f"{label} has a tool call without the name of its function")
    if "arguments" not in function:
        raise RowError(f"{label} has a tool call without 'arguments'. Fix: give {{}} for a function that takes none")
    arguments = _parse_json(function["arguments"] or {}, f"the arguments of a tool call of {label}")
    if not isinstance(arguments, dict):
        raise RowError(f"the arguments of a tool call of {label} are {json_type(arguments)}, not an object")
    call_fields = non_null_fields(call) if function is not call else {}
    function_fields = {key: x for key, x in non_null_fields(function).items() if key not in ("id", "type")}
    ids = {
        key: _check_text(call[key], f"{key!r} of a tool call of {label}") for key in ("id", "type") if call.get(key) is not None
    }
    return {"type": "function", **call_fields, **ids, "function": {**function_fields, "arguments": arguments}}


def json_type(value: Any) -> str:
    """Return the JSON type of a value in words, or the name of its Python type if JSON has no such type."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"of the type {type(value).__name__}")


def _check_text(value: Any, label: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{label} is {json_type(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise RowError(f"{label} has half a surrogate pair at character {e.start + 1}") from e
    return value
