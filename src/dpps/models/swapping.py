"""Other tensors in the places of a model's parameters for the time of a call."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """These parameters and buffers in place of the model's own, wherever they are used (tied ones, too);
    afterwards its own again.

    What `torch.func.functional_call` does, without its checks: those take as long as a small model itself. Differentiate inside it:
    checkpointed modules run again during the backward pass, with whatever parameters are in place then.

    Args:
        model: nobody else may call it meanwhile.
        tensors: by the names of `named_parameters` and `named_buffers`.
    """
    if not tensors:
        yield
        return
    places = _places(model)
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            for store, key in places[name]:
                before.append((store, key, store[key]))
                store[key] = tensor
        yield
    finally:
        for store, key, own in reversed(before):
            store[key] = own


def _places(model: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """By name: every module's dictionary, and the key in it, that holds this very tensor."""
    by_tensor: dict[int, list[tuple[dict[str, Any], str]]] = {}
    names: dict[str, int] = {}
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:  # `named_modules(remove_duplicate=False)`, whose generators take as long as a small model
        prefix, module = left.pop()
        left.extend(
            (f"{prefix}{name}.", inner) for name, inner in module._modules.items() if inner is not None
        )
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for key, tensor in store.items():
                if tensor is not None:
                    names[prefix + key] = id(tensor)
                    by_tensor.setdefault(id(tensor), []).append((store, key))
    return {name: by_tensor[own] for name, own in names.items()}
