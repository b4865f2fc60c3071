"""Somebody on the way between two members: passes bytes on and keeps them, or answers with a certificate of its own."""

import socket
import ssl
import threading
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from dpps.peers import Key, Request


class Relay:
    """Listens at a port and passes everything on to another one."""

    def __init__(self, target: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._target = target
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            try:
                called = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                caller.close()
                continue
            for one, other in ((caller, called), (called, caller)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while content := one.recv(1 << 16):
                self.seen += content
                other.sendall(content)
        except OSError:
            pass
        for each in (one, other):
            each.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # whoever waits for a caller wakes up
        self._server.close()


class Impostor:
    """Answers in the place of a member, with a certificate that says the same but is signed by itself."""

    def __init__(self, folder: Path, request: Request) -> None:
        key = Key.make(folder / "own.key")
        issuer = key.certify_itself("dpps convener", 30)
        own = Request(request.name, request.address, key.public)
        (folder / "own.crt").write_bytes(
            key.certify(own, issuer, 30).public_bytes(serialization.Encoding.PEM)
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "own.crt", folder / "own.key")
        self._context.set_alpn_protocols(["h2"])
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.heard = b""
        self.failed: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            try:
                with self._context.wrap_socket(caller, server_side=True) as secured:
                    self.heard += secured.recv(1 << 16)
            except OSError as error:
                self.failed.append(str(error))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # whoever waits for a caller wakes up
        self._server.close()
