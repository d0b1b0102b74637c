"""Chat templates: a conversation as text, with its control tokens and the parts that count in the loss.

A template is Jinja2, run in a sandbox. What it writes itself may be control tokens; what stands in the messages never is. To
tell the two apart in the rendered text, a mark (a Unicode noncharacter) is put into each message where its text could be read
as a control token, or as the end or the beginning of one; the marks are taken out again when the text has been cut at its
control tokens. The text without marks must be the one that the template makes of the unmarked messages, or the row is refused.
"""

import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxtrain.data.tokenizer import ControlToken, Tokenizer, TokenizerError, read_beside

MARK, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters: no text that is meant to be exchanged holds them
LOSSES = ("assistant", "all", "last")
# The byte tokenizer's own: a line that names the role, the text, end-of-text after each assistant turn, a blank line between.
BYTE_TEMPLATE = """{%- for message in messages -%}
{%- if not loop.first %}{{ '\\n\\n' }}{% endif -%}
{{ '### ' + message['role'] + '\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\n\\n### assistant\\n' }}{% endif -%}"""


class RowError(ValueError):
    """A row that cannot be read; the message says why, and the caller names the file and the line."""


@dataclass(frozen=True)
class Part:
    """Of a rendered conversation: a control token, or text that is encoded by itself."""

    text: str
    control: int = -1  # the id of a control token
    loss: bool = False
    place: str = "start"  # of text: start | after (a control token) | inner (after other text)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: what stands between is an assistant's."""

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
    return json.dumps(value, ensure_ascii=False, **options)  # jinja2's own escapes HTML


