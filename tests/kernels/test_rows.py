"""The passes between a decoder layer's products against plain torch, and their bits under other row counts and threads."""

from __future__ import annotations

import pytest
import torch
from pagedgen.kernels.cpu import fused

from pagedgen.threads import set_threads

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def assert_close(got, want):
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[got.dtype], rtol=2 * TOLERANCE[got.dtype])


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    torch.manual_seed(3)
    return request.param


@pytest.mark.parametrize("width", [16, 48, 576])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(dtype, width, with_delta):
    residual, weight = torch.randn(7, width), torch.rand(width) + 0.5
    delta = torch.randn(7, width).to(dtype) if with_delta else None
    want = residual + delta.float() if with_delta else residual.clone()
    out = torch.empty(7, width, dtype=dtype)
    fused.add_rms_norm(residual, delta, weight, out, EPS)
    assert torch.equal(residual, want)
    assert_close(out, rms_norm(want, weight))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (2, 1, 8), (3, 3, 40)])
@pytest.mark.parametrize("with_norms", [True, False])
def test_rotate(dtype, heads, kv_heads, head_dim, with_norms):
    rows, sizes = 5, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    qkv = torch.randn(rows, sum(sizes)).to(dtype)
    angles = torch.rand(rows, head_dim // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if with_norms else None
    query, key, value = (torch.empty(rows, n // head_dim, head_dim, dtype=dtype) for n in sizes)
    fused.rotate(qkv, cos, sin, norms, query, key, value, EPS)

    def expected(part, weight):
        x = part.float().view(rows, -1, head_dim)
        if weight is not None:
            x = rms_norm(x, weight)
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    q, k, v = qkv.split(sizes, dim=1)
    assert_close(query, expected(q, norms and norms[0]))
    assert_close(key, expected(k, norms and norms[1]))
    assert torch.equal(value.flatten(1), v)


@pytest.mark.parametrize("width", [16, 96, 1536])
def test_silu_mul(dtype, width):
    gate_up = (torch.randn(6, 2 * width) * 4).to(dtype)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])  # beyond what exp can hold
    out = torch.empty(6, width, dtype=dtype)
    fused.silu_mul(gate_up, out)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=2 * TOLERANCE[dtype] + 1e-6)


def test_not_a_number_stays_one():
    residual, delta = torch.ones(2, 16), torch.zeros(2, 16)
    delta[1, 5] = float("nan")
    out = torch.empty(2, 16)
    fused.add_rms_norm(residual, delta, torch.ones(16), out, EPS)
    assert torch.isfinite(out[0]).all() and out[1].isnan().all()
    gate_up = torch.ones(1, 32)
    gate_up[0, 3] = float("nan")
    activated = torch.empty(1, 16)
    fused.silu_mul(gate_up, activated)
    assert activated[0, 3].isnan() and activated.isnan().sum() == 1


def test_a_rows_bits_depend_on_nothing_but_the_row():
    residual, delta, weight = torch.randn(37, 64), torch.randn(37, 64), torch.rand(64)
    gate_up = torch.randn(37, 128)

    def run(rows):
        x, out, activated = residual[rows].clone(), torch.empty(len(rows), 64), torch.empty(len(rows), 64)
        fused.add_rms_norm(x, delta[rows].contiguous(), weight, out, EPS)
        fused.silu_mul(gate_up[rows].contiguous(), activated)
        return torch.cat([x, out, activated], dim=1)

    whole = run(list(range(37)))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            set_threads(threads, "cpu")
            for rows in ([5], [36, 0, 11], list(range(10, 30))):
                assert torch.equal(run(rows), whole[rows])
    finally:
        set_threads(before, "cpu")


@pytest.mark.parametrize(("width", "num_groups"), [(4, 1), (12, 1), (12, 3), (64, 1), (576, 1), (576, 3), (1536, 6)])
def test_quantize(dtype, width, num_groups):
    x = (torch.randn(9, width) * torch.logspace(-20, 15, 9)[:, None]).to(dtype)
    x = torch.where(x.isinf(), 1000.0, x)  # fp16
    x[4] = 0
    got, scales = fused.quantize(x, num_groups=num_groups)
    parts = x.float().view(9, num_groups, -1)
    torch.testing.assert_close(scales, parts.abs().amax(dim=2) / 127)
    restored = (got.float().view(parts.shape) - 128) * scales[:, :, None]
    assert ((restored - parts).abs() <= 0.5001 * scales[:, :, None] + 1e-30).all()
    assert got.min() >= 1
    signed, same = fused.quantize(x, torch.int16, num_groups)
    assert torch.equal(signed, got.short() - 128) and torch.equal(same, scales)
    for value in (float("nan"), float("inf"), float("-inf")):
        broken = torch.zeros(2, width, dtype=dtype)
        broken[1, width - 1] = value
        scales = fused.quantize(broken, num_groups=num_groups)[1]
        assert (scales[0] == 0).all() and (scales[1, :-1] == 0).all() and scales[1, -1].isnan()
