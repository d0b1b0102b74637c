"""Chat templates: write a conversation as text, and find its control tokens and the parts that count in the loss.

A template is Jinja2, run in a sandbox. The template may write control tokens, and the data may not. So a mark (a Unicode
noncharacter) is put into each string of the data that could be read as a control token or as part of a control token. The
marks are removed after the rendered text is cut at its control tokens. If the text without marks differs from the text that the
template writes for the unmarked data, the row is refused.
"""

import datetime
import hashlib
import itertools
import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from jaxtrain.data.tokenizer import (
    ControlToken,
    Tokenizer,
    TokenizerError,
    read_beside,
    read_json,
    special_tokens,
)

# Noncharacters: never part of a text. TRACE encloses the number of a position in the data.
MARK, OPEN, CLOSE, ANSWER, TRACE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning of a message; templates read one of them
TEXTS = ("content", *THOUGHTS)  # of a message: free text with any content
LOSSES = ("assistant", "all", "last")
# The templates of data/templates, for tokenizers without one -> the control tokens that each needs.
BUILTIN_TEMPLATES = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "alpaca": (),
}
# The byte tokenizer's template: a line with the role, the text, end-of-text after each assistant turn, a blank line between.
BYTE_TEMPLATE = """{%- for message in messages -%}
{%- if not loop.first %}{{ '\\n\\n' }}{% endif -%}
{{ '### ' + message['role'] + '\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\n\\n### assistant\\n' }}{% endif -%}"""


class RowError(ValueError):
    """An error: a row cannot be read. The message has the reason; the caller adds file and line to the message."""


