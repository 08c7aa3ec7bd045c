"""The kernel signatures every backend shares, and the choice of a backend.

Shapes used throughout (T tokens and S rows of one packed batch, H query heads, Hkv key/value heads, D = head_dim):

    query                  (T, H, D)             contiguous
    key, value             (T, Hkv, D)           last dimension contiguous
    key_cache, value_cache (num_blocks, Hkv, block_size, D)   any strides: the strides tell the layout
    key_scales, value_scales (num_blocks, Hkv, block_size) fp32   of int8 caches: a token's K or V is its codes * its scale
    block_tables           (S, B) int32          block ids of each row in token order, -1 past its last block
    cu_seqlens_q           (S + 1,) int32        queries of row s are query[cu_seqlens_q[s] : cu_seqlens_q[s + 1]]
    seq_lens_kv            (S,) int32            tokens of row s in the cache, this step's included
    slot_mapping           (T,) int64            block_id * block_size + offset of each token, -1 = do not write

Query i of row s stands at position `seq_lens_kv[s] - q_len[s] + i` and sees positions `(p - sliding_window, p]`.
Slots that no row has written may hold anything, NaN included: kernels mask by `seq_lens_kv` and never read them into a result.
Int8 caches come with both scales, others with neither (None). A head of K or V is stored as scale = max |x| / 127 and codes
round(x / scale), to nearest even, within -127 .. 127; zeros have scale 0; a head that holds a NaN or an infinity has scale NaN.
Offsets into the caches are 64-bit: a pool passes 2**31 elements on any large device.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

BACKENDS = ("reference", "cpu", "gpu")


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of consecutive rows whose block tables begin with the same full blocks: attention reads those once a group.

    Every row sees all of its shared blocks: `num_shared_blocks * block_size <= seq_lens_kv`. One value serves all layers of a
    step; layers with a sliding window ignore it. Rows 0, 1, 2 with 5 common blocks and row 3 alone:

        SharedPrefixes(row_bounds=[0, 3, 4], num_shared_blocks=[5, 0], num_rows=4, max_shared_blocks=5)
    """

    row_bounds: torch.Tensor  # (G + 1,) int32: the rows of group g are row_bounds[g] : row_bounds[g + 1]; all are in one
    num_shared_blocks: torch.Tensor  # (G,) int32: leading entries of the block tables that its rows have in common
    # Known to the host, so that no launch has to ask the device.
    num_rows: int  # row_bounds[-1]
    max_shared_blocks: int  # num_shared_blocks.max()

    @cached_property
    def row_shared_blocks(self) -> torch.Tensor:
        """Return the number of shared blocks of each row, (S,) int32."""
        return self.num_shared_blocks.repeat_interleave(self.row_bounds.diff(), output_size=self.num_rows)


@dataclass(frozen=True)
class LayerCache:
    """One layer's views of the pool, shaped as above; scales only beside int8."""

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class Backend(Protocol):
    """One module with these four functions; `reference.py` documents the arithmetic."""

    # True when K is stored transposed inside its block, (head_dim, block_size), so that vector lanes run over tokens.
    KEY_TRANSPOSED: bool

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        """Store each token's K and V in its slot, quantized where the caches are int8; a slot of -1 is skipped."""

    def paged_prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens_kv: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        max_seqlen_q: int,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        """Causal attention of many rows' new tokens, each row over its own cached context; writes `out` (T, H, D)."""

    def paged_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens_kv: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        shared: SharedPrefixes | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        """Attention of one new token a row (query is (S, H, D)) over that row's cached context; writes `out` (S, H, D).

        `shared` changes how often blocks are read, not what is computed. It is ignored beside `sliding_window`.
        """

    def copy_blocks(self, kv: torch.Tensor, src_block_ids: torch.Tensor, dst_block_ids: torch.Tensor) -> None:
        """Copy whole blocks `kv[src] -> kv[dst]`, all layers at once. Sources and destinations must be disjoint."""


def load_backend(name: str) -> Backend:
    """Import and return a backend module.

    Raises:
        ValueError: the name is not one of `BACKENDS`.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}: choose one of {', '.join(BACKENDS)}")
    module = {"reference": ".reference", "cpu": ".cpu.attention", "gpu": ".gpu.attention"}[name]
    return cast(Backend, importlib.import_module(module, package=__package__))
