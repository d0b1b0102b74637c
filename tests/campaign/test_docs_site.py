"""The documentation site: run.sh builds and serves it with Sphinx, and mistakes end the build."""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import packages
import pytest
from run_sh import REPO, Machine, copy_launcher

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium here: the site is checked as text only")
SLOW_S = 900  # ends a build that hangs; a passing test never takes that long
LINKED = ("docs", "jaxtrain", "configs", "notebooks")  # folders that pages link to, and the sources of the API page


def machine(folder: Path) -> Machine:
    """Return a home with a copy of the repository. Its run.sh uses this process's Python, with Sphinx."""
    sphinx = packages.folder_with("sphinx", "docs")
    repo = copy_launcher(folder / "jaxtrain")
    for name in LINKED:
        shutil.copytree(REPO / name, repo / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    shutil.copy(REPO / "pyproject.toml", repo)
    return Machine(repo, folder, f'#!/bin/bash\nPYTHONPATH="$PYTHONPATH:{sphinx}" exec "{sys.executable}" "$@"\n')


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


def shown(address: str, folder: Path) -> str:
    """Return the document of an address after its scripts ran in a browser."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=8000"]
    command = [str(BROWSER), *flags, "--window-size=1280,1200", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def found(address: str, folder: Path, query: str) -> list[str]:
    """Return the pages that a search finds, the best first."""
    document = shown(f"{address}search.html?q={urllib.parse.quote(query)}", folder)
    results = document.partition('id="search-results"')[2]
    return list(dict.fromkeys(re.findall(r'<a href="([\w/.]+)\.html', results)))


@in_browser
def test_the_search_finds_what_explains_a_message_first(site: tuple[Path, str], tmp_path: Path):
    rows = (REPO / "docs" / "troubleshooting.md").read_text().splitlines()
    messages = [row.split("`")[1] for row in rows if row.startswith("| `")]
    for query in ("out of memory", "does not divide", *messages[:: len(messages) // 4]):
        assert found(site[1], tmp_path, query)[0] == "troubleshooting", query
    assert {"finetuning", "data"} <= set(found(site[1], tmp_path, "chat template")[:3])
    assert found(site[1], tmp_path, "muon")[0] == "optimizers", "one word is no message"


PROBE = """<pre id="probe"></pre><script>
const taken = [];
Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => taken.push(text) } });
addEventListener("load", () => {
  const blocks = [...document.querySelectorAll(".highlight pre")];
  const buttons = [...document.querySelectorAll("button.copy")];
  for (const button of buttons) button.click();
  const contents = document.querySelector(".toc-drawer").getBoundingClientRect();
  const cut = blocks.map((pre) => pre.scrollWidth > pre.clientWidth + 1);
  const texts = blocks.map((pre) => pre.textContent);
  document.getElementById("probe").textContent = JSON.stringify({ texts, copied: taken, cut,
    contents: [contents.left, contents.right, innerWidth], wide: document.documentElement.scrollWidth - innerWidth });
});
</script>"""


@in_browser
@pytest.mark.parametrize("page", ["finetuning", "quickstart"])
def test_code_can_be_copied_and_commands_are_not_cut(site: tuple[Path, str], page: str, tmp_path: Path):
    """Prompts and output are not copied. At 1280 px, commands wrap and the contents of a page are visible."""
    folder, address = site
    text = (folder / f"{page}.html").read_text()
    (folder / "probed.html").write_text(text.replace("<body>", f"<body>{PROBE}", 1))
    seen = json.loads(
        html.unescape(re.findall(r'<pre id="probe">(.+?)</pre>', shown(f"{address}probed.html", tmp_path), re.S)[0])
    )
    assert len(seen["copied"]) == len(seen["texts"]) > 1
    for given, copied, cut in zip(seen["texts"], seen["copied"], seen["cut"], strict=True):
        commands = [line.removeprefix("$ ") for line in given.splitlines() if line.startswith("$ ")]
        assert copied.splitlines() == (commands or given.rstrip().splitlines())
        assert not (cut and given.startswith(("./run.sh", ".venv/bin"))), given
    left, right, width = seen["contents"]
    assert 0 < left < right <= width and seen["wide"] <= 0
    assert re.search(r"jaxtrain \d+\.\d+", text)


def test_functions_have_their_docstrings(site: tuple[Path, str]):
    from jaxtrain.commands import api

    text = (site[0] / "api.html").read_text()
    assert re.findall(r'id="jaxtrain\.commands\.api\.(\w+)"', text) == [name for name in vars(api) if name in api.__all__]
    assert (api.load.__doc__ or "").splitlines()[0] in text


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
