"""The notebooks run, and their stored outputs are those of the current code.

`python tests/campaign/test_notebooks.py [NAME ...]` runs them and stores the outputs. The tests compare these with fresh
outputs. A cell tagged `compiled` shows figures of one jaxlib's compiler. It is compared only under the version that the
notebook names. A cell tagged `varies` shows values that differ between runs, such as seconds, and is not compared.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jaxlib.version
import packages
import pytest

from jaxtrain import main as main_command
from jaxtrain.commands import plan
from jaxtrain.commands.command import read_line

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# If the CUDA plugin is installed without a driver, its libraries print messages to stderr that vary between runs.
NOISE = re.compile(r".*(cudart_stub|log messages before absl::InitializeLog).*\n")
# Text that would reveal on whose machine a notebook was stored.
LOCAL = re.compile(r"(?<![\w.])/(home|root|work|tmp|Users|mnt|opt|usr)/|site-packages|\d{4}-\d\d-\d\dT\d\d:")
COMMANDS = {"plan": plan.parser(), "main": main_command.parser()}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.fixture(scope="module", autouse=True)
def jupyter() -> str:
    """Make nbformat and nbclient importable, and return the folder that kernels need on PYTHONPATH."""
    folder = packages.folder_with("nbclient", "notebooks")
    if folder:
        sys.path.append(folder)
    return folder


def read(path: Path) -> Any:
    import nbformat

    return nbformat.read(path, as_version=4)


def run(path: Path, folder: str = "") -> Any:
    """Return the notebook with fresh outputs, run in its own folder on one CPU device, as a reader would run it.

    folder: where the kernel finds Jupyter's packages, if they are not installed.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    where = {"metadata": {"path": str(FOLDER)}}
    # The printed text of a cell arrives in pieces that depend on timing.
    client = NotebookClient(notebook, timeout=600, resources=where, record_timing=False, coalesce_streams=True)
    client.execute(env={**env, "JAX_PLATFORMS": "cpu"} | ({"PYTHONPATH": folder} if folder else {}))
    for cell in code(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = NOISE.sub("", output.text)
        cell.outputs = [o for o in cell.outputs if o.output_type != "stream" or o.text]
    notebook.metadata = {**METADATA, "jaxlib": jaxlib.version.__version__}
    return notebook


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> list[str]:
    """Return the visible contents of a cell's outputs, without line numbers of sources, which move with every edit."""
    contents = [dict(o.data) if "data" in o else o.get("text", o.get("evalue")) for o in cell.outputs]
    return [re.sub(r"\.py:\d+", ".py", json.dumps(content, sort_keys=True)) for content in contents]


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def stale(stored: Any, fresh: Any) -> list[str]:
    """Return the cells whose stored output differs from the fresh output."""
    same_compiler = stored.metadata.get("jaxlib") == fresh.metadata["jaxlib"]
    found = []
    for i, (old, new) in enumerate(zip(code(stored), code(fresh), strict=True), 1):
        if "varies" in tags(old) or ("compiled" in tags(old) and not same_compiler):
            continue
        if shown(old) != shown(new):
            found.append(f"cell {i}:\n{old.source}\n--- stored\n{shown(old)}\n--- now\n{shown(new)}")
    return found


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_and_its_outputs_are_not_stale(path, jupyter):
    """Fresh outputs equal the stored outputs. A cell that raises fails this test with the cell's traceback."""
    found = stale(read(path), run(path, jupyter))
    assert not found, "\n\n".join(["python tests/campaign/test_notebooks.py stores them anew", *found])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_stored_with_outputs_and_nothing_of_a_machine(path):
    notebook = read(path)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run from top to bottom"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert {k: v for k, v in notebook.metadata.items() if k != "jaxlib"} == METADATA
    assert not LOCAL.findall(path.read_text())
    assert {tag for cell in cells for tag in tags(cell)} <= {"varies", "compiled"}


def test_a_command_that_a_notebook_prints_is_accepted(monkeypatch):
    """Each ./run.sh command in the notebooks' outputs has valid arguments, in the repository's root."""
    monkeypatch.chdir(FOLDER.parent)
    texts = [o.get("text", "") for path in NOTEBOOKS for cell in code(read(path)) for o in cell.outputs]
    found = [shlex.split(line)[1:] for text in texts for line in text.splitlines() if line.startswith("./run.sh ")]
    commands = [("main", words) if words[0].startswith("--") else (words[0], words[1:]) for words in found]
    assert {name for name, _ in commands} == {*COMMANDS}
    for name, argv in commands:
        assert not read_line(COMMANDS[name], argv).problems, (name, argv)


def main(names: list[str]) -> None:
    """Run the notebooks of these names (all if there are none) and store their outputs."""
    import nbformat

    for path in NOTEBOOKS:
        if not names or path.stem in names:
            nbformat.write(run(path), path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
