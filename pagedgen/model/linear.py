"""GEMMs on CPU whose rows don't depend on their neighbours: the same bits at any batch size and number of threads.

A GEMM library picks its kernel, and with it the order of each sum, by the number of rows M. For one fixed M a row's bits don't
depend on its place or on the other rows; between different M they may differ. So every product is cut into calls of a few
fixed sizes (*row buckets*), the last one filled up with zero rows. Which buckets agree is measured once per weight shape: a
bucket is used only when its rows have the bits of the canonical call, 64 rows on one thread. bf16 on a CPU with AMX needs this
(there M = 32 and M = 64 differ for many shapes), and it makes the sizes few, so that the library's kernel cache always hits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

ROW_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CANONICAL_ROWS = 64

Product = Callable[[torch.Tensor], torch.Tensor]
# (weight shape, dtype and kind; number of threads) -> row buckets that agree with the canonical call
MeasuredBuckets = dict[Any, tuple[int, ...]]


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agreeing_buckets(product: Product, in_features: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the row buckets whose bits, at the current number of threads, equal the canonical call's; maybe none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(ROW_BUCKETS), in_features, generator=generator).to(dtype)
    with _threads(1):
        want = torch.cat([product(part) for part in x.split(CANONICAL_ROWS)])
    return tuple(rows for rows in ROW_BUCKETS if torch.equal(product(x[:rows]), want[:rows]))


def split_rows(num_rows: int, buckets: tuple[int, ...]) -> list[int]:
    """Cut `num_rows` into bucket sizes, the last one possibly larger than what is left."""
    sizes = []
    while num_rows > 0:
        fitting = [b for b in buckets if b >= num_rows]
        sizes.append(fitting[0] if fitting else buckets[-1])
        num_rows -= sizes[-1]
    return sizes


class RowInvariantProduct:
    """Call a product x @ W^T (+ bias) in agreeing buckets. Weights of one shape share what was measured."""

    def __init__(self, measured: MeasuredBuckets):
        self._measured = measured

    def __call__(self, product: Product, key: Any, x: torch.Tensor, out_features: int) -> torch.Tensor:
        """Return product(x) for x (..., in_features), with rows independent of each other."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        key = (key, torch.get_num_threads())
        buckets = self._measured.get(key)
        if buckets is None:
            buckets = self._measured[key] = agreeing_buckets(product, x.shape[-1], x.dtype)
        if not buckets:  # no size agrees on this many threads: run as the canonical call does
            with _threads(1):
                out = self._in_buckets(product, rows, out_features, (CANONICAL_ROWS,))
        else:
            out = self._in_buckets(product, rows, out_features, buckets)
        return out.reshape(*x.shape[:-1], out_features)

    @staticmethod
    def _in_buckets(product: Product, rows: torch.Tensor, out_features: int, buckets: tuple[int, ...]) -> torch.Tensor:
        num_rows = rows.shape[0]
        if num_rows in buckets:
            return product(rows)
        out = rows.new_empty(num_rows, out_features)
        at = 0
        for size in split_rows(num_rows, buckets):
            part = rows[at : at + size]
            if part.shape[0] < size:
                filled = rows.new_zeros(size, rows.shape[1])
                filled[: part.shape[0]] = part
                out[at:] = product(filled)[: part.shape[0]]
            else:
                out[at : at + size] = product(part)
            at += size
        return out


def _can_prepack() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class RowInvariantLinear(nn.Module):
    """A drop-in for `nn.Linear` at inference: weight prepacked for oneDNN where possible, rows independent of the batch."""

    def __init__(self, linear: nn.Linear, invariant: RowInvariantProduct):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._invariant = invariant
        weight, self.bias = linear.weight.detach(), linear.bias
        kind = "plain"
        if _can_prepack() and weight.dtype in (torch.float32, torch.bfloat16):
            try:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 128)
                kind, weight = "packed", packed
            except RuntimeError:  # this CPU has no oneDNN kernel for the dtype
                kind = "plain"
        # Not registered as a parameter: an opaque oneDNN layout has no strides that nn.Module could handle.
        self._weight = (weight,)
        self._key = (self.out_features, self.in_features, self.bias is not None, linear.weight.dtype, kind)
        self._product = self._packed if kind == "packed" else self._plain

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight[0], self.bias, "none", [], "")

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._weight[0], self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._invariant(self._product, self._key, x, self.out_features)


class _InvariantMode(TorchFunctionMode):
    """Routes plain weight products (MoE routers and experts, which are no `nn.Linear`) through row buckets."""

    def __init__(self, invariant: RowInvariantProduct):
        super().__init__()
        self._invariant = invariant

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear and args[1].ndim == 2 and not kwargs:
            x, weight = args[0], args[1]
            bias = args[2] if len(args) > 2 else None
            return self._run(lambda rows: func(rows, weight, bias), x, weight, weight.shape[0], "linear")
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and args[1].ndim == 2:
            x, weight = args
            return self._run(lambda rows: func(rows, weight), x, weight, weight.shape[1], "matmul")
        if func is torch.addmm and not kwargs:  # GPT-2's Conv1D
            bias, x, weight = args
            return self._run(lambda rows: func(bias, rows, weight), x, weight, weight.shape[1], "addmm")
        return func(*args, **kwargs)

    def _run(self, product: Product, x: torch.Tensor, weight: torch.Tensor, out_features: int, kind: str):
        if x.numel() == 0:
            return product(x)
        return self._invariant(product, (tuple(weight.shape), weight.stride(), x.dtype, kind), x, out_features)


def make_row_invariant(model: nn.Module) -> MeasuredBuckets:
    """Replace every `nn.Linear` and wrap every other module that owns weight matrices; return what will be measured."""
    measured: MeasuredBuckets = {}
    invariant = RowInvariantProduct(measured)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, RowInvariantLinear(child, invariant))
    for module in model.modules():
        if isinstance(module, (nn.Embedding, RowInvariantLinear)):
            continue
        if any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            _wrap_forward(module, _InvariantMode(invariant))
    return measured


def _wrap_forward(module: nn.Module, mode: TorchFunctionMode) -> None:
    forward = module.forward

    def wrapped(*args, **kwargs):
        with mode:
            return forward(*args, **kwargs)

    module.forward = wrapped  # type: ignore[method-assign]
