"""How an alert leaves the process: by HTTP, to a command, to a function; no error tells a secret."""

from __future__ import annotations

import base64
import json
import random
import re
import shlex
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from gradsentinel._version import __version__
from gradsentinel.errors import ConfigurationError
from gradsentinel.wording import printable

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds between attempts: the first ones, and at most."""
_HURRIED_WAIT = 0.1
_AGAIN = frozenset({408, 425, 429})
"""Refusals that may be none a little later; so may everything from 500."""
_LONGEST_ANSWER = 1 << 16
_ADDRESS = re.compile(r"(\w+://)[^\s/'\"<>]*@?[^\s'\"<>]*")
_PATH = re.compile(r"(url:? )\S+", re.IGNORECASE)


class DeliveryError(Exception):
    """An alert did not arrive; the message holds no secret."""


class Delivery(Protocol):
    """Brings an alert somewhere."""

    target: str
    """Where to, as it may be told."""

    def deliver(self, alert: Mapping[str, Any], hurry: threading.Event) -> None:
        """Deliver an alert, or raise; once `hurry` is set there is no time to wait between attempts."""


class Post:
    """POSTs JSON; tries again after errors that may pass. A redirection could leak headers: none is followed.

    Args:
        url: http or https; a name and password in it become a header.
        headers: further headers.
        timeout: seconds that the server may take for each answer.
        retries: further attempts.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, retries: int) -> None:
        parts = _split(url)
        self.target = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        self._headers = {
            "Content-Type": "application/json",
            "User-Agent": f"gradsentinel/{__version__}",
            **headers,
        }
        if parts.username is not None:
            if any(name.lower() == "authorization" for name in headers):
                raise ConfigurationError(
                    "url= holds a name and password and headers= an Authorization: give one of the two"
                )
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(words.encode()).decode()}"
        netloc = parts.netloc.rpartition("@")[2]
        self._url = urlunsplit((parts.scheme, netloc, parts.path or "/", parts.query, ""))
        self._timeout, self._retries = timeout, retries
        self._opener = urllib.request.build_opener(_NoRedirection)
        self._chance = random.Random()  # noqa: S311 - jitter; the program's own random state is not touched

    def deliver(self, alert: Mapping[str, Any], hurry: threading.Event) -> None:
        """Send the alert, with growing waits between the attempts."""
        body = json.dumps(alert, allow_nan=False).encode()
        for attempt in range(self._retries + 1):
            problem, asked = self._attempt(body)
            if problem is None:
                return
            if asked is None or attempt == self._retries:
                break
            wait = max(asked, min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * self._chance.uniform(0.5, 1.0))
            if hurry.wait(wait):
                threading.Event().wait(_HURRIED_WAIT)
        raise DeliveryError(f"{self.target}: {problem}")

    def _attempt(self, body: bytes) -> tuple[str | None, float | None]:
        """Try once; returns what went wrong, and the seconds to wait at least, None if it is hopeless."""
        request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")  # noqa: S310 - http(s) only
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                answer.read(_LONGEST_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                again = error.code in _AGAIN or error.code >= 500
                wait = _seconds(error.headers.get("Retry-After")) if again else None
                return f"it answered {error.code}", wait
        except urllib.error.URLError as error:
            return _reason(error.reason), 0.0
        except (OSError, ValueError) as error:  # a timeout while reading; a broken answer
            return _reason(error), 0.0
        except Exception as error:  # noqa: BLE001 - http.client has exceptions of its own
            return type(error).__name__, 0.0
        return None, None


class Command:
    """Runs a program without a shell, with the alert as JSON on its standard input; once.

    Args:
        command: the program and its arguments, in one string or as a list.
        timeout: seconds after which it is killed.
    """

    def __init__(self, command: str | Sequence[str], timeout: float) -> None:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        if not words:
            raise ConfigurationError("command= is empty; name a program that reads JSON from stdin")
        found = shutil.which(words[0])
        if found is None:
            raise ConfigurationError(
                f"command=: there is no program {printable(words[0])}; no shell is used: name an executable"
            )
        self._words, self._timeout = [found, *words[1:]], timeout
        self.target = Path(found).name

    def deliver(self, alert: Mapping[str, Any], hurry: threading.Event) -> None:
        """Run the program."""
        del hurry
        text = json.dumps(alert, allow_nan=False).encode()
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command, without a shell
                self._words,
                input=text,
                timeout=self._timeout,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise DeliveryError(f"{self.target}: killed after {self._timeout:g} s") from None
        except OSError as error:
            raise DeliveryError(f"{self.target}: {error.strerror or type(error).__name__}") from None
        if done.returncode:
            raise DeliveryError(f"{self.target}: exit code {done.returncode}")


class Call:
    """Calls a function with the alert; once."""

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        if not callable(function):
            raise ConfigurationError("fn= must be a function that takes the alert, a dict")
        self._function = function
        self.target = printable(getattr(function, "__name__", type(function).__name__))

    def deliver(self, alert: Mapping[str, Any], hurry: threading.Event) -> None:
        """Call the function."""
        del hurry
        try:
            self._function(dict(alert))
        except Exception as error:  # noqa: BLE001 - the user's own function
            raise DeliveryError(f"{self.target}: {without_addresses(error)}") from None


def without_addresses(error: BaseException) -> str:
    """Return an exception in words, without paths and queries of addresses: they often are passwords."""
    if isinstance(error, DeliveryError):  # ours: a sentence without secrets already
        return printable(error)[:300]
    text = _ADDRESS.sub(r"\1...", f"{type(error).__name__}: {error}")
    return printable(_PATH.sub(r"\1...", text))[:300]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def _split(url: str) -> Any:
    """Return the parts of an address; raises ConfigurationError without repeating it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        known = parts.scheme in {"http", "https"} and bool(parts.hostname)
    except (TypeError, ValueError, AttributeError):
        known = False
    if not known or not str(url).isprintable() or " " in url:
        raise ConfigurationError(
            "url= must be an address such as https://host/path (not repeated here: it may hold a password)"
        )
    return parts


def _seconds(text: str | None) -> float:
    """Return what a server asks for in Retry-After, as far as it is sensible."""
    try:
        return min(_LONGEST_WAIT, max(0.0, float(text or 0.0)))
    except ValueError:
        return 0.0


def _reason(reason: Any) -> str:
    """Return why there was no answer, in words that cannot hold the address."""
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return str(reason.strerror)
    return type(reason).__name__
