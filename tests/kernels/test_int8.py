"""Int8 caches: the numba backend against `reference.py`, that against plain attention, and bits under every way of splitting.

Slots that no row owns have NaN scales and random codes.
"""

from __future__ import annotations

import random

import pytest
import torch
from attention_calls import assert_within, decode, lengths_around, prefill
from pagedgen.kernels.api import load_backend
from pagedgen.kernels.reference import quantize

from pagedgen.threads import set_threads

reference = load_backend("reference")
cpu = load_backend("cpu")
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
SHAPES = [(48, 32), (20, 8), (7, 4), (100, 16), (64, 64)]  # head_dim, block_size


def assert_close(got, want):
    assert_within(TOLERANCE[want.dtype], got, want)


def empty_cache(num_blocks, num_heads, block_size, head_dim, *, key_transposed):
    """Return write_kv's caches and scales, full of what no write would leave."""
    key, value = torch.full((2, num_blocks, num_heads, block_size, head_dim), -128, dtype=torch.int8)
    if key_transposed:
        key = key.reshape(num_blocks, num_heads, head_dim, block_size).transpose(2, 3)
    key_scales, value_scales = torch.full((2, num_blocks, num_heads, block_size), -1.0)
    return (key, value), {"key_scales": key_scales, "value_scales": value_scales}


def odd_heads(head_dim, dtype):
    """Return K and V (2, 21, 3, head_dim) of all magnitudes, with zeros, denormals, ties, NaN and infinities among them."""
    gen = torch.Generator().manual_seed(3)
    states = torch.randn(2, 21, 3, head_dim, generator=gen) * torch.exp(4 * torch.randn(2, 21, 3, 1, generator=gen))
    states[0, 3, 1] = 0
    states[1, 4, 2, head_dim - 1] = float("nan")
    states[0, 5, 0, 1], states[1, 5, 0, 0] = float("inf"), -float("inf")
    states[0, 6], states[1, 7] = 1e-44, 190 * 2.0**-149
    states[0, 8, 1] = torch.arange(head_dim) - 2.5
    states[0, 8, 1, 0] = -127.0  # a scale of 1: halves are ties
    return states.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_what_is_written_is_the_references_to_the_bit(dtype, head_dim, block_size):
    key, value = odd_heads(head_dim, dtype)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(0))[:21].clone()
    slots[2] = slots[17] = -1
    written = []
    for backend in (reference, cpu):
        caches, scales = empty_cache(6, 3, block_size, head_dim, key_transposed=backend is cpu)
        backend.write_kv(key, value, *caches, slots, **scales)
        written.append((*caches, *scales.values()))
    for got, want in zip(*written, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    codes, _, key_scales, value_scales = written[1]
    assert int((key_scales != -1).sum()) == int((value_scales != -1).sum()) == 19 * 3
    assert int((codes[..., 0] != -128).sum()) == 19 * 3, "slots nobody named are as they were; -128 is no code"
    for states, scales in ((key, key_scales), (value, value_scales)):
        assert int(scales.isnan().sum()) == int((~states[slots >= 0].isfinite().all(-1)).sum()) > 0
    at = slots[3] // block_size, 1, slots[3] % block_size
    assert key_scales[at] == 0
    assert not codes[at].any()


def test_threads_write_the_same_as_one():
    key, value = odd_heads(20, torch.float32)
    written = []
    before = torch.get_num_threads()
    try:
        for threads in (1, before):
            set_threads(threads, "cpu")
            caches, scales = empty_cache(3, 3, 8, 20, key_transposed=True)
            cpu.write_kv(key, value, *caches, torch.arange(21), **scales)
            written.append((*caches, *scales.values()))
    finally:
        set_threads(before, "cpu")
    for one, several in zip(*written, strict=True):
        torch.testing.assert_close(one, several, rtol=0, atol=0, equal_nan=True)


def test_a_value_is_at_most_half_a_scale_off():
    states = odd_heads(64, torch.float32)
    codes, scales = quantize(states)
    finite = states.isfinite().all(-1)
    assert torch.equal(scales.isnan(), ~finite)
    normal = finite & (states.abs().amax(-1) > 1e-30)
    error = (codes * scales[..., None] - states).abs().amax(-1)
    assert (error <= 0.5 * scales * (1 + 2e-5))[normal].all()
    assert torch.equal(codes.abs().amax(-1)[normal], torch.full((int(normal.sum()),), 127, dtype=torch.int8))
    ties = codes[0, 8, 1]
    assert ties[1:5].tolist() == [-2, 0, 0, 2], "halves go to the even neighbour"


@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_the_reference_is_attention_over_what_the_codes_mean(make_case, make_int8_case, head_dim, block_size):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "block_size": block_size, "dtype": torch.float32}
    case = make_int8_case([75, 40, 1], [70, 3, 1], key_transposed=False, **shape)
    plain = make_case([75, 40, 1], [70, 3, 1], **shape)
    exact = prefill(reference, plain)
    plain.key_cache = case.key_cache * case.key_scales[..., None]
    plain.value_cache = case.value_cache * case.value_scales[..., None]
    got = prefill(reference, case)
    torch.testing.assert_close(got, prefill(reference, plain), rtol=0, atol=0)
    assert 0 < (got - exact).abs().max() < 0.05, "near what it was before it was rounded to 8 bits, and not the same"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_decode_equals_reference_at_block_edges(make_int8_case, dtype, block_size):
    lengths = lengths_around(block_size)
    case = make_int8_case(
        lengths, [1] * len(lengths), num_heads=9, num_kv_heads=3, head_dim=64, block_size=block_size, dtype=dtype
    )
    assert_close(decode(cpu, case), decode(reference, case))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("head_dim", [4, 5, 8, 12, 16, 17, 20, 64, 80, 100, 128, 256])
