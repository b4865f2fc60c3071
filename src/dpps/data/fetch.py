"""Download of published files, verified by their hash, into the user cache."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpps.errors import RunError
from dpps.logs import only_from

if TYPE_CHECKING:
    from dpps.data.catalog import Source

log = logging.getLogger(__name__)

TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as cut."""


def user_cache() -> Path:
    """The folder for everything of this user that can be made again."""
    import pooch  # slow to load, and a run on embedded data does without

    return Path(pooch.os_cache("dpps"))


def fetch(source: "Source", folder: Path, progress: bool = True) -> Path:
    """The file in `folder`, downloaded from the first address that works unless it is there with the right hash.

    A file with the wrong hash is never returned: a download is thrown away, and one that is already there is replaced.
    """
    import pooch
    import requests

    target = folder / source.file
    if target.exists() and not pooch.hashes.hash_matches(str(target), source.hash):
        log.warning(
            "%s is damaged or was changed, as its hash is not %s: downloading it again", target, source.hash
        )
        target.unlink()
    failures = []
    for address in source.addresses:
        bar = _Bar(source.file) if progress and sys.stderr.isatty() else None
        downloader = pooch.HTTPDownloader(
            progressbar=bar or False,
            chunk_size=1 << 18,
            timeout=TIMEOUT,
            # identity: the hash is that of the file as published, not as repacked for the way.
            headers={"Accept-Encoding": "identity"},
        )
        try:
            with only_from(logging.WARNING, pooch.get_logger()):  # the bar and the errors say the same
                pooch.retrieve(address, source.hash, source.file, folder, downloader=downloader)
        except (requests.RequestException, ValueError) as error:  # ValueError: pooch refused the hash
            log.warning("%s: %s", address, error)
            failures.append(f"{address} ({error})")
        else:
            return target
        finally:
            if bar is not None:
                bar.close()  # pooch leaves it open when a download fails
    raise RunError(
        f"cannot download {source.file}: {'; '.join(failures)}; remedy: run again, or put {source.file} "
        f"({source.hash}) into {folder}"
    )


class _Bar:
    """A progress bar of rich as pooch wants it."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=None)
        self.total = 0

    def update(self, count: int) -> None:
        """So many bytes more have arrived."""
        self._progress.start()
        self._progress.update(self._task, advance=count, total=self.total or None)

    def reset(self) -> None:
        """Nothing has arrived."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """The bar stays as it is."""
        self._progress.stop()


@contextlib.contextmanager
def one_at_a_time(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """Keep the processes of one machine (torchrun starts several) from writing the same files at once: those who name the same lock.

    There is no such lock on Windows; there two writers end in a refused hash, never in a wrong file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / lock).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
