"""The storage of checkpoints: a folder on a mounted disk, or a bucket at gs:// or s3://.

Paths are those of etils.epath, which Orbax uses too. epath reads and writes the small files. It does not list, copy, delete or
sync here: it takes an unreadable path for a missing one, lists a bucket folder by folder, copies objects through this machine,
and deletes them by requests whose refusal s3fs drops. The clients of buckets are those that epath opens. A step is complete
when meta.json and Orbax's mark `arrays/commit_success.txt` exist. On a disk Orbax writes `arrays` with the mark under another
name, and renames the folder at the end. A bucket has no rename, so Orbax writes the mark last. Disks and buckets differ in
four ways. A disk has a page cache to sync, atomic renames and limited space. A bucket is listed by prefix instead of by
folder. On a disk, a folder `arrays` was complete once, or a user is copying it. So a step on a disk with `arrays` but without
the mark counts as damaged, and is never removed.
"""

import concurrent.futures
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from etils import epath
from rich.filesize import decimal

from jaxtrain.config import stores

META = "meta.json"
ARRAYS = "arrays"
DIGESTS = "integrity.json"
COMMITTED = f"{ARRAYS}/commit_success.txt"
DELETED = f"{ARRAYS}.deleted"  # arrays of a step on a disk, while they are deleted
BLOCK = 4 << 20  # bytes
THREADS = 8  # for requests to a bucket, and for CRC-32, which runs outside the interpreter's lock at 2 to 6 GB/s each
ELSEWHERE = "or move the folder to another disk and set checkpoint.dir to it, and start again."
# Parts of the error of a save to a disk -> its remedy.
REMEDIES = {
    ("No space left", "quota exceeded", "are free there"): f"Free some space, {ELSEWHERE}",
    ("Permission denied", "not permitted", "Read-only"): f"Let this user write there again, {ELSEWHERE}",
    ("Mount it again",): "Then start again.",
}
CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws, or the role of the machine",
}


class CheckpointError(RuntimeError):
    """An error: a checkpoint cannot be written, found or read, or does not fit the run. The message names a remedy."""


class NotFinite(CheckpointError):
    """An error: parameters are infinite or NaN, so they are not saved. Another attempt at the save would find the same."""


class Damaged(CheckpointError):
    """An error: a step's files are not those that were written, or its parameters are not finite. An older step may be good."""


class Unreachable(CheckpointError, OSError):
    """An error: a request to a bucket failed. The steps in the bucket may be good: none counts as damaged or missing."""


