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
