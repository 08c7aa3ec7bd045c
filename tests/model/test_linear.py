"""Products in row buckets: each row has the bits it has alone, for every number of rows and threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagedgen.model import linear as module
from pagedgen.model.linear import (
    ROW_BUCKETS,
    ProductKind,
    RowInvariantLinear,
    RowInvariantProduct,
    agreeing_buckets,
    split_rows,
)

SHAPES = [(960, 576), (576, 1536), (1000, 64), (7, 33), (49152, 64)]


def test_split_covers_the_rows_and_only_the_last_part_is_filled_up():
    for buckets in ((64,), (16, 48, 512), ROW_BUCKETS):
        for rows in range(1200):
            sizes = split_rows(rows, buckets)
            assert set(sizes) <= set(buckets)
            assert sum(sizes) >= rows > sum(sizes[:-1]) or rows == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_independent_of_their_number(dtype, out_features, in_features, bias):
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(False)
    invariant = RowInvariantLinear(linear, RowInvariantProduct())
    x = torch.randn(700, in_features).to(dtype)
    whole = invariant(x)
    want = linear(x)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(whole, want, atol=tolerance, rtol=tolerance)
    for rows in (1, 2, 5, 16, 17, 33, 48, 63, 64, 65, 100, 129, 300, 511, 513):
        assert torch.equal(invariant(x[:rows]), whole[:rows]), rows
        assert torch.equal(invariant(x[200 : 200 + rows]), whole[200 : 200 + rows]), rows
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(invariant(x[:130]), whole[:130])
    finally:
        torch.set_num_threads(before)


def test_measuring_tells_apart_orders_of_summation_that_bf16_rounding_hides():
    """Two halves summed apart give another order; ordinary data would show it in a few elements, the measurement in most."""

    def apply(rows, weight, bias):
        if rows.shape[0] == 64:
            return (rows.float() @ weight.float().t()).to(rows.dtype)
        half = rows.shape[1] // 2 + 7
        parts = [(rows[:, s].float() @ weight[:, s].float().t()) for s in (slice(0, half), slice(half, None))]
        return (parts[0] + parts[1]).to(rows.dtype)

    kind = ProductKind("split", lambda weight: weight, apply)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert agreeing_buckets(kind, 24, 64, torch.bfloat16) == (64,)
    finally:
        torch.set_num_threads(before)


def test_what_was_measured_is_kept(monkeypatch, tmp_path):
    """Found again by the next process; anything else in its place is measured again; without a cache it is measured."""
    monkeypatch.setenv("PAGEDGEN_CACHE", str(tmp_path))
    calls = []

    def measure(*args, **kwargs):
        calls.append(args)
        return (16, 64)

    monkeypatch.setattr(module, "agreeing_buckets", measure)
    threads = torch.get_num_threads()

    def ask(kind=module.PLAIN):
        module._measured_once.cache_clear()
        return module._measured_once(kind, (8, 8), torch.float32, False, threads)

    try:
        assert ask() == ask() == (16, 64) and len(calls) == 1
        (path,) = (tmp_path / "row_buckets").iterdir()
        for spoiled in ("", "{}", "[16, 17]", "16"):
            path.write_text(spoiled)
            assert ask() == (16, 64)
        assert len(calls) == 5
        assert ask(module.PACKED) == (16, 64) and len(calls) == 6  # another product
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert ask() == (16, 64) and len(calls) == 7
        (tmp_path / "file").touch()
        monkeypatch.setenv("PAGEDGEN_CACHE", str(tmp_path / "file"))
        assert ask() == ask() == (16, 64) and len(calls) == 9
    finally:
        module._measured_once.cache_clear()


def test_a_product_no_bucket_agrees_on_still_has_one_answer():
    """A product that differs for every number of rows: only calls of the canonical size on one thread are made."""
    calls = []

    def apply(rows, weight, bias):
        calls.append((rows.shape[0], torch.get_num_threads()))
        return rows * 1.0 if torch.get_num_threads() == 1 else rows * (2.0 + rows.shape[0])

    kind = ProductKind("moody", lambda weight: weight, apply)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        invariant = RowInvariantProduct()
        x = torch.randn(100, 8)
        assert torch.equal(invariant(kind, x, torch.eye(8), (8, 8), None), x)
        assert list(invariant.measured.values()) == [()]
        assert calls[-2:] == [(64, 1), (64, 1)]
    finally:
        torch.set_num_threads(before)


def test_without_prepacking_rows_are_independent_too(monkeypatch):
    monkeypatch.setattr(module, "_can_prepack", lambda dtype: False)
    linear = nn.Linear(96, 200).requires_grad_(False)
    invariant = RowInvariantLinear(linear, RowInvariantProduct())
    x = torch.randn(300, 96)
    whole = invariant(x)
    for rows in (1, 3, 17, 64, 130):
        assert torch.equal(invariant(x[:rows]), whole[:rows])
