"""The nodes of a run, and the processes that the first node starts on the other nodes by ssh."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.runtime.addresses import PORT, brackets_missing, host_port, is_ipv6, without_brackets
from jaxtrain.runtime.messages import Refusal, say
from jaxtrain.runtime.variables import COMMIT, DIRTY, EXPECTED, LAUNCHED, RESTART

SSH = "ssh -n -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15"
PATIENCE_S = 60.0
UNREACHED = 255  # ssh's own exit code
REFUSED = 2
# The variables that are sent to other nodes. For all other variables, a node has its own environment.
SENT = (RESTART, LAUNCHED, "JAXTRAIN_CUDA", "JAXTRAIN_PREFLIGHT_ALLOW")
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Nodes:
    """The nodes of a run, this node first, and the address at which all nodes connect to process 0."""

    def __init__(self, text: str):
        """Read HOST[:PORT],HOST,... Raises Refusal for any other text."""

        def refuse(rule: str, fix: str = "--nodes=node1,node2") -> Refusal:
            return Refusal("--nodes", text, rule, fix)

        self.text = text
        words = text.split(",")
        if len(words) < 2:
            raise refuse("names one node", "leave --nodes out to stay on this one")
        names: list[str] = []
        port = ""
        for word in words:
            user, host, own_port = read_node(word)
            if not host and (bracketed := brackets_missing(word.rpartition("@")[2])):
                bracketed = bracketed.rpartition(":")[0] if names else bracketed  # only the first node has a port
                fixed = ",".join(word[: word.rfind("@") + 1] + bracketed if each == word else each for each in words)
                raise refuse(f"{word!r} is an IPv6 address, which needs brackets before its port", f"--nodes={fixed}")
            if not host:
                raise refuse(f"{word!r} is no host")
            if own_port and names:
                raise refuse(f"only the first node has a port, and ssh reaches {host}", f"write {host} without a port")
            if user + host in names:
                raise refuse(f"names {host} twice", f"write {host} once")
            names.append(user + host)
            port = port or own_port
        self.hosts = [words[0], *names[1:]]  # the others as ssh takes them: an IPv6 address without brackets
        self.host = names[0].rpartition("@")[2]
        port = port or str(PORT)
        if not 0 < int(port) < 65536:
            first = names[0].removesuffix(self.host) + host_port(self.host, PORT)
            raise refuse(f"{port} is no port", f"--nodes={','.join([first, *words[1:]])}")
        self.coordinator = host_port(self.host, port)

    def arguments(self, index: int) -> list[str]:
        """Return the command-line options of the process with this index: coordinator, number of processes, and index."""
        return [f"--coordinator={self.coordinator}", f"--num-processes={len(self.hosts)}", f"--process-id={index}"]

    def announce(self) -> None:
        """Print the address at which other nodes connect to process 0, unless this node is known to have it.

        For a loopback address, print a warning, because each other node would connect to itself.
        """
        here = socket.gethostname()
        if self.host in ("localhost", "::1") or self.host.startswith("127."):
            say(f"--nodes = {self.text}: on every node {self.host} is that node itself. Fix: name this node {here}.")
        elif not is_here(self.host):
            say(f"process 0 runs here, on {here}, and the others look for it at {self.host}")


def read_node(text: str) -> tuple[str, str, str]:
    """Return ("USER@", host, port) of USER@HOST:PORT, each "" if it lacks; the host is "" if the text names no node.

    A host is a name or an address; an IPv6 address may be without brackets if no port follows it. They are removed.
    """
    user, at, address = text.rpartition("@")
    name = "[A-Za-z0-9][A-Za-z0-9._-]*"
    found = re.fullmatch(rf"(\[.+\]|{name})(?::([0-9]{{1,5}}))?", address)
    host, port = (address, "") if is_ipv6(address) else found.groups("") if found else ("", "")
    host = without_brackets(host)
    known = is_ipv6(host) or re.fullmatch(name, host)
    return (user + at, host, port) if known and (not at or re.fullmatch(name, user)) else ("", "", "")


def is_here(host: str) -> bool:
    """Return whether `host` is this node: its host name, or an address to which a socket can be bound."""
    if host in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def remote_line(root: Path, words: list[str], environ: Mapping[str, str]) -> str:
    """Return the shell line that runs run.sh on another node, without restarts.

    The other node compares its commit and uncommitted changes with those of this node, which the line passes.
    """
    variables = {"JAXTRAIN_RESTARTS": "0", EXPECTED: f"{environ.get(COMMIT, '')} {environ.get(DIRTY, '')}"}
    variables |= {name: environ[name] for name in SENT if environ.get(name)}
    assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"cd {shlex.quote(os.getcwd())} && env {assigned} {shlex.join([str(root / 'run.sh'), *words])}"


def ssh_command(environ: Mapping[str, str]) -> list[str]:
    """Return the command that reaches a node: JAXTRAIN_SSH, or by default ssh. Raises Refusal if the program is missing."""
    text = environ.get("JAXTRAIN_SSH") or SSH
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Refusal("JAXTRAIN_SSH", text, f"cannot be read ({error})", "unset it for ssh") from None
    if not words or shutil.which(words[0]) is None:
        raise Refusal("JAXTRAIN_SSH", text, "names no program on this node", "install ssh, or name another program")
    return words


def _ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


class RemoteProcess:
    """A command on another node, and the ssh process that waits for the end of the command."""

    def __init__(self, host: str, line: str, environ: Mapping[str, str], patience_s: float):
        self.host = host
        self._patience_s = patience_s
        self._failed_at: float | None = None
        # ssh ignores signals to the process group. The remote process ends with the other processes of the run, then ssh ends.
        self._ssh = subprocess.Popen([*ssh_command(environ), host, line], stdin=subprocess.DEVNULL, preexec_fn=_ignore_signals)

    def failed(self) -> bool:
        """Return whether this node's trainer should be ended, because the other node's process has failed.

        A trainer detects the loss of another process by itself, and saves a checkpoint if it can. So the result is True only
        `patience_s` after the failure. If the other node refused the command or is unreachable, the result is True at once,
        because it is useless to wait.
        """
        code = self._ssh.poll()
        if not code:
            return False
        self._failed_at = self._failed_at or time.monotonic()
        patience_s = 0.0 if code in (REFUSED, UNREACHED) else self._patience_s
        return time.monotonic() - self._failed_at >= patience_s

    def end(self, deadline: float) -> int | None:
        """Return the exit code on the other node. If its process has not ended by `deadline`, end ssh and return None."""
        try:
            return exit_code(self._ssh.wait(timeout=max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
            return None


def exit_code(returncode: int) -> int:
    """Return the exit code that a shell reports for a returncode of subprocess: after a signal, 128 + its number."""
    return 128 - returncode if returncode < 0 else returncode


def verdict(code: int, ends: Mapping[str, int | None], stopped: bool) -> int:
    """Return the exit code of a run on several nodes, and report nodes that ended differently from this node.

    A refusal, a preflight fault (3) or a hang (124) on another node overrides the code of this node. Any other failure of
    another node overrides only 0, and 143 (SIGTERM) if no signal asked the supervisor to end. An unreachable node turns 0 and
    143 into 75.

    Args:
        code: the exit code on this node.
        ends: the exit code on each other node, None if it has not ended.
        stopped: whether a signal asked the supervisor to end.
    """
    for host, end in ends.items():
        if end is None:
            say(f"{host} had not ended {PATIENCE_S:.0f} s after this node; it is not stopped")
        elif end == UNREACHED:
            say(f"{host}: ssh could not reach it, or lost it")
        elif end not in (0, code):
            say(f"{host} ended with {end}")
        if end in (REFUSED, 3, 124):  # Nothing was started there; or a hang there ended this process, which lost a process.
            code = end
        elif end == UNREACHED and code in (0, 143):
            code = 75
        elif end and end != UNREACHED and (code == 0 or (code == 143 and not stopped)):
            code = end
    return code
