"""Where checkpoints lie: a folder on a mounted disk, or a bucket of Google Cloud Storage.

A disk has renames, which happen at once or not at all, a page cache that has to be synced, and an end. A bucket has none of
them. An object appears whole or not at all, and everybody sees it from then on; there are no folders, only names with slashes;
to rename is to copy and to delete. So on a disk Orbax renames a step's arrays into place when they are complete, and in a
bucket it writes `arrays/commit_success.txt` last.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from jaxtrain import stores
from jaxtrain.checkpoint.errors import CheckpointError, Unreachable

if TYPE_CHECKING:
    from etils import epath

    # A path of a bucket is no Path: pathlib would make one slash of two.
    AnyPath = Path | epath.Path

META = "meta.json"
ARRAYS = "arrays"
DIGESTS = "integrity.json"
COMMITTED = f"{ARRAYS}/commit_success.txt"
DELETING = ".deleting"
BLOCK = 16 << 20  # bytes that one request reads of a bucket


class Place(Protocol):
    """What is done with the place itself. Methods raise OSError where it fails, in a bucket always `Unreachable`."""

    way_out: str  # when a save has failed

    @property
    def path(self) -> "AnyPath":
        """The folder that holds the folders of the steps."""
        ...

    def states(self) -> dict[int, str]:
        """Every step folder: 'complete', 'unfinished' or 'damaged'."""
        ...

    def state(self, step: int) -> str:
        """That of one step; 'missing' where there is none."""
        ...

    def files(self, folder: "AnyPath") -> dict[str, int]:
        """Every file below a folder, as its path within it, and its bytes."""
        ...

    def read(self, path: "AnyPath") -> bytes:
        """A small file. Raises FileNotFoundError where there is none."""
        ...

    def opened(self, path: "AnyPath") -> BinaryIO:
        """A file to read in large pieces."""
        ...

    def file_system(self) -> int | None:
        """Which one it is on; None where there is nothing to mistake it for."""
        ...

    def check(self, size: int, keep: int, file_system: int | None) -> None:
        """Before a save of so many bytes: whether it is the place that it was, and has the room. Removes what is left over."""
        ...

    def make(self, step: int) -> "AnyPath":
        """A step's folder, to write into."""
        ...

    def write(self, path: "AnyPath", text: str) -> None:
        """Replace a file, at once, and durably."""
        ...

    def sweep(self) -> None:
        """Remove what cut-off saves and deletions left: it can never be restored and would fill the place."""
        ...

    def delete(self, step: int) -> None:
        """A step, so that half of it is never taken for one."""
        ...

    def set_aside(self, steps: Iterable[int], name: str) -> "AnyPath":
        """Move steps to a folder beside them, which is returned."""
        ...


