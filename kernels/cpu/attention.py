"""The CPU backend: the signatures of `api.Backend` over the compiled `attend.py` and `write.py`.

K is stored transposed inside its block, `(head_dim, block_size)`; the caller passes the transpose view, so shapes are the
same everywhere and only strides differ. fp32, bf16 and fp16 tensors, int8 caches beside them; fp32 arithmetic throughout. Numba
must have been given the same number of threads as torch (`threads.set_threads`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..api import SharedPrefixes
from ..reference import copy_blocks as copy_blocks
from . import load_kernels
from .fused import TAGS

KEY_TRANSPOSED = True

# (query, head) rows handled together: enough to use a K/V tile well, few enough that scores and sums stay in the L1 cache.
_ROWS_PER_ITEM = 42
# Where rows share blocks, items are the larger the more blocks are read once; so many are left that threads end together.
_ITEMS_PER_THREAD = 2

_F32 = TAGS[torch.float32]
NO_SINKS = np.empty(0, np.float32)
_NARROW = np.uint8(0)
_NO_SLOTS = np.empty(0, np.int64)


def byte_strides(tensor: torch.Tensor, *dims: int) -> tuple[int, ...]:
    size, strides = tensor.itemsize, tensor.stride()
    return tuple([strides[dim] * size for dim in dims])


@lru_cache(maxsize=4)
def _one_query_each(num_rows: int) -> torch.Tensor:
    """Return cu_seqlens_q of decoding rows; every layer of a step asks for the same."""
    return torch.arange(num_rows + 1, dtype=torch.int32)


def scale_strides(cache: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the address of a cache's scales and their strides in bytes (block, head); zeros where it has none."""
    if (scales is not None) != (cache.dtype == torch.int8):
        raise ValueError(f"a cache of {cache.dtype} with{'out' if scales is None else ''} scales: int8 has them, nothing else")
    if scales is None:
        return 0, 0, 0
    if scales.dtype != torch.float32 or scales.shape != cache.shape[:3] or scales.stride(2) != 1:
        raise ValueError("scales are fp32, one for each block, head and token of their cache, contiguous by token")
    block_stride, head_stride = byte_strides(scales, 0, 1)
    return scales.data_ptr(), block_stride, head_stride


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """See `api.Backend.write_kv`."""
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("write_kv needs keys and values whose head_dim is contiguous")
    quantizes = key_cache.dtype == value_cache.dtype == torch.int8
    if key.dtype != value.dtype or not (quantizes or key.dtype == key_cache.dtype == value_cache.dtype):
        raise ValueError(f"write_kv copies bits: {key.dtype} and {value.dtype} don't fit a pool of {key_cache.dtype}")
    kernels, num_threads = load_kernels("write")
    kernels.store_kv(
        key.data_ptr(),
        byte_strides(key, 0, 1),
        value.data_ptr(),
        byte_strides(value, 0, 1),
        key_cache.data_ptr(),
        byte_strides(key_cache, 0, 1, 2, 3),
        value_cache.data_ptr(),
        byte_strides(value_cache, 0, 1, 2, 3),
        scale_strides(key_cache, key_scales),
        scale_strides(value_cache, value_scales),
        slot_mapping.numpy(),
        key.shape[1],
        key.shape[2],
        key_cache.shape[2],
        num_threads,
        TAGS[key.dtype],
        TAGS[key_cache.dtype],
        _F32,
    )


