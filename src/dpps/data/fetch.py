"""Download of published files: verified, resumable, from the first address that works."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests
import urllib3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dpps.data.recipe import Source
from dpps.errors import RunError
from dpps.logs import only_from

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often one address may cut the connection before the next one is tried."""

TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as cut."""

CHUNK = 1 << 18


def fetch(source: Source, folder: Path, progress: bool = True) -> Path:
    """The file in `folder`, downloaded unless it is there with the right hash.

    A cut download leaves `FILE.part`, which the next attempt continues. A file with the wrong hash, whether
    downloaded or already there, is removed: it is never returned.
    """
    target = folder / source.file
    _remove_if_wrong(target, source)
    downloader = _Resuming(folder / f"{source.file}.part", progress)
    failures = []
    for address in source.addresses:
        try:
            with only_from(logging.WARNING, pooch.get_logger()):  # the bar and the errors say the same
                pooch.retrieve(address, source.hash, source.file, folder, downloader=downloader)
        except (requests.RequestException, ValueError) as error:  # ValueError: pooch refused the hash
            log.warning("%s: %s", address, error)
            failures.append(f"{address} ({error})")
        else:
            return target
    raise RunError(
        f"cannot download {source.file}: {'; '.join(failures)}; remedy: run again, or put {source.file} "
        f"({source.hash}) into {folder}"
    )


def _remove_if_wrong(target: Path, source: Source) -> None:
    if not target.exists():
        return
    algorithm, _, expected = source.hash.partition(":")
    found = pooch.file_hash(str(target), alg=algorithm)
    if found != expected:
        target.unlink()
        log.warning(
            "removed %s, which is damaged or was changed: expected %s %s, found %s",
            target,
            algorithm,
            expected,
            found,
        )


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep the processes of one machine (torchrun starts several) from filling the same folder at once.

    There is no such lock on Windows; there two writers end in a refused hash, never in a wrong file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class _Resuming:
    """A downloader for pooch that continues `part` with an HTTP range request."""

    part: Path
    progress: bool

    def __call__(self, url: str, output_file: str, _pooch: object) -> None:
        for _ in range(ATTEMPTS):
            if self._receive(url):
                self.part.replace(output_file)
                return
        raise requests.ConnectionError(
            f"connection cut {ATTEMPTS} times; {self._size()} bytes are kept in {self.part}"
        )

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _receive(self, url: str) -> bool:
        """Ask for the rest of the file and append it; false when there is still something missing."""
        start = self._size()
        # identity: the hash is that of the file as published, not as repacked for the way.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if start and not _usable(response, start):
                self.part.unlink()
                return False
            response.raise_for_status()
            resumed = response.status_code == requests.codes.partial_content
            return self._write(response, start if resumed else 0)

    def _write(self, response: requests.Response, start: int) -> bool:
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with self.part.open("ab" if start else "wb") as file, self._bar() as bar:
            task = bar.add_task(self.part.name.removesuffix(".part"), completed=start, total=total)
            try:
                for chunk in response.raw.stream(CHUNK, decode_content=False):
                    file.write(chunk)
                    bar.advance(task, len(chunk))
            except urllib3.exceptions.HTTPError as error:
                log.info("%s: %s", response.url, error)
                return False
        return total is None or self._size() == total

    def _bar(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        return Progress(
            *columns, console=Console(stderr=True), disable=not (self.progress and sys.stderr.isatty())
        )


def _usable(response: requests.Response, start: int) -> bool:
    """False when the answer to a range request is the wrong range, or says there is no such range."""
    if response.status_code == requests.codes.partial_content:
        return response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
    return response.status_code != requests.codes.requested_range_not_satisfiable
