"""The routes of the tab as WSGI applications: GET only, JSON and the files of the front end."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from gradsentinel.views.files import ViewError

if TYPE_CHECKING:
    from gradsentinel.views.library import Views

logger = logging.getLogger("gradsentinel")

Application = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]
Query = Mapping[str, list[str]]

_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-cache, must-revalidate"),
    ("Content-Security-Policy", "default-src 'self'; object-src 'none'; frame-ancestors 'self'"),
    ("Referrer-Policy", "no-referrer"),
]
_COMPRESSED_FROM = 1 << 10
_MOST_FIELDS = 300
_STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}


class BadRequest(Exception):
    """The query makes no sense; the message says why."""


def assets() -> dict[str, Application]:
    """Return a route for each file of the front end; no other file can be asked for."""
    found: dict[str, Application] = {}
    for file in resources.files("gradsentinel.views").joinpath("assets").iterdir():
        kind = _TYPES.get(Path(file.name).suffix)
        if kind is not None and file.is_file():
            found[f"/{file.name}"] = partial(_serve, partial(_asset, file, kind))
    return found


def data_routes(root: Path | None) -> dict[str, Application]:
    """Return the routes that answer with JSON about the runs under a directory."""
    library = _Library(root)
    answers: dict[str, Callable[[Views, Query], Any]] = {
        "/runs": lambda views, _: views.runs(),
        "/run": lambda views, query: views.run(_one(query, "name"), _one(query, "lang", "en")),
        "/timeline": _timeline,
        "/incidents": lambda views, query: views.incidents(_one(query, "name"), _one(query, "lang", "en")),
        "/incident": lambda views, query: views.incident(
            _one(query, "name"), _one(query, "id"), _one(query, "lang", "en")
        ),
        "/compare": lambda views, query: views.compare(
            query.get("name", []), _one(query, "tag", "loss"), _whole(query, "points", 800) or 800
        ),
    }
    return {route: partial(_serve, partial(_data, library, answer)) for route, answer in answers.items()}


class _Library:
    """The views, made when they are asked for first: they import torch."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._views: Views | None = None
        self._lock = threading.Lock()

    def views(self) -> Views:
        if self._root is None:
            raise ViewError("TensorBoard was started without a log directory of this machine")
        with self._lock:
            if self._views is None:
                from gradsentinel.views.library import Views  # noqa: PLC0415 - as above

                self._views = Views(self._root)
        return self._views


def _timeline(views: Views, query: Query) -> Any:
    return views.timeline(
        _one(query, "name"),
        query.get("tag"),
        _whole(query, "start"),
        _whole(query, "stop"),
        _whole(query, "points", 800) or 800,
    )


def _data(library: _Library, answer: Callable[[Views, Query], Any], query: Query) -> tuple[str, bytes]:
    body = json.dumps(
        answer(library.views(), query), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    # Names of files that are not UTF-8 hold lone surrogates, which no browser can put into an address.
    return _TYPES[".json"], body.encode(errors="replace")


def _asset(file: Any, kind: str, _: Query) -> tuple[str, bytes]:
    return kind, file.read_bytes()


def _serve(
    answer: Callable[[Query], tuple[str, bytes]],
    environ: Mapping[str, Any],
    start_response: Callable[..., Any],
) -> Iterable[bytes]:
    """Answer one request; what goes wrong is told as JSON, and logged if it is our fault."""
    method = environ.get("REQUEST_METHOD", "GET")
    code, kind = 200, _TYPES[".json"]
    extra: list[tuple[str, str]] = []
    try:
        if method not in {"GET", "HEAD"}:
            extra.append(("Allow", "GET, HEAD"))
            code, body = 405, _error("only GET is answered: nothing can be changed here")
        else:
            kind, body = answer(_query(environ))
    except BadRequest as error:
        code, body = 400, _error(str(error))
    except ViewError as error:
        code, body = 404, _error(str(error))
    except Exception as error:
        logger.exception("the GradSentinel tab could not answer %s", environ.get("PATH_INFO", ""))
        code, body = 500, _error(f"the server failed: {type(error).__name__}, see its log")
    if len(body) >= _COMPRESSED_FROM and "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
        body = gzip.compress(body, compresslevel=1, mtime=0)
        extra.append(("Content-Encoding", "gzip"))
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), *_HEADERS, *extra]
    start_response(f"{code} {_STATUS[code]}", headers)
    return [] if method == "HEAD" else [body]


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()


def _query(environ: Mapping[str, Any]) -> Query:
    try:
        return parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise BadRequest(f"the query has more than {_MOST_FIELDS} fields") from None


def _one(query: Query, name: str, default: str | None = None) -> str:
    values = query.get(name, [])
    if values:
        return values[-1]
    if default is None:
        raise BadRequest(f"the query needs {name}=")
    return default


def _whole(query: Query, name: str, default: int | None = None) -> int | None:
    text = _one(query, name, "")
    if not text:
        return default
    try:
        return max(-(1 << 62), min(int(text), 1 << 62))
    except ValueError:
        raise BadRequest(f"{name}= must be a whole number") from None
