"""Linear maps by our own compiled product (`kernels/cpu/gemm.py`), in fp32 arithmetic.

The libraries' products read fp32 weights, or emulate bf16 where a processor has no arithmetic for it. Ours keeps a weight in 16
bits wherever that loses nothing, as of a checkpoint in bf16 that is run in fp32. It takes any number of rows and gives each the
bits it has alone.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.cpu import fused
from ..machine import cpu_flags

# Instructions that only the libraries' products use.
_LIBRARIES_HAVE = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.int8: {"amx_int8"}}


def panels_pay(dtype: torch.dtype) -> bool:
    """Return True where our product of a dtype was measured to be faster (see RESULTS.md): on x86 with AVX2 or AVX-512."""
    flags = cpu_flags()
    return {"avx2", "fma"} <= flags and not flags & _LIBRARIES_HAVE.get(dtype, set())


NO_SPACE = torch.empty(0)


def taken_from(space: torch.Tensor, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (num_rows, width) of a flat fp32 work space, or new memory where it has no room: that costs page faults."""
    count = num_rows * width
    room = space.view(dtype)
    return (room[:count] if count <= room.shape[0] else torch.empty(count, dtype=dtype)).view(num_rows, width)


class PanelLinear(nn.Module):
    """A drop-in for `nn.Linear` at inference; weights and inputs in fp32, bf16 or fp16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        panels = fused.pack(_smallest(linear.weight.detach()))
        self._width = panels.shape[0] * fused.panel_width()
        extra = self._width - self.out_features
        wide_bias = None if self.bias is None else nn.functional.pad(self.bias.detach().float(), (0, extra))
        # Not parameters: their shape is nobody else's business.
        self._operands = (panels, wide_bias)

    @property
    def packed(self) -> torch.Tensor:
        """The weight as `fused.pack` made it."""
        return self._operands[0]

    def buckets(self) -> tuple[int, ...]:
        """Return the numbers of rows to call with; none are better than others."""
        return ()

    def rows(self, x: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
        """Return the product (T, out_features) of x (T, in_features), in `space` where it has room; see `taken_from`."""
        out = taken_from(space, x.shape[0], self._width, x.dtype)
        fused.product(x.float().contiguous(), *self._operands, out)
        return out if self._width == self.out_features else out[:, : self.out_features].contiguous()

    def gated(self, x: torch.Tensor, out: torch.Tensor, space: torch.Tensor) -> None:
        """out (T, out_features / 2) = silu(the first half of the product) * the second."""
        if self.out_features % (2 * fused.panel_width()):
            fused.silu_mul(self.rows(x, space), out)
        else:
            fused.product(x.float().contiguous(), *self._operands, out, gated=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.rows(x.reshape(-1, self.in_features), NO_SPACE)
        return product.reshape(*x.shape[:-1], self.out_features)


def _smallest(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the shortest dtype that holds every element exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        short = weight.to(dtype)
        if torch.equal(short.to(weight.dtype), weight):
            return short
    return weight
