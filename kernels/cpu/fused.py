"""What lies between a decoder layer's products, on tensors: the signatures of `rows.py`'s compiled kernels.

All tensors are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from . import load_kernels

# What tells a compiled kernel the dtype behind an address (see `simd.py`): a number whose type is looked at, not its value.
_F32 = np.float32(0)
_UINT8, _INT16 = np.uint8(0), np.int16(0)
_PAIRS = np.uint32(0)
TAGS: dict[torch.dtype, np.generic] = {
    torch.float32: _F32,
    torch.bfloat16: np.uint16(0),
    torch.float16: _INT16,
    torch.int8: np.int8(0),
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


class Panels(NamedTuple):
    """A weight (N, C) in panels of output channels, filled up with zeros, and what a product needs to know of it."""

    packed: torch.Tensor  # (P, C / together, width, together); bf16 comes as int32 (P, C, width / 2, 1), see `gemm.py`
    bias: torch.Tensor | None  # (P * width,) fp32
    starts: torch.Tensor | None  # of whole numbers: (groups of inputs, P * width) int32, what makes up for the rows' offset
    scales: torch.Tensor | None  # of whole numbers: (P * width,) fp32
    width: int  # output channels, the zeros at the end included
    operand: np.ndarray[Any, Any]  # `gemm.py`'s fields, (OPERAND_FIELDS,) int64


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Panels:
    """Return a weight (N, C) and its bias (N,) in panels, for `product`."""
    return _described(_in_panels(weight, 1), weight.shape[1], bias)


def pack_int8(weight: torch.Tensor, scales: torch.Tensor, num_groups: int = 1, bias: torch.Tensor | None = None) -> Panels:
    """Return a weight (N, C) int8 of magnitudes to 127, to be multiplied by `scales` (N,), its inputs in equal groups.

    A group's inputs are a multiple of 4. For `product_int8`.
    """
    together = load_kernels("gemm")[0].TOGETHER
    packed = _in_panels(weight, together)
    offset = 128 if together == 4 else 0  # of the rows' numbers, see `quantize`
    starts = -offset * weight.view(weight.shape[0], num_groups, -1).sum(dim=2, dtype=torch.int32).t()
    return _described(packed, weight.shape[1], bias, starts, scales)


def _in_panels(weight: torch.Tensor, together: int) -> torch.Tensor:
    """Input channels that are multiplied `together` lie side by side."""
    width = panel_width()
    out_features, in_features = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -out_features % width))
    if weight.dtype == torch.bfloat16:
        return filled.view(-1, 2, width // 2, in_features).permute(0, 3, 2, 1).contiguous().view(torch.int32)
    return filled.view(-1, width, in_features // together, together).transpose(1, 2).contiguous()


def _described(
    packed: torch.Tensor,
    in_features: int,
    bias: torch.Tensor | None,
    starts: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> Panels:
    width = packed.shape[0] * panel_width()

    def filled(of_channels: torch.Tensor | None) -> torch.Tensor | None:
        if of_channels is None:
            return None
        return torch.nn.functional.pad(of_channels, (0, width - of_channels.shape[-1])).contiguous()

    starts, scales, bias = filled(starts), filled(scales), filled(None if bias is None else bias.detach().float())
    gemm = load_kernels("gemm")[0]
    operand = np.zeros(gemm.OPERAND_FIELDS, np.int64)
    for field, tensor in ((gemm.PACKED, packed), (gemm.STARTS, starts), (gemm.SCALES, scales), (gemm.BIAS, bias)):
        operand[field] = 0 if tensor is None else tensor.data_ptr()
    operand[gemm.INPUTS], operand[gemm.PANELS] = in_features, packed.shape[0]
    operand[gemm.GROUPS] = 1 if starts is None else starts.shape[0]
    return Panels(packed, bias, starts, scales, width, operand)


def product(x: torch.Tensor, weight: Panels, out: torch.Tensor, *, gated: bool = False) -> None:
    """out (T, P * width) = x @ weight^T + bias. x (T, C) fp32, the weight packed by `pack`.

    gated: out (T, P / 2 * width) = silu(the first half) * the second.
    """
    kernels, num_threads = load_kernels("gemm")
    kernels.product(
        x.data_ptr(),
        weight.operand,
        out.data_ptr(),
        x.shape[0],
        2 if gated else 1,
        num_threads,
        _F32,
        tag_of_panels(weight),
        TAGS[out.dtype],
        _F32,
    )


def product_int8(x: torch.Tensor, weight: Panels, out: torch.Tensor, *, gated: bool = False) -> None:
    """out (T, P * width) = x @ weight^T + bias, each of the weight's groups of a row of x (T, C) rounded by its own scale.

    gated: out (T, P / 2 * width) = silu(the first half) * the second.
    """
    kernels, num_threads = load_kernels("gemm")
    kernels.product_int8(
        x.data_ptr(),
        weight.operand,
        out.data_ptr(),
        x.shape[0],
        2 if gated else 1,
        num_threads,
        TAGS[x.dtype],
        tag_of_panels(weight),
        TAGS[out.dtype],
        _F32,
    )


def best_channels(
    x: torch.Tensor,
    panels: Panels,
    whole: Panels,
    rounded: torch.Tensor,
    slack: torch.Tensor,
    num_channels: int,
) -> torch.Tensor:
    """Return ids (T,) int64 of each row's largest product with the first `num_channels` of a weight; -1 where it isn't finite.

    x (T, C) fp32; see `greedy.best_channels` for the rest.
    """
    assert whole.starts is not None
    assert whole.scales is not None
    kernels, num_threads = load_kernels("greedy")
    best = torch.empty(x.shape[0], dtype=torch.int64)
    kernels.best_channels(
        x.numpy(),
        panels.packed.data_ptr(),
        whole.packed.data_ptr(),
        whole.starts[0].numpy(),
        whole.scales.numpy(),
        rounded.numpy(),
        slack.numpy(),
        best.numpy(),
        num_channels,
        num_threads,
        tag_of_panels(panels),
        _F32,
    )
    return best


def tag_of_panels(weight: Panels) -> np.generic:
    """Return the tag of a weight's dtype; of whole numbers, that of the rows rounded to meet it."""
    if weight.scales is not None:
        return _UINT8 if load_kernels("gemm")[0].TOGETHER == 4 else _INT16
    return _PAIRS if weight.packed.dtype == torch.int32 else TAGS[weight.packed.dtype]


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
