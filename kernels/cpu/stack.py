"""A decoder's layers as one call on tensors: see `layers.py`.

For weights whose products are our own and fill their panels, on fp32 states; K and V may be int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..api import LayerCache, SharedPrefixes
from . import load_kernels
from .attention import NO_SINKS, Rows, byte_strides, check_layout, cut_rows, narrow_tag, scale_strides
from .fused import TAGS, Panels, tag_of_panels

_F32 = TAGS[torch.float32]


class LayerWeights(NamedTuple):
    """One layer's weights; norms fp32."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int | None
    qkv: Panels
    out: Panels
    gate_up: Panels
    down: Panels


class StackBuffers(NamedTuple):
    """Where the states of a step are, contiguous fp32."""

    residual: torch.Tensor  # (T, hidden): the embedded tokens
    normed: torch.Tensor  # (T, hidden)
    query: torch.Tensor  # (T, H, D)
    key: torch.Tensor  # (T, Hkv, D)
    value: torch.Tensor
    attended: torch.Tensor  # (T, H, D)
    cos: torch.Tensor  # (T, D)
    sin: torch.Tensor
    activated: torch.Tensor  # (chunk, intermediate)
    product: torch.Tensor  # (chunk, widest product)


class StackStep(Protocol):
    """What the layers need to know of a step's rows, of which the first ones decode and the others have prompts."""

    cache_layers: Sequence[LayerCache]
    slot_mapping: torch.Tensor
    num_decodes: int
    decode_block_tables: torch.Tensor
    decode_seq_lens: torch.Tensor
    decode_shared: SharedPrefixes | None
    prefill_block_tables: torch.Tensor
    prefill_cu_seqlens_q: torch.Tensor
    prefill_seq_lens: torch.Tensor
    max_seqlen_q: int


class LayerStack:
    """Layers that run together. All of their weights are kept in one form: `tag_of_panels` of all is the same."""

    def __init__(self, layers: Sequence[LayerWeights], *, heads: tuple[int, int, int], eps: float, scale: float):
        """heads: H, Hkv, D."""
        self._layers = layers  # the addresses below are of their tensors
        self._heads = heads
        self._eps, self._scale = np.float32(eps), np.float32(scale)
        self._weight_tag = tag_of_panels(layers[0].qkv)
        self._is_int8 = layers[0].qkv.scales is not None
        self._fields = np.array([_fields(layer) for layer in layers], np.int64)
        products = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in layers]
        self._operands = np.array([[panels.operand for panels in of_layer] for of_layer in products])

    def run(self, buffers: StackBuffers, step: StackStep) -> None:
        """Run the layers, but for the last one's products after attention: its output is left in `buffers.attended`.

        Keys and values go to their slots.

        Raises:
            ValueError: a pool that is neither fp32 nor int8, or see `attention.check_layout`.
            MemoryError: a kernel's threads got none; what the step has computed is not to be used.
        """
        kernels, num_threads = load_kernels("layers")
        num_heads, num_kv_heads, head_dim = self._heads
        first, chunk = step.cache_layers[0], buffers.activated.shape[0]
        check_layout(first.key, first.value)
        if first.key.dtype not in (torch.float32, torch.int8) or first.value.dtype != first.key.dtype:
            raise ValueError(f"K and V in fp32 don't fit a pool of {first.key.dtype} and {first.value.dtype}")
        block_size = first.key.shape[2]
        cache_tag, narrow = TAGS[first.key.dtype], narrow_tag(block_size, head_dim)
        cut = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "num_threads": num_threads}

        def decodes(shared: SharedPrefixes | None) -> Rows:
            return cut_rows(step.decode_block_tables, None, step.decode_seq_lens, shared, max_seqlen_q=1, **cut)

        prefills = cut_rows(
            step.prefill_block_tables,
            step.prefill_cu_seqlens_q,
            step.prefill_seq_lens,
            None,
            max_seqlen_q=step.max_seqlen_q,
            **cut,
        )
        done = kernels.run_layers(
            *_functions(self._is_int8, self._weight_tag.dtype.name, cache_tag.dtype.name, narrow.dtype.name),
            self._fields,
            self._operands,
            np.array([_cache_addresses(layer) for layer in step.cache_layers[: len(self._layers)]], np.int64),
            byte_strides(first.key, 0, 1, 2, 3) + byte_strides(first.value, 0, 1, 2, 3),
            scale_strides(first.key, first.key_scales)[1:] + scale_strides(first.value, first.value_scales)[1:],
            tuple([buffer.data_ptr() for buffer in buffers]),
            buffers.residual.shape[0],
            chunk,
            step.num_decodes,
            (buffers.residual.shape[1], num_heads, num_kv_heads, head_dim, block_size),
            step.slot_mapping.numpy(),
            tuple(decodes(step.decode_shared)),
            tuple(decodes(None)),
            tuple(prefills),
            self._eps,
            self._scale,
            num_threads,
            NO_SINKS,
            _F32,
            self._weight_tag,
            cache_tag,
            narrow,
        )
        if not done:
            raise MemoryError("a kernel got no memory to work in")


def _cache_addresses(cache: LayerCache) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in (cache.key, cache.value, cache.key_scales, cache.value_scales)]


def _fields(layer: LayerWeights) -> list[int]:
    query_norm, key_norm = (0, 0) if layer.head_norms is None else (norm.data_ptr() for norm in layer.head_norms)
    return [layer.input_norm.data_ptr(), layer.post_norm.data_ptr(), query_norm, key_norm, layer.window or 0]


@cache
def _functions(is_int8: bool, weight_type: str, cache_type: str, narrow_type: str) -> tuple[Any, ...]:
    """Return the kernels of `run_layers` for dtypes, as first-class functions, compiled or found on disk."""
    from numba.core import types

    i64, f32 = types.int64, types.float32
    tag32, weight_tag, cache_tag, narrow_tag = f32, *(getattr(types, name) for name in (weight_type, cache_type, narrow_type))
    ints, rows, tables, sinks = (types.Array(t, d, "C") for t, d in ((i64, 1), (types.int32, 1), (types.int32, 2), (f32, 1)))
    pair, triple, four = (types.UniTuple(i64, count) for count in (2, 3, 4))
    gemm, rows_kernels = load_kernels("gemm")[0], load_kernels("rows")[0]
    signatures = (
        (rows_kernels.add_rms_norm, (*[i64] * 6, f32, i64, tag32, tag32, tag32)),
        (
            gemm.product_int8 if is_int8 else gemm.product,
            (i64, ints, i64, i64, i64, i64, tag32, weight_tag, tag32, tag32),
        ),
        (rows_kernels.rotate, (*[i64] * 12, f32, i64, tag32, tag32, tag32)),
        (
            load_kernels("write")[0].store_kv,
            (i64, pair, i64, pair, i64, four, i64, four, triple, triple, ints, *[i64] * 4, tag32, cache_tag, tag32),
        ),
        (
            load_kernels("attend")[0].attend,
            (
                i64, pair, i64, triple, i64, triple, triple, triple, i64, pair, i64, i64, pair, ints,
                tables, *[rows] * 4, sinks, *[i64] * 6, f32, i64, f32, i64, tag32, cache_tag, tag32, narrow_tag,
            ),
        ),
    )  # fmt: skip
    for kernel, of in signatures:
        kernel.compile(of)  # as a call from Python would: under another key the disk cache would hold it twice
    return tuple(types.CompileResultWAP(kernel.overloads[of]) for kernel, of in signatures)
