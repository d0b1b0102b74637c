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

# Noncharacters: never part of a text. TRACE encloses the number of a place in the data.
MARK, OPEN, CLOSE, ANSWER, TRACE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning of a message; templates read one of them
TEXTS = ("content", *THOUGHTS)  # of a message: free text with any content
LOSSES = ("assistant", "all", "last")
# The templates of data/templates, for tokenizers without one -> the control tokens that each needs.
NAMED = {
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
READ = ("role", *TEXTS, "tool_calls", "train")  # keys of messages that need no note: they are written, or refused
READ_IN_CALLS = ("type", "function", "name", "arguments")
RESERVED = ("messages", "add_generation_prompt", "strftime_now", "raise_exception")  # variables that no row can set
# As <think>, [/THINK] and ◁think▷: tags by which some templates cut a content into pieces.
TAG = re.compile(
    r"([<\[◁][^<>\[\]◁▷\s]*(?:think|thought|reason|answer|tool|analysis|final)[^<>\[\]◁▷\s]*[>\]▷])", re.IGNORECASE
)


def _traced(talk: Conversation, chosen: Container[int]) -> tuple[Conversation, list[tuple[int, str]]]:
    """Return the conversation with marks at the places whose numbers are chosen, and all places: (message or -1, what it is).

    Places are the beginning and the end of every text, also between tags; the names, keys and arguments of tool calls; and in
    `tools` the name and description of each function, and the descriptions of its parameters.
    """
    places: list[tuple[int, str]] = []

    def put(text: str, message: int, what: str) -> str:
        pieces = TAG.split(text) if what == CONTENT else [text]
        if not any(piece.strip() for piece in pieces[::2]):  # nothing but tags
            pieces = [text]
        for i in range(0, len(pieces), 2):
            if core := pieces[i].strip():
                begin, end = (f"{TRACE}{n}{TRACE}" if n in chosen else "" for n in (len(places), len(places) + 1))
                places.extend([(message, what)] * 2)
                pieces[i] = f"{begin}{core}{end}".join(pieces[i].split(core, 1))
        return "".join(pieces)

    def every(value: Any, message: int) -> Any:
        if isinstance(value, str):
            return put(value, message, CALLS)
        if isinstance(value, Mapping):
            return {put(key, message, CALLS): every(x, message) for key, x in value.items()}
        return [every(x, message) for x in value] if isinstance(value, list | tuple) else value

    def described(value: Any, what: str) -> Any:
        if isinstance(value, list | tuple):
            return [described(x, what) for x in value]
        if what == TOOLS and isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            return {**value, "function": described(value["function"], TOOLS)}
        made = dict(value) if isinstance(value, Mapping) else {}
        for key, x in made.items():
            if isinstance(x, str) and key in ("description", "name")[: 2 if what == TOOLS else 1]:
                made[key] = put(x, -1, what)
            elif key not in ("default", "enum", "const", "examples"):
                made[key] = described(x, DETAIL)
        return made if isinstance(value, Mapping) else value

    messages = []
    for i, message in enumerate(talk.messages):
        made = message | {"content": put(message["content"], i, CONTENT)}
        if THOUGHTS[0] in message:
            made |= dict.fromkeys(THOUGHTS[:2], put(message[THOUGHTS[0]], i, THOUGHT))
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            traced = [x | {"name": put(x["name"], i, CALLS), "arguments": every(x["arguments"], i)} for x in functions]
            made["tool_calls"] = [call | {"function": x} for call, x in zip(calls, traced, strict=True)]
        messages.append(made)
    return replace(talk, messages=messages, tools=described(talk.tools, TOOLS)), places


def _without_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a function without its parameters."""
    function = tool.get("function")
    made = {**tool, "function": _without_parameters(function)} if isinstance(function, Mapping) else dict(tool)
    return made | ({"parameters": {"type": "object", "properties": {}}} if tool.get("parameters") else {})


def _without(talk: Conversation, where: str, keys: Container[str]) -> Conversation:
    """Return the conversation with keys removed from its messages, or from its tool calls and their functions."""

    def kept(value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: x for key, x in value.items() if key not in keys}

    if where == "messages":
        return replace(talk, messages=[kept(message) for message in talk.messages])
    messages = [dict(message) for message in talk.messages]
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [kept(call) | {"function": kept(call["function"])} for call in calls]
    return replace(talk, messages=messages)


@dataclass(frozen=True)
class Part:
    """A control token of a rendered conversation, or text that is encoded by itself."""

    text: str
    control: int = -1  # the id of a control token
    loss: bool = False
    place: str = "start"  # the place of text: start (of the document) | after (a control token) | inner (after other text)
    turn: str = ""  # of a control token in an assistant's turn: end (nothing but white space follows in the turn) | inside


class _Generation(jinja2.ext.Extension):
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
        described = [source, sorted(tokens.items()), date if self.dated else ""]
        self.sha256 = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        day = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
        environment.globals |= {"raise_exception": _refuse, "strftime_now": day.strftime}
        try:
            self._template = environment.from_string(source)
            used = self.used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"chat template {name}: line {e.lineno}: {e.message}") from e
        known = {token.text for token in control}
        self.unnamed = [name for name in ("bos_token", "eos_token") if name in used and tokens.get(name) not in {"", *known}]
        self.marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        self._control = _pattern(control)
        texts = [token.text for token in control]
        first = re.escape("".join(sorted({text[0] for text in texts})))  # a quick test, for tokenizers of many control tokens
        first = re.escape("".join(sorted({text[0] for text in texts})))  # tested before all tokens, of which there may be many
        self._starts = re.compile(f"(?s)(?=[{first}])(?={'|'.join(map(re.escape, texts))})." if texts else r"(?!)")
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
        if found := [token.text for token in self.control if len(token.text) == 1 and token.text in text]:
            raise RowError(f"a message holds {found[0]!r}, a control token of one character, which cannot be told from text")
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

    def _guarded(self, talk: Conversation, prompt: bool = False) -> tuple[Conversation, str]:
        """Return (the conversation with marks, its text by the template, with marks). prompt: as for `render`."""
        for joins in (True, False):
            found = replace(
                talk,
                messages=self._guard_all(talk.messages, joins),
                tools=self._guard_all(talk.tools, joins),
                variables=self._guard_all(talk.variables, joins),
            )
            whole = self.render(found, prompt)
            same = (found.messages, found.tools, found.variables) == (talk.messages, talk.tools, talk.variables)
            if same or _unmarked(whole) == _unmarked(self.render(talk, prompt)):
                return found, whole
        raise RowError("a message holds the text of a control token, and the chat template does not write it as it stands")

    def render(self, talk: Conversation, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt` also the beginning of an assistant's turn. Raises RowError."""
        variables = {"tools": talk.tools, "documents": None, **self.tokens, **talk.variables}
        try:
            text = self._template.render(variables, messages=talk.messages, add_generation_prompt=prompt)
            text.encode()  # half a surrogate pair is no text
            return text
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
            raise RowError(f"the chat template cannot write its first {len(talk.messages)} messages: {e}") from e

    def check(self, talk: Conversation) -> tuple[str, ...]:
        """Return notes on what the template does not write and the model does not need.

        The conversation is rendered with a mark at every place of its data (`_traced`). A place whose mark is missing is
        confirmed by a mark there alone: it is lost if the text stays the same. Many templates leave out thoughts of earlier
        turns, so thoughts must be written only in the conversation that ends with their message.

        Raises RowError if another text of the conversation leaves no trace.
        """
        plain = self.render(talk)
        places = _traced(talk, ())[1]
        missing = self._missing(talk, range(len(places)))
        notes: list[str] = []
        for message, numbers in itertools.groupby(missing, lambda number: places[number][0]):
            group = [*numbers]
            if 0 <= message < len(talk.messages) - 1 and talk.messages[message]["role"] == "assistant":
                written = (message, CONTENT) in [place for n, place in enumerate(places) if n not in missing]
                thoughts = [n for n in group if places[n][1] == THOUGHT or (places[n][1] == CONTENT and written)]
                left = self._missing(talk.first(message + 1), thoughts) if thoughts else []
                if len(left) < len(thoughts):
                    notes.append("thoughts of earlier turns, which the chat template leaves out")
                    group = [n for n in group if n not in thoughts or n in left]
            for number in group:
                what = places[number][1]
                if not self._same(_traced(talk, [number])[0], plain):  # it compares its data with texts
                    continue
                if what != DETAIL:
                    role = talk.messages[message]["role"]
                    raise self._lost(what if message < 0 else f"{what} of message {message + 1} ({role})")
                notes.append("not written by the chat template, in tools: descriptions of parameters")
        if talk.tools:
            for tools in ([], [_without_parameters(tool) for tool in talk.tools]):
                if tools != talk.tools and self._same(replace(talk, tools=tools or None), plain):
                    raise self._lost(TOOLS)
        unread = [name for name in talk.variables if name not in self.used or name in RESERVED]
        notes += [f"not read by the chat template, in 'chat_template_kwargs': {name!r}" for name in unread]
        calls = [call for message in talk.messages for call in message.get("tool_calls", ())]
        for where, known, values in (
            ("messages", READ, talk.messages),
            ("tool calls", READ_IN_CALLS, [*calls, *(call["function"] for call in calls)]),
        ):
            found = {key for value in values for key, x in value.items() if x not in ([], {}, "") or where != "messages"}
            keys = sorted(found - {*known})
            if keys and not self._same(_without(talk, where, keys), plain):
                keys = [key for key in keys if self._same(_without(talk, where, [key]), plain)]
            notes += [f"not written by the chat template, in {where}: {key!r}" for key in keys]
        return tuple(dict.fromkeys(notes))

    def _lost(self, what: str) -> RowError:
        fix = "Fix: give --chat-template=FILE with one that does, or leave it out of the rows"
        return RowError(f"the chat template {self.name} does not write {what}. {fix}")

    def _missing(self, talk: Conversation, numbers: Sequence[int]) -> list[int]:
        """Return those of the places whose marks are not in the text. numbers: of the places that have one."""
        try:
            text = self.render(_traced(talk, numbers)[0])
        except RowError:  # it compares its data with texts: each place is tried by itself
            text = ""
        found = {int(number) for number in re.findall(f"{TRACE}(\\d+){TRACE}", text)}
        return [number for number in numbers if number not in found]

    def _same(self, talk: Conversation, plain: str) -> bool:
        """Return whether the text of a conversation is `plain`."""
        try:
            return self.render(talk) == plain
        except RowError:  # the template needs what is missing, or compares it with other texts
            return False

    def turn_ends(self) -> set[int]:
        """Return the control tokens that end an answer to a single question; empty if the template cannot write one."""
        asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        try:
            _, parts = self.parts(Conversation(asked), "assistant")
        except RowError:
            return set()
        return {part.control for part in parts if part.turn == "end"}

    def prompt(self, talk: Conversation) -> list[Part]:
        """Return the parts of a conversation with the beginning of the assistant's answer. Raises RowError."""
        self.check(talk)
        _, whole = self._guarded(talk, prompt=True)
        return self._cut(whole.replace(OPEN, "").replace(CLOSE, ""), [])

    def parts(self, talk: Conversation, loss: str) -> tuple[str, list[Part]]:
        """Return the conversation as text, and its parts: cut at control tokens and where the loss begins and ends.

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
        guarded, whole = self._guarded(talk)
        plain = _unmarked(whole)
        skipped = [not message.get("train", True) for message in talk.messages if message["role"] == "assistant"]
        try:
            spans = self._turns(guarded, whole)
        except RowError:
            if loss != "all" or any(skipped):
                raise
            spans = []  # they are sought only for the tokens that end them
        whole = whole.replace(OPEN, "").replace(CLOSE, "")
        if any(skipped) and len(spans) != len(skipped):
            raise RowError(
                f"the chat template marks {len(spans)} turns for {len(skipped)} messages of the assistant, so those with "
                "`train` false or `weight` 0 cannot be told from others. Fix: give --chat-template=FILE with one "
                "{% generation %} block for each"
            )
        without = [span for span, skip in zip(spans, skipped, strict=True) if skip] if any(skipped) else []
        if loss == "all":
            borders = [0, *(border for span in without for border in span), len(whole)]
            return plain, self._cut(whole, list(zip(borders[::2], borders[1::2], strict=True)), spans)
        counted = spans[self._turns_of_prompt(guarded) :]
        if not counted:
            raise RowError("no assistant's turn, so nothing counts in the loss (--loss=all counts all of it)")
        counted = [span for span in (counted[-1:] if loss == "last" else counted) if span not in without]
        if not counted:
            raise RowError("no turn counts in the loss: `train` is false, or `weight` 0. Fix: leave the row out")
        return plain, self._cut(whole, counted, spans)

    def _turns_of_prompt(self, talk: Conversation) -> int:
        """Return the number of assistant turns in the prompt. Raises RowError."""
        if self.marks_turns:
            return len(_marked_spans(self.render(talk.first(talk.prompt)))) if talk.prompt else 0
        return sum(message["role"] == "assistant" for message in talk.messages[: talk.prompt])

    def _turns(self, talk: Conversation, whole: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each assistant turn in the text. Raises RowError if the turns are not found."""
        if self.marks_turns:
            return _marked_spans(whole)
        spans = []
        turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
        for i in turns:
            before = self.render(talk.first(i), prompt=True)
            after = self.render(talk.first(i + 1))
            if not (after.startswith(before) and whole.startswith(after)):
                spans = self._headed_spans(talk, whole)
                if not spans:
                    rule = f"writes message {i + 1} otherwise after its generation prompt, or when more messages follow"
                    raise RowError(
                        f"the chat template {rule}, so the assistant's turn cannot be found. Mark it in the template with "
                        "{% generation %} and {% endgeneration %} (--chat-template=FILE; the Python package trl has such "
                        "templates for many models), or use --loss=all"
                    )
                break
            begin, end = len(before), len(after)
            for token in self._control.finditer(whole, begin, end):
                if not whole[token.end() : end].strip():
                    end = token.end()
            spans.append((begin, end))
        return spans

    def _headed_spans(self, talk: Conversation, whole: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each assistant turn in the text: from a generation prompt to the token that ends the answer.

        Return [] if the turns are not certain. Turns are certain under two conditions: the text has the generation prompt
        exactly once for each assistant message, and not before the first assistant message. In both, a prefix of the
        generation prompt that includes its first control token may replace the whole prompt.
        """
        turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
        asked = talk.first(turns[0])
        if not asked.messages:
            return []
        before, after = self.render(asked), self.render(asked, prompt=True)
        answer = {"role": "assistant", "content": ANSWER}
        answered = self.render(replace(asked, messages=[*asked.messages, answer]))
        shared = len(os.path.commonprefix([before, after]))  # not all of `before`: some templates end a text with a token
        token = next((found for found in self._control.finditer(after) if found.end() > shared), None)
        ending = self._control.search(answered, answered.find(ANSWER) + 1)
        if token is None or ending is None or ANSWER not in answered:
            return []
        header = after[token.start() :]
        sizes = range(len(header), len(token[0]) - 1, -1)
        size = next((n for n in sizes if whole.count(header[:n]) == len(turns)), 0)
        if not size or header[:size] in before:
            return []
        begins = [found.end() for found in re.finditer(re.escape(header[:size]), whole)]
        spans = []
        for begin, limit in zip(begins, [*begins[1:], len(whole)], strict=True):
            ends = (found.end() for found in self._control.finditer(whole, begin, limit) if found[0] == ending[0])
            spans.append((begin, next(ends, -1)))
        if any(end < 0 for _, end in spans):
            return []
        begin, end = spans[-1]
        if not self._control.sub("", whole[end:]).strip():  # only tokens that end the text
            spans[-1] = begin, max([end, *(found.end() for found in self._control.finditer(whole, end))])
        return spans

    def _cut(self, whole: str, spans: list[tuple[int, int]], turns: Sequence[tuple[int, int]] = ()) -> list[Part]:
        """Return the parts of a text. spans: (begin, end) of what counts in the loss. turns: those of the assistant's turns."""
        parts: list[Part] = []

        def counts(at: int) -> bool:
            return any(begin <= at < end for begin, end in spans)

        borders = sorted({border for span in spans for border in span})
        done = 0
        for token in [*self._control.finditer(whole), None]:
            stop = token.start() if token else len(whole)
            for begin, end in itertools.pairwise([done, *(b for b in borders if done < b < stop), stop]):
                if piece := whole[begin:end].replace(MARK, ""):
                    place = "start" if not parts else "after" if parts[-1].control >= 0 else "inner"
                    parts.append(Part(piece, loss=counts(begin), place=place))
            if token:
                group = token.lastindex or 1
                control, at, after = self.control[group - 1], token.start(group), token.end(group)
                if any(at < border < after for border in borders):
                    raise RowError(f"an assistant's turn begins or ends within the control token {control.text!r}")
                rest = next((whole[after:end] for begin, end in turns if begin <= at < end), None)
                turn = "" if rest is None else "inside" if rest.replace(MARK, "").strip() else "end"
                parts.append(Part(control.text, control.id, counts(at), turn=turn))
                done = token.end()
        return parts


def _pattern(control: Sequence[ControlToken]) -> re.Pattern[str]:
    """Return a regular expression for control tokens. Group i + 1 is token i; the match also has the spaces that it absorbs."""
    groups = [
        rf"{r'\s*' if token.lstrip else ''}({re.escape(token.text)}){r'\s*' if token.rstrip else ''}" for token in control
    ]
    return re.compile("|".join(groups) or r"(?!)")


def _unmarked(text: str) -> str:
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
    """Return a chat template for a tokenizer: one of NAMED, the template in a file, or for "" the tokenizer's own.

    The tokenizer's own template is chat_template.jinja, or else the template in tokenizer_config.json, beside the
    tokenizer.json. For the byte tokenizer it is BYTE_TEMPLATE.

    Args:
      spec: the tokenizer's name.
      choice: a name in NAMED, the path of a file, or "".
      date: as for `ChatTemplate`.

    Raises:
      TokenizerError: there is no template, it cannot be read, or the tokenizer lacks a token that it needs.
    """
    control, tokens, name = tokenizer.control_tokens(), special_tokens(spec), choice
    known, fit = {token.text for token in control}, fitting(control)
    if choice in NAMED:
        if missing := [text for text in NAMED[choice] if text not in known]:
            rule = f"needs the control token {missing[0]}, which tokenizer {spec!r} does not have"
            raise TokenizerError(f"--chat-template = {choice}: {rule}. Fix: --chat-template={fit[0]}")
        bos = tokenizer.text_of(tokenizer.bos[-1]) if tokenizer.bos else ""
        eos = "" if tokenizer.eot is None else tokenizer.text_of(tokenizer.eot)
        tokens = {"bos_token": bos, "eos_token": eos} | {key: text for key, text in tokens.items() if text in known}
        source = (Path(__file__).parent / "templates" / f"{choice}.jinja").read_text(encoding="utf-8")
    elif choice:
        try:
            source = Path(choice).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            rule = f"is none of {', '.join(NAMED)}, and cannot be read as a file ({e})"
            fix = f"give one of {', '.join(fit)}, or the path of a file"
            raise TokenizerError(f"--chat-template = {choice}: {rule}. Fix: {fix}") from e
    else:
        name, source = own_template(spec)
    if not source:
        more = f" (or {', '.join([*fit[1:], 'a file of your own'])})"
        raise TokenizerError(
            f"tokenizer {spec!r}: has no chat template (neither chat_template.jinja nor a `chat_template` in "
            f"tokenizer_config.json beside its tokenizer.json). Fix: --chat-template={fit[0]}{more}"
        )
    return ChatTemplate(name, source, tokens, control, date)


def fitting(control: Sequence[ControlToken]) -> list[str]:
    """Return the names in NAMED whose control tokens a tokenizer has; alpaca needs none, and comes last."""
    texts = {token.text for token in control}
    return [name for name, needed in NAMED.items() if texts.issuperset(needed)]


def own_template(spec: str, offline: bool = False) -> tuple[str, str]:
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