class Storage:
    """A folder of checkpoints, with a folder for each step. Methods raise OSError if they fail; in a bucket, Unreachable."""

    def __init__(self, path: "str | os.PathLike[str]"):
        """Raise CheckpointError for a path that cannot hold checkpoints. Writes nothing."""
        text = os.fspath(path)
        if problem := stores.path_problem(text, checkpoints=True):
            raise CheckpointError(f"{text}: {problem[0]}. {problem[1]}")
        self.is_bucket = stores.is_bucket(text)
        self.path = epath.Path(text.rstrip("/") if self.is_bucket else Path(text).expanduser().absolute())
        self._device: int | None = None  # number (st_dev) of the disk's file system, once `note_device` was called

    def remedy(self, error: str) -> str:
        """Return the remedy, as text, for a save that failed with this error."""
        if self.is_bucket:
            return "Check that the bucket can be reached and written to, and start again."
        remedies = (remedy for fragments, remedy in REMEDIES.items() if any(fragment in error for fragment in fragments))
        return next(remedies, f"Check this disk, {ELSEWHERE}")

    # Reading

    def states(self) -> dict[int, str]:
        """Return step -> 'complete', 'unfinished' or 'damaged', for each step that has a folder."""
        names: dict[int, set[str]] = {}
        if self.is_bucket:
            for name in self.files(self.path):
                step, _, file = name.partition("/")
                if is_step(step) and file:
                    names.setdefault(int(step), set()).add(file)
        elif (root := Path(self.path)).exists():
            names = {int(f.name): _marks(f) for f in root.iterdir() if is_step(f.name) and f.is_dir()}
        return {step: _state_of(file_names) for step, file_names in names.items()}

    def state(self, step: int) -> str:
        """Return the state of one step; 'missing' if it has no folder."""
        folder = self.path / str(step)
        if not self.is_bucket:
            return _state_of(_marks(Path(folder))) if Path(folder).exists() else "missing"
        names = self.files(folder)
        return _state_of(names) if names else "missing"

    def files(self, folder: epath.Path) -> dict[str, int]:
        """Return every file below a folder: path within it -> bytes."""
        if not self.is_bucket:
            sizes: dict[str, int] = {}
            for path in (Path(above, name) for above, _, names in os.walk(folder) for name in names):
                with contextlib.suppress(FileNotFoundError):  # a run that saves there has renamed or deleted it
                    sizes[path.relative_to(folder).as_posix()] = path.lstat().st_size
            return sizes
        scheme, _, root = os.fspath(folder).rstrip("/").partition("://")
        root += "/"
        with _requests(folder) as client:
            try:
                listing = client.find(root, detail=True)
            except FileNotFoundError:  # an empty prefix is no error: there is no bucket to list
                rule = f"{folder}: there is no such bucket, or these credentials may not list it"
                fix = f"name one that exists, as {scheme}://BUCKET/PATH, or set {CREDENTIALS[scheme]}"
                raise Unreachable(f"{rule}. Fix: {fix}, with the right to list objects.") from None
        return {
            name.removeprefix(root): info["size"]
            for name, info in listing.items()
            if name.startswith(root) and name != root and info["type"] != "directory"
        }

    def read(self, path: epath.Path) -> bytes:
        """Return the contents of a small file. Raises FileNotFoundError if the file does not exist."""
        with _requests(path):
            return path.read_bytes()

    def blocks(self, path: epath.Path) -> Iterator[bytes]:
        """Yield the contents of a file, at most `BLOCK` bytes at a time."""
        with _requests(path), path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block

    # Saving

    def write(self, path: epath.Path, text: str) -> None:
        """Write a small file, atomically and durably. An existing file is replaced."""
        if self.is_bucket:
            with _requests(path):
                path.write_text(text, encoding="utf-8")
            return
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _fsync(path.parent)

    def note_device(self) -> None:
        """Remember the file system of the folder, which has checkpoints."""
        self._device = None if self.is_bucket else os.stat(self.path).st_dev

    def check(self, size: int, keep: int) -> None:
        """Prepare a save of `size` bytes: remove the remains of killed saves, and check a disk's free space.

        keep: checkpoint.keep, for the text of the error.

        Raises OSError if the disk has less than `size` bytes free, or another file system is mounted there.
        """
        # If the disk was unmounted during the run, the save would go to a new folder on the disk of the mount point.
        if self._device is not None and (nearest := _nearest(Path(self.path))).stat().st_dev != self._device:
            raise OSError(f"{nearest} is on another file system than the earlier checkpoints: was it unmounted? Mount it again")
        self.sweep()
        free = self._free()
        if free is not None and free < size:
            raise OSError(f"{decimal(free)} are free there, a checkpoint needs {decimal(size)}, and checkpoint.keep is {keep}")

    def room(self) -> int | None:
        """Return the free bytes for the next save, with those of unfinished steps, which it removes; None if not known."""
        free = self._free()
        if free is None:
            return None
        return free + sum(sum(self.files(self.path / str(step)).values()) for step in self._leftovers())

    def _free(self) -> int | None:
        return None if self.is_bucket else free_bytes(Path(self.path))

    def make(self, step: int) -> epath.Path:
        """Return the folder of a step for a save. First remove its integrity.json and, in a bucket, its arrays."""
        folder = self.path / str(step)
        if self.is_bucket:  # Orbax would remove old arrays one by one, and would need more permissions for it
            self._unlink(folder, [name for name in self.files(folder) if name.startswith((f"{ARRAYS}/", DIGESTS))])
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._unlink(folder, [DIGESTS])
        self.note_device()
        return folder

    def sync(self, step: int) -> None:
        """Wait until every file of a step is durable. Objects in a bucket are durable at once."""
        if self.is_bucket:
            return
        for folder, _, names in os.walk(self.path / str(step)):
            for name in names:
                _fsync(Path(folder, name))
            _fsync(folder)
        _fsync(self.path)

    # Deleting

    def sweep(self) -> None:
        """Remove unfinished steps, which killed saves and deletions left. A step with any other file in its folder is kept."""
        for step in self._leftovers():
            self._remove(step)

    def _leftovers(self) -> list[int]:
        """Return the unfinished steps whose folders have only files of a save: the user put any other file there."""
        unfinished = [step for step, state in self.states().items() if state == "unfinished"]
        return [step for step in unfinished if all(_is_save_file(name) for name in self.files(self.path / str(step)))]

    def delete(self, step: int) -> None:
        """Delete a step.

        integrity.json is removed first. Then the mark is removed; on a disk, `arrays` is renamed instead. So a killed deletion
        leaves an unfinished step.
        """
        folder = self.path / str(step)
        self._unlink(folder, [DIGESTS])
        if self.is_bucket:
            self._unlink(folder, [COMMITTED])
        elif (arrays := Path(folder / ARRAYS)).exists():
            deleted = Path(folder / DELETED)
            if deleted.exists():  # left by an earlier deletion
                shutil.rmtree(deleted)
            arrays.rename(deleted)
            _fsync(folder)
        self._remove(step)

    def set_aside(self, steps: Iterable[int], name: str) -> epath.Path:
        """Move steps to the new folder `name` and return its path. In a bucket each step is copied, then deleted."""
        target = self.path / name
        if not self.is_bucket:
            target.mkdir()
        for step in steps:
            old, new = self.path / str(step), target / str(step)
            if not self.is_bucket:
                old.rename(new)
                continue
            with _requests(old) as client:  # epath would copy through this machine
                in_threads(lambda file, a=old, b=new: client.cp_file(os.fspath(a / file), os.fspath(b / file)), self.files(old))
            self.delete(step)
        return target

    def _remove(self, step: int) -> None:
        folder = self.path / str(step)
        if self.is_bucket:
            self._unlink(folder, self.files(folder))
        else:
            shutil.rmtree(folder)

    def _unlink(self, folder: epath.Path, names: Iterable[str]) -> None:
        """Delete those files of a folder that exist, durably; in a bucket as many as it allows, before an error is raised."""
        if not self.is_bucket:
            for name in names:
                Path(folder / name).unlink(missing_ok=True)
            return _fsync(folder)
        with _requests(folder) as client:

            def remove(name: str) -> None:
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    # A request of its own. To one for several objects, S3 may answer with status 200 and refuse single ones,
                    # and s3fs drops those errors.
                    client.rm_file(os.fspath(folder / name))

            in_threads(remove, names)
        return None


