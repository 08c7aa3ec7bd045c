"""The truth the fast backends are tested against: plain torch, one row at a time, fp32 arithmetic.

Clear rather than fast, but usable on any device and with any cache strides.
"""

from __future__ import annotations

import torch

from .api import LayerCache, SharedPrefixes

KEY_TRANSPOSED = False


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
    block_size = key_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    blocks, offsets = slots // block_size, slots % block_size
    for states, cache, scales in ((key[written], key_cache, key_scales), (value[written], value_cache, value_scales)):
        if scales is None:
            cache[blocks, :, offsets] = states.to(cache.dtype)
        else:
            cache[blocks, :, offsets], scales[blocks, :, offsets] = quantize(states)


def quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads (..., D) as int8 codes (..., D) and fp32 scales (...), as `api` defines them."""
    states = states.float()
    largest = states.abs().amax(dim=-1)
    scales = torch.where(largest.isfinite(), largest / 127, float("nan"))
    codes = torch.where(scales[..., None] > 0, states / scales[..., None], 0.0)
    return codes.round().clamp(-127, 127).to(torch.int8), scales


def _gather(cache: torch.Tensor, scales: torch.Tensor | None, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` cached tokens of a block table as (Hkv, length, D) fp32."""
    block_size = cache.shape[2]
    blocks = block_table[: -(-length // block_size)].long()
    tokens = cache[blocks].transpose(0, 1).float()  # (Hkv, blocks, block_size, D)
    if scales is not None:
        tokens = tokens * scales[blocks].transpose(0, 1)[..., None]
    return tokens.reshape(cache.shape[1], -1, cache.shape[3])[:, :length]


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
    """See `api.Backend.paged_prefill`. For a row: softmax(softcap(q k^T * scale) + mask) v, with the sink as an extra logit."""
    group = query.shape[1] // key_cache.shape[1]
    bounds = cu_seqlens_q.tolist()
    for row, length in enumerate(seq_lens_kv.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if start == end:
            continue
        k = _gather(key_cache, key_scales, block_tables[row], length).repeat_interleave(group, dim=0)
        v = _gather(value_cache, value_scales, block_tables[row], length).repeat_interleave(group, dim=0)
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
    shared: SharedPrefixes | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """See `api.Backend.paged_decode`: prefill with one query a row, or in two parts where rows share blocks.

    A group's queries attend to its shared blocks together, each row then to the rest of its own; both parts and the sink
    count by their share of the sum of exponentials.
    """
    if shared is None or sliding_window is not None:
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
            key_scales=key_scales,
            value_scales=value_scales,
        )
        return
    block_size, cache = key_cache.shape[2], LayerCache(key_cache, value_cache, key_scales, value_scales)
    lengths, bounds = seq_lens_kv.tolist(), shared.row_bounds.tolist()
    for g, num_blocks in enumerate(shared.num_shared_blocks.tolist()):
        first, end = bounds[g], bounds[g + 1]
        table = block_tables[first, :num_blocks]
        prefix = _attend_blocks(query[first:end], cache, table, num_blocks * block_size, scale, softcap)
        for row in range(first, end):
            table, length = block_tables[row, num_blocks:], lengths[row] - num_blocks * block_size
            suffix = _attend_blocks(query[row : row + 1], cache, table, length, scale, softcap)
            parts = [(prefix[0][row - first], prefix[1][row - first]), (suffix[0][0], suffix[1][0])]
            if sinks is not None:
                parts.append((sinks.float(), torch.zeros_like(parts[0][1])))
            shares = torch.softmax(torch.stack([log_sum for log_sum, _ in parts]), dim=0)
            merged = sum(share[:, None] * part for share, (_, part) in zip(shares, parts, strict=True))
            out[row] = merged.to(out.dtype)


def _attend_blocks(
    query: torch.Tensor,
    cache: LayerCache,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log of the sum of exponentials (N, H), attention (N, H, D)) of N queries over a table's first `length` tokens.

    They are -inf and 0 over no tokens.
    """
    group = query.shape[1] // cache.key.shape[1]
    k = _gather(cache.key, cache.key_scales, block_table, length).repeat_interleave(group, dim=0)
    v = _gather(cache.value, cache.value_scales, block_table, length).repeat_interleave(group, dim=0)
    scores = query.transpose(0, 1).float() @ k.transpose(1, 2) * scale  # (H, N, length)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    attention = torch.softmax(scores, dim=-1) @ v
    return torch.logsumexp(scores, dim=-1).T, attention.transpose(0, 1)


def copy_blocks(kv: torch.Tensor, src_block_ids: torch.Tensor, dst_block_ids: torch.Tensor) -> None:
    """See `api.Backend.copy_blocks`."""
    kv[dst_block_ids.long()] = kv[src_block_ids.long()]
