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


class Space:
    """Memory for one product at a time, kept from step to step: fresh memory would cost a page fault every 4 KiB.

    Its views are kept too. Steps of a job have the same few shapes again and again, and to make a view takes as long as a
    small kernel.
    """

    _MOST_VIEWS = 1024

    def __init__(self, num_floats: int):
        self._flat = torch.empty(num_floats)
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return (num_rows, width) of the space, or new memory where it has no room."""
        shape = (num_rows, width, dtype)
        view = self._views.get(shape)
        if view is None:
            room = self._flat.view(dtype)
            if num_rows * width > room.shape[0]:
                return torch.empty(num_rows, width, dtype=dtype)
            if len(self._views) == self._MOST_VIEWS:
                self._views.clear()
            view = self._views[shape] = room[: num_rows * width].view(num_rows, width)
        return view


NO_SPACE = Space(0)


class PanelLinear(nn.Module):
    """A drop-in for `nn.Linear` at inference; weights and inputs in fp32, bf16 or fp16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Not parameters: their shape is nobody else's business.
        self.panels = fused.pack(_smallest(linear.weight.detach()), linear.bias)

    def buckets(self) -> tuple[int, ...]:
        """Return the numbers of rows to call with; none are better than others."""
        return ()

    def rows(self, x: torch.Tensor, space: Space) -> torch.Tensor:
        """Return the product (T, out_features) of x (T, in_features), contiguous, in `space` where it has room."""
        width = self.panels.width
        out = space.rows(x.shape[0], width, x.dtype)
        fused.product(_in_fp32(x), self.panels, out)
        return out if width == self.out_features else out[:, : self.out_features].contiguous()

    def gated(self, x: torch.Tensor, out: torch.Tensor, space: Space) -> None:
        """out (T, out_features / 2) = silu(the first half of the product) * the second."""
        if self.out_features % (2 * fused.panel_width()):
            fused.silu_mul(self.rows(x, space), out)
        else:
            fused.product(_in_fp32(x), self.panels, out, gated=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.rows(x.reshape(-1, self.in_features).contiguous(), NO_SPACE)
        return product.reshape(*x.shape[:-1], self.out_features)


def _in_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float32 else x.float()


def _smallest(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the shortest dtype that holds every element exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        short = weight.to(dtype)
        if torch.equal(short.to(weight.dtype), weight):
            return short
    return weight
