"""Start a model from a weight file: a state dict saved by torch, or a safetensors file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpps.errors import UsageError

LISTED = 8  # misfits named in an error before "and N more"
HEADS = ("fc", "heads.head")
"""Classification heads. One with other shapes in the file, such as ImageNet's 1000 classes, is left as it is."""


def load_weights(model: nn.Module, file: str | Path) -> list[str]:
    """Copy the tensors of a weight file into the model, in place, after comparing every name and shape.

    Nothing is copied unless everything fits. BatchNorm's batch counter may be missing, as old files lack it.

    Args:
        model: the model; of `HEADS` its own values may remain.
        file: read with safetensors if named `*.safetensors`, else as a torch file (tensors only, no code).

    Returns:
        The names left as they are because the file's head has other shapes.
    """
    tensors, state = _read(Path(file)), model.state_dict()
    skipped = _other_heads(tensors, state)
    misfits = _misfits(tensors, state, set(skipped))
    if misfits:
        listed = [
            *misfits[:LISTED],
            *([f"and {len(misfits) - LISTED} more"] if len(misfits) > LISTED else []),
        ]
        raise UsageError(
            f"weights file {str(file)!r} does not fit {type(model).__name__}: {'; '.join(listed)}: "
            "give a file saved from the same model"
        )
    with torch.no_grad():
        for name in state.keys() & tensors.keys() - set(skipped):
            state[name].copy_(tensors[name])
    return skipped


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise UsageError(f"weights file {str(file)!r} does not exist: give the path of a state dict")
    safe = file.suffix == ".safetensors"
    try:
        content = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    # Foreign bytes make torch.load fail in any way, even by assertions and struct.error: all mean the same.
    except Exception as error:
        kind = "safetensors file" if safe else "torch file of tensors"
        raise UsageError(
            f"weights file {str(file)!r} is no readable {kind} ({type(error).__name__}): "
            "save model.state_dict() with torch.save or as .safetensors"
        ) from error
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items())
    ):
        raise UsageError(
            f"weights file {str(file)!r} holds no state dict of names and tensors: save model.state_dict()"
        )
    return dict(content)


def _other_heads(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """The names of heads with another shape in the file; a head is skipped whole, never half."""
    heads = [[name for name in state if name.startswith(f"{head}.") and name in tensors] for head in HEADS]
    return [name for head in heads if any(tensors[n].shape != state[n].shape for n in head) for name in head]


def _misfits(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], skipped: set[str]) -> list[str]:
    """One phrase for every name that is in one of the two only, or in both with different shapes."""
    missing = [n for n in state if n not in tensors and not n.endswith("num_batches_tracked")]
    surplus = [n for n in tensors if n not in state]
    common = [n for n in state if n in tensors and n not in skipped]
    return [
        *(f"{n} {_shape(state[n])} is missing from the file" for n in missing),
        *(f"{n} {_shape(tensors[n])} is not in the model" for n in surplus),
        *(
            f"{n} is {_shape(tensors[n])} in the file and {_shape(state[n])} in the model"
            for n in common
            if tensors[n].shape != state[n].shape
        ),
    ]


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
