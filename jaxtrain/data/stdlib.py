"""The corpus of data.source=stdlib: source code of the Python standard library on this machine."""

import hashlib
import os
import platform
import secrets
import sysconfig
from pathlib import Path

from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.tokenfile import TokenWriter

# Left out: installed packages, tests and their fixtures, byte code; and generated files (character tables, the help texts of
# pydoc), which would otherwise be a tenth of the corpus and most of the validation split.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "encodings", "pydoc_data"}
VALIDATION = 0.05


def list_files() -> list[tuple[str, Path]]:
    """Return (path relative to the library, path) of every module that is not empty and not in a SKIPPED folder, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in SKIPPED]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.stat().st_size:
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


def is_validation(relative: str) -> bool:
    """Return whether a file belongs to validation, by its path alone. So a file stays in its split if its contents change."""
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4]) < VALIDATION * 2**32


def token_file_paths(data_dir: Path | str) -> tuple[Path, Path]:
    """Return the paths of the files of `stdlib_files`, which may not exist yet."""
    listing = [(relative, path.stat().st_size) for relative, path in list_files()]
    recipe = (platform.python_version(), VALIDATION, tokenfile.VERSION, listing)
    fingerprint = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    train, validation = (Path(data_dir).expanduser() / f"stdlib-{fingerprint}.{split}.tok" for split in ("train", "val"))
    return train, validation


def stdlib_files(data_dir: Path | str) -> tuple[Path, Path]:
    """Return (training, validation): token files of the byte tokenizer, made on first use.

    A file's name has a fingerprint of the Python version, the file format, and the names and sizes of the modules. Several
    processes may make a file at the same time: each writes a temporary file, and the first complete one gets the name.
    """
    train, validation = token_file_paths(data_dir)
    files = list_files()
    for out, wanted in ((train, False), (validation, True)):
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            write_split(out, [(r, p) for r, p in files if is_validation(r) == wanted])
    return train, validation


def write_split(out: Path, files: list[tuple[str, Path]]) -> None:
    byte = tokenizers.ByteTokenizer()
    sources = [f"python {platform.python_version()} standard library, {len(files)} files"]
    with TokenWriter(
        out, tokenizers.tokenizer_info(byte), suffix=f".partial.{secrets.token_hex(4)}", sources=sources
    ) as writer:
        for _, path in files:
            # A few modules are Latin-1 by their coding line. Their bytes that are not UTF-8 become U+FFFD.
            text = path.read_bytes().decode(errors="replace")
            ids = byte.encode_batch([text])[0]
            writer.write(ids, len(text.encode()), first_bytes=byte.first_bytes(text, ids[0]))
            writer.end_document()
        writer.seal()
        writer.publish(keep=True)