def check_layout(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Refuse blocks that attention can't read.

    Raises:
        ValueError: K is not transposed inside its block, V not contiguous in head_dim, or one of both sizes below 4.
    """
    if key_cache.stride(2) != 1 or value_cache.stride(3) != 1:
        raise ValueError("the cpu backend needs K transposed inside its block and V contiguous in head_dim")
    block_size, head_dim = key_cache.shape[2:]
    if head_dim < 4 or block_size < 4:
        raise ValueError(f"the cpu backend needs head_dim >= 4 and block_size >= 4, not {head_dim} and {block_size}")


class Rows(NamedTuple):
    """Rows whose attention is one call, and how their work is cut: what `attend.attend` takes in this order."""

    block_tables: np.ndarray[Any, Any]
    cu_seqlens_q: np.ndarray[Any, Any]
    seq_lens_kv: np.ndarray[Any, Any]
    row_bounds: np.ndarray[Any, Any]
    num_shared_blocks: np.ndarray[Any, Any]
    queries_per_item: int
    heads_per_item: int


def cut_rows(
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens_kv: torch.Tensor,
    shared: SharedPrefixes | None,
    *,
    max_seqlen_q: int,
    num_heads: int,
    num_kv_heads: int,
    num_threads: int,
) -> Rows:
    """Return rows with their work items; cu_seqlens_q None: each has one query."""
    num_rows = seq_lens_kv.shape[0]
    if cu_seqlens_q is None:
        cu_seqlens_q = _one_query_each(num_rows)
    queries_per_item = max(1, _ROWS_PER_ITEM * num_kv_heads // num_heads)
    if shared is None:
        row_bounds, num_shared_blocks = np.array([0, num_rows], np.int32), np.zeros(1, np.int32)
        queries_per_item = min(queries_per_item, max(1, max_seqlen_q))
    else:
        row_bounds, num_shared_blocks = shared.row_bounds.numpy(), shared.num_shared_blocks.numpy()
        fair = num_rows * num_kv_heads // (_ITEMS_PER_THREAD * num_threads)
        queries_per_item = min(queries_per_item, max(1, fair))
    # Of rows with one query each item has all heads, which lie side by side in a block; unless that leaves threads idle.
    alone = queries_per_item == 1 and num_rows >= _ITEMS_PER_THREAD * num_threads
    return Rows(
        np.ascontiguousarray(block_tables.numpy()),
        cu_seqlens_q.numpy(),
        seq_lens_kv.numpy(),
        row_bounds,
        num_shared_blocks,
        queries_per_item,
        num_kv_heads if alone else 1,
    )


def narrow_tag(block_size: int, head_dim: int) -> np.generic:
    """Return the tag that says whether vectors of less than 16 lanes are needed."""
    return _NARROW if min(block_size, head_dim) < 16 else _F32


def paged_prefill(
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
    shared: SharedPrefixes | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """See `api.Backend.paged_prefill`. With `shared`, rows of one query: see `api.Backend.paged_decode`."""
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    check_layout(key_cache, value_cache)
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the cpu backend needs query and out contiguous in head_dim")
    kernels, num_threads = load_kernels("attend")
    rows = cut_rows(
        block_tables,
        cu_seqlens_q,
        seq_lens_kv,
        None if sliding_window is not None else shared,
        max_seqlen_q=max_seqlen_q,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_threads=num_threads,
    )
    kernels.attend(
        query.data_ptr(),
        byte_strides(query, 0, 1),
        key_cache.data_ptr(),
        byte_strides(key_cache, 0, 1, 3),
        value_cache.data_ptr(),
        byte_strides(value_cache, 0, 1, 2),
        scale_strides(key_cache, key_scales),
        scale_strides(value_cache, value_scales),
        out.data_ptr(),
        byte_strides(out, 0, 1),
        0,
        0,
        (0, 0),
        _NO_SLOTS,
        *rows[:5],
        NO_SINKS if sinks is None else sinks.detach().float().numpy(),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        rows.queries_per_item,
        rows.heads_per_item,
        np.float32(scale),
        sliding_window or 0,
        np.float32(softcap or 0.0),
        num_threads,
        TAGS[query.dtype],
        TAGS[key_cache.dtype],
        _F32,
        narrow_tag(block_size, head_dim),
    )


def paged_decode(
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
    """See `api.Backend.paged_decode`: the same kernel with one query a row, so that decode and prefill give the same bits.

    `shared` doesn't change a bit either: a row's arithmetic is the same whoever reads its tiles with it.
    """
    cu_seqlens_q = _one_query_each(query.shape[0])
    paged_prefill(
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens_kv,
        out,
        scale=scale,
        max_seqlen_q=1,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        shared=shared,
        key_scales=key_scales,
        value_scales=value_scales,
    )
