"""Our own product against torch's: values, every shape and dtype, and bits under other row counts and threads."""

from __future__ import annotations

import numba
import pytest
import torch
from pagedgen.kernels.cpu import fused
from torch import nn

from pagedgen.model import panels
from pagedgen.model.panels import NO_SPACE, PanelLinear

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (64, 1536), (33, 60), (7, 3), (263, 257)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_product_in_fp64(dtype, out_features, in_features, bias):
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(2, 9, in_features).to(dtype)
    got = PanelLinear(linear)(x)
    assert got.dtype == dtype and got.shape == (2, 9, out_features)
    want = x.double() @ linear.weight.double().t()
    want = want + linear.bias.double() if bias else want
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("exact_in", "kept_in"),
    [
        (torch.bfloat16, torch.int32),  # in pairs
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_short_weights_are_kept_only_where_nothing_is_lost(exact_in, kept_in):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False).requires_grad_(False)
    linear.weight.copy_(linear.weight.to(exact_in))
    short = PanelLinear(linear)
    assert short.panels.packed.dtype == kept_in
    long = PanelLinear(linear)
    long.panels = fused.pack(linear.weight)
    for rows in (1, 5, 30):
        x = torch.randn(rows, 64)
        assert torch.equal(short(x), long(x))


def test_a_rows_bits_depend_on_nothing_but_the_row():
    torch.manual_seed(0)
    linear = PanelLinear(nn.Linear(576, 100).requires_grad_(False))
    x = torch.randn(700, 576)
    whole = linear(x)
    before = torch.get_num_threads(), numba.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            numba.set_num_threads(threads)
            for rows in (*range(1, 20), 64, 127, 128, 129, 300, 511):
                assert torch.equal(linear(x[100 : 100 + rows]), whole[100 : 100 + rows]), rows
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


def test_no_rows_and_not_a_number():
    linear = PanelLinear(nn.Linear(32, 20).requires_grad_(False))
    assert linear(torch.empty(0, 32)).shape == (0, 20)
    x = torch.zeros(3, 32)
    x[1, 4] = float("nan")
    got = linear(x)
    assert got[1].isnan().all() and torch.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("half", [160, 1536, 48])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_is_the_product_and_the_activation_after_it(dtype, half, bias):
    torch.manual_seed(0)
    linear = nn.Linear(96, 2 * half, bias=bias).to(dtype).requires_grad_(False)
    panel = PanelLinear(linear)
    x = torch.randn(700, 96).to(dtype)
    out = torch.empty(700, half, dtype=dtype)
    panel.gated(x, out, NO_SPACE)
    gate, up = (x.double() @ linear.weight.double().t() + (linear.bias.double() if bias else 0)).split(half, dim=1)
    torch.testing.assert_close(out.double(), nn.functional.silu(gate) * up, atol=TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    for rows in (1, 5, 13, 64):  # a row's bits are its own
        part = torch.empty(rows, half, dtype=dtype)
        panel.gated(x[100 : 100 + rows], part, NO_SPACE)
        assert torch.equal(part, out[100 : 100 + rows])


@pytest.mark.parametrize(
    ("flags", "dtype", "pays"),
    [
        ({"avx2", "fma"}, torch.bfloat16, True),
        ({"avx2", "fma", "avx512f"}, torch.float32, True),
        ({"avx2", "fma", "avx512f"}, torch.bfloat16, True),
        ({"avx2", "fma", "avx512f", "avx512_bf16"}, torch.bfloat16, False),
        ({"avx2", "fma", "avx512f", "amx_bf16"}, torch.bfloat16, False),
        ({"avx2", "fma", "avx512f", "amx_bf16", "amx_int8"}, torch.float32, True),
        ({"avx2", "fma", "avx512f", "avx512_vnni"}, torch.int8, True),
        ({"avx2", "fma", "avx512f", "amx_bf16", "amx_int8"}, torch.int8, False),
        ({"asimd"}, torch.float32, False),
        (set(), torch.float32, False),
    ],
)
def test_where_it_is_chosen(monkeypatch, flags, dtype, pays):
    monkeypatch.setattr(panels, "cpu_flags", lambda: frozenset(flags))
    assert panels.panels_pay(dtype) == pays