@dataclass(frozen=True)
class Conversation:
    """The data of a chat template.

    Attributes:
      messages: dicts with `role`, `content` and other keys of templates, such as `tool_calls` and `reasoning_content`. An
        assistant's message with `train` false does not count in the loss.
      tools: descriptions of functions, as JSON schemas; None if there are none.
      variables: further variables of the template, such as `enable_thinking`.
      prompt: number of messages of the prompt. Assistant turns in the prompt do not count in the loss.
      notes: what of the row is not in the conversation.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = MappingProxyType({})
    prompt: int = 0
    notes: tuple[str, ...] = ()

    def first(self, count: int) -> "Conversation":
        """Return the conversation with only its first `count` messages."""
        return replace(self, messages=self.messages[:count])


CONTENT, THOUGHT, CALLS, TOOLS, DETAIL = "the content", "thoughts", "`tool_calls`", "`tools`", "descriptions of parameters"
READ_KEYS = ("role", *TEXTS, "tool_calls", "train")  # keys of messages that need no note: they are written, or refused
READ_CALL_KEYS = ("type", "function", "name", "arguments")
RESERVED = ("messages", "add_generation_prompt", "strftime_now", "raise_exception")  # variables that no row can set
# As <think>, [/THINK] and ◁think▷: tags by which some templates cut a content into pieces.
TAG = re.compile(
    r"([<\[◁][^<>\[\]◁▷\s]*(?:think|thought|reason|answer|tool|analysis|final)[^<>\[\]◁▷\s]*[>\]▷])", re.IGNORECASE
)


def _insert_marks(chat: Conversation, chosen: Container[int]) -> tuple[Conversation, list[tuple[int, str]]]:
    """Return the conversation with marks at the chosen positions (their numbers), and all positions: (message or -1, kind).

    Positions are the beginning and the end of every text, also between tags; the names, keys and arguments of tool calls; and
    in `tools` the name and description of each function, and the descriptions of its parameters.
    """
    positions: list[tuple[int, str]] = []

    def put_marks(text: str, message: int, kind: str) -> str:
        pieces = TAG.split(text) if kind == CONTENT else [text]
        if not any(piece.strip() for piece in pieces[::2]):  # nothing but tags
            pieces = [text]
        for i in range(0, len(pieces), 2):
            if core := pieces[i].strip():
                begin, end = (f"{TRACE}{n}{TRACE}" if n in chosen else "" for n in (len(positions), len(positions) + 1))
                positions.extend([(message, kind)] * 2)
                pieces[i] = f"{begin}{core}{end}".join(pieces[i].split(core, 1))
        return "".join(pieces)

    def mark_values(value: Any, message: int) -> Any:
        if isinstance(value, str):
            return put_marks(value, message, CALLS)
        if isinstance(value, Mapping):
            return {put_marks(key, message, CALLS): mark_values(x, message) for key, x in value.items()}
        return [mark_values(x, message) for x in value] if isinstance(value, list | tuple) else value

    def mark_descriptions(value: Any, kind: str) -> Any:
        if isinstance(value, list | tuple):
            return [mark_descriptions(x, kind) for x in value]
        if kind == TOOLS and isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            return {**value, "function": mark_descriptions(value["function"], TOOLS)}
        marked = dict(value) if isinstance(value, Mapping) else {}
        for key, x in marked.items():
            if isinstance(x, str) and key in ("description", "name")[: 2 if kind == TOOLS else 1]:
                marked[key] = put_marks(x, -1, kind)
            elif key not in ("default", "enum", "const", "examples"):
                marked[key] = mark_descriptions(x, DETAIL)
        return marked if isinstance(value, Mapping) else value

    messages = []
    for i, message in enumerate(chat.messages):
        marked_message = message | {"content": put_marks(message["content"], i, CONTENT)}
        if THOUGHTS[0] in message:
            marked_message |= dict.fromkeys(THOUGHTS[:2], put_marks(message[THOUGHTS[0]], i, THOUGHT))
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            marked_functions = [
                x | {"name": put_marks(x["name"], i, CALLS), "arguments": mark_values(x["arguments"], i)} for x in functions
            ]
            marked_message["tool_calls"] = [call | {"function": x} for call, x in zip(calls, marked_functions, strict=True)]
        messages.append(marked_message)
    return replace(chat, messages=messages, tools=mark_descriptions(chat.tools, TOOLS)), positions


def _remove_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    description = {**tool, "function": _remove_parameters(function)} if isinstance(function, Mapping) else dict(tool)
    return description | ({"parameters": {"type": "object", "properties": {}}} if tool.get("parameters") else {})


def _remove_keys(chat: Conversation, level: str, keys: Container[str]) -> Conversation:
    """Return the conversation with keys removed from its messages, or from its tool calls and their functions."""

    def drop_keys(value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: x for key, x in value.items() if key not in keys}

    if level == "messages":
        return replace(chat, messages=[drop_keys(message) for message in chat.messages])
    messages = [dict(message) for message in chat.messages]
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [drop_keys(call) | {"function": drop_keys(call["function"])} for call in calls]
    return replace(chat, messages=messages)


@dataclass(frozen=True)
class Chunk:
    """A control token of a rendered conversation, or text that is encoded by itself."""

    text: str
    control: int = -1  # the id of a control token
    loss: bool = False
    position: str = "start"  # of text: start (of the document) | after (a control token) | inner (after other text)
    turn: str = ""  # of a control token in an assistant's turn: end (nothing but white space follows in the turn) | inside


class _GenerationTag(jinja2.ext.Extension):
    """The tags `{% generation %} ... {% endgeneration %}`: the text between the tags is an assistant's turn."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return OPEN + caller() + CLOSE


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})  # jinja2's own filter escapes HTML


