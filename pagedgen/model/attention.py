"""The bridge into transformers: an attention function that writes K/V to the pool and attends over its blocks.

Registered in transformers' `AttentionInterface` under one name and in no mask registry, so that models build no mask. A step's
`AttentionStep` reaches it as a keyword argument of `model(...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelError
from ..kernels.api import Backend, LayerCache, SharedPrefixes

ATTENTION_NAME = "pagedgen"

# Named options that change the arithmetic, and tensors that don't: what they say is in the packed batch already.
_UNSUPPORTED = ("position_bias", "head_mask", "attention_bias", "alibi", "attn_bias", "sinks")
_HARMLESS_TENSORS = ("position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "num_items_in_batch")


def check_attention_call(module: torch.nn.Module, attention_mask: Any, options: dict[str, Any]) -> None:
    """Refuse what the paged kernels would leave out: masks, biases, index tensors, attention in both directions.

    `options`: keyword arguments besides the ones the kernels take.

    Raises:
        ModelError: the message names the module and what it wants.
    """
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelError(f"{name} passes a mask of its own to its attention, which the paged kernels don't support")
    for option, value in options.items():
        foreign = isinstance(value, torch.Tensor) and option not in _HARMLESS_TENSORS
        if foreign or (option in _UNSUPPORTED and value is not None):
            raise ModelError(f"{name} passes {option} to its attention, which the paged kernels don't support")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{name} attends in both directions; only causal models can be generated from")


def window_in_mask_only(module: torch.nn.Module, sliding_window: int | None) -> int | None:
    """Return the sliding window of a layer that doesn't hand it to its attention function but relies on a mask.

    Packed batches build no mask, so such a model is exact only while no row is longer than the window.
    """
    config = getattr(module, "config", None)
    declared = getattr(config, "sliding_window", None)
    if sliding_window is not None or not declared:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return declared if kinds[int(module.layer_idx)] == "sliding_attention" else None  # type: ignore[arg-type]
    return declared if getattr(config, "use_sliding_window", True) else None


@dataclass
class AttentionStep:
    """What every layer's attention needs of the current batch; tensors on the device. See `engine.batch.PackedBatch`."""

    backend: Backend
    cache_layers: Sequence[LayerCache]
    num_tokens: int
    num_decodes: int
    slot_mapping: torch.Tensor
    decode_block_tables: torch.Tensor
    decode_seq_lens: torch.Tensor
    prefill_block_tables: torch.Tensor
    prefill_cu_seqlens_q: torch.Tensor
    prefill_seq_lens: torch.Tensor
    max_seqlen_q: int
    max_model_len: int
    decode_shared: SharedPrefixes | None  # of the decodes
    checked_layers: set[int]  # layers whose call was found to ask for nothing the kernels leave out; kept between steps


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. query (1, H, T, D), key and value (1, Hkv, T, D) → ((1, T, H, D), None).

    T may end in rows that only fill up a GEMM; they belong to no sequence and their output is zero.

    Raises:
        ModelError: the layer wants something the kernels don't do.
    """
    if paged_step is None:
        raise ModelError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    step, layer_id = paged_step, int(module.layer_idx)  # type: ignore[arg-type]
    if layer_id not in step.checked_layers:
        check_attention_call(module, attention_mask, kwargs)
        window = window_in_mask_only(module, sliding_window)
        if window is not None and window < step.max_model_len:
            raise ModelError(
                f"{type(module).__name__} has a window of {window} tokens only in its mask; pass --max-model-len {window}"
            )
        step.checked_layers.add(layer_id)
    key_cache = step.cache_layers[layer_id].key
    if key.shape[1] != key_cache.shape[1] or key.shape[3] != key_cache.shape[3] or value.shape != key.shape:
        raise ModelError(
            f"layer {layer_id} has {key.shape[1]} KV heads of {key.shape[3]}/{value.shape[3]} dimensions (K/V), "
            f"the pool {key_cache.shape[1]} of {key_cache.shape[3]}: only models with one KV shape can run"
        )
    # Rotary embeddings and norms may leave fp32 behind; the pool and the kernels have one dtype. V, which neither touches, has
    # the model's where the pool is int8.
    dtype = value.dtype if key_cache.dtype == torch.int8 else key_cache.dtype
    q, k, v = (_rows(t.to(dtype)) for t in (query, key, value))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scale = scaling if scaling is not None else q.shape[2] ** -0.5
    attend(step, layer_id, q, k, v, out, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    return out[None].to(query.dtype), None


def attend(
    step: AttentionStep,
    layer_id: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """Write a layer's K and V to the pool and attend over it. query, out (T, H, D); key, value (T, Hkv, D).

    T may end in rows that only fill up a GEMM: their output is zero. `options` as `api.Backend.paged_decode`'s.
    """
    cache = step.cache_layers[layer_id]
    live, decodes = step.num_tokens, step.num_decodes
    step.backend.write_kv(
        _first(key, live),
        _first(value, live),
        cache.key,
        cache.value,
        step.slot_mapping,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
    )
    if query.shape[0] > live:
        out[live:] = 0
    if decodes:
        step.backend.paged_decode(
            _first(query, decodes),
            cache.key,
            cache.value,
            step.decode_block_tables,
            step.decode_seq_lens,
            _first(out, decodes),
            shared=step.decode_shared,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            **options,
        )
    if live > decodes:
        step.backend.paged_prefill(
            query[decodes:live],
            cache.key,
            cache.value,
            step.prefill_block_tables,
            step.prefill_cu_seqlens_q,
            step.prefill_seq_lens,
            out[decodes:live],
            max_seqlen_q=step.max_seqlen_q,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            **options,
        )


def _first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first rows; of all there are no view has to be made, which takes as long as a small kernel."""
    return rows if rows.shape[0] == count else rows[:count]


def _rows(states: torch.Tensor) -> torch.Tensor:
    """(1, heads, T, D) → (T, heads, D) with a contiguous last dimension; a view in every common model."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()


def register() -> None:
    """Make the attention function known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
