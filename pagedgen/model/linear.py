"""GEMMs on CPU whose rows don't depend on their neighbours: the same bits at any batch size and number of threads.

A GEMM library picks its kernel, and with it the order of each sum, by the number of rows M. For one fixed M a row's bits don't
depend on its place or on the other rows; between different M they may differ. So every product is cut into calls of a few
fixed sizes (*row buckets*), the last one filled up with zero rows. Which buckets agree is measured once per weight shape: a
bucket is used only when its rows have the bits of the canonical call, 64 rows on one thread. bf16 on a CPU with AMX needs this
(there M = 32 and M = 64 differ for many shapes), and it makes the sizes few, so that the library's kernel cache always hits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..kernels.cpu import fused
from ..machine import cache_root, cpu_flags, cpu_name
from .panels import Space

ROW_BUCKETS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512)
CANONICAL_ROWS = 64
# What one more call costs, in rows: it reads all weights again.
_CALL_ROWS = 16

# (kind, weight shape, dtype, has bias, number of threads) -> row buckets that agree with the canonical call
MeasuredBuckets = dict[Any, tuple[int, ...]]


@dataclass(frozen=True)
class ProductKind:
    """One way to multiply by a weight: `prepare` it once (prepacking, or nothing), then `apply` rows to it."""

    name: str
    prepare: Callable[[torch.Tensor], torch.Tensor]
    apply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


PLAIN = ProductKind("plain", lambda weight: weight, nn.functional.linear)
PACKED = ProductKind(
    "packed",
    lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 128),
    lambda rows, packed, bias: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], ""),
)


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cancelling_operands(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (512, in_features) and weight (out_features, in_features) whose exact products sum to 0.

    What a GEMM makes of them is rounding error alone, so another order of the sum shows in almost every element; with
    ordinary data the rounding of the result to bf16 would hide it in all but a few of a hundred thousand.
    """
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    shuffled = torch.randperm(half, generator=generator)
    x = torch.zeros(max(ROW_BUCKETS), in_features, dtype=dtype)
    weight = torch.zeros(out_features, in_features, dtype=dtype)
    a = torch.randn(max(ROW_BUCKETS), half, generator=generator).to(dtype)
    b = torch.randn(out_features, half, generator=generator).to(dtype)
    x[:, :half], x[:, half : 2 * half] = a, a[:, shuffled]
    weight[:, :half], weight[:, half : 2 * half] = b, -b[:, shuffled]
    return x, weight


def agreeing_buckets(
    kind: ProductKind, out_features: int, in_features: int, dtype: torch.dtype, *, has_bias: bool = False
) -> tuple[int, ...]:
    """Return the row buckets whose bits, at the current number of threads, equal the canonical call's; maybe none."""
    x, weight = _cancelling_operands(out_features, in_features, dtype)
    operand = kind.prepare(weight)
    bias = torch.zeros(out_features, dtype=dtype) if has_bias else None
    with _threads(1):
        want = torch.cat([kind.apply(part, operand, bias) for part in x.split(CANONICAL_ROWS)])
    return tuple(rows for rows in ROW_BUCKETS if torch.equal(kind.apply(x[:rows], operand, bias), want[:rows]))


@cache
def _measured_once(
    kind: ProductKind, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, num_threads: int
) -> tuple[int, ...]:
    """Return `agreeing_buckets` for the current `num_threads`, measured once on a machine and kept in the cache."""
    assert num_threads == torch.get_num_threads()
    path = _kept_at(kind.name, shape, str(dtype), has_bias, num_threads)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, list) and set(kept) <= set(ROW_BUCKETS):
            return tuple(sorted(kept))
    except (OSError, ValueError):
        pass
    buckets = agreeing_buckets(kind, *shape, dtype, has_bias=has_bias)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(buckets), encoding="utf-8")
        unfinished.replace(path)
    except OSError:  # a cache that can't be written isn't
        pass
    return buckets


def _kept_at(*product: object) -> Path:
    """Return where the buckets of a product are kept: by all that decides which kernels the libraries choose."""
    told = sorted((k, v) for k, v in os.environ.items() if k.startswith(("ONEDNN_", "DNNL_", "MKL_")))
    machine = [cpu_name(), sorted(cpu_flags()), torch.__version__, ROW_BUCKETS, told]
    digest = hashlib.sha256(json.dumps([machine, product], default=str).encode()).hexdigest()[:16]
    return cache_root() / "row_buckets" / f"{digest}.json"


