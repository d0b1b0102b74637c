"""The documentation site: run.sh builds and serves it with Sphinx; mistakes end the build; its pages fit a browser window."""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import BROWSER
from run_sh import REPO, Machine, copy_launcher

SLOW_S = 900  # ends a build that hangs; a passing test never takes that long
LINKED = ("docs", "jaxtrain", "configs", "notebooks")  # folders that pages link to, and the sources of the API page


def machine(folder: Path) -> Machine:
    """Return a home with a copy of the repository. Its run.sh uses this process's Python, which has Sphinx."""
    repo = copy_launcher(folder / "jaxtrain")
    for name in LINKED:
        shutil.copytree(REPO / name, repo / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    return Machine(repo, folder, f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Serve the site, and return its folder and address. Afterwards Ctrl-C ends the server."""
    made = machine(tmp_path_factory.mktemp("site"))
    command = ["bash", str(made.repo / "run.sh"), "docs", "--serve"]
    with subprocess.Popen(command, env=made.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout and server.stderr
        printed = server.stdout.readline(), server.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", printed[1])
        if not address:
            server.kill()
            raise AssertionError(server.stderr.read())
        assert printed[0] == f"{made.repo}/build/docs/index.html\n"
        yield made.repo / "build" / "docs", address[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(SLOW_S) == 0


def test_every_page_is_there_and_can_be_found(site: tuple[Path, str]):
    folder, address = site
    with urllib.request.urlopen(address) as answer:
        assert answer.read() == (folder / "index.html").read_bytes()
    pages = {path.relative_to(REPO / "docs").with_suffix("") for path in (REPO / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.html")}
    index = (folder / "searchindex.js").read_text()
    assert all(f'"{page}"' in index for page in pages)


def test_a_file_outside_of_the_pages_comes_along(site: tuple[Path, str]):
    (file,) = re.findall(r'href="(_downloads/\w+/loss\.py)"', (site[0] / "extending.html").read_text())
    assert (site[0] / file).read_bytes() == (REPO / "jaxtrain/train/loss.py").read_bytes()


def test_functions_have_their_docstrings(site: tuple[Path, str]):
    from jaxtrain import api

    text = (site[0] / "api.html").read_text()
    assert re.findall(r'id="jaxtrain\.api\.(\w+)"', text) == [name for name in vars(api) if name in api.__all__]
    assert "Return a config with keys set as on the command line." in text


def test_mistakes_end_the_build(tmp_path: Path):
    """Links to a missing page, heading and file, and a page in no table of contents, end the build with a warning each."""
    made = machine(tmp_path)
    with (made.repo / "docs/quickstart.md").open("a") as file:
        file.write("\n[a](nowhere.md) [b](plan.md#no-such-heading) [c](#none-here) [d](../jaxtrain/none.py)\n")
    (made.repo / "docs/unlisted.md").write_text("# Unlisted\n")
    command = ["bash", str(made.repo / "run.sh"), "docs"]
    done = subprocess.run(command, env=made.environ, capture_output=True, text=True, timeout=SLOW_S)
    assert done.returncode != 0 and done.stdout == ""
    said = "\n".join(line for line in done.stderr.splitlines() if "WARNING" in line)
    for word in ("nowhere.md", "no-such-heading", "none-here", "none.py", "unlisted.md"):
        assert len(re.findall(re.escape(word), said)) == 1, said
    assert said.count("WARNING") == 5, said


PROBE = """<!DOCTYPE html><body><pre id="probe"></pre><script>
const wide = [];
const open = (page) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style = "border: 0; width: WIDTHpx; height: 900px";
  frame.onload = () => done(frame);
  frame.src = page;
  document.body.append(frame);
});
(async () => {
  for (const page of PAGES) {
    const frame = await open(page), inside = frame.contentDocument;
    const parts = [...inside.querySelectorAll("article :is(p, li, h1, h2, h3, img, dt)")];
    const outside = (part) => part.getBoundingClientRect().right > WIDTH + 1 && !part.closest(".table-wrapper, pre");
    if (inside.documentElement.scrollWidth > WIDTH || parts.some(outside)) wide.push(page);
    frame.remove();
  }
  const found = await open("search.html?q=attention");
  while (!found.contentDocument.querySelector("#search-results li a")) await new Promise((done) => setTimeout(done, 50));
  const hits = [...found.contentDocument.querySelectorAll("#search-results li a")].map((link) => link.getAttribute("href"));
  document.getElementById("probe").textContent = JSON.stringify({ wide, hits });
})();
</script></body>"""


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: how the site is laid out is not checked")
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_its_window_and_the_search_finds_pages(site: tuple[Path, str], tmp_path: Path, width: int):
    folder, address = site
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html") if path.name != "probe.html")
    assert len(pages) > 50
    (folder / "wide.html").write_text(f'<article><p style="width: {width + 9}px">too wide</p></article>')
    probe = PROBE.replace("PAGES", json.dumps([*pages, "wide.html"])).replace("WIDTH", str(width))
    (folder / "probe.html").write_text(probe)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=300000", f"--user-data-dir={tmp_path}"]
    command = [str(BROWSER), *flags, "--window-size=1400,1000", "--dump-dom", f"{address}probe.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW_S, check=True)
    found = json.loads(html.unescape(re.findall(r'<pre id="probe">(.+?)</pre>', done.stdout)[0]))
    (folder / "wide.html").unlink()
    assert found["wide"] == ["wide.html"]
    assert any(hit.startswith("attention.html") for hit in found["hits"])
