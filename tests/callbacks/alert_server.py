"""A real HTTP server on this machine that misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class AlertServer:
    """Answers each POST with the next of `answers`, the last one again and again; keeps what was posted.

    An answer is a status, or "hang", which says nothing until the server is closed.
    """

    def __init__(self, *answers: int | str, headers: dict[str, str] | None = None) -> None:
        self.answers, self.headers = list(answers or (200,)), headers or {}
        self.bodies: list[Any] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/secret-path?token=hidden"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with outer.changed:
                    outer.requests.append((self.path, dict(self.headers)))
                    outer.bodies.append(json.loads(body))
                    answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                    outer.changed.notify_all()
                if answer == "hang":
                    outer.closing.wait(30)
                    return
                self.send_response(answer)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Answers

    def wait_for(self, count: int) -> list[Any]:
        """Return the bodies once there are so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.bodies) >= count, timeout=30)
        return self.bodies


@contextmanager
def alert_server(*answers: int | str, headers: dict[str, str] | None = None) -> Iterator[AlertServer]:
    """Serve until the end of the block."""
    server = AlertServer(*answers, headers=headers)
    server._thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server._server.shutdown()
        server._server.server_close()
