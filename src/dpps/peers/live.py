"""A live page about a member's run, for browsers on this machine only."""

import ipaddress
import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from dpps.errors import RunError, UsageError
from dpps.peers.identity import check_address
from dpps.peers.status import Status

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'"


def check_page(address: str) -> tuple[str, int]:
    """Host and port of a page.

    Raises:
        UsageError: others than this machine could see it.
    """
    host, _, port = check_address("--page", address).rpartition(":")
    try:
        local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise UsageError(
            f"--page is {address}: it shows private numbers, so it stays on this machine; give 127.0.0.1:{port}, and see it from "
            "elsewhere through ssh -L"
        )
    return host.strip("[]"), int(port)


class LivePage:
    """Serves the page until it is closed.

    Args:
        address: HOST:PORT of this machine.
        status: gives what is shown.

    Attributes:
        url: where it is; a random part of it keeps out other users of this machine.
    """

    def __init__(self, address: str, status: Callable[[], Status]) -> None:
        host, port = check_page(address)
        page = files("dpps.peers").joinpath("live.html").read_bytes()
        token = secrets.token_urlsafe(16)
        self.url = f"http://{address}/{token}/"

        class Answers(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                name = self.headers.get("Host", "").rpartition(":")[0]
                if name not in ("127.0.0.1", "localhost", "[::1]", address.rpartition(":")[0]):
                    # a page elsewhere whose name was turned to this machine
                    self.send_error(HTTPStatus.FORBIDDEN)
                elif secrets.compare_digest(self.path.encode(), f"/{token}/".encode()):
                    self._send(page, "text/html; charset=utf-8")
                elif secrets.compare_digest(self.path.encode(), f"/{token}/status.json".encode()):
                    self._send(json.dumps(status().to_json()).encode(), "application/json")
                else:
                    self.send_error(HTTPStatus.NOT_FOUND)

            def _send(self, content: bytes, kind: str) -> None:
                self.send_response(HTTPStatus.OK)
                facts = {
                    "Content-Type": kind,
                    "Content-Length": str(len(content)),
                    "Cache-Control": "no-store",
                    "Content-Security-Policy": _POLICY,
                    "X-Content-Type-Options": "nosniff",
                    "Referrer-Policy": "no-referrer",
                }
                for name, value in facts.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
                """Nobody needs to know who looks."""

        try:
            self._server = ThreadingHTTPServer((host, port), Answers)
        except OSError as error:
            raise RunError(
                f"--page {address} cannot be served: {error.strerror}; choose another port"
            ) from error
        self._server.daemon_threads = True
        self.address = address
        threading.Thread(target=self._server.serve_forever, name="dpps page", daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "LivePage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
