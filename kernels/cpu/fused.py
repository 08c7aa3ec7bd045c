"""What lies between a decoder layer's products, on tensors: the signatures of `rows.py`'s compiled kernels.

All tensors are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from . import load_kernels

_F32 = np.empty(0, np.float32)
_UINT8, _INT16 = np.empty(0, np.uint8), np.empty(0, np.int16)
_PAIRS = np.empty(0, np.uint32)
_MOST_ROWS = 56  # of a product's work item: their part beside a panel's in the L1 cache, and all of them in the L2 cache
# What tells a compiled kernel the dtype behind an address (see `simd.py`).
TAGS: dict[torch.dtype, np.ndarray[Any, Any]] = {
    torch.float32: _F32,
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
}


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """residual += delta; out = RMSNorm(residual) * weight.

    residual (T, C) and weight (C,) fp32; delta and out (T, C). C is a multiple of 16.
    """
    kernels, num_threads = load_kernels("rows")
    kernels.add_rms_norm(
        residual.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        np.float32(eps),
        num_threads,
        TAGS[out.dtype if delta is None else delta.dtype],
        TAGS[out.dtype],
        _F32,
    )


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
) -> None:
    """Split fused projections qkv (T, (H + 2 Hkv) * D) into rotated query (T, H, D) and key, and value (T, Hkv, D).

    cos, sin (T, D) fp32. `norms`: fp32 weights (D,) of an RMSNorm of each query and key head before it is rotated. D is a
    multiple of 8.
    """
    kernels, num_threads = load_kernels("rows")
    kernels.rotate(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        0 if norms is None else norms[0].data_ptr(),
        0 if norms is None else norms[1].data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        qkv.shape[0],
        query.shape[1],
        key.shape[1],
        query.shape[2],
        np.float32(eps),
        num_threads,
        TAGS[qkv.dtype],
        TAGS[query.dtype],
        _F32,
    )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up. gate_up (T, 2 I), out (T, I). I is a multiple of 16."""
    kernels, num_threads = load_kernels("rows")
    kernels.silu_mul(
        gate_up.data_ptr(),
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        num_threads,
        TAGS[gate_up.dtype],
        TAGS[out.dtype],
    )


def panel_width() -> int:
    """Return how many output channels a panel has."""
    return load_kernels("gemm")[0].PANEL


