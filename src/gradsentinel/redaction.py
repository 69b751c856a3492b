"""Text that can be shown to strangers: without users, machines, paths, addresses, and what variables hold."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress

_HARMLESS = re.compile(
    r"true|false|on|off|yes|no|none|enable|disable|strict|silent"
    r"|\d{1,9}(?:\.\d+)?|:\d+:\d+|\d+(?:[,-]\d+)*"
    r"|[a-z_]+:(?:true|false|\d+)(?:,[a-z_]+:(?:true|false|\d+))*|[a-z]+=\d+(?:,[a-z]+=\d+)*",
    re.IGNORECASE,
)
"""Switches, numbers and lists of them: they name nothing."""
_PATH = re.compile(
    r"\b[a-z][a-z0-9+.-]*://[^\s'\"`,;)|]+"
    r"|(?<=['\"`])(?:~|[a-z]:)?[/\\](?![/\\\s])[^'\"`\n]*(?=['\"`])"  # in quotes, with spaces
    r"|(?<![\w.<~/\\])(?:~|[a-z]:)?[/\\](?![/\\\s])[^\s'\"`,;:()\[\]{}|<>]*",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"  # IPv4; a version of four numbers, too
    r"|(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}\b|(?<![\w:])[0-9a-f:]*::[0-9a-f:]+"  # IPv6
    r"|(?<![\w.-])(?![\w.-]*\.py:)[a-z][\w-]*(?:\.[\w-]+)*:\d{4,5}\b",  # a host's name and port
    re.IGNORECASE,
)
_USERS = ("USER", "LOGNAME", "USERNAME")
_HOSTS = ("HOSTNAME", "MASTER_ADDR")
_SHORTEST = 3


def is_harmless(value: str) -> bool:
    """Return True for a variable's value that is a switch, a number, or a list of them."""
    return _HARMLESS.fullmatch(value.strip()) is not None


def harmless_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with their values where these name nothing; of the others, that they are set."""
    return {name: value if is_harmless(value) else "(set)" for name, value in variables.items()}


def redact(text: str, *, hide: Iterable[str] = ()) -> str:
    """Return a text without this user, this machine, paths, addresses, and values that are to be hidden.

    Rather too much than too little: a version of four numbers goes as an address would. Values of `hide` that
    are shorter than three letters, or harmless, stay.
    """
    text = _PATH.sub("<path>", text)
    words = {value: "<hidden>" for value in hide if len(value) >= _SHORTEST and not is_harmless(value)}
    words |= dict.fromkeys(_hosts(), "<host>") | dict.fromkeys(_users(), "<user>")
    for value in sorted(words.keys() - {""}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w<]){re.escape(value)}(?![\w>])", words[value], text)
    return _ADDRESS.sub("<address>", text)


def _hosts() -> set[str]:
    names = {socket.gethostname(), platform.node(), *(os.environ.get(name, "") for name in _HOSTS)}
    return names | {name.partition(".")[0] for name in names}


def _users() -> set[str]:
    names = {os.environ.get(name, "") for name in _USERS}
    with suppress(Exception):  # a container's user may have no name
        names.add(getpass.getuser())
    return names