def in_threads[Item, Result](act: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of `act` for all items, from threads. Every call has ended before the first error is raised."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        calls = [pool.submit(act, item) for item in items]
    return [call.result() for call in calls]


def is_step(name: str) -> bool:
    """Return whether this is the name of a step's folder: a number without leading zeros."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


@contextlib.contextmanager
def _requests(path: epath.Path) -> Iterator[Any]:
    """Yield the client of a bucket; None for a disk. Errors of a bucket become Unreachable, except FileNotFoundError."""
    if not stores.is_bucket(path):
        yield None
        return
    scheme = os.fspath(path).partition("://")[0]
    try:
        yield open_client(scheme)
    except (FileNotFoundError, Unreachable):
        raise
    except Exception as e:  # errors of five libraries
        text = " ".join(str(e).split())[:300]
        raise Unreachable(
            f"{path}: a request to the bucket failed ({type(e).__name__}: {text}). Some files may be written, copied or "
            f"deleted already; complete steps are unchanged. Fix: set {CREDENTIALS[scheme]}, with the right to list, read, "
            "write and delete objects; then start again."
        ) from None


def open_client(scheme: str) -> Any:
    """Return the fsspec client that epath uses for gs:// or s3://, without its cache of listings."""
    import fsspec
    from fsspec.config import conf

    protocol, options = ("gcs", {"finalize_on_close": True}) if scheme == "gs" else (scheme, {})  # as epath opens them
    conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # gcsfs logs a page for each error, in addition to raising it
    return fsspec.filesystem(protocol, **options)


def _marks(folder: Path) -> set[str]:
    """Return those names in a step's folder on a disk that decide the step's state (`_state_of`).

    The folder is a path of pathlib, because epath treats an unreadable path as one that does not exist.
    """
    return {name for name in (META, COMMITTED, DIGESTS, ARRAYS) if (folder / name).exists()}


def _state_of(names: Iterable[str]) -> str:
    marks = set(names)
    if COMMITTED in marks:
        return "complete" if META in marks else "damaged"
    # integrity.json is written when a step is complete, and is the first file that a deletion removes. ARRAYS is a folder on a
    # disk, which Orbax renames into place when it is complete, and a deletion renames before it removes a file.
    return "damaged" if DIGESTS in marks or ARRAYS in marks else "unfinished"


def _is_save_file(name: str) -> bool:
    """Return whether a save writes this file into a step's folder. name: path within the folder."""
    first = name.partition("/")[0]
    return first.removesuffix(".partial") in (META, DIGESTS) or first.startswith(ARRAYS)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may write on the disk of a folder, or of its nearest parent that exists.

    None: the file system does not tell, as some network file systems. A quota counts if the file system counts it itself.
    """
    usage = shutil.disk_usage(_nearest(path))
    return usage.free if usage.total else None


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _fsync(path: "str | os.PathLike[str]") -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