def pack(weight: torch.Tensor, together: int = 1) -> torch.Tensor:
    """Return a weight (N, C) in panels of output channels, filled up with zeros: (P, C / together, width, together).

    Input channels that are multiplied `together` lie side by side. bf16 comes as int32 (P, C, width / 2, 1), see `gemm.py`.
    """
    width = panel_width()
    out_features, in_features = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -out_features % width))
    if weight.dtype == torch.bfloat16:
        return filled.view(-1, 2, width // 2, in_features).permute(0, 3, 2, 1).contiguous().view(torch.int32)
    return filled.view(-1, width, in_features // together, together).transpose(1, 2).contiguous()


def product(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, gated: bool = False
) -> None:
    """out = x @ weight^T + bias. x (T, C) fp32, packed by `pack`, bias (P * width,) fp32, out (T, P * width).

    gated: out (T, P / 2 * width) = silu(the first half) * the second.
    """
    kernels, num_threads = load_kernels("gemm")
    num_panels, in_features = packed.shape[:2]
    kernels.product(
        x.data_ptr(),
        packed.data_ptr(),
        _F32 if bias is None else bias.numpy(),
        out.data_ptr(),
        x.shape[0],
        in_features,
        num_panels,
        2 if gated else 1,
        _rows_per_item(x.shape[0], kernels.ROWS_TOGETHER),
        num_threads,
        _tag_of_panels(packed),
        TAGS[out.dtype],
        _F32,
    )


class Int8Panels(NamedTuple):
    """A weight (N, C) of whole numbers in panels, for `product_int8`."""

    packed: torch.Tensor  # (P, C / together, width, together) int8
    starts: torch.Tensor  # (groups of inputs, P * width) int32: what makes up for the rows' offset
    scales: torch.Tensor  # (P * width,) fp32


def pack_int8(weight: torch.Tensor, scales: torch.Tensor, num_groups: int = 1) -> Int8Panels:
    """Return a weight (N, C) int8 of magnitudes to 127, to be multiplied by `scales` (N,), its inputs in equal groups.

    A group's inputs are a multiple of 4.
    """
    together = load_kernels("gemm")[0].TOGETHER
    packed = pack(weight, together)
    extra = packed.shape[0] * packed.shape[2] - weight.shape[0]
    offset = 128 if together == 4 else 0  # of the rows' numbers, see `quantize`
    starts = -offset * weight.view(weight.shape[0], num_groups, -1).sum(dim=2, dtype=torch.int32).t()
    return Int8Panels(packed, *(torch.nn.functional.pad(t, (0, extra)).contiguous() for t in (starts, scales)))


def product_int8(x: torch.Tensor, weight: Int8Panels, out: torch.Tensor, *, gated: bool = False) -> None:
    """out (T, P * width) = x @ weight^T, each of the weight's groups of a row of x (T, C) rounded by its own scale.

    gated: out (T, P / 2 * width) = silu(the first half) * the second.
    """
    kernels, num_threads = load_kernels("gemm")
    kernels.product_int8(
        x.data_ptr(),
        weight.packed.data_ptr(),
        weight.starts.numpy(),
        weight.scales.numpy(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        weight.starts.shape[0],
        weight.packed.shape[0],
        2 if gated else 1,
        _rows_per_item(x.shape[0], kernels.ROWS_TOGETHER),
        num_threads,
        TAGS[x.dtype],
        _UINT8 if kernels.TOGETHER == 4 else _INT16,
        TAGS[out.dtype],
        _F32,
    )


def best_channels(
    x: torch.Tensor,
    packed: torch.Tensor,
    whole: Int8Panels,
    rounded: torch.Tensor,
    slack: torch.Tensor,
    num_channels: int,
) -> torch.Tensor:
    """Return ids (T,) int64 of each row's largest product with the first `num_channels` of a weight; -1 where it isn't finite.

    x (T, C) fp32, packed by `pack`; see `greedy.best_channels` for the rest.
    """
    kernels, num_threads = load_kernels("greedy")
    best = torch.empty(x.shape[0], dtype=torch.int64)
    kernels.best_channels(
        x.numpy(),
        packed.data_ptr(),
        whole.packed.data_ptr(),
        whole.starts[0].numpy(),
        whole.scales.numpy(),
        rounded.numpy(),
        slack.numpy(),
        best.numpy(),
        num_channels,
        _rows_per_item(x.shape[0], kernels.ROWS_TOGETHER),
        num_threads,
        _tag_of_panels(packed),
        _F32,
    )
    return best


def _tag_of_panels(packed: torch.Tensor) -> np.ndarray[Any, Any]:
    return _PAIRS if packed.dtype == torch.int32 else TAGS[packed.dtype]


def _rows_per_item(num_rows: int, rows_together: int) -> int:
    """Return how many rows a product's work item takes: all items alike, in whole steps of what is multiplied together."""
    num_items = max(1, -(-num_rows // _MOST_ROWS))
    return max(1, -(-num_rows // (num_items * rows_together))) * rows_together


def quantize(x: torch.Tensor, dtype: torch.dtype = torch.uint8, num_groups: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each of `num_groups` equal parts of each row of x (T, C) to 255 levels.

    Returns them and scales (T, num_groups) fp32 with x = levels * scale. As int16 the levels are from -127 to 127, as uint8 128
    stands for 0. A part has at least 4 elements. One that holds a NaN or an infinity has a NaN for its scale.
    """
    kernels, num_threads = load_kernels("rows")
    out = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty(x.shape[0], num_groups)
    tag = _UINT8 if dtype == torch.uint8 else _INT16
    kernels.quantize(
        x.data_ptr(),
        out.data_ptr(),
        scales.numpy().reshape(-1),
        x.shape[0] * num_groups,
        x.shape[1] // num_groups,
        num_threads,
        TAGS[x.dtype],
        tag,
    )
    return out, scales
