"""Text is UTF-8 in every locale: jaxtrain names the encoding of each text file and of each child's output."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
BINARY = ("gzip", "bz2", "lzma", "os", "TokenFile")  # their open() has bytes by default, or a descriptor


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of calls that open text in the locale's encoding. Ruff finds them only where it knows the type."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        named = {word.arg: word.value for word in call.keywords}
        if None in named or "encoding" in named:
            continue
        method = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        words = [each for each in (*call.args, named.get("mode")) if isinstance(each, ast.Constant)]
        modes = [word.value for word in words if isinstance(word.value, str) and set(word.value) <= set("rwax+bt")]
        opens = method in ("open", "fdopen") and owner.rpartition(".")[2] not in BINARY
        if (
            (method in ("read_text", "write_text") and owner)
            or any(name in named and ast.unparse(named[name]) == "True" for name in ("text", "universal_newlines"))
            or (opens and not any("b" in mode for mode in modes))
            or (method in ("TemporaryFile", "NamedTemporaryFile") and any("b" not in mode for mode in modes))
        ):
            yield call.lineno


def test_no_text_is_read_or_written_in_the_locales_encoding():
    files = [path for folder in ("jaxtrain", "configs") for path in sorted((REPO / folder).rglob("*.py"))]
    found = [f"{file}:{line}" for file in files for line in without_encoding(ast.parse(file.read_bytes()))]
    assert len(files) > 100 and found == []
