"""Which product a linear map gets on CPU, and models whose rows don't depend on their batch.

Library products in row buckets (`linear.py`), our own where they are faster (`panels.py`), or 8-bit ones (`int8.py`).
"""

from __future__ import annotations

from torch import nn

from .int8 import Int8Linear, is_quantized
from .linear import InvariantMode, MeasuredBuckets, RowInvariantLinear, RowInvariantProduct
from .panels import PanelLinear, panels_pay
from .spec import ModelSpec

Product = RowInvariantLinear | PanelLinear | Int8Linear


def make_product(linear: nn.Linear, spec: ModelSpec, invariant: RowInvariantProduct) -> Product:
    """Return a linear map as it runs on this machine; `invariant` keeps what the model's library products share."""
    if spec.quantization == "int8" and is_quantized(linear, spec.intermediate_size):
        return Int8Linear(linear)
    return PanelLinear(linear) if panels_pay() else RowInvariantLinear(linear, invariant)


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
