"""Tensors of a checkpoint by name, read from its safetensors files one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelError


class Weights(Protocol):
    """A model's tensors, each to be taken once."""

    def __contains__(self, name: object) -> bool: ...

    def pop(self, name: str) -> torch.Tensor:
        """Return a tensor; nothing else holds it afterwards."""


class Checkpoint:
    """The safetensors files of a directory; tensors in the dtype that they are stored in."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = files  # by the tensor's name

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def pop(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own: a file that is changed later changes nothing.

        Raises:
            ModelError: it can't be read.
        """
        try:
            return self._files[name].get_tensor(name).clone()
        except (OSError, SafetensorError) as error:
            raise ModelError(f"can't read the weights {name}: {error}") from error


def open_checkpoint(paths: Iterable[Path], tensors: Mapping[str, tuple[int, ...]]) -> Checkpoint | None:
    """Return a checkpoint whose files hold tensors of exactly these names and shapes, in floats; None for any other."""
    files: dict[str, Any] = {}
    try:
        for path in paths:
            opened = safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118  it isn't a dict
                part = opened.get_slice(name)
                if tuple(part.get_shape()) != tensors.get(name) or part.get_dtype() not in ("F32", "BF16", "F16"):
                    return None
                files[name] = opened
    except (OSError, SafetensorError):
        return None
    return Checkpoint(files) if files.keys() == tensors.keys() else None
