"""Locales that are not UTF-8, for child processes."""

import functools
import os
import shutil
import subprocess
import tempfile

import pytest

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@functools.cache
def latin() -> dict[str, str]:
    """Return the variables of an ISO-8859-1 locale, made for this process. Skips the test if the system cannot make one."""
    folder = tempfile.mkdtemp(prefix="jaxtrain-locale-")
    command = ["localedef", "-f", "ISO-8859-1", "-i", "en_US", f"{folder}/en_US.ISO-8859-1"]
    if not shutil.which("localedef") or subprocess.run(command, capture_output=True).returncode > 1:
        pytest.skip("localedef makes no en_US.ISO-8859-1 here")
    return {"LOCPATH": folder, "LC_ALL": "en_US.ISO-8859-1"}


def environ(locale: dict[str, str]) -> dict[str, str]:
    """Return the environment of a child process in a locale, with no other setting of text."""
    text = ("LC_", "LANG", "LOCPATH", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONPATH", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(text)}
    return {**kept, "JAX_PLATFORMS": "cpu", **locale}
