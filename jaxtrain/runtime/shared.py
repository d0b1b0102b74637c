"""Check that the processes of a run share a folder: what one writes there, the others see, and they can write there too."""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.runtime.peers import Peers
from jaxtrain.runtime.words import error_text, process_list

PROBE = ".shared-"  # begins the name of the folder that process 0 makes
SEE_S = 5.0  # a network file system may show a new folder some seconds late
UNSEEN = "unseen"


def find_unshared(folders: Mapping[str, Path], peers: Peers, timeout_s: float) -> dict[str, str]:
    """Return name -> why, for each folder that the processes do not share; the same on all processes.

    All processes call it together. Process 0 makes a folder of a new name in each folder, and each other process a file in it,
    as in a save. All are removed, and so are the folders that did not exist before.

    Raises:
      PeerLost: a process did not answer within `timeout_s`.
    """
    if peers.count == 1:
        return {}
    paths = {name: Path(os.path.abspath(folder)) for name, folder in folders.items()}
    new_folders = [p for path in paths.values() for p in (path, *path.parents) if not p.exists()]
    token = peers.gather("probe", PROBE + uuid.uuid4().hex, timeout_s)[0]
    probes = {name: path / f"{token}-{i}" for i, (name, path) in enumerate(paths.items())}  # two names may be of one folder
    first = peers.process_index == 0
    try:
        errors = {name: _make_probe(probe) for name, probe in probes.items()} if first else {}
        errors = json.loads(peers.gather("probe made", json.dumps(errors), timeout_s)[0])
        if not first:
            errors = {name: "" if errors[name] else _try_probe(probe, peers.process_index) for name, probe in probes.items()}
        view = [errors, {name: str(path) for name, path in paths.items()}]
        views = [json.loads(each) for each in peers.gather("probe seen", json.dumps(view), timeout_s)]
    finally:
        for probe in probes.values() if first else ():
            shutil.rmtree(probe, ignore_errors=True)
    rules = {name: rule for name in paths if (rule := _rule(name, views, peers))}
    # Of a shared folder only process 0: another process would remove it when process 0 has made it again for the run.
    for folder in new_folders if rules or first else ():
        with contextlib.suppress(OSError):  # another process uses it, or has removed it
            folder.rmdir()
    return rules


def _make_probe(probe: Path) -> str:
    why = ""
    for _ in range(2):  # a run that ends may remove a parent that it has made
        try:
            probe.mkdir(parents=True)
            return ""
        except OSError as error:
            why = error_text(error)
    return why


def _try_probe(probe: Path, index: int) -> str:
    """Write a file into the probe. Return UNSEEN if the probe does not appear in time, the system's text of an error, or ""."""
    deadline = time.monotonic() + SEE_S
    file = probe / str(index)
    while True:
        try:
            # On a network file system this asks the server for the folder, which may be newer than what the node remembers.
            probe.parent.mkdir(parents=True, exist_ok=True)
            os.listdir(probe.parent)
            file.touch()
            file.unlink()
            return ""
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return UNSEEN
        except OSError as error:
            return error_text(error)
        time.sleep(0.2)


def _rule(name: str, views: list[tuple[dict[str, str], dict[str, str]]], peers: Peers) -> str:
    """Return why a folder is not shared; "" if it is. views: (name -> error, name -> absolute path) of each process."""
    failing = [i for i, (errors, _) in enumerate(views) if errors[name]]
    if not failing:
        return ""
    i = failing[0]
    error, path = views[i][0][name], views[i][1][name]
    if error == UNSEEN:
        rule = f"{peers.name(i)} does not see in {path} what {peers.name(0)} writes in {views[0][1][name]}"
    else:
        rule = f"{peers.name(i)} cannot write to {path} ({error})"
    return rule + (f"; the same holds for {process_list(failing[1:])}" if len(failing) > 1 else "")
