"""Helpers for tests of HTML pages: their text, a check that they load nothing, and their layout in a browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

EVIL = '</script><script>alert("1&1")</script>'  # a name that becomes a script if the page does not escape it
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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
        assert "src" not in attributes and (link == "data:," or (tag == "a" and link.startswith("./"))), tag
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


def opened(text: str, folder: Path, width: int) -> tuple[str, list[str]]:
    """Return a page's document after its scripts ran in a browser, and the lines of the browser's console."""
    path = folder / "page.html"
    path.write_text(text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    command = [str(BROWSER), *flags, f"--window-size={width},1200", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


LAYOUT = """<pre id="probe"></pre><script>
const found = { words: [], overlaps: [], outside: [], wide: document.documentElement.scrollWidth - innerWidth, tips: [] };
for (const chart of document.querySelectorAll(".chart")) {
  const boxes = [...chart.querySelectorAll("text")].filter((t) => t.getClientRects().length)
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => {
    found.words.push(a);
    if (p.left < 0 || p.right > innerWidth) found.outside.push(a);
    for (const [b, q] of boxes.slice(i + 1))
      if (p.left < q.right && q.left < p.right && p.top < q.bottom - 2 && q.top < p.bottom - 2) found.overlaps.push([a, b]);
  });
  const shown = [...chart.children].find((c) => c.tagName === "svg" && c.getClientRects().length);
  const plot = shown.getBoundingClientRect(), tip = chart.querySelector(".tip"), tips = [];
  for (const part of [0, 1]) {
    const clientX = plot.left + part * plot.width;
    chart.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: plot.top + 5 }));
    const box = tip.getBoundingClientRect();
    if (box.left < 0 || box.right > innerWidth) found.outside.push(tip.textContent);
    tips.push(tip.textContent);
  }
  for (const key of ["Home", "ArrowRight"]) chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
  found.tips.push([...tips, tip.textContent]);
}
MORE
document.getElementById("probe").textContent = JSON.stringify(found);
</script>"""


def laid_out(page: str, folder: Path, width: int, more: str = "") -> dict[str, Any]:
    """Measure a page in a browser, with the script LAYOUT, and return the script's `found`.

    Checks that the console is empty, that no texts overlap or leave the window, and that the page is no wider than the window.

    Args:
        width: the window's width in px.
        more: further statements of the script, which add to `found`.
    """
    document, console = opened(page.replace("</body>", f"{LAYOUT.replace('MORE', more)}</body>"), folder, width)
    assert console == []
    found = json.loads(html.unescape(re.findall(r'<pre id="probe">(.+?)</pre>', document)[0]))
    assert found["overlaps"] == [] and found["outside"] == [] and found["wide"] <= 0
    return found
