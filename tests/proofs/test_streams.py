"""The text of a command in locales that are not UTF-8, and its standard streams."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import locales
import pytest

REPO = Path(__file__).resolve().parents[2]
WORD = "größe"
LIST = [sys.executable, "-m", "jaxtrain"]  # prints the commands; with an argument, an error that names it


def run(words: list[str | bytes], locale: dict[str, str], **how) -> subprocess.CompletedProcess[bytes]:
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": REPO, "timeout": 60}
    return subprocess.run([*LIST, *words], env=locales.environ(locale), **{**kept, **how})


@pytest.mark.parametrize("kind", ["utf-8", "ascii", "latin"])
def test_an_argument_of_utf_8_is_text_in_every_locale(kind: str):
    locale = {"utf-8": {"LC_ALL": "C.UTF-8"}, "ascii": locales.ASCII}.get(kind) or locales.latin()
    done = run([WORD.encode()], locale)
    assert done.returncode == 2 and WORD in done.stderr.decode()


def test_a_path_of_utf_8_is_found_in_every_locale(tmp_path: Path):
    (tmp_path / f"{WORD}.py").write_text("from jaxtrain.config import default_config as get_config\n")
    for locale in (locales.ASCII, locales.latin()):
        command = [sys.executable, "-m", "jaxtrain.main", f"--config={tmp_path}/{WORD}.py", "--explain"]
        done = subprocess.run(command, env=locales.environ(locale), cwd=REPO, capture_output=True)
        assert f"{WORD}.py" in done.stdout.decode() and b"Traceback" not in done.stderr


def test_an_argument_in_the_terminals_encoding_is_text_unless_it_is_a_path(tmp_path: Path):
    raw = WORD.encode("iso-8859-1")
    assert WORD in run([raw], locales.latin()).stderr.decode()
    (tmp_path / os.fsdecode(raw)).touch()
    how = {"cwd": tmp_path, "env": locales.environ(locales.latin()) | {"PYTHONPATH": str(REPO)}}
    done = subprocess.run([*LIST, raw], capture_output=True, **how)
    assert done.returncode == 2 and WORD not in done.stderr.decode() and b"udcf6" in done.stderr


def test_a_name_that_is_not_text_is_printed_with_escapes():
    done = run([b"gr\xf6"], {"LC_ALL": "C.UTF-8"})
    assert done.returncode == 2 and b"gr\\udcf6" in done.stderr


def test_a_terminal_gets_its_own_encoding():
    latin, ascii = WORD.encode("iso-8859-1"), b"gr\\xf6\\xdfe"
    for locale, shown in ((locales.latin(), latin), (locales.ASCII, ascii), ({"LC_ALL": "C"}, WORD.encode())):
        ours, theirs = pty.openpty()
        done = run([WORD.encode()], locale, stderr=theirs)
        os.close(theirs)
        assert done.returncode == 2 and shown in os.read(ours, 10_000)
        os.close(ours)


def test_the_encoding_that_the_user_sets_is_obeyed():
    done = run([WORD.encode()], {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2 and b"gr\\xf6\\xdfe" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_ends_as_usual(tmp_path: Path, closed: str):
    for words, code in (("", 0), ("nothing", 2)):
        line = f'exec "$0" -m jaxtrain {words} {closed}'
        done = subprocess.run(["bash", "-c", line, sys.executable], cwd=REPO, capture_output=True)
        assert done.returncode == code and b"Traceback" not in done.stderr
        script = tmp_path / "script.sh"  # bash opens a script in the place of a stream that is closed
        script.write_text(f'exec "{sys.executable}" -m jaxtrain {words}\n')
        done = subprocess.run(["bash", "-c", f"exec bash {script} {closed}"], cwd=REPO, capture_output=True)
        assert done.returncode == code and b"Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_command_whose_reader_ends_is_quiet_and_ends_as_usual(unbuffered: dict[str, str]):
    reading, writing = os.pipe()
    os.close(reading)
    for words, code in (([], 0), (["nothing"], 2)):
        done = run(words, unbuffered, stdout=writing)
        assert done.returncode == code and (b"error" in done.stderr) == bool(words) and b"Traceback" not in done.stderr
    assert run(["nothing"], unbuffered, stderr=writing).returncode == 2
    os.close(writing)


NOTE, ERROR = "I0000 cudart_stub.cc:31] no drivers", "E0000 real"


@pytest.mark.parametrize(("imported", "said"), [("jaxtrain, jax", [ERROR]), ("jax, jaxtrain", [NOTE, ERROR])])
def test_an_import_of_jax_after_jaxtrain_prints_errors_alone(imported: str, said: list[str], tmp_path: Path):
    """So the Python API prints no notes about missing drivers. An error of the import stays as it is."""
    (tmp_path / "jax.py").write_text(
        f"import os\nos.write(2, b'{NOTE}\\n{ERROR}\\n')\nif 'BREAK' in os.environ:\n    raise OSError('broken')\n"
    )
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    command = [sys.executable, "-c", f"import {imported}; print(jax.__spec__.name)"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "jax\n" and done.stderr.splitlines() == said
    broken = subprocess.run(command, env=environ | {"BREAK": "1"}, capture_output=True, text=True, check=False)
    assert broken.returncode == 1 and broken.stderr.splitlines()[-1] == "OSError: broken" and ERROR in broken.stderr
