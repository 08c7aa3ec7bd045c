"""The numba backend against `reference.py`, and its bits against itself under every way of splitting the work."""

from __future__ import annotations

import pytest
import torch
from attention_calls import assert_within, decode, lengths_around, prefill
from pagedgen.kernels.api import load_backend

from pagedgen.threads import set_threads

reference = load_backend("reference")
cpu = load_backend("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(got, want):
    assert_within(TOLERANCE[want.dtype], got, want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_decode_equals_reference_at_block_edges(make_case, dtype, block_size):
    lengths = lengths_around(block_size)
    case = make_case(
        lengths, [1] * len(lengths), num_heads=9, num_kv_heads=3, head_dim=64, block_size=block_size, dtype=dtype,
        key_transposed=True,
    )  # fmt: skip
    assert_close(decode(cpu, case), decode(reference, case))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("head_dim", [4, 8, 12, 16, 20, 64, 80, 96, 100, 112, 128, 160, 256])
def test_every_group_and_head_dim(make_case, group, head_dim):
    case = make_case(
        [33, 5, 70, 16], [33, 1, 9, 3], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, block_size=16,
        dtype=torch.float32, key_transposed=True,
    )  # fmt: skip
    assert_close(prefill(cpu, case), prefill(reference, case))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("seq_lens", "q_lens"),
    [([40, 17, 64], [40, 0, 1]), ([100], [37]), ([31, 32, 33, 200], [31, 32, 33, 1]), ([500, 3], [450, 3])],
)
def test_prefill_with_cached_context_before_it(make_case, dtype, seq_lens, q_lens):
    case = make_case(
        seq_lens, q_lens, num_heads=8, num_kv_heads=2, head_dim=64, block_size=32, dtype=dtype, key_transposed=True
    )
    assert_close(prefill(cpu, case), prefill(reference, case))


@pytest.mark.parametrize("sliding_window", [None, 1, 7, 16, 33, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(make_case, sliding_window, softcap, with_sinks):
    case = make_case(
        [75, 40, 1, 33], [70, 3, 1, 33], num_heads=6, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32,
        key_transposed=True,
    )  # fmt: skip
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)) * 3 if with_sinks else None
    options = {"sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    assert_close(prefill(cpu, case, **options), prefill(reference, case, **options))


def test_large_scores_do_not_overflow(make_case):
    case = make_case(
        [90], [90], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, key_transposed=True
    )
    case.query *= 300
    assert_close(prefill(cpu, case), prefill(reference, case))


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_key_that_is_no_number_is_not_passed_over(make_case, block_size, softcap, what):
    """Its weight became about 1e-38, and the row's answer a number. Row 1 sees it, row 0 doesn't."""
    case = make_case(
        [70, 70], [1, 1], num_heads=2, num_kv_heads=1, head_dim=16, block_size=block_size, dtype=torch.float32,
        key_transposed=True,
    )  # fmt: skip
    case.query.abs_()  # so that an infinite key has an infinite score
    want = decode(cpu, case, softcap=softcap)
    for position in (0, 3, 30, 69):
        spoiled = case.clone()
        spoiled.key_cache[case.block_tables[1, position // block_size], 0, position % block_size] = what
        got = decode(cpu, spoiled, softcap=softcap)
        assert torch.equal(got[0], want[0])
        want_spoiled = decode(reference, spoiled, softcap=softcap)
        torch.testing.assert_close(got, want_spoiled, atol=2e-6, rtol=2e-6, equal_nan=True)
        if softcap is None or what != what:
            assert got[1].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("sliding_window", [None, 13])
def test_bits_do_not_depend_on_chunking_batch_or_threads(make_case, dtype, block_size, sliding_window):
    """Every query of a whole prefill gives the same bits alone as a decode, in chunks, and on another number of threads."""
    length = 3 * block_size + 5
    whole = make_case(
        [length, 29], [length, 29], num_heads=6, num_kv_heads=2, head_dim=48, block_size=block_size, dtype=dtype,
        key_transposed=True,
    )  # fmt: skip
    options = {"sliding_window": sliding_window}
    want = prefill(cpu, whole, **options)
    for position in range(length):
        one = whole.clone()
        one.query, one.q_lens = whole.query[position : position + 1], [1]
        one.seq_lens_kv, one.block_tables = torch.tensor([position + 1], dtype=torch.int32), whole.block_tables[:1]
        assert torch.equal(decode(cpu, one, **options)[0], want[position])
    for chunk in (1, 5, 16):
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            part = whole.clone()
            part.query, part.q_lens = whole.query[start:end], [end - start]
            part.cu_seqlens_q = torch.tensor([0, end - start], dtype=torch.int32)
            part.seq_lens_kv, part.block_tables = torch.tensor([end], dtype=torch.int32), whole.block_tables[:1]
            assert torch.equal(prefill(cpu, part, **options), want[start:end])
    before = torch.get_num_threads()
    try:
        set_threads(1, "cpu")
        assert torch.equal(prefill(cpu, whole, **options), want)
    finally:
        set_threads(before, "cpu")


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 13])
def test_rows_decoded_together_have_the_bits_they_have_alone(make_case, heads, sliding_window):
    """Many rows' work items hold all KV heads, one row's a head each."""
    lengths = [1, 16, 17, 40, 3, 32, 64, 63]
    together = make_case(
        lengths, [1] * len(lengths), num_heads=heads[0], num_kv_heads=heads[1], head_dim=48, block_size=16,
        dtype=torch.float32, key_transposed=True,
    )  # fmt: skip
    got = decode(cpu, together, sliding_window=sliding_window)
    for row, length in enumerate(lengths):
        alone = together.clone()
        alone.query, alone.q_lens = together.query[row : row + 1], [1]
        alone.seq_lens_kv = torch.tensor([length], dtype=torch.int32)
        alone.block_tables = together.block_tables[row : row + 1]
        assert torch.equal(decode(cpu, alone, sliding_window=sliding_window)[0], got[row])


@pytest.mark.parametrize("order", ["scattered", "in_runs"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_write_kv_fills_exactly_the_mapped_slots(dtype, order):
    gen = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 21, 3, 20, generator=gen).to(dtype)
    slots = torch.randperm(48, generator=gen)[:21].clone() if order == "scattered" else torch.arange(5, 26)
    slots[4] = slots[17] = -1
    pools = []
    for backend in (reference, cpu):
        stored = torch.full((2, 6, 3, 8, 20), float("nan"), dtype=dtype)
        key_cache = stored[0]
        if backend is cpu:
            key_cache = key_cache.reshape(6, 3, 20, 8).transpose(2, 3)
        backend.write_kv(key, value, key_cache, stored[1], slots)
        pools.append((key_cache.contiguous(), stored[1]))
    for got, want in zip(pools[1], pools[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert int((~got[..., 0].isnan()).sum()) == 19 * 3


def test_write_kv_refuses_another_dtype():
    pool = torch.zeros(2, 1, 4, 8, dtype=torch.bfloat16)
    new = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match="float32"):
        cpu.write_kv(new, new, pool, pool, torch.tensor([0]))


def test_offsets_pass_two_to_the_31_elements(make_case):
    """A pool whose block stride puts the last blocks past 2**31 elements: memory is reserved, few pages are touched."""
    block_size, head_dim, stride = 16, 64, 2**29
    pool = torch.empty(9 * stride, dtype=torch.bfloat16)
    key_cache = pool.as_strided((9, 1, block_size, head_dim), (stride, 0, 1, block_size))
    value_cache = pool.as_strided((9, 1, block_size, head_dim), (stride, 0, head_dim, 1), block_size * head_dim)
    case = make_case([50], [50], num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)
    want = prefill(reference, case)
    moved = torch.tensor([[8, 6, 7, 5]], dtype=torch.int32)
    for old, new in zip(case.block_tables[0, :4].tolist(), moved[0].tolist(), strict=True):
        key_cache[new] = case.key_cache[old]
        value_cache[new] = case.value_cache[old]
    case.key_cache, case.value_cache, case.block_tables = key_cache, value_cache, moved
    assert_close(prefill(cpu, case), want)
    cpu.write_kv(case.query[:1, :1], case.query[:1, 1:], key_cache, value_cache, torch.tensor([8 * block_size + 3]))
    assert torch.equal(key_cache[8, 0, 3], case.query[0, 0])
    assert torch.equal(value_cache[8, 0, 3], case.query[0, 1])


def test_copy_blocks_copies_whole_blocks():
    kv = torch.arange(6 * 4, dtype=torch.float32).reshape(6, 4).clone()
    before = kv.clone()
    cpu.copy_blocks(kv, torch.tensor([1, 5], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32))
    assert torch.equal(kv[[0, 3]], before[[1, 5]])
    assert torch.equal(kv[[1, 2, 4, 5]], before[[1, 2, 4, 5]])
