"""Linear maps by our own compiled product (`kernels/cpu/gemm.py`), for processors without AVX-512.

There the libraries' products are bound by reading fp32 weights, or emulate bf16. Ours keeps a weight in 16 bits wherever that
loses nothing, as of a checkpoint in bf16 that is run in fp32, and computes in fp32. It takes any number of rows and gives each
the bits it has alone.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.cpu import fused
from ..machine import cpu_flags


def panels_pay() -> bool:
    """Return True on x86 processors without AVX-512, where this is what was measured to be faster (`gemm` in RESULTS.md)."""
    flags = cpu_flags()
    return "avx2" in flags and "fma" in flags and "avx512f" not in flags


class PanelLinear(nn.Module):
    """A drop-in for `nn.Linear` at inference; weights and inputs in fp32, bf16 or fp16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        panels = fused.pack(_smallest(linear.weight.detach()))
        extra = panels.shape[0] * panels.shape[2] - self.out_features
        wide_bias = None if self.bias is None else nn.functional.pad(self.bias.detach().float(), (0, extra))
        # Not parameters: their shape is nobody else's business.
        self._operands = (panels, wide_bias)

    def buckets(self) -> tuple[int, ...]:
        """Return the numbers of rows to call with; none are better than others."""
        return ()

    def rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the product (T, out_features) of x (T, in_features); None: its rows are not to be scaled (see `int8.py`)."""
        panels, bias = self._operands
        out = fused.product(x.float().contiguous(), panels, bias, x.dtype)
        return (out if out.shape[1] == self.out_features else out[:, : self.out_features].contiguous()), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, _ = self.rows(x.reshape(-1, self.in_features))
        return product.reshape(*x.shape[:-1], self.out_features)


def _smallest(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the shortest dtype that holds every element exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        short = weight.to(dtype)
        if torch.equal(short.to(weight.dtype), weight):
            return short
    return weight
