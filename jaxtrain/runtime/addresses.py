"""Addresses of nodes: HOST:PORT, with an IPv6 address in brackets."""

import ipaddress
import re

PORT = 12321  # of process 0, where nothing gives another


def is_ipv6(text: str) -> bool:
    """Return whether the text is an IPv6 address without brackets, with or without a zone, as fe80::1%eth0."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def without_brackets(host: str) -> str:
    """Return the IPv6 address in [...], as ssh takes it. Other text is returned as it is."""
    inside = host[1:-1]
    return inside if host == f"[{inside}]" and is_ipv6(inside) else host


def host_port(host: str, port: int | str) -> str:
    """Return HOST:PORT, or [HOST]:PORT for an IPv6 address with or without brackets."""
    bare = without_brackets(host)
    return f"[{bare}]:{port}" if is_ipv6(bare) else f"{host}:{port}"


def brackets_missing(text: str) -> str:
    """Return an address with the brackets that it lacks: fd00::1:29500 -> [fd00::1]:29500, fd00::1 -> [fd00::1]:12321.

    Returns "" if the text lacks none.
    """
    host, _, port = text.rpartition(":")
    if is_ipv6(host) and re.fullmatch(r"[0-9]{4,5}", port):
        return host_port(host, port)
    return host_port(text, PORT) if is_ipv6(text) else ""
