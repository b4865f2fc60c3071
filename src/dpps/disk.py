"""What is on disk is what survives."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """A new or renamed file is only safe once its folder's entry is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_aside(target: Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        aside.write_bytes(content)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
