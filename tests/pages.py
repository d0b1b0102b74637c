"""Helpers for tests of HTML pages: their text, their curves, and a check that they load nothing."""

import json
import re
from html.parser import HTMLParser
from typing import Any

EVIL = '</script><script>alert("1&1")</script>'  # a name that becomes a script if the page does not escape it
VOID = {"meta", "link", "br", "wbr", "img", "input"}


class Read(HTMLParser):
    """The text, titles and labels of a page, and its elements with their attributes. Checks that tags close in order."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.code: list[str] = []  # text of scripts and styles
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.words += [value or "" for name, value in attrs if name in ("title", "aria-label", "content")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))  # an SVG element that closes itself

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        (self.code if self._open and self._open[-1] in ("script", "style") else self.words).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def assert_self_contained(page: str) -> None:
    """Check that the page loads nothing, and that its Content-Security-Policy forbids all sources by default."""
    assert not re.findall(r"https?:|//[a-z]|@import", re.sub(r"// .*", "", page))
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#too-much"}  # a pattern that the page itself defines
    read = Read(page)
    for tag, attributes in read.elements:
        link = attributes.get("href") or "data:,"
        assert "src" not in attributes and (link == "data:," or (tag == "a" and link.startswith(("./", "#")))), tag
    (policy,) = [m for m in read.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert (policy["content"] or "").startswith("default-src 'none'")


def curves_of(page: str) -> dict[str, dict[float, Any]]:
    """Return {curve: {step: value}} of all charts of a page whose x axis is the step."""
    out: dict[str, dict[float, Any]] = {}
    for script in re.findall(r'<script type="application/json">(.*?)</script>', page):
        found = json.loads(script)
        if isinstance(found, dict) and found["axes"][0] == "step":
            out |= {c["name"]: dict(zip(c["x"][0], c["y"], strict=True)) for c in found["curves"]}
    return out
