"""The kernel signatures every backend shares, and the choice of a backend.

Shapes used throughout (T tokens and S rows of one packed batch, H query heads, Hkv key/value heads, D = head_dim):

    query                  (T, H, D)             contiguous
    key, value             (T, Hkv, D)           last dimension contiguous
    key_cache, value_cache (num_blocks, Hkv, block_size, D)   any strides: the strides tell the layout
    block_tables           (S, B) int32          block ids of each row in token order, -1 past its last block
    cu_seqlens_q           (S + 1,) int32        queries of row s are query[cu_seqlens_q[s] : cu_seqlens_q[s + 1]]
    seq_lens_kv            (S,) int32            tokens of row s in the cache, this step's included
    slot_mapping           (T,) int64            block_id * block_size + offset of each token, -1 = do not write

Query i of row s stands at position `seq_lens_kv[s] - q_len[s] + i` and sees positions `(p - sliding_window, p]`.
Slots that no row has written may hold anything, NaN included: kernels mask by `seq_lens_kv` and never read them into a result.
Offsets into the caches are 64-bit: a pool passes 2**31 elements on any large device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

BACKENDS = ("reference", "cpu", "gpu")


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
    ) -> None:
        """Store each token's K and V in its slot; a slot of -1 is skipped."""

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
    ) -> None:
        """Attention of one new token a row (query is (S, H, D)) over that row's cached context; writes `out` (S, H, D)."""

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