class ChatTemplate:
    """A template together with the tokenizer whose control tokens it writes.

    Attributes:
      source: the template as text.
      tokens: its variables such as `bos_token`.
      used: names of the variables that it reads.
      marks_turns: whether the template has `{% generation %}` blocks.
      unnamed: variables such as `eos_token` that the template writes, and whose text is no control token of the tokenizer.
    """

    def __init__(self, name: str, source: str, tokens: dict[str, str], control: Sequence[ControlToken], date: str):
        """Compile a template.

        Args:
          source: the template.
          tokens: the template's variables such as `bos_token`.
          control: the tokenizer's control tokens.
          date: the day, as 2025-01-31, that `strftime_now` formats in templates. The clock is not read: equal jobs give equal
              files.

        Raises:
          TokenizerError: the source is not Jinja2.
        """
        self.name = name
        self.source = source
        self.tokens = tokens
        self.control = control
        self.dated = "strftime_now" in source
        definition = [source, sorted(tokens.items()), date if self.dated else ""]
        self.sha256 = hashlib.sha256(json.dumps(definition).encode()).hexdigest()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        day = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
        environment.globals |= {"raise_exception": _refuse, "strftime_now": day.strftime}
        try:
            self._template = environment.from_string(source)
            used = self.used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"chat template {name}: line {e.lineno}: {e.message}") from e
        control_texts = {token.text for token in control}
        self.unnamed = [
            name for name in ("bos_token", "eos_token") if name in used and tokens.get(name) not in {"", *control_texts}
        ]
        self.marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        self._control = _control_pattern(control)
        texts = [token.text for token in control]
        # Tested before all tokens, of which there may be many
        first_chars = re.escape("".join(sorted({text[0] for text in texts})))
        self._starts = re.compile(f"(?s)(?=[{first_chars}])(?={'|'.join(map(re.escape, texts))})." if texts else r"(?!)")
        self._beginnings = tuple({text[:n] for text in texts for n in range(1, len(text))})
        self._endings = tuple({text[n:] for text in texts for n in range(1, len(text))})
        self._insides = {text[i:j] for text in texts for i in range(1, len(text)) for j in range(i + 1, len(text))}

    def describe(self, loss: str) -> str:
        """Return a line of text that names the tokens that count in the loss. loss: one of LOSSES."""
        turns, last = "answers and the tokens that end them", "the last answer and the token that ends it"
        if self.marks_turns:
            turns, last = "its {% generation %} blocks", "tokens of its last {% generation %} block"
        count = {"all": "every token counts", "last": f"only {last} count"}.get(loss, f"{turns} count")
        return f"chat template {self.name}: {count} in the loss"

    def guard(self, text: str, joins: bool = True) -> str:
        """Return the text with marks, so that it cannot be read as a control token.

        Args:
          joins: also mark a text that could form a control token together with the template's text next to it.
        """
        if any(mark in text for mark in (MARK, OPEN, CLOSE, ANSWER, TRACE)):
            raise RowError("a message holds one of the noncharacters U+FDD0 to U+FDD4, which are used as marks here")
        if single_chars := [token.text for token in self.control if len(token.text) == 1 and token.text in text]:
            raise RowError(
                f"a message holds {single_chars[0]!r}, a control token of one character, which cannot be told from text"
            )
        core, guarded = text.strip(), self._starts.sub(rf"\g<0>{MARK}", text)
        if joins and core and (core in self._insides or core.endswith(self._beginnings) or core.startswith(self._endings)):
            inner = guarded.strip()
            guarded = f"{MARK}{inner}{MARK}".join(guarded.split(inner, 1))
        return guarded

    def _guard_all(self, value: Any, joins: bool) -> Any:
        """Return nested data with marks (`guard`) in all strings except roles.

        joins: passed to `guard` for the values. For values below the keys in TEXTS it is always True, because templates compare
        only other strings, such as types. For keys it is always False.
        """
        if isinstance(value, str):
            return self.guard(value, joins)
        if isinstance(value, Mapping):
            return {
                self.guard(key, joins=False): item if key == "role" else self._guard_all(item, joins or key in TEXTS)
                for key, item in value.items()
            }
        return [self._guard_all(item, joins) for item in value] if isinstance(value, list | tuple) else value

    def _guard_conversation(self, chat: Conversation, prompt: bool = False) -> tuple[Conversation, str]:
        """Return (the conversation with marks, its text by the template, with marks). prompt: as for `render`."""
        for joins in (True, False):
            guarded = replace(
                chat,
                messages=self._guard_all(chat.messages, joins),
                tools=self._guard_all(chat.tools, joins),
                variables=self._guard_all(chat.variables, joins),
            )
            text = self.render(guarded, prompt)
            unchanged = (guarded.messages, guarded.tools, guarded.variables) == (chat.messages, chat.tools, chat.variables)
            if unchanged or _strip_marks(text) == _strip_marks(self.render(chat, prompt)):
                return guarded, text
        raise RowError("a message holds the text of a control token, and the chat template does not write it as it stands")

    def render(self, chat: Conversation, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt` also the beginning of an assistant's turn. Raises RowError."""
        variables = {"tools": chat.tools, "documents": None, **self.tokens, **chat.variables}
        try:
            text = self._template.render(variables, messages=chat.messages, add_generation_prompt=prompt)
            text.encode()  # half a surrogate pair is no text
            return text
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
            raise RowError(f"the chat template cannot write its first {len(chat.messages)} messages: {e}") from e

    def check(self, chat: Conversation) -> tuple[str, ...]:
        """Return notes on what the template does not write and the model does not need.

        The conversation is rendered with a mark at every position of its data (`_insert_marks`). A position whose mark is
        missing is confirmed by a mark there alone: it is lost if the text stays the same. Many templates leave out thoughts of
        earlier turns, so thoughts must be written only in the conversation that ends with their message.

        Raises RowError if another text of the conversation leaves no trace.
        """
        plain = self.render(chat)
        positions = _insert_marks(chat, ())[1]
        missing_numbers = self._find_missing(chat, range(len(positions)))
        notes: list[str] = []
        for message, numbers in itertools.groupby(missing_numbers, lambda number: positions[number][0]):
            group = [*numbers]
            if 0 <= message < len(chat.messages) - 1 and chat.messages[message]["role"] == "assistant":
                is_written = (message, CONTENT) in [
                    position for n, position in enumerate(positions) if n not in missing_numbers
                ]
                thoughts = [n for n in group if positions[n][1] == THOUGHT or (positions[n][1] == CONTENT and is_written)]
                still_missing = self._find_missing(chat.first(message + 1), thoughts) if thoughts else []
                if len(still_missing) < len(thoughts):
                    notes.append("thoughts of earlier turns, which the chat template leaves out")
                    group = [n for n in group if n not in thoughts or n in still_missing]
            for number in group:
                kind = positions[number][1]
                if not self._renders_as(_insert_marks(chat, [number])[0], plain):  # it compares its data with texts
                    continue
                if kind != DETAIL:
                    role = chat.messages[message]["role"]
                    raise self._lost_error(kind if message < 0 else f"{kind} of message {message + 1} ({role})")
                notes.append("not written by the chat template, in tools: descriptions of parameters")
        if chat.tools:
            for tools in ([], [_remove_parameters(tool) for tool in chat.tools]):
                if tools != chat.tools and self._renders_as(replace(chat, tools=tools or None), plain):
                    raise self._lost_error(TOOLS)
        unread = [name for name in chat.variables if name not in self.used or name in RESERVED]
        notes += [f"not read by the chat template, in 'chat_template_kwargs': {name!r}" for name in unread]
        calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
        for level, read_keys, values in (
            ("messages", READ_KEYS, chat.messages),
            ("tool calls", READ_CALL_KEYS, [*calls, *(call["function"] for call in calls)]),
        ):
            used_keys = {key for value in values for key, x in value.items() if x not in ([], {}, "") or level != "messages"}
            keys = sorted(used_keys - {*read_keys})
            if keys and not self._renders_as(_remove_keys(chat, level, keys), plain):
                keys = [key for key in keys if self._renders_as(_remove_keys(chat, level, [key]), plain)]
            notes += [f"not written by the chat template, in {level}: {key!r}" for key in keys]
        return tuple(dict.fromkeys(notes))

    def _lost_error(self, item: str) -> RowError:
        fix = "Fix: give --chat-template=FILE with one that does, or leave it out of the rows"
        return RowError(f"the chat template {self.name} does not write {item}. {fix}")

    def _find_missing(self, chat: Conversation, numbers: Sequence[int]) -> list[int]:
        """Return those of the positions whose marks are not in the text. numbers: of the positions that have one."""
        try:
            text = self.render(_insert_marks(chat, numbers)[0])
        except RowError:  # it compares its data with texts: each position is tried by itself
            text = ""
        present = {int(number) for number in re.findall(f"{TRACE}(\\d+){TRACE}", text)}
        return [number for number in numbers if number not in present]

    def _renders_as(self, chat: Conversation, plain: str) -> bool:
        try:
            return self.render(chat) == plain
        except RowError:  # the template needs what is missing, or compares it with other texts
            return False

    def turn_ends(self) -> set[int]:
        """Return the control tokens that end an answer to a single question; empty if the template cannot write one."""
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        try:
            _, chunks = self.split_conversation(Conversation(messages), "assistant")
        except RowError:
            return set()
        return {chunk.control for chunk in chunks if chunk.turn == "end"}

    def split_prompt(self, chat: Conversation) -> list[Chunk]:
        """Return the chunks of a conversation with the beginning of the assistant's answer. Raises RowError."""
        self.check(chat)
        _, text = self._guard_conversation(chat, prompt=True)
        return self._split_text(text.replace(OPEN, "").replace(CLOSE, ""), [])

    def split_conversation(self, chat: Conversation, loss: str) -> tuple[str, list[Chunk]]:
        """Return the conversation as text, and its chunks: cut at control tokens and where the loss begins and ends.

        No token spans a cut: the text before a turn is encoded like the prompt of a generation.

        Assistant turns are the `{% generation %}` blocks of the template if it has such blocks. Otherwise turns are found by
        rendering:

        - A turn is the text that the assistant's message adds to the earlier conversation with the generation prompt. The turn
          includes the control token that ends it.
        - A template may write earlier messages differently when more messages follow: some leave out earlier reasoning. Then a
          turn begins after each generation prompt in the text, and ends with the control token that ends an answer.

        Args:
          loss: the turns that count in the loss (LOSSES).

        Raises:
          RowError: the template cannot write the conversation, or the turns cannot be found.
        """
        guarded, text = self._guard_conversation(chat)
        plain = _strip_marks(text)
        skipped = [not message.get("train", True) for message in chat.messages if message["role"] == "assistant"]
        try:
            spans = self._turns(guarded, text)
        except RowError:
            if loss != "all" or any(skipped):
                raise
            spans = []  # they are sought only for the tokens that end them
        text = text.replace(OPEN, "").replace(CLOSE, "")
        if any(skipped) and len(spans) != len(skipped):
            raise RowError(
                f"the chat template marks {len(spans)} turns for {len(skipped)} messages of the assistant, so those with "
                "`train` false or `weight` 0 cannot be told from others. Fix: give --chat-template=FILE with one "
                "{% generation %} block for each"
            )
        skipped_spans = [span for span, skip in zip(spans, skipped, strict=True) if skip] if any(skipped) else []
        if loss == "all":
            borders = [0, *(border for span in skipped_spans for border in span), len(text)]
            return plain, self._split_text(text, list(zip(borders[::2], borders[1::2], strict=True)), spans)
        loss_spans = spans[self._turns_of_prompt(guarded) :]
        if not loss_spans:
            raise RowError("no assistant's turn, so nothing counts in the loss (--loss=all counts all of it)")
        loss_spans = [span for span in (loss_spans[-1:] if loss == "last" else loss_spans) if span not in skipped_spans]
        if not loss_spans:
            raise RowError("no turn counts in the loss: `train` is false, or `weight` 0. Fix: leave the row out")
        return plain, self._split_text(text, loss_spans, spans)

    def _turns_of_prompt(self, chat: Conversation) -> int:
        """Return the number of assistant turns in the prompt. Raises RowError."""
        if self.marks_turns:
            return len(_marked_spans(self.render(chat.first(chat.prompt)))) if chat.prompt else 0
        return sum(message["role"] == "assistant" for message in chat.messages[: chat.prompt])

    def _turns(self, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each assistant turn in the text. Raises RowError if the turns are not found."""
        if self.marks_turns:
            return _marked_spans(text)
        spans = []
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        for i in turns:
            prompt_text = self.render(chat.first(i), prompt=True)
            turn_text = self.render(chat.first(i + 1))
            if not (turn_text.startswith(prompt_text) and text.startswith(turn_text)):
                spans = self._headed_spans(chat, text)
                if not spans:
                    rule = f"writes message {i + 1} otherwise after its generation prompt, or when more messages follow"
                    raise RowError(
                        f"the chat template {rule}, so the assistant's turn cannot be found. Mark it in the template with "
                        "{% generation %} and {% endgeneration %} (--chat-template=FILE; the Python package trl has such "
                        "templates for many models), or use --loss=all"
                    )
                break
            begin, end = len(prompt_text), len(turn_text)
            for token in self._control.finditer(text, begin, end):
                if not text[token.end() : end].strip():
                    end = token.end()
            spans.append((begin, end))
        return spans

    def _headed_spans(self, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each assistant turn in the text: from a generation prompt to the token that ends the answer.

        Return [] if the turns are not certain. Turns are certain under two conditions: the text has the generation prompt
        exactly once for each assistant message, and not before the first assistant message. In both, a prefix of the
        generation prompt that includes its first control token may replace the whole prompt.
        """
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        question = chat.first(turns[0])
        if not question.messages:
            return []
        without_prompt, with_prompt = self.render(question), self.render(question, prompt=True)
        answer = {"role": "assistant", "content": ANSWER}
        with_answer = self.render(replace(question, messages=[*question.messages, answer]))
        # Not all of `without_prompt`: some templates end a text with a token
        shared = len(os.path.commonprefix([without_prompt, with_prompt]))
        token = next((match for match in self._control.finditer(with_prompt) if match.end() > shared), None)
        ending = self._control.search(with_answer, with_answer.find(ANSWER) + 1)
        if token is None or ending is None or ANSWER not in with_answer:
            return []
        header = with_prompt[token.start() :]
        sizes = range(len(header), len(token[0]) - 1, -1)
        size = next((n for n in sizes if text.count(header[:n]) == len(turns)), 0)
        if not size or header[:size] in without_prompt:
            return []
        begins = [match.end() for match in re.finditer(re.escape(header[:size]), text)]
        spans = []
        for begin, limit in zip(begins, [*begins[1:], len(text)], strict=True):
            ends = (match.end() for match in self._control.finditer(text, begin, limit) if match[0] == ending[0])
            spans.append((begin, next(ends, -1)))
        if any(end < 0 for _, end in spans):
            return []
        begin, end = spans[-1]
        if not self._control.sub("", text[end:]).strip():  # only tokens that end the text
            spans[-1] = begin, max([end, *(match.end() for match in self._control.finditer(text, end))])
        return spans

    def _split_text(self, text: str, spans: list[tuple[int, int]], turns: Sequence[tuple[int, int]] = ()) -> list[Chunk]:
        """Return the chunks of a text. spans: (begin, end) of what counts in the loss. turns: those of the assistant."""
        chunks: list[Chunk] = []

        def counts(at: int) -> bool:
            return any(begin <= at < end for begin, end in spans)

        borders = sorted({border for span in spans for border in span})
        done = 0
        for token in [*self._control.finditer(text), None]:
            stop = token.start() if token else len(text)
            for begin, end in itertools.pairwise([done, *(b for b in borders if done < b < stop), stop]):
                if piece := text[begin:end].replace(MARK, ""):
                    position = "start" if not chunks else "after" if chunks[-1].control >= 0 else "inner"
                    chunks.append(Chunk(piece, loss=counts(begin), position=position))
            if token:
                group = token.lastindex or 1
                control, at, after = self.control[group - 1], token.start(group), token.end(group)
                if any(at < border < after for border in borders):
                    raise RowError(f"an assistant's turn begins or ends within the control token {control.text!r}")
                remainder = next((text[after:end] for begin, end in turns if begin <= at < end), None)
                turn = "" if remainder is None else "inside" if remainder.replace(MARK, "").strip() else "end"
                chunks.append(Chunk(control.text, control.id, counts(at), turn=turn))
                done = token.end()
        return chunks


def _control_pattern(control: Sequence[ControlToken]) -> re.Pattern[str]:
    """Return a regular expression for control tokens. Group i + 1 is token i; the match also has the spaces that it absorbs."""
    groups = [
        rf"{r'\s*' if token.lstrip else ''}({re.escape(token.text)}){r'\s*' if token.rstrip else ''}" for token in control
    ]
    return re.compile("|".join(groups) or r"(?!)")


def _strip_marks(text: str) -> str:
    return text.replace(MARK, "").replace(OPEN, "").replace(CLOSE, "")


def _marked_spans(text: str) -> list[tuple[int, int]]:
    """Return (begin, end) of each generation block that has text, in the text without the marks of blocks."""
    spans, size, begin = [], 0, 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            begin = size
        elif piece != CLOSE:
            size += len(piece)
        elif size > begin:
            spans.append((begin, size))
    return spans


def load_template(spec: str, tokenizer: Tokenizer, choice: str, date: str) -> ChatTemplate:
    """Return a chat template for a tokenizer: one of BUILTIN_TEMPLATES, the template in a file, or for "" the tokenizer's own.

    The tokenizer's own template is chat_template.jinja, or else the template in tokenizer_config.json, beside the
    tokenizer.json. For the byte tokenizer it is BYTE_TEMPLATE.

    Args:
      spec: the tokenizer's name.
      choice: a name in BUILTIN_TEMPLATES, the path of a file, or "".
      date: as for `ChatTemplate`.

    Raises:
      TokenizerError: there is no template, it cannot be read, or the tokenizer lacks a token that it needs.
    """
    control, tokens, name = tokenizer.control_tokens(), special_tokens(spec), choice
    control_texts, supported = {token.text for token in control}, supported_templates(control)
    if choice in BUILTIN_TEMPLATES:
        if missing := [text for text in BUILTIN_TEMPLATES[choice] if text not in control_texts]:
            rule = f"needs the control token {missing[0]}, which tokenizer {spec!r} does not have"
            raise TokenizerError(f"--chat-template = {choice}: {rule}. Fix: --chat-template={supported[0]}")
        bos = tokenizer.text_of(tokenizer.bos[-1]) if tokenizer.bos else ""
        eos = "" if tokenizer.eot is None else tokenizer.text_of(tokenizer.eot)
        tokens = {"bos_token": bos, "eos_token": eos} | {key: text for key, text in tokens.items() if text in control_texts}
        source = (Path(__file__).parent / "templates" / f"{choice}.jinja").read_text(encoding="utf-8")
    elif choice:
        try:
            source = Path(choice).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            rule = f"is none of {', '.join(BUILTIN_TEMPLATES)}, and cannot be read as a file ({e})"
            fix = f"give one of {', '.join(supported)}, or the path of a file"
            raise TokenizerError(f"--chat-template = {choice}: {rule}. Fix: {fix}") from e
    else:
        name, source = tokenizer_template(spec)
    if not source:
        alternatives = f" (or {', '.join([*supported[1:], 'a file of your own'])})"
        raise TokenizerError(
            f"tokenizer {spec!r}: has no chat template (neither chat_template.jinja nor a `chat_template` in "
            f"tokenizer_config.json beside its tokenizer.json). Fix: --chat-template={supported[0]}{alternatives}"
        )
    return ChatTemplate(name, source, tokens, control, date)


def supported_templates(control: Sequence[ControlToken]) -> list[str]:
    """Return the names in BUILTIN_TEMPLATES whose control tokens a tokenizer has; alpaca needs none, and comes last."""
    texts = {token.text for token in control}
    return [name for name, needed in BUILTIN_TEMPLATES.items() if texts.issuperset(needed)]


def tokenizer_template(spec: str, offline: bool = False) -> tuple[str, str]:
    """Return (name, source) of a tokenizer's own chat template; the source is "" if there is none. Raises TokenizerError.

    offline: read only files on this machine.
    """
    if spec == "byte":
        return "of the byte tokenizer", BYTE_TEMPLATE
    name = f"{spec}: tokenizer_config.json"
    source = read_json(spec, "tokenizer_config.json", offline).get("chat_template") or ""
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), "")
    file = "chat_template.jinja"
    if (beside := read_beside(spec, file, offline)) is not None:
        try:
            name, source = f"{spec}: {file}", beside.decode()
        except UnicodeDecodeError as e:
            raise TokenizerError(
                f"tokenizer {spec!r}: {file} is not UTF-8 ({e.reason}, byte {e.start + 1}). Fetch it again."
            ) from e
    return name, source
