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
import nbformat
import pytest
from nbclient import NotebookClient

from jaxtrain import main as main_command
from jaxtrain.plan import __main__ as plan

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# If the CUDA plugin is installed without a driver, its libraries print messages to stderr that vary between runs.
NOISE = re.compile(r".*(cudart_stub|log messages before absl::InitializeLog).*\n")
# Text that would reveal on whose machine a notebook was stored.
LOCAL = re.compile(r"(?<![\w.])/(home|root|work|tmp|Users|mnt|opt|usr)/|site-packages|\d{4}-\d\d-\d\dT\d\d:")
COMMANDS = {"plan": plan.COMMAND, "main": main_command.COMMAND}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def run(path: Path) -> Any:
    """Return the notebook with fresh outputs, run in its own folder on one CPU device, as a reader would run it."""
    notebook = read(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    where = {"metadata": {"path": str(FOLDER)}}
    # The printed text of a cell arrives in pieces that depend on timing.
    client = NotebookClient(notebook, timeout=600, resources=where, record_timing=False, coalesce_streams=True)
    client.execute(env={**env, "JAX_PLATFORMS": "cpu"})
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_and_its_outputs_are_not_stale(path):
    """Fresh outputs equal the stored outputs. A cell that raises fails this test with the cell's traceback."""
    found = stale(read(path), run(path))
    assert not found, "\n\n".join(["python tests/campaign/test_notebooks.py stores them anew", *found])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_stored_with_outputs_and_pictures_and_nothing_of_a_machine(path):
    notebook = read(path)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run from top to bottom"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    kinds = {kind for o in outputs for kind in o.get("data", {})}
    assert {"text/html", "text/plain"} <= kinds  # tables, drawings of shardings and of memory
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 2
    assert {k: v for k, v in notebook.metadata.items() if k != "jaxlib"} == METADATA
    assert not LOCAL.search(path.read_text()), LOCAL.findall(path.read_text())
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}
    assert {tag for cell in cells for tag in tags(cell)} <= {"varies", "compiled"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_short_and_uses_the_python_api_alone(path):
    lines = [line for cell in code(read(path)) for line in cell.source.splitlines() if line.strip()]
    assert len(lines) <= 40
    imported = {line.split()[1].partition(".")[0] for line in lines if re.match(r"\s*(import|from)\b", line)}
    assert "jaxtrain" in imported and imported <= {"jaxtrain", "os", "shutil", "sys"}
    assert not [line for line in lines if "jaxtrain." in line or "from jaxtrain" in line]


def test_a_command_that_a_notebook_prints_is_accepted(monkeypatch):
    """Each ./run.sh command in the notebooks' outputs has valid arguments, in the repository's root."""
    monkeypatch.chdir(FOLDER.parent)
    texts = [o.get("text", "") for path in NOTEBOOKS for cell in code(read(path)) for o in cell.outputs]
    found = [shlex.split(line)[1:] for text in texts for line in text.splitlines() if line.startswith("./run.sh ")]
    commands = [("main", words) if words[0].startswith("--") else (words[0], words[1:]) for words in found]
    assert {name for name, _ in commands} == {*COMMANDS}
    for name, argv in commands:
        assert not COMMANDS[name].parse(argv).problems, (name, argv)


def test_a_changed_number_is_stale():
    """`stale` finds changed outputs. It ignores line numbers, and `compiled` cells under another jaxlib."""
    stored, fresh = read(NOTEBOOKS[0]), read(NOTEBOOKS[0])
    assert not stale(stored, fresh)
    source = nbformat.v4.new_output("stream", text="zero.py:156 896.00 MiB")
    moved = nbformat.v4.new_output("stream", text="zero.py:161 896.00 MiB")
    other = nbformat.v4.new_output("stream", text="zero.py:161 896.01 MiB")
    cells = [nbformat.v4.new_code_cell(outputs=[o]) for o in (source, moved, other)]
    assert shown(cells[0]) == shown(cells[1]) != shown(cells[2])
    cell = next(c for c in code(fresh) if c.outputs and not tags(c))
    cell.outputs[0] = nbformat.v4.new_output("stream", text="896.01 MiB")
    assert len(stale(stored, fresh)) == 1
    cell = next(c for c in code(fresh) if "compiled" in tags(c))
    cell.outputs = []
    assert len(stale(stored, fresh)) == 2
    fresh.metadata["jaxlib"] = "0.0.1"
    assert len(stale(stored, fresh)) == 1


def main(names: list[str]) -> None:
    """Run the notebooks of these names (all if there are none) and store their outputs."""
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            nbformat.write(run(path), path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
