"""The text of a command: UTF-8 in every locale, and standard streams that end no command. Works on Python 3.12 or later."""

import codecs
import fcntl
import io
import locale
import os
import sys
from typing import Any


def set_up_streams() -> None:
    """Set the encodings of this process, its arguments and its standard streams. Call it first in a process.

    In a locale that is not UTF-8, this function starts the process again in Python's UTF-8 mode.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for child processes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    sys.argv[1:] = map(decode_argument, sys.argv[1:])
    for number in (0, 1, 2):
        if not _is_open(number):  # a file that is opened later must not get this number
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")  # empty
    elif not os.environ.get("PYTHONIOENCODING"):
        sys.stdin.reconfigure(encoding=console_encoding(0), errors="surrogateescape")  # pyright: ignore
    sys.stdout = sys.__stdout__ = _output(sys.stdout, 1)
    sys.stderr = sys.__stderr__ = _output(sys.stderr, 2)


def _is_open(number: int) -> bool:
    """Return whether a standard stream can be used. Where one is closed, bash opens its script in its place, to read."""
    try:
        access = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return False
    return number == 0 or access != os.O_RDONLY


def decode_argument(word: str) -> str:
    """Return an argument as text. What is not UTF-8 is in the encoding of the terminal, unless it is the path of a file."""
    if word.isascii() or os.path.lexists(word.rpartition("=")[2]):
        return word
    raw = os.fsencode(word)
    for encoding in ("utf-8", locale.getencoding()):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    return word


def console_encoding(number: int) -> str:
    """Return the encoding of a standard stream: the locale's on a terminal, UTF-8 in files and pipes.

    In the locale C, Python itself assumes that the terminal is of UTF-8, unless PYTHONUTF8=0.
    """
    try:
        encoding = codecs.lookup(locale.getencoding()).name
    except LookupError:
        encoding = "utf-8"
    assumed = encoding == "ascii" and "utf8" not in sys._xoptions  # this process was not started again
    return encoding if os.isatty(number) and not assumed else "utf-8"


class Output(io.FileIO):
    """The bytes of a standard stream. After its reader has ended (`| head -1`), what is written is dropped."""

    ended = False

    def write(self, data):  # noqa: ANN001, ANN201  # pyright: ignore
        try:
            return super().write(data)
        except BrokenPipeError:
            self.ended = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def reader_ended(stream: object) -> bool:
    """Return whether the reader of a stream that `set_up_streams` made has ended."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "ended", False)


def printable(text: str, stream: Any) -> str:
    """Return a text with \\xNN for what the encoding of a stream lacks. A program's own streams may refuse such characters."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _output(stream: Any, number: int) -> io.TextIOWrapper:
    """Return a stream for this descriptor that writes \\xNN for what its encoding lacks. stream: Python's own; None: closed."""
    encoding = stream.encoding if stream and os.environ.get("PYTHONIOENCODING") else console_encoding(number)
    raw = Output(number, "w", closefd=False)
    direct = stream is not None and stream.write_through  # with PYTHONUNBUFFERED
    buffer = raw if direct else io.BufferedWriter(raw)
    lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=lines, write_through=direct)  # pyright: ignore
