"""Products of 8-bit integers on CPU (`--quantization int8`): a scale a weight channel, a scale a row, exact sums.

A weight is quantized once, a row when it comes (`kernels.cpu.fused.quantize`), each by its own largest magnitude, so a row's
result depends on no other row: the sums are whole numbers, exact in any order. A feed-forward network's inner states have a
scale for every few hundred elements, whose sums are added up in fp32: a gated activation has a few large elements, beside which
8 bits leave little of their neighbours. The product is our own (`kernels/cpu/gemm.py`),
which adds in 32 bits, or oneDNN's where a processor has AMX, and elsewhere than on x86. Without VNNI oneDNN's adds pairs of
products in 16 bits, which hold them only if weights have 7 bits: how many levels are exact is measured, not looked up.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from ..kernels.cpu import fused
from .linear import ROW_BUCKETS
from .panels import NO_SPACE, Space, panels_pay

# oneDNN makes a kernel for every number of rows it meets: they are kept few.
_ROWS_STEP = 16
_GROUP = 256  # inner states that share a scale: on GSM8K 128 gave the same perplexity, and take more passes over the sums


def _library_product(rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor) -> torch.Tensor:
    """Return (rows - 128) @ weight^T * scales in fp32. rows (M, in_features) uint8."""
    return torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, 128, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )


def weight_levels() -> int:
    """Return the largest weight whose products with any row are exact on this machine: 127, 63, or 0 where nothing is."""
    return 127 if panels_pay(torch.int8) else library_levels()


@lru_cache
def library_levels() -> int:
    """Return `weight_levels` of oneDNN's product."""
    size = 64
    for levels in (127, 63):
        weight = torch.full((size, size), levels, dtype=torch.int8)
        weight[::2] = -levels
        rows = torch.full((size, size), 255, dtype=torch.uint8)
        try:
            packed = torch.ops.onednn.qlinear_prepack(weight, [size, size])
            got = _library_product(rows, packed, torch.ones(size), torch.zeros(size, dtype=torch.int64))
        except (AttributeError, RuntimeError):
            return 0
        if torch.equal(got, (rows.float() - 128) @ weight.float().t()):
            return levels
    return 0


def quantize_channels(weight: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an fp32 weight (N, C) as int8 of magnitudes to `levels`, and a scale (N,) by which each channel is multiplied."""
    scales = weight.abs().amax(dim=1) / levels
    return torch.round(weight / scales.clamp_min(1e-30)[:, None]).to(torch.int8), scales


def inner_groups(in_features: int) -> int:
    """Return in how many groups the inner states of a feed-forward network are scaled: equal ones of up to 256 elements."""
    sizes = [size for size in range(32, _GROUP + 1, 4) if in_features % size == 0]
    return in_features // max(sizes) if sizes else 1


class Int8Linear(nn.Module):
    """A drop-in for `nn.Linear` at inference with an int8 weight; a row has a scale for each group of 4 n inputs."""

    def __init__(self, linear: nn.Linear, num_groups: int = 1):
        super().__init__()
        self._num_groups = num_groups
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.panels: fused.Panels | None = None  # where the product is ours
        quantized, scales = quantize_channels(linear.weight.detach().float(), weight_levels())
        if panels_pay(torch.int8):
            self.panels = fused.pack_int8(quantized, scales, num_groups, linear.bias)
        else:
            parts = [part.contiguous() for part in quantized.chunk(num_groups, dim=1)]
            packed = [torch.ops.onednn.qlinear_prepack(part, [max(ROW_BUCKETS), part.shape[1]]) for part in parts]
            # Not buffers: an opaque oneDNN layout has no strides that nn.Module could handle.
            self._operands = (packed, scales, torch.zeros(self.out_features, dtype=torch.int64))

    def buckets(self) -> tuple[int, ...]:
        """Return the numbers of rows to call with: all agree, oneDNN's are few; none where any number is as good."""
        return () if self.panels is not None else ROW_BUCKETS

    def rows(self, x: torch.Tensor, space: Space) -> torch.Tensor:
        """Return the product (T, out_features) fp32 of x (T, in_features), contiguous, in `space` where it has room."""
        if self.panels is None:
            product = self._by_library(x)
            return product if self.bias is None else product.add_(self.bias)
        width = self.panels.width
        product = space.rows(x.shape[0], width, torch.float32)
        fused.product_int8(x, self.panels, product)
        return product if width == self.out_features else product[:, : self.out_features].contiguous()

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        packed, scales, zero_points = self._operands
        levels, row_scales = fused.quantize(x, num_groups=self._num_groups)
        total: torch.Tensor | None = None
        for group, part in enumerate(levels.chunk(self._num_groups, dim=1)):
            product = _library_product(part.contiguous(), packed[group], scales, zero_points)
            product.mul_(row_scales[:, group : group + 1])
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def gated(self, x: torch.Tensor, out: torch.Tensor, space: Space) -> None:
        """out (T, out_features / 2) = silu(the first half of the product) * the second."""
        if self.panels is None or self.out_features % (2 * fused.panel_width()):
            fused.silu_mul(self.rows(x, space), out)
        else:
            fused.product_int8(x, self.panels, out, gated=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        count = rows.shape[0]
        if self.panels is None:
            rows = nn.functional.pad(rows, (0, 0, 0, -count % _ROWS_STEP))
        product = self.rows(rows, NO_SPACE)[:count]
        return product.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


def is_quantized(in_features: int) -> bool:
    """Return whether a linear map of so many inputs takes 8-bit numbers."""
    return in_features % 4 == 0
