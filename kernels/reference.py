"""The truth the fast backends are tested against: plain torch, one row at a time, fp32 arithmetic.

Clear rather than fast, but usable on any device and with any cache strides.
"""

from __future__ import annotations

import torch

KEY_TRANSPOSED = False


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `api.Backend.write_kv`."""
    block_size = key_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    key_cache[slots // block_size, :, slots % block_size] = key[written].to(key_cache.dtype)
    value_cache[slots // block_size, :, slots % block_size] = value[written].to(value_cache.dtype)


def _gather(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """Return one row's first `length` cached tokens as (Hkv, length, D) fp32."""
    block_size = cache.shape[2]
    blocks = block_table[: -(-length // block_size)].long()
    tokens = cache[blocks].transpose(0, 1)  # (Hkv, blocks, block_size, D)
    return tokens.reshape(cache.shape[1], -1, cache.shape[3])[:, :length].float()


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
) -> None:
    """See `api.Backend.paged_prefill`. For a row: softmax(softcap(q k^T * scale) + mask) v, with the sink as an extra logit."""
    group = query.shape[1] // key_cache.shape[1]
    bounds = cu_seqlens_q.tolist()
    for row, length in enumerate(seq_lens_kv.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if start == end:
            continue
        k = _gather(key_cache, block_tables[row], length).repeat_interleave(group, dim=0)
        v = _gather(value_cache, block_tables[row], length).repeat_interleave(group, dim=0)
        q = query[start:end].transpose(0, 1).float()  # (H, q_len, D)
        scores = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        q_positions = torch.arange(length - (end - start), length, device=query.device)[:, None]
        kv_positions = torch.arange(length, device=query.device)[None, :]
        hidden = kv_positions > q_positions
        if sliding_window is not None:
            hidden |= kv_positions <= q_positions - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, end - start, 1)
            probs = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            probs = torch.softmax(scores, dim=-1)
        out[start:end] = (probs @ v).transpose(0, 1).to(out.dtype)


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
) -> None:
    """See `api.Backend.paged_decode`: prefill with one query a row."""
    cu_seqlens_q = torch.arange(query.shape[0] + 1, dtype=torch.int32)
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
    )


def copy_blocks(kv: torch.Tensor, src_block_ids: torch.Tensor, dst_block_ids: torch.Tensor) -> None:
    """See `api.Backend.copy_blocks`."""
    kv[dst_block_ids.long()] = kv[src_block_ids.long()]