def test_every_group_and_head_dim(make_int8_case, group, head_dim):
    case = make_int8_case(
        [33, 5, 70, 16], [33, 1, 9, 3], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, block_size=16,
        dtype=torch.float32,
    )  # fmt: skip
    assert_close(prefill(cpu, case), prefill(reference, case))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("seq_lens", "q_lens"),
    [([40, 17, 64], [40, 0, 1]), ([100], [37]), ([31, 32, 33, 200], [31, 32, 33, 1]), ([500, 3], [450, 3])],
)
def test_prefill_with_cached_context_before_it(make_int8_case, dtype, seq_lens, q_lens):
    case = make_int8_case(seq_lens, q_lens, num_heads=8, num_kv_heads=2, head_dim=64, block_size=32, dtype=dtype)
    assert_close(prefill(cpu, case), prefill(reference, case))


@pytest.mark.parametrize("sliding_window", [None, 1, 7, 16, 33, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(make_int8_case, sliding_window, softcap, with_sinks):
    case = make_int8_case(
        [75, 40, 1, 33], [70, 3, 1, 33], num_heads=6, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32
    )
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)) * 3 if with_sinks else None
    options = {"sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    assert_close(prefill(cpu, case, **options), prefill(reference, case, **options))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("sliding_window", [None, 13])
def test_bits_do_not_depend_on_chunking_batch_or_threads(make_int8_case, dtype, block_size, sliding_window):
    """Every query of a whole prefill gives the same bits alone as a decode, in chunks, and on another number of threads.

    A decode sees slots as unowned that the prefill has written: their scales become NaN here.
    """
    length = 3 * block_size + 5
    whole = make_int8_case(
        [length, 29], [length, 29], num_heads=6, num_kv_heads=2, head_dim=48, block_size=block_size, dtype=dtype
    )
    options = {"sliding_window": sliding_window}
    want = prefill(cpu, whole, **options)
    for chunk in (1, 5, 16):
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            part = whole.clone()
            part.query, part.q_lens = whole.query[start:end], [end - start]
            part.cu_seqlens_q = torch.tensor([0, end - start], dtype=torch.int32)
            part.seq_lens_kv, part.block_tables = torch.tensor([end], dtype=torch.int32), whole.block_tables[:1]
            last = whole.block_tables[0, (end - 1) // block_size]
            for scales in part.scales.values():
                scales[last, :, (end - 1) % block_size + 1 :] = float("nan")
            assert torch.equal(prefill(cpu, part, **options), want[start:end])
            if chunk == 1:
                assert torch.equal(decode(cpu, part, **options), want[start:end])
    before = torch.get_num_threads()
    try:
        set_threads(1, "cpu")
        assert torch.equal(prefill(cpu, whole, **options), want)
    finally:
        set_threads(before, "cpu")


@pytest.mark.parametrize("poison", [0.0, float("inf"), -float("inf")])
def test_unwritten_slots_weigh_nothing_whatever_they_hold(make_int8_case, poison):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 20, "dtype": torch.float32}
    for block_size in (4, 16, 32):
        case = make_int8_case([75, 40, 1, 33], [70, 3, 1, 33], block_size=block_size, **shape)
        want = prefill(cpu, case)
        assert not want.isnan().any()
        for scales in case.scales.values():
            scales[scales.isnan()] = poison
        assert torch.equal(prefill(cpu, case), want)


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("which", ["key_scales", "value_scales"])
def test_a_token_that_is_no_number_spoils_the_rows_that_see_it_alone(make_int8_case, backend, which):
    case = make_int8_case(
        [40, 40], [1, 1], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32,
        key_transposed=backend is cpu,
    )  # fmt: skip
    want = decode(backend, case)
    getattr(case, which)[case.block_tables[1, 1], 1, 3] = float("nan")
    got = decode(backend, case)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1, :2], want[1, :2]), "the other KV head"
    assert got[1, 2:].isnan().all()


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_sharing_does_not_change_a_bit(make_int8_case, share_blocks, block_size):
    rng = random.Random(block_size)
    for heads in [(2, 2), (9, 3), (8, 1)]:
        for head_dim in (16, 20, 80):
            groups = [(rng.choice([1, 3, 11, 40]), rng.randint(1, 12)), (2, 0), (rng.choice([2, 7]), rng.randint(1, 20))]
            lengths = [blocks * block_size + rng.randint(1, 3 * block_size) for rows, blocks in groups for _ in range(rows)]
            case = make_int8_case(
                lengths, [1] * len(lengths), num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
                block_size=block_size, dtype=torch.float32,
            )  # fmt: skip
            shared = share_blocks(case, groups)
            options = {"softcap": rng.choice([None, 3.0]), "sinks": rng.choice([None, torch.linspace(-2, 4, heads[0])])}
            alone = decode(cpu, case, **options)
            assert not alone.isnan().any()
            assert torch.equal(decode(cpu, case, shared=shared, **options), alone)
            want = decode(reference, case, **options)
            assert_close(alone, want)
            assert_close(decode(reference, case, shared=shared, **options), want)


def test_scales_and_int8_come_together(make_case, make_int8_case):
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": 4, "dtype": torch.float32}
    with pytest.raises(ValueError, match="without scales"):
        decode(cpu, make_int8_case([5], [1], **shape), key_scales=None)
    plain = make_case([5], [1], key_transposed=True, **shape)
    with pytest.raises(ValueError, match="with scales"):
        decode(cpu, plain, key_scales=torch.ones(plain.key_cache.shape[:3]))
    case = make_int8_case([5], [1], **shape)
    with pytest.raises(ValueError, match="one for each block"):
        decode(cpu, case, key_scales=case.key_scales[:1])
