"""Which product a linear map gets on CPU, and models whose rows don't depend on their batch.

Library products in row buckets (`linear.py`), our own where they are faster (`panels.py`), or 8-bit ones (`int8.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from .int8 import Int8Linear, inner_groups, is_quantized
from .linear import InvariantMode, MeasuredBuckets, RowInvariantLinear, RowInvariantProduct
from .panels import PanelLinear, panels_pay
from .spec import ModelSpec

Product = RowInvariantLinear | PanelLinear | Int8Linear


def make_product(linear: nn.Linear, spec: ModelSpec, invariant: RowInvariantProduct) -> Product:
    """Return a linear map as it runs on this machine; `invariant` keeps what the model's library products share."""
    if spec.quantization == "int8" and is_quantized(linear.in_features):
        is_inner = linear.in_features == spec.intermediate_size
        return Int8Linear(linear, inner_groups(linear.in_features) if is_inner else 1)
    dtype = getattr(torch, spec.dtype)
    if panels_pay(dtype):
        return PanelLinear(linear)
    return RowInvariantLinear(_in_dtype(linear, dtype), invariant)


def as_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return the linear map of a weight (out_features, in_features), which it shares."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _in_dtype(linear: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """Return a linear map with its weights in a dtype; itself if they are."""
    if linear.weight.dtype == dtype:
        return linear
    return as_linear(linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype))


def make_row_invariant(model: nn.Module, spec: ModelSpec) -> MeasuredBuckets:
    """Replace every `nn.Linear` of a model and wrap every other module that owns weight matrices.

    Returns the dict in which the row buckets of each shape appear once the model has been run.
    """
    invariant = RowInvariantProduct()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make_product(child, spec, invariant))
    for module in model.modules():
        if isinstance(module, (nn.Embedding, Product)):
            continue
        if any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            _wrap_forward(module, InvariantMode(invariant))
    return invariant.measured


def _wrap_forward(module: nn.Module, mode: InvariantMode) -> None:
    forward = module.forward

    def wrapped(*args, **kwargs):
        with mode:
            return forward(*args, **kwargs)

    module.forward = wrapped
