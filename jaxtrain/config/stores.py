"""Addresses of object stores, and checks of the paths of a config. The checks import no client of a store.

A path names a folder on a mounted disk. Checkpoints may also be in a bucket, at gs:// (Google) or s3:// (Amazon S3 and
compatible stores).
"""

import difflib
import importlib.util
from pathlib import Path

from jaxtrain.config import installed

BUCKETS = {"gs://": "gcsfs", "s3://": "s3fs"}  # scheme -> package of its client, which an extra installs
EXTRAS = {"gcsfs": "gcs", "s3fs": "s3"}
SPECIAL = "#[]*?"  # characters that clients read as an object's version or as patterns of names


def is_bucket(path: object) -> bool:
    """Return whether a path is the address of a store that checkpoints can be in."""
    return str(path).startswith(tuple(BUCKETS))


def path_problem(path: str, checkpoints: bool = False) -> tuple[str, str] | None:
    """Return the broken rule and the remedy for a path that cannot be used; None if the path can be used.

    checkpoints: whether the path is for checkpoints. All other files must be on a mounted file system.
    """
    scheme, separator, bucket_path = path.partition("://")
    one_slash = path.startswith(("gs:", "s3:")) and not is_bucket(path)  # pathlib.Path leaves a single one, too
    if not separator and not one_slash:
        return None
    if one_slash and checkpoints:
        return "names a local folder, not a bucket", f"Write {path[:2]}://BUCKET/PATH."
    if not checkpoints:
        return (
            "object stores are not supported here: checkpoints may be at gs:// or s3://, all other files are locked, appended "
            "to or memory-mapped",
            "Name a folder; a store can be mounted as one.",
        )
    package = BUCKETS.get(f"{scheme}://")
    if package is None:
        return (
            f"object stores other than gs:// and s3:// are not supported: Orbax would write to a local folder '{scheme}:'",
            "Save to a disk and copy finished steps with the store's own tool, or mount the store as a folder.",
        )
    if not bucket_path.strip("/") or bucket_path.startswith("/"):
        return "names no bucket", f"Write {scheme}://BUCKET/PATH."
    if special_chars := [c for c in SPECIAL if c in bucket_path]:
        return f"{special_chars[0]!r} has a special meaning in names there", "Name a path without it."
    if importlib.util.find_spec(package) is None:
        rule = f"{scheme}:// needs the package `{package}`, which is not installed"
        return rule, installed.install_remedy(EXTRAS[package])
    return None


NAME_WEIGHTS = "Name a run's folder, its checkpoints folder, one checkpoints/STEP, a Hugging Face folder, or hf:NAME."


def missing_folder(path: str) -> str:
    """Return the rule and the remedy for a folder that does not exist; "" if it exists, or the path is a URL or hf:NAME."""
    folder = Path(path).expanduser()
    if path.startswith("hf:") or "://" in path or folder.exists():
        return ""
    siblings = [each.name for each in folder.parent.glob("*/")]
    if near := difflib.get_close_matches(folder.name, siblings, 1):
        return f"no such folder. Did you mean {Path(path).with_name(near[0])}?"
    return f"no such folder. {NAME_WEIGHTS}"
