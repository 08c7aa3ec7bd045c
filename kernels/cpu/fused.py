"""What lies between a decoder layer's products, on tensors: the signatures of `rows.py`'s compiled kernels.

All tensors are contiguous. A product may come with `scales` (T,) fp32, by which its rows are still to be multiplied (see
`quantize`); it is fp32 then, whatever the model's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import load_kernels

_F32 = np.empty(0, np.float32)
_UINT8, _INT16 = np.empty(0, np.uint8), np.empty(0, np.int16)
_ROWS_PER_ITEM = 128  # of a product: their inputs of one slice stay in the L2 cache
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
    scales: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """residual += delta * scales; out = RMSNorm(residual) * weight.

    residual (T, C) and weight (C,) fp32; delta and out (T, C). C is a multiple of 16.
    """
    kernels, num_threads = load_kernels("rows")
    kernels.add_rms_norm(
        residual.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        _F32 if scales is None else scales.numpy(),
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
    scales: torch.Tensor | None,
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
        _F32 if scales is None else scales.numpy(),
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


def silu_mul(gate_up: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = silu(gate) * up. gate_up (T, 2 I), out (T, I). I is a multiple of 16."""
    kernels, num_threads = load_kernels("rows")
    kernels.silu_mul(
        gate_up.data_ptr(),
        _F32 if scales is None else scales.numpy(),
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        num_threads,
        TAGS[gate_up.dtype],
        TAGS[out.dtype],
    )


def pack(weight: torch.Tensor, together: int = 1) -> torch.Tensor:
    """Return a weight (N, C) in panels of 16 output channels, filled up with zeros: (P, C / together, 16, together).

    Input channels that are multiplied `together` lie side by side, see `gemm.py`.
    """
    width = load_kernels("gemm")[0].PANEL
    out_features, in_features = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -out_features % width))
    return filled.view(-1, width, in_features // together, together).transpose(1, 2).contiguous()


def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return x @ weight^T + bias in `dtype`, (T, P * 16). x (T, C) fp32, packed (P, C, 16, 1) floats, bias (P * 16,) fp32."""
    kernels, num_threads = load_kernels("gemm")
    num_panels, in_features, width, _ = packed.shape
    out = torch.empty(x.shape[0], num_panels * width, dtype=dtype)
    kernels.product(
        x.data_ptr(),
        packed.data_ptr(),
        _F32 if bias is None else bias.numpy(),
        out.data_ptr(),
        x.shape[0],
        in_features,
        num_panels,
        _ROWS_PER_ITEM,
        num_threads,
        TAGS[packed.dtype],
        TAGS[dtype],
        _F32,
    )
    return out


def product_int8(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return x @ weight^T * scales, (T, P * 16) fp32. x (T, C) int16, packed (P, C / 2, 16, 2) int8, scales (P * 16,) fp32."""
    kernels, num_threads = load_kernels("gemm")
    num_panels, _, width, _ = packed.shape
    out = torch.empty(x.shape[0], num_panels * width)
    kernels.product_int8(
        x.data_ptr(),
        packed.data_ptr(),
        scales.numpy(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        num_panels,
        _ROWS_PER_ITEM,
        num_threads,
        _F32,
    )
    return out


def quantize(x: torch.Tensor, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of x (T, C) to 255 levels: return them and scales (T,) fp32 with x = levels * scale.

    As int16 the levels are from -127 to 127, as uint8 128 stands for 0. C is at least 4. A row that holds a NaN or an
    infinity has a NaN for its scale.
    """
    kernels, num_threads = load_kernels("rows")
    out = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty(x.shape[0])
    tag = _UINT8 if dtype == torch.uint8 else _INT16
    kernels.quantize(x.data_ptr(), out.data_ptr(), scales.numpy(), x.shape[0], x.shape[1], num_threads, TAGS[x.dtype], tag)
    return out, scales