class ChatTemplate:
    """A template together with the tokenizer whose control tokens it writes.

    `source`: the template; `tokens`: its variables such as `bos_token`; `date` stands for today where a template asks for it,
    so that equal commands give equal files. Raises TokenizerError where it is not Jinja2.
    """

    def __init__(self, name: str, source: str, tokens: dict[str, str], control: Sequence[ControlToken], date: str):
        self.name = name
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
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"chat template {name}: line {e.lineno}: {e.message}") from e
        self._marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        self._control = _pattern(control)
        texts = [token.text for token in control]
        self._texts = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
        self._longest = max(map(len, texts), default=0)
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in texts for n in range(1, len(text))}
        self._insides = {text[i:j] for text in texts for i in range(1, len(text)) for j in range(i + 1, len(text))}

    def guard(self, text: str) -> str:
        """The text with marks where it, or what the template may write next to it, could be read as a control token."""
        if any(mark in text for mark in (MARK, OPEN, CLOSE)):
            raise RowError("a message holds one of the noncharacters U+FDD0 to U+FDD2, which are used as marks here")
        core = text.strip()
        # what begins, ends or lies within a control token may be made whole by what the template writes next to it
        joins = core in self._insides or any(
            core[-n:] in self._beginnings or core[:n] in self._endings for n in range(1, min(len(core), self._longest) + 1)
        )
        guarded = text
        while found := self._texts.search(guarded):
            if len(found[0]) == 1:
                raise RowError(
                    f"a message holds {found[0]!r}, a control token of one character, which cannot be told from text"
                )
            guarded = guarded[: found.start() + 1] + MARK + guarded[found.start() + 1 :]
        if joins:
            start = len(text) - len(text.lstrip())
            end = len(guarded) - (len(text) - len(text.rstrip()))
            guarded = guarded[:start] + MARK + guarded[start:end] + MARK + guarded[end:]
        return guarded

    def render(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        """What the template writes; with `prompt` also the beginning of an assistant's turn. Raises RowError."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **self.tokens)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
            raise RowError(f"the chat template cannot write its first {len(messages)} messages: {e}") from e

    def parts(self, messages: list[dict[str, str]], loss: str) -> tuple[str, list[Part]]:
        """The conversation as text, and the same cut at control tokens and where the loss begins and ends. Raises RowError.

        No token reaches over a cut: what stands before a turn is encoded as the prompt of a generation would be.

        Assistant turns are what stands in `{% generation %}` blocks where the template has them. Else a turn is what its
        message adds to the conversation before it with the generation prompt, up to the control token that ends it.
        """
        guarded = [{**m, "content": self.guard(m["content"])} for m in messages]
        whole = self.render(guarded)
        plain = _unmarked(whole)
        if guarded != messages and plain != _unmarked(self.render(messages)):
            raise RowError("a message holds the text of a control token, and the chat template does not write it as it stands")
        if self._marks_turns:
            whole, spans = _marked_spans(whole)
        else:
            spans = self._added_spans(guarded, whole)
        if loss == "all":
            spans = [(0, len(whole))]
        elif not spans:
            raise RowError("no assistant's turn, so nothing counts in the loss (--loss=all counts all of it)")
        elif loss == "last":
            spans = spans[-1:]
        return plain, self._cut(whole, spans)

    def _added_spans(self, messages: list[dict[str, str]], whole: str) -> list[tuple[int, int]]:
        """What each assistant's message adds to the text before it."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], prompt=True)
            after = self.render(messages[: i + 1])
            if not after.startswith(before) or not whole.startswith(after):
                what = "begins message {} otherwise than its generation prompt" if whole.startswith(after) else (
                    "writes the messages up to {} otherwise when more follow"
                )  # fmt: skip
                raise RowError(
                    f"the chat template {what.format(i + 1)}, so the assistant's turn cannot be found. Mark it in the "
                    "template with {% generation %} and {% endgeneration %} (--chat-template=FILE), or use --loss=all"
                )
            begin, end = len(before), len(after)
            for token in self._control.finditer(whole, begin, end):
                if not whole[token.end() : end].strip():
                    end = token.end()
            spans.append((begin, end))
        return spans

    def _cut(self, whole: str, spans: list[tuple[int, int]]) -> list[Part]:
        parts: list[Part] = []

        def counts(at: int) -> bool:
            return any(begin <= at < end for begin, end in spans)

        borders = sorted({border for span in spans for border in span})

        def text(begin: int, end: int) -> None:
            at = [begin, *(b for b in borders if begin < b < end), end]
            for first, last in itertools.pairwise(at):
                if piece := whole[first:last].replace(MARK, ""):
                    place = "start" if not parts else "after" if parts[-1].control >= 0 else "inner"
                    parts.append(Part(piece, loss=counts(first), place=place))

        done = 0
        for token in self._control.finditer(whole):
            text(done, token.start())
            control = self.control[(token.lastindex or 1) - 1]
            at = token.start(token.lastindex or 1)
            if any(at < border < at + len(control.text) for border in borders):
                raise RowError(f"an assistant's turn begins or ends within the control token {control.text!r}")
            parts.append(Part(control.text, control.id, counts(at)))
            done = token.end()
        text(done, len(whole))
        return parts


def _pattern(control: Sequence[ControlToken]) -> re.Pattern[str]:
    """Finds control tokens, the longest first; group i + 1 is the text of token i. Some take the space beside them."""
    order = sorted(range(len(control)), key=lambda i: -len(control[i].text))
    groups = [""] * len(control)
    for i, token in enumerate(control):
        groups[i] = rf"{r'\s*' if token.lstrip else ''}(?P<t{i}>{re.escape(token.text)}){r'\s*' if token.rstrip else ''}"
    if order != list(range(len(control))):
        raise ValueError("control tokens are given with the longest first")
    return re.compile("|".join(groups) or r"(?!)")


def _unmarked(text: str) -> str:
    return text.replace(MARK, "").replace(OPEN, "").replace(CLOSE, "")


def _marked_spans(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of generation blocks, and where these stood."""
    spans, out, size, begin = [], [], 0, 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            begin = size
        elif piece == CLOSE:
            if size > begin:
                spans.append((begin, size))
        else:
            out.append(piece)
            size += len(piece)
    return "".join(out), spans


def load_template(spec: str, tokenizer: Tokenizer, file: Path | None, date: str) -> ChatTemplate:
    """The template of a tokenizer: of `file`, else of chat_template.jinja or tokenizer_config.json beside its tokenizer.json.

    Raises TokenizerError.
    """
    control = tokenizer.control_tokens()
    eos = next(token.text for token in control if token.id == tokenizer.eot) if spec == "byte" else ""
    tokens, name, source = ({"eos_token": eos, "bos_token": ""} if spec == "byte" else {}), "", ""
    if spec == "byte":
        name, source = "of the byte tokenizer", BYTE_TEMPLATE
    else:
        settings = _settings(spec)
        for key, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
        if (beside := read_beside(spec, "chat_template.jinja")) is not None:
            name, source = f"{spec}: chat_template.jinja", beside.decode()
        elif found := settings.get("chat_template"):
            name, source = f"{spec}: tokenizer_config.json", found
            if isinstance(found, list):
                named = {entry["name"]: entry["template"] for entry in found}
                source = named.get("default", "")
    if file is not None:
        try:
            name, source = str(file), file.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise TokenizerError(f"--chat-template={file}: cannot be read ({e})") from e
    if not source:
        raise TokenizerError(
            f"tokenizer {spec!r}: has no chat template (neither chat_template.jinja nor a `chat_template` in "
            "tokenizer_config.json beside its tokenizer.json). Give one with --chat-template=FILE."
        )
    return ChatTemplate(name, source, tokens, control, date)


def _settings(spec: str) -> dict[str, Any]:
    """tokenizer_config.json, {} where there is none."""
    data = read_beside(spec, "tokenizer_config.json")
    if data is None:
        return {}
    try:
        settings = json.loads(data)
    except ValueError as e:
        raise TokenizerError(f"tokenizer {spec!r}: its tokenizer_config.json is not JSON ({e})") from e
    return settings if isinstance(settings, dict) else {}
