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
    heads = [[n for n in state if n.startswith(f"{head}.") and n in tensors] for head in HEADS]
    # a head is skipped whole, never half
    skipped = [n for head in heads if any(tensors[n].shape != state[n].shape for n in head) for n in head]
    misfits = [
        f"{name} {_shape(state, name)} in the model, {_shape(tensors, name)} in the file"
        for name in {**state, **tensors}
        if _shape(state, name) != _shape(tensors, name)
        and name not in skipped
        and (name in tensors or not name.endswith("num_batches_tracked"))
    ]
    if misfits:
        more = [f"and {len(misfits) - LISTED} more"] if len(misfits) > LISTED else []
        raise UsageError(
            f"weights file {str(file)!r} does not fit {type(model).__name__}: {'; '.join(misfits[:LISTED] + more)}: "
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
    pairs = content.items() if isinstance(content, Mapping) else ()
    if not pairs or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in pairs):
        raise UsageError(
            f"weights file {str(file)!r} holds no state dict of names and tensors: save model.state_dict()"
        )
    return dict(pairs)


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return "x".join(map(str, tensors[name].shape)) or "scalar" if name in tensors else "missing"