@lru_cache(maxsize=4096)
def split_rows(num_rows: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `num_rows` into bucket sizes, the last one possibly larger than what is left: as few rows and calls as can be.

    Whole calls of the largest size first; what is left is covered by the one or two sizes that cost least.
    """
    full, rest = divmod(num_rows, buckets[-1])
    whole = (buckets[-1],) * full
    if not rest:
        return whole
    one = min(b for b in buckets if b >= rest)
    two = [(first, min(b for b in buckets if b >= rest - first)) for first in buckets if first < rest]
    return whole + min([(one,), *two], key=lambda sizes: sum(sizes) + _CALL_ROWS * len(sizes))


def common_buckets(measured: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the row buckets that suit all products which have any; none where any number of rows is as good."""
    sets = [set(buckets) for buckets in measured if buckets]
    return tuple(sorted(set.intersection(*sets) or {CANONICAL_ROWS})) if sets else ()


class RowInvariantProduct:
    """Products x @ weight^T (+ bias) in agreeing buckets; weights of one shape, dtype and kind share what was measured."""

    def __init__(self) -> None:
        self.measured: MeasuredBuckets = {}

    def __call__(
        self,
        kind: ProductKind,
        x: torch.Tensor,
        operand: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product of x (..., in_features) with a prepared weight of `shape`, each row independent of the others."""
        rows = x.reshape(-1, shape[1])
        if not rows.is_contiguous():
            rows = rows.contiguous()
        buckets = self.buckets(kind, shape, x.dtype, has_bias=bias is not None)
        if buckets:
            out = _in_buckets(kind, rows, operand, shape[0], bias, buckets)
        else:  # no size agrees on this many threads: run as the canonical call does
            with _threads(1):
                out = _in_buckets(kind, rows, operand, shape[0], bias, (CANONICAL_ROWS,))
        return out.reshape(*x.shape[:-1], shape[0])

    def buckets(self, kind: ProductKind, shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool) -> tuple[int, ...]:
        """Return the agreeing row buckets of a product at the current number of threads, measuring them the first time."""
        key = (kind, shape, dtype, has_bias, torch.get_num_threads())
        if key not in self.measured:
            self.measured[key] = _measured_once(*key)
        return self.measured[key]


def _in_buckets(
    kind: ProductKind,
    rows: torch.Tensor,
    operand: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None,
    buckets: tuple[int, ...],
) -> torch.Tensor:
    num_rows = rows.shape[0]
    if num_rows in buckets:
        return kind.apply(rows, operand, bias)
    out = rows.new_empty(num_rows, out_features)
    at = 0
    for size in split_rows(num_rows, buckets):
        part = rows[at : at + size]
        if part.shape[0] < size:
            filled = rows.new_zeros(size, rows.shape[1])
            filled[: part.shape[0]] = part
            out[at:] = kind.apply(filled, operand, bias)[: part.shape[0]]
        else:
            out[at : at + size] = kind.apply(part, operand, bias)
        at += size
    return out


class RowInvariantLinear(nn.Module):
    """A drop-in for `nn.Linear` at inference: weight prepacked for oneDNN where possible, rows independent of the batch."""

    def __init__(self, linear: nn.Linear, invariant: RowInvariantProduct):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._shape = (linear.out_features, linear.in_features)
        self._invariant = invariant
        self.bias = linear.bias
        weight = linear.weight.detach()
        self._dtype = weight.dtype
        self._kind = PACKED if _can_prepack(weight.dtype) else PLAIN
        # Not registered as a parameter: an opaque oneDNN layout has no strides that nn.Module could handle.
        self._operand = (self._kind.prepare(weight),)

    def buckets(self) -> tuple[int, ...]:
        """Return the row buckets that agree at the current number of threads; maybe none."""
        return self._invariant.buckets(self._kind, self._shape, self._dtype, has_bias=self.bias is not None)

    def rows(self, x: torch.Tensor, space: Space) -> torch.Tensor:
        """Return the product (T, out_features) of x (T, in_features). The library brings its memory: `space` is not used."""
        return self(x)

    def gated(self, x: torch.Tensor, out: torch.Tensor, space: Space) -> None:
        """out (T, out_features / 2) = silu(the first half of the product) * the second."""
        fused.silu_mul(self(x), out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._invariant(self._kind, x, self._operand[0], self._shape, self.bias)


@lru_cache
def _can_prepack(dtype: torch.dtype) -> bool:
    """True where oneDNN has a kernel for the dtype on this CPU and torch lets us call it with a packed weight."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        PACKED.apply(torch.zeros(16, 16, dtype=dtype), PACKED.prepare(torch.zeros(16, 16, dtype=dtype)), None)
    except (AttributeError, RuntimeError):
        return False
    return True


class InvariantMode(TorchFunctionMode):
    """Routes plain weight products (MoE routers and experts, which are no `nn.Linear`) through row buckets."""

    def __init__(self, invariant: RowInvariantProduct):
        super().__init__()
        self._invariant = invariant

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear and args[1].ndim == 2 and not kwargs:
            x, weight = args[0], args[1]
            return self._run(PLAIN, x, weight, tuple(weight.shape), args[2] if len(args) > 2 else None)
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and args[1].ndim == 2:
            x, weight = args
            return self._run(_TRANSPOSED, x, weight, (weight.shape[1], weight.shape[0]), None)
        if func is torch.addmm and not kwargs:  # GPT-2's Conv1D
            bias, x, weight = args
            return self._run(_TRANSPOSED, x, weight, (weight.shape[1], weight.shape[0]), bias)
        return func(*args, **kwargs)

    def _run(self, kind, x, weight, shape, bias):
        if x.numel() == 0:
            return kind.apply(x, weight, bias)
        return self._invariant(kind, x, weight, shape, bias)


# A weight stored (in_features, out_features).
_TRANSPOSED = ProductKind(
    "transposed",
    lambda weight: weight.t().contiguous(),
    lambda rows, weight, bias: rows @ weight if bias is None else torch.addmm(bias, rows, weight),
)
