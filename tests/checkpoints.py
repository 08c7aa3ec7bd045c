"""Checkpoints that a test changes."""

from __future__ import annotations

from safetensors.torch import load_file, save_file


def change_tensors(path, change):
    """Let `change` have the tensors of a model's directory, by name, and write them back."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
