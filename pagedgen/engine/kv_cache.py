"""The KV pool: one tensor, a block of it contiguous for all layers, and each layer's view as the kernels want it."""

from __future__ import annotations

import torch

from ..kernels.api import LayerCache
from ..machine import prefer_huge_pages
from ..model.spec import SCALE_BYTES


class KVCache:
    """`kv[num_blocks, num_layers, 2, num_kv_heads, block_size * head_dim]`, the last dimension being (block_size, head_dim).

    In int8 each last dimension is longer: behind its codes lie block_size fp32 scales as bytes, one a token, so that whatever
    copies a block copies them. With `key_transposed` K lies as (head_dim, block_size) inside its block; the views hide that
    behind strides, so shapes are (num_blocks, num_kv_heads, block_size, head_dim) everywhere. Data is never cleared: kernels
    mask by seq_lens_kv.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        key_transposed: bool,
    ):
        region = block_size * (head_dim + (SCALE_BYTES if dtype == torch.int8 else 0))
        self.kv = torch.empty((num_blocks, num_layers, 2, num_kv_heads, region), dtype=dtype, device=device)
        if device == "cpu":
            prefer_huge_pages(self.kv.data_ptr(), self.kv.numel() * self.kv.element_size())
        self.layers: list[LayerCache] = []
        for layer in range(num_layers):
            key, key_scales = _views(self.kv[:, layer, 0], block_size, head_dim, transposed=key_transposed)
            value, value_scales = _views(self.kv[:, layer, 1], block_size, head_dim)
            self.layers.append(LayerCache(key, value, key_scales, value_scales))


def _views(
    regions: torch.Tensor, block_size: int, head_dim: int, *, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the data (num_blocks, num_kv_heads, block_size, head_dim) and, in int8, the scales (num_blocks, num_kv_heads,
    block_size) of K's or V's regions (num_blocks, num_kv_heads, region)."""
    data, scales = regions.split([block_size * head_dim, regions.shape[-1] - block_size * head_dim], dim=-1)
    if transposed:
        data = data.unflatten(-1, (head_dim, block_size)).transpose(2, 3)
    else:
        data = data.unflatten(-1, (block_size, head_dim))
    return data, scales.view(torch.float32) if regions.dtype == torch.int8 else None
