"""The KV pool: one tensor, a block of it contiguous for all layers, and each layer's view as the kernels want it."""

from __future__ import annotations

import torch


class KVCache:
    """`kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    With `key_transposed` K lies as (head_dim, block_size) inside its block; the views hide that behind strides, so shapes are
    (num_blocks, num_kv_heads, block_size, head_dim) everywhere. Data is never cleared: kernels mask by seq_lens_kv.
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
        self.kv = torch.empty((num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), dtype=dtype, device=device)
        # (key_cache, value_cache) of each layer, each (num_blocks, num_kv_heads, block_size, head_dim)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(num_layers):
            key, value = self.kv[:, layer, 0], self.kv[:, layer, 1]
            if key_transposed:
                key = key.view(num_blocks, num_kv_heads, head_dim, block_size).transpose(2, 3)
            self.layers.append((key, value))