class Folder:
    """On a mounted disk."""

    way_out = "Free some space, or set checkpoint.dir to another place and start again."

    def __init__(self, path: Path):
        self.path = path

    def states(self) -> dict[int, str]:
        if not self.path.exists():
            return {}
        return {int(f.name): self.state(int(f.name)) for f in self.path.iterdir() if is_step(f.name) and f.is_dir()}

    def state(self, step: int) -> str:
        folder = self.path / str(step)
        if not folder.exists():
            return "missing"
        # Orbax writes beside it and renames `arrays` into place at the end.
        if not (folder / ARRAYS).exists():
            return "unfinished"
        return "complete" if (folder / META).exists() else "damaged"

    def files(self, folder: "AnyPath") -> dict[str, int]:
        found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
        return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in found}

    def read(self, path: "AnyPath") -> bytes:
        return path.read_bytes()

    def opened(self, path: "AnyPath") -> BinaryIO:
        return open(path, "rb", buffering=0)

    def file_system(self) -> int | None:
        return self.path.stat().st_dev

    def check(self, size: int, keep: int, file_system: int | None) -> None:
        place = _existing(self.path)
        # A disk that was unmounted under the run would otherwise be replaced by a folder on the disk below it.
        if file_system is not None and place.stat().st_dev != file_system:
            raise OSError(f"{place} is on another file system than the checkpoints before: was it unmounted? Mount it again")
        self.sweep()
        free = shutil.disk_usage(_existing(self.path)).free
        if free < size:
            raise OSError(
                f"{free / 2**30:.2f} GiB are free there, a checkpoint needs {size / 2**30:.2f} GiB, and checkpoint.keep is "
                f"{keep}"
            )

    def make(self, step: int) -> Path:
        folder = self.path / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write(self, path: "AnyPath", text: str) -> None:
        partial = Path(path.with_name(path.name + ".partial"))
        with open(partial, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
        sync(path.parent)

    def sweep(self) -> None:
        if not self.path.exists():
            return
        for folder in list(self.path.iterdir()):
            number, _, rest = folder.name.partition(".")
            if is_step(number) and (f".{rest}" == DELETING or (not rest and self._is_leftover(folder))):
                shutil.rmtree(folder)

    def _is_leftover(self, folder: Path) -> bool:
        return _only_ours(entry.name for entry in folder.iterdir()) and self.state(int(folder.name)) == "unfinished"

    def delete(self, step: int) -> None:
        folder = self.path / str(step)
        shutil.rmtree(folder.rename(folder.parent / (folder.name + DELETING)))

    def set_aside(self, steps: Iterable[int], name: str) -> Path:
        target = self.path / name
        target.mkdir()
        for step in steps:
            (self.path / str(step)).rename(target / str(step))
        return target


class Bucket:
    """At gs://. Nothing is cached: what another process has written or deleted is seen at once."""

    way_out = "See whether the bucket can be reached and written to, or set checkpoint.dir to another place and start again."

    def __init__(self, path: str):
        from etils import epath

        self.path = epath.Path(path)

    def states(self) -> dict[int, str]:
        names: dict[int, set[str]] = {}
        for name in self.files(self.path):
            step, _, rest = name.partition("/")
            if is_step(step) and rest:
                names.setdefault(int(step), set()).add(rest)
        return {step: _state_of(found) for step, found in names.items()}

    def state(self, step: int) -> str:
        return _state_of(self.files(self.path / str(step)))

    def files(self, folder: "AnyPath") -> dict[str, int]:
        root = os.fspath(folder).removeprefix(stores.GCS) + "/"
        with _asking(folder):
            try:
                found = _client().find(root, detail=True)
            except FileNotFoundError:  # an empty folder is no error: without the bucket there is nothing to list in
                raise Unreachable(f"{folder}: there is no such bucket, or it is not shown to these credentials.") from None
        return {
            name.removeprefix(root): about["size"]
            for name, about in found.items()
            if name.startswith(root) and name != root and about["type"] != "directory"
        }

    def read(self, path: "AnyPath") -> bytes:
        with _asking(path):
            return _client().cat_file(os.fspath(path))

    def opened(self, path: "AnyPath") -> BinaryIO:
        with _asking(path):
            return cast(BinaryIO, _Asked(_client().open(os.fspath(path), "rb", block_size=BLOCK), path))

    def file_system(self) -> int | None:
        return None

    def check(self, size: int, keep: int, file_system: int | None) -> None:
        self.sweep()

    def make(self, step: int) -> "AnyPath":
        folder = self.path / str(step)
        # Arrays without a meta.json, which are never restored: Orbax would remove them by means that need more rights.
        self._remove(folder, (name for name in self.files(folder) if name.startswith(f"{ARRAYS}/")))
        return folder

    def write(self, path: "AnyPath", text: str) -> None:
        with _asking(path):
            _client().pipe_file(os.fspath(path), text.encode())

    def sweep(self) -> None:
        for step, state in self.states().items():
            folder = self.path / str(step)
            names = self.files(folder) if state == "unfinished" else {}
            if names and _only_ours(name.partition("/")[0] for name in names):
                self._remove(folder, names)

    def delete(self, step: int) -> None:
        folder = self.path / str(step)
        self._remove(folder, self.files(folder))

    def set_aside(self, steps: Iterable[int], name: str) -> "AnyPath":
        """All are copied, within the bucket, before the first is deleted."""
        target, moved = self.path / name, {step: list(self.files(self.path / str(step))) for step in steps}
        for step, names in moved.items():
            for file in names:
                here, there = self.path / str(step) / file, target / str(step) / file
                with _asking(here):
                    _client().cp_file(os.fspath(here), os.fspath(there))
        for step, names in moved.items():
            self._remove(self.path / str(step), names)
        return target

    def _remove(self, folder: "AnyPath", names: Iterable[str]) -> None:
        # First what says that the step is complete: cut off in the middle, the rest is a leftover that the next save removes.
        paths = sorted(names, key=lambda name: name != COMMITTED)
        with _asking(folder):
            for some in (paths[:1], paths[1:]):
                with contextlib.suppress(FileNotFoundError):  # gone already
                    _client().rm([os.fspath(folder / name) for name in some]) if some else None


class _Asked:
    """A file of a bucket whose reads fail as everything else there does."""

    def __init__(self, file: Any, path: "AnyPath"):
        self._file, self._path = file, path

    def read(self, size: int) -> bytes:
        with _asking(self._path):
            return self._file.read(size)

    def __enter__(self) -> "_Asked":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def at(path: "str | os.PathLike[str]") -> Place:
    """The place that a path names. Raises CheckpointError for one where no checkpoints can be."""
    text = os.fspath(path)
    if problem := stores.refused(text, checkpoints=True):
        raise CheckpointError(f"{text}: {problem[0]}. {problem[1]}")
    return Bucket(text.rstrip("/")) if stores.is_bucket(text) else Folder(Path(text).expanduser().absolute())


def is_step(name: str) -> bool:
    """Whether a folder of this name is that of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def sync(path: "str | os.PathLike[str]") -> None:
    """What was written to a file, or to the list of a folder's files, is on disk. In a bucket it is from the start."""
    if stores.is_bucket(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: "str | os.PathLike[str]") -> None:
    """`sync` of a folder and of all that is in it."""
    for folder, _, names in () if stores.is_bucket(root) else os.walk(root):
        for name in names:
            sync(Path(folder, name))
        sync(folder)


def _state_of(names: Iterable[str]) -> str:
    """That of a step in a bucket, by the names of its objects."""
    there = set(names)
    if COMMITTED not in there:
        return "unfinished" if there else "missing"
    return "complete" if META in there else "damaged"


def _only_ours(entries: Iterable[str]) -> bool:
    """Only what a save itself writes before the end: anything else in the folder was put there by somebody."""
    return all(n.removesuffix(".partial") in (META, DIGESTS) or n.startswith(ARRAYS) for n in entries)


def _existing(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place


def _client() -> Any:
    """The client of Orbax itself (etils.epath has this very one), with its cache of listings off."""
    import fsspec
    from fsspec.config import conf

    for protocol in ("gcs", "gs"):
        conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # a page for each error that it raises as well
    return fsspec.filesystem("gcs", finalize_on_close=True)


@contextlib.contextmanager
def _asking(path: "AnyPath") -> Iterator[None]:
    """The client raises errors of five libraries. FileNotFoundError passes."""
    try:
        yield
    except (FileNotFoundError, Unreachable):
        raise
    except Exception as e:
        said = " ".join(str(e).split())[:300]
        raise Unreachable(
            f"{path}: the bucket cannot be reached, or does not allow it ({type(e).__name__}: {said}). What lies there is as "
            "it was. See that GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login` give the right to "
            "list, read, write and delete objects in it; then start again."
        ) from None
