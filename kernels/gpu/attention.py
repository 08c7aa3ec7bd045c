"""The Triton backend: the four functions of `api.Backend`, each a launch without a host sync.

Works with fp16, bf16 and fp32, not with int8 caches; with any head_dim, and block sizes that are powers of two. The tensors'
device must be the current one. With TRITON_INTERPRET=1 (set before triton is imported) the same functions run on CPU
tensors; Triton's interpreter computes bf16 wrongly, silently, so use fp16 or fp32 there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from ..api import SharedPrefixes
from .copy import copy_blocks_kernel
from .decode import SPLIT_SIZE, decode_config, decode_split_kernel, max_num_splits, merge_splits_kernel
from .prefill import prefill_config, prefill_kernel
from .prefix import prefix_split_kernel
from .write import write_kv_kernel

KEY_TRANSPOSED = False

# One very long row makes the partials of every row large: rows are then launched in groups that fit this.
MAX_PARTIAL_BYTES = 256 * 2**20
MERGE_CHUNK = 8  # splits merged at a time
COPY_CHUNK = 8192  # elements of a block one program copies
# Given to every launch: a variable of the environment must not change a result's bits.
FP_FUSION = True

_NO_INT8 = "the gpu backend has no int8 caches: `EngineConfig.resolve` refuses them"


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
    assert key_scales is value_scales is None, _NO_INT8
    num_tokens, num_kv_heads, head_dim = key.shape
    _check_last_dim_contiguous(key, value, key_cache, value_cache)
    if num_tokens == 0:
        return
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        enable_fp_fusion=FP_FUSION,
    )


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
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """See `api.Backend.paged_prefill`. `max_seqlen_q` is not needed: the grid's size follows from T and S."""
    assert key_scales is value_scales is None, _NO_INT8
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = seq_lens_kv.shape[0]
    assert query.dtype == key_cache.dtype == value_cache.dtype
    _check_last_dim_contiguous(query, key_cache, value_cache, block_tables, out)
    if num_tokens == 0:
        return
    group = num_heads // key_cache.shape[1]
    config = prefill_config(head_dim, group, query.element_size())
    grid = (num_tokens // (config["BLOCK_M"] // group) + num_seqs, key_cache.shape[1])
    prefill_kernel[grid](
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens_kv,
        sinks,
        out,
        float(scale),
        num_seqs,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=key_cache.shape[2],
        ALIGNMENT=_common_alignment(query, key_cache, value_cache, out),
        SLIDING_WINDOW=sliding_window,
        SOFTCAP=softcap,
        enable_fp_fusion=FP_FUSION,
        **config,
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
    """See `api.Backend.paged_decode`. The number of splits follows from the width of `block_tables`.

    Shared blocks take a launch of their own, before; the merge sums a row's partials in the order of positions.
    """
    assert key_scales is value_scales is None, _NO_INT8
    num_seqs, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    assert query.dtype == key_cache.dtype == value_cache.dtype
    _check_last_dim_contiguous(query, key_cache, value_cache, block_tables, out)
    if num_seqs == 0:
        return
    if sliding_window is not None or (shared is not None and shared.max_shared_blocks == 0):
        shared = None
    group = num_heads // num_kv_heads
    row_splits = max_num_splits(block_tables.shape[1] * block_size, sliding_window)
    num_splits = row_splits if shared is None else row_splits + 1  # one more where a prefix ends within a split
    common = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "SPLIT_SIZE": SPLIT_SIZE,
        "enable_fp_fusion": FP_FUSION,
    }

    partials: tuple[torch.Tensor | None, ...] = (None, None, None)  # max, sum, acc
    shared_blocks = None
    num_rows = num_seqs
    if num_splits > 1:
        bytes_per_row = num_heads * num_splits * (head_dim + 2) * 4
        num_rows = min(num_seqs, max(1, MAX_PARTIAL_BYTES // bytes_per_row))
        partial_max = query.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)
        partial_acc = query.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
        partials = (partial_max, torch.empty_like(partial_max), partial_acc)

    for first_row in range(0, num_seqs, num_rows):
        rows = slice(first_row, first_row + num_rows)
        q, o, lengths, tables = query[rows], out[rows], seq_lens_kv[rows], block_tables[rows]
        if shared is not None:
            shared_blocks = shared.row_shared_blocks[rows]
            _attend_prefixes(
                query,
                key_cache,
                value_cache,
                block_tables,
                shared,
                sinks,
                partials,
                num_splits,
                range(num_seqs)[rows],
                scale,
                softcap,
                common,
            )
        decode_split_kernel[(q.shape[0], num_kv_heads, row_splits)](
            q,
            key_cache,
            value_cache,
            tables,
            lengths,
            shared_blocks,
            sinks,
            o,
            *partials,
            float(scale),
            num_splits,
            *q.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            tables.stride(0),
            *o.stride()[:2],
            GROUP=group,
            ALIGNMENT=_common_alignment(query, key_cache, value_cache, out),
            SLIDING_WINDOW=sliding_window,
            SOFTCAP=softcap,
            **common,
            **decode_config(head_dim, group, query.element_size()),
        )
        if num_splits > 1:
            merge_splits_kernel[(q.shape[0], num_heads)](
                *partials,
                lengths,
                shared_blocks,
                o,
                num_splits,
                *o.stride()[:2],
                SLIDING_WINDOW=sliding_window,
                CHUNK=MERGE_CHUNK,
                **common,
            )


def _attend_prefixes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    shared: SharedPrefixes,
    sinks: torch.Tensor | None,
    partials: tuple[torch.Tensor | None, ...],
    num_splits: int,
    rows: range,
    scale: float,
    softcap: float | None,
    common: dict[str, Any],
) -> None:
    """Attend to the shared blocks of all groups; write the first of the `num_splits` partials of each of `rows`."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    config = prefill_config(head_dim, group, query.element_size())
    num_groups = shared.num_shared_blocks.shape[0]
    num_chunks = num_seqs // (config["BLOCK_M"] // group) + num_groups
    prefix_splits = max_num_splits(shared.max_shared_blocks * block_size, None)
    prefix_split_kernel[(num_chunks, num_kv_heads, prefix_splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        shared.row_bounds,
        shared.num_shared_blocks,
        sinks,
        *partials,
        float(scale),
        num_groups,
        rows.start,
        rows.stop,
        num_splits,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        ALIGNMENT=_common_alignment(query, key_cache, value_cache),
        SOFTCAP=softcap,
        **common,
        **config,
    )


def copy_blocks(kv: torch.Tensor, src_block_ids: torch.Tensor, dst_block_ids: torch.Tensor) -> None:
    """See `api.Backend.copy_blocks`. Each block must be one contiguous region."""
    assert kv[0].is_contiguous(), f"blocks of strides {kv.stride()} are not contiguous"
    num_pairs = src_block_ids.shape[0]
    if num_pairs == 0:
        return
    # As integers: a copy is of bits, whatever they mean, NaN and fp8 included.
    integers = kv.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kv.element_size()])
    block_numel = kv[0].numel()
    copy_blocks_kernel[(num_pairs * triton.cdiv(block_numel, COPY_CHUNK),)](
        integers,
        src_block_ids,
        dst_block_ids,
        kv.stride(0),
        block_numel,
        CHUNK=COPY_CHUNK,
        enable_fp_fusion=FP_FUSION,
    )


def _check_last_dim_contiguous(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"last dimension of strides {tensor.stride()}"


def _common_alignment(*tensors: torch.Tensor) -> int:
    """Return the largest power of two up to 16 that divides every stride, in elements, but the last dimension's."""
    return math.gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))
