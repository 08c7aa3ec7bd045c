"""What lies between a decoder layer's products, on tensors: the signatures of `rows.py`'s compiled kernels.

All tensors are contiguous and of one dtype (fp32, bf16 or fp16), except where fp32 is said.
"""

from __future__ import annotations

import numpy as np
import torch

from . import load_kernels

_F32 = np.empty(0, np.float32)
TAGS = {torch.float32: _F32, torch.bfloat16: np.empty(0, np.uint16), torch.float16: np.empty(0, np.int16)}


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """residual += delta; out = RMSNorm(residual) * weight. residual (T, C), weight (C,) fp32; delta, out (T, C). 16 | C."""
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

    cos, sin (T, D) fp32. `norms`: fp32 weights (D,) of an RMSNorm of each query and key head before it is rotated. D % 8 == 0.
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
        _F32,
    )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up. gate_up (T, 2 I), out (T, I); I % 16 == 0."""
    kernels, num_threads = load_kernels("rows")
    kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1], num_threads, TAGS[out.dtype], _F32)
