"""Which places a path may name: a folder on a mounted disk, and for checkpoints a bucket of Google Cloud Storage, gs://.

Needs neither jax nor any client: a config is refused by it before anything starts.
"""

import importlib.util
from pathlib import Path

GCS = "gs://"
SPECIAL = "#[]*?"  # to the client a version of an object, and patterns of names


def is_bucket(place: object) -> bool:
    """Whether it is an address that checkpoints can be written to without a file system."""
    return str(place).startswith(GCS)


def refused(place: str, checkpoints: bool = False) -> tuple[str, str] | None:
    """Why this is no place for what is to be there, and what to do instead; None for a path, and for a bucket that will do.

    checkpoints: whether it is checkpoints that lie there. Anything else is on a mounted file system.
    """
    scheme, there, rest = place.partition("://")
    if not there:
        return None
    if not checkpoints:
        return (
            "object stores are not supported here: checkpoints may lie at gs://, all else is locked, appended to or read piece "
            "by piece",
            "Copy it to, or mount it as, a folder.",
        )
    if scheme != "gs":
        at_s3 = scheme == "s3"
        copied = "`aws s3 sync`" if at_s3 else "the store's own tool"
        mounted = " (Mountpoint for S3 cannot, s3fs can)" if at_s3 else ""
        return (
            f"object stores are not supported but gs://: Orbax writes to no other, and as a path it is a local folder "
            f"'{scheme}:'",
            f"Save to a disk and copy finished steps with {copied}, or mount the bucket as a folder that can rename "
            f"folders{mounted}.",
        )
    if not rest.strip("/") or rest.startswith("/"):
        return "names no bucket", "Write gs://BUCKET/PATH."
    if wrong := [c for c in SPECIAL if c in rest]:
        return f"{wrong[0]!r} has a meaning of its own in names there", "Name a path without it."
    if importlib.util.find_spec("gcsfs") is None:
        return "gs:// needs the package `gcsfs`, which is not installed", "pip install 'jaxtrain[gcs]'"
    return None


def missing(path: str) -> str:
    """Return the rule and the remedy for a folder of checkpoints that does not exist; "" where it does, or is in a store."""
    if path.startswith("hf:") or "://" in path or Path(path).expanduser().exists():
        return ""
    return "no such folder. Name a run's folder, its checkpoints folder, or one checkpoints/STEP."
