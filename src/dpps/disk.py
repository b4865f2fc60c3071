"""What is on disk is what survives; and what a run writes is for its owner's eyes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpps.errors import RunError, UsageError


def sync_folder(folder: Path) -> None:
    """A new or renamed file is only safe once its folder's entry is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writable(folder: Path) -> bool:
    """Whether files may be made here. A folder without any write permission is meant to stay as it is, also where root could."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def check_target(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before any work is done for it. `option` is what the user calls it."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it, or name another file")
    if not writable(path.parent) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"{option} {path} may not be written: name another file")


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that neither exists nor could be made, before any work is done for it."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{option} {path} is a file: name a folder")
    above = next((each for each in path.absolute().parents if each.exists()), None)
    if above is None or not above.is_dir() or not writable(path if path.exists() else above):
        raise UsageError(f"{option} {path} cannot be made or written to: name another folder")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """The one way to write a file completely or not at all: a path to write to, which takes the target's place at the end.

    Where writing fails, the target stays as it was and nothing is left behind.
    """
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield aside
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def write_aside(target: Path, content: bytes) -> None:
    """Write a file that anybody may read so that it is there completely or not at all; its folder is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as aside:
        aside.write_bytes(content)


def private(path: str | Path, flags: int) -> int:
    """Open a file that only its owner may read and write, whatever the umask: ``open(path, "w", opener=private)``."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def private_folder(folder: Path) -> None:
    """Make a folder, and the folders above it that are missing, for the owner only. A folder that exists stays as it is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(0o700, exist_ok=True)
        path.chmod(0o700)  # the umask may have taken more away


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses here (the disk is full, say) becomes a RunError of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file of the owner's, and wait until it is on disk."""
    with open(path, "wb", opener=private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_private(target: Path, content: bytes) -> None:
    """Write a file of the owner's so that it is on disk completely or not at all. RunError: it could not be written."""
    with writing(target):
        with replacing(target) as aside:
            write_synced(aside, content)
        sync_folder(target.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else writes this file meanwhile (RunError: somebody does); where there is none, there is nothing to lock."""
    if not path.exists():
        yield
        return
    handle = open_alone(path)
    try:
        yield
    finally:
        close_alone(handle)


def open_alone(path: Path, flags: int = 0) -> int:
    """Open for appending, as the only writer until `close_alone` or the end of the process. RunError: another process, or another
    part of this one, has it open."""
    import fcntl  # there is none on Windows, where the rest of the package can still be imported

    handle = private(path, os.O_WRONLY | os.O_APPEND | flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = os.path.samestat(os.fstat(handle), path.stat())  # not when its writer has just moved it away
    except BlockingIOError:
        alone = False
    if not alone:
        os.close(handle)
        raise RunError(
            f"somebody else is writing {path}, and it has one writer at a time: wait for the other run to end, or stop it"
        )
    return handle


def close_alone(handle: int) -> None:
    """Let others write."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_UN)  # explicitly: a forked child may hold the same open file
    os.close(handle)
