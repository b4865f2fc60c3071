"""Reads folders of images with one sub-folder per class, by a public schema that names classes and size.

Every image becomes the declared size and bytes become numbers from 0 to 1: nothing is computed over the data.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.data.schema import ImageSchema, read_schema
from dpps.errors import MismatchError, UsageError, needs_extra, quoted

log = logging.getLogger(__name__)

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_DEEP = ("I", "F")  # kinds of pixels with more than eight bits


def image_dataset(folder: str | Path, schema: ImageSchema | str | Path) -> TensorDataset:
    """Read a folder of images as a data set of (inputs from 0 to 1, class numbers) for `dpps.Run`. No
    statistics of the data are computed.

    Args:
        folder: folder with one sub-folder per class.
        schema: a schema, or a schema file (`dpps data describe FOLDER` drafts one).
    """
    found = schema if isinstance(schema, ImageSchema) else read_schema(Path(schema))
    if not isinstance(found, ImageSchema):
        raise UsageError(f"the schema {schema} describes tables: use dpps.data.table_dataset(file, schema)")
    return TensorDataset(*labelled_images(Path(folder), found))


def labelled_images(folder: Path, schema: ImageSchema) -> tuple[Tensor, Tensor]:
    """Inputs of shape (images, *schema.shape) from 0 to 1, and class numbers, from a folder with one sub-folder per class."""
    files: list[Path] = []
    labels: list[int] = []
    for sub in _sub_folders(folder):
        if sub.name not in schema.classes:
            raise MismatchError(
                f"{sub} is no class of the schema ({quoted(schema.classes)}): rename the folder",
                "declare the class",
            )
        files += image_files(sub)
        labels += [schema.classes.index(sub.name)] * (len(files) - len(labels))
    if not files:
        raise UsageError(
            f"{folder} holds no images in sub-folders named as the classes ({quoted(schema.classes)}): put them there"
        )
    return _read_all(files, schema), torch.tensor(labels)


def unlabelled_images(folder: Path, schema: ImageSchema) -> Tensor:
    """All images in a folder and below, in the order of `image_files`."""
    files = image_files(folder)
    if not files:
        raise UsageError(f"{folder} holds no images ({', '.join(ENDINGS)}): put some there")
    return _read_all(files, schema)


def image_files(folder: Path, quiet: bool = False) -> list[Path]:
    """The images in a folder and below, in the order of their names. Hidden files are skipped, and others give a warning."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: images lie in a folder")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    images = [file for file in files if file.suffix.lower() in ENDINGS]
    if len(images) < len(files) and not quiet:
        log.warning("%s: %d files are no images and left out", folder, len(files) - len(images))
    return images


def guess_image_schema(folder: Path) -> ImageSchema:
    """Classes, colours and the most frequent size as this folder has them. They are read off private data."""
    part = folder / "train" if (folder / "train").is_dir() else folder
    classes = tuple(sub.name for sub in _sub_folders(part))
    if len(classes) < 2:
        raise UsageError(
            f"{part} has {len(classes)} sub-folders: images of two or more classes are needed, one folder for each"
        )
    sizes: Counter[tuple[int, int]] = Counter()
    grey = True
    for file in image_files(part, quiet=True):
        with _opened(file) as image:
            sizes[image.height, image.width] += 1
            grey = grey and image.mode in ("1", "L", "LA")
    if not sizes:
        raise UsageError(f"{part} holds no images ({', '.join(ENDINGS)}): put some into its sub-folders")
    (height, width), _ = sizes.most_common(1)[0]
    return ImageSchema(classes, (1 if grey else 3, height, width))


def _sub_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: images lie in a folder, with a sub-folder for every class")
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def _read_all(files: list[Path], schema: ImageSchema) -> Tensor:
    channels, height, width = schema.shape
    pixels = np.empty((len(files), channels, height, width), np.uint8)
    for k, file in enumerate(files):
        with _opened(file) as image:
            try:
                own = image.convert("L" if channels == 1 else "RGB")
                if own.size != (width, height):
                    own = own.resize((width, height), _pillow().Resampling.BILINEAR)
            except (OSError, ValueError, SyntaxError) as error:
                raise UsageError(
                    f"{file} is damaged ({error}): copy it anew, or take it out of the folder"
                ) from error
        values = np.asarray(own, np.uint8)
        pixels[k] = values[None] if channels == 1 else values.transpose(2, 0, 1)
    return torch.from_numpy(pixels).float() / 255


def _pillow() -> Any:
    with needs_extra("images"):
        from PIL import Image
    return Image


def _opened(file: Path) -> Any:
    """The image, not yet decoded; deep pixels would lose their meaning and are refused."""
    reader = _pillow()
    try:
        image = reader.open(file)
    except (OSError, ValueError, SyntaxError, reader.DecompressionBombError) as error:
        raise UsageError(
            f"{file} is no image that can be read ({type(error).__name__}): copy it anew, or take it out of the folder"
        ) from error
    if image.mode.startswith(_DEEP):
        image.close()
        raise UsageError(
            f"{file} has pixels of the kind {image.mode}, more than 8 bits: save it with 8 bits, or give "
            "arrays (.npz) with --classes"
        )
    return image
