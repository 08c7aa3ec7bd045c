"""The Triton kernels against `reference.py`, on a GPU. `test_triton_interpreter.py` runs this file on the CPU."""

from __future__ import annotations

import math
import os

import pytest
import torch
from pagedgen.kernels import reference
from pagedgen.kernels.api import load_backend

pytestmark = pytest.mark.gpu
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

# Of the largest absolute difference: fp32 differs by the order of additions, 16-bit types by rounding P and the output
# too.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def gpu():
    return load_backend("gpu")


def build(make_case, spec, dtype, device):
    """Return the case, its caches being one layer's views of a pool whose other slots are NaN."""
    num_heads, num_kv_heads = spec.heads
    case = make_case(
        spec.seq_lens,
        spec.q_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=dtype,
        device=device,
    )
    case.key_cache, case.value_cache = pool_views(case.key_cache, case.value_cache)
    return case


def pool_views(key_cache, value_cache):
    """Copy the caches into layer 1 of a pool (num_blocks, 2 layers, 2, Hkv, block_size, D) and return the views."""
    num_blocks, *block_shape = key_cache.shape
    kv = key_cache.new_full((num_blocks, 2, 2, *block_shape), float("nan"))
    kv[:, 1, 0] = key_cache
    kv[:, 1, 1] = value_cache
    return kv[:, 1, 0], kv[:, 1, 1]


def make_options(spec, case):
    """Return the keyword arguments of the attention functions."""
    options = {"scale": case.scale, **spec.options}
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 3, spec.heads[0], device=case.query.device).to(case.query.dtype)
    return options


def prefill(backend, case, options):
    out = torch.full_like(case.query, float("nan"))
    caches = (case.key_cache, case.value_cache, case.block_tables)
    max_seqlen_q = max(case.q_lens)
    backend.paged_prefill(case.query, *caches, case.cu_seqlens_q, case.seq_lens_kv, out, max_seqlen_q=max_seqlen_q, **options)
    return out


def decode(backend, case, query, options):
    out = torch.full_like(query, float("nan"))
    backend.paged_decode(query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens_kv, out, **options)
    return out


def decode_query(case):
    """Return one query a row, (S, H, D)."""
    gen = torch.Generator().manual_seed(1)
    shape = (case.seq_lens_kv.shape[0], *case.query.shape[1:])
    return torch.randn(shape, generator=gen).to(case.query)


def assert_matches(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[actual.dtype], rtol=0)


def test_prefill_matches_the_reference(gpu, make_case, spec, dtype, device):
    case = build(make_case, spec, dtype, device)
    options = make_options(spec, case)
    assert_matches(prefill(gpu, case, options), prefill(reference, case, options))


def test_decode_matches_the_reference(gpu, make_case, spec, dtype, device):
    case = build(make_case, spec, dtype, device)
    options = make_options(spec, case)
    query = decode_query(case)
    expected = decode(reference, case, query, options)
    assert_matches(decode(gpu, case, query, options), expected)


# Groups (rows, shared blocks of 16), and the rows' own tokens. Prefixes end before, at and behind the edge of a split (512).
SHARED = {
    "one group": ([(3, 4)], [1, 16, 17]),
    "groups and rows alone": ([(2, 3), (3, 0), (1, 2), (2, 1)], [5, 1, 40, 1, 17, 9, 48, 2]),
    "an end at a split's edge": ([(2, 32), (2, 31), (2, 33)], [1, 30, 16, 17, 1, 600]),
    "more rows than a program takes": ([(70, 2), (1, 0)], [1 + i % 20 for i in range(71)]),
    "rows that end with their shared blocks": ([(2, 32), (2, 5)], [0, 3, 0, 0]),
    "a long prefix and a long row": ([(2, 70), (1, 0)], [20, 1, 1500]),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(
    ("heads", "head_dim", "options"), [((4, 2), 64, {}), ((3, 1), 80, {"softcap": 2.0, "sinks": True})], ids=["plain", "all"]
)
def test_decode_with_shared_blocks_matches_the_reference(
    gpu, make_case, share_blocks, dtype, device, name, heads, head_dim, options
):
    groups, own = SHARED[name]
    prefixes = [num_blocks * 16 for num_rows, num_blocks in groups for _ in range(num_rows)]
    lengths = [prefix + n for prefix, n in zip(prefixes, own, strict=True)]
    ones = [1] * len(lengths)
    case = make_case(
        lengths, ones, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=16, dtype=dtype, device=device
    )
    shared = share_blocks(case, groups)
    case.key_cache, case.value_cache = pool_views(case.key_cache, case.value_cache)
    options = {"scale": case.scale, **options}
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 3, heads[0], device=device).to(dtype)
    expected = decode(reference, case, case.query, options)
    assert_matches(decode(gpu, case, case.query, {**options, "shared": shared}), expected)


def test_shared_blocks_are_read_through_the_first_row(gpu, make_case, share_blocks, device):
    """A kernel that ignored `shared` would read the NaN of the other rows' tables."""
    case = small_case(make_case, device, [600, 560, 40, 33], [1] * 4)
    shared = share_blocks(case, [(2, 34), (2, 2)])
    options = {"scale": case.scale}
    expected = decode(reference, case, case.query, options)
    nan_block = case.key_cache[:, 0, 0, 0].isnan().nonzero()[0].int()
    case.block_tables[1, :34] = case.block_tables[3, :2] = nan_block
    assert_matches(decode(gpu, case, case.query, {**options, "shared": shared}), expected)


def test_a_window_is_right_beside_shared_blocks(gpu, make_case, share_blocks, device):
    case = small_case(make_case, device, [600, 560], [1] * 2)
    shared = share_blocks(case, [(2, 34)])
    options = {"scale": case.scale, "sliding_window": 30}
    expected = decode(reference, case, case.query, options)
    assert_matches(decode(gpu, case, case.query, {**options, "shared": shared}), expected)


def test_rows_alone_keep_their_bits_beside_shared_blocks(gpu, make_case, share_blocks, dtype, device):
    case = small_case(make_case, device, [600, 300, 90, 70], [1] * 4, dtype)
    shared = share_blocks(case, [(2, 0), (2, 4)])
    options = {"scale": case.scale}
    alone = decode(gpu, case, case.query, options)
    together = decode(gpu, case, case.query, {**options, "shared": shared})
    assert torch.equal(together[:2], alone[:2])
    assert_matches(together[2:], alone[2:])


def test_shared_blocks_in_groups_of_rows_give_the_same_bits(gpu, make_case, share_blocks, device, monkeypatch):
    """The memory for partials may cut a group of rows in two."""
    case = small_case(make_case, device, [600, 620, 640, 80, 90], [1] * 5)
    shared = share_blocks(case, [(3, 35), (2, 4)])
    options = {"scale": case.scale, "shared": shared}
    expected = decode(gpu, case, case.query, options)
    monkeypatch.setattr(gpu, "MAX_PARTIAL_BYTES", 2 * 4 * 3 * (64 + 2) * 4)  # two rows, 4 heads, 3 splits
    assert torch.equal(decode(gpu, case, case.query, options), expected)


def small_case(make_case, device, seq_lens, q_lens, dtype=torch.float32, head_dim=64):
    return make_case(
        seq_lens, q_lens, num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype, device=device
    )


def test_attention_takes_strided_tensors(gpu, make_case, device):
    """Queries are a slice of a fused projection; the caches keep their tokens outside their heads."""
    case = small_case(make_case, device, [40, 17], [40, 3])
    options = {"scale": case.scale}
    expected = prefill(reference, case, options)

    fused = torch.full((case.query.shape[0], 8, 64), float("nan"), device=device)
    fused[:, 2:6] = case.query
    case.query = fused[:, 2:6]
    case.key_cache = case.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    case.value_cache = case.value_cache.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    assert_matches(prefill(gpu, case, options), expected)

    query = case.query[case.cu_seqlens_q[1:].long() - 1]
    assert_matches(decode(gpu, case, query, options), expected[case.cu_seqlens_q[1:].long() - 1])


def test_decode_reads_no_block_outside_the_window(gpu, make_case, device):
    """An engine may give away blocks that a window has left behind."""
    case = small_case(make_case, device, [100], [1])
    options = {"scale": case.scale, "sliding_window": 20}
    expected = decode(reference, case, case.query, options)
    case.block_tables[0, :5] = -1
    assert_matches(decode(gpu, case, case.query, options), expected)
    assert_matches(prefill(gpu, case, options), expected)


def test_decode_gives_a_row_the_same_bits_in_any_batch(gpu, make_case, dtype, device):
    """Alone, a short row takes the one-kernel way; beside a long row, its single split is merged."""
    case = small_case(make_case, device, [300, 1100, 37], [1, 1, 1], dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    options = {"scale": case.scale, "sinks": sinks}
    together = decode(gpu, case, case.query, options)
    tables, lengths = case.block_tables, case.seq_lens_kv
    for row, length in enumerate(lengths.tolist()):
        case.block_tables = tables[row : row + 1, : math.ceil(length / 16)]
        case.seq_lens_kv = lengths[row : row + 1]
        alone = decode(gpu, case, case.query[row : row + 1], options)
        assert torch.equal(alone[0], together[row])


def test_prefill_gives_a_row_the_same_bits_in_any_chunks(gpu, make_case, dtype, device):
    case = small_case(make_case, device, [150], [150], dtype)
    options = {"scale": case.scale}
    whole = prefill(gpu, case, options)
    query, chunks = case.query, []
    for start, end in [(0, 1), (1, 70), (70, 150)]:
        case.query, case.q_lens = query[start:end], [end - start]
        case.cu_seqlens_q = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        case.seq_lens_kv = torch.tensor([end], dtype=torch.int32, device=device)
        chunks.append(prefill(gpu, case, options))
    assert torch.equal(torch.cat(chunks), whole)


def test_decode_in_groups_of_rows_gives_the_same_bits(gpu, make_case, device, monkeypatch):
    case = small_case(make_case, device, [600, 20, 513, 1, 30], [1] * 5)
    options = {"scale": case.scale}
    expected = decode(gpu, case, case.query, options)
    monkeypatch.setattr(gpu, "MAX_PARTIAL_BYTES", 2 * 4 * 2 * (64 + 2) * 4)  # two rows, 4 heads, 2 splits
    assert torch.equal(decode(gpu, case, case.query, options), expected)


def test_empty_batches_do_nothing(gpu, make_case, device):
    case = small_case(make_case, device, [5], [5])
    options = {"scale": case.scale}
    case.query, case.cu_seqlens_q = case.query[:0], torch.zeros_like(case.cu_seqlens_q)
    assert prefill(gpu, case, options).shape[0] == 0
    case.block_tables, case.seq_lens_kv = case.block_tables[:0], case.seq_lens_kv[:0]
    assert decode(gpu, case, case.query, options).shape[0] == 0
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    new = torch.empty((0, 2, 64), device=device)
    gpu.write_kv(new, new, case.key_cache, case.value_cache, nothing)
    gpu.copy_blocks(case.key_cache, nothing, nothing)


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(3, 64, 16), (1, 100, 4), (2, 80, 32)])
def test_write_kv_matches_the_reference(gpu, device, dtype, num_kv_heads, head_dim, block_size):
    """Slots in random order, some skipped; the new K and V are slices of a fused projection."""
    gen = torch.Generator().manual_seed(0)
    fused = torch.randn((20, 4 * num_kv_heads, head_dim), generator=gen).to(dtype).to(device)
    key, value = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads : 3 * num_kv_heads]
    slots = torch.randperm(10 * block_size, generator=gen)[:20].to(device)
    slots[[0, 7, 19]] = -1
    empty = torch.full((10, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device)
    expected = pool_views(empty, empty)
    actual = pool_views(empty, empty)
    reference.write_kv(key, value, *expected, slots)
    gpu.write_kv(key, value, *actual, slots)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_copy_blocks_copies_bits(gpu, device, pool_dtype, id_dtype):
    """A block of 3 layers x 2 x 3 heads x 16 slots x 80 is three chunks; NaN keep their bits."""
    kv = torch.randint(0, 256, (7, 3, 2, 3, 16, 80 * pool_dtype.itemsize), dtype=torch.uint8).to(device).view(pool_dtype)
    src = torch.tensor([6, 0, 3], dtype=id_dtype, device=device)
    dst = torch.tensor([1, 5, 2], dtype=id_dtype, device=device)
    expected = kv.clone()
    reference.copy_blocks(expected, src, dst)
    gpu.copy_blocks(kv, src, dst)
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8))


def test_offsets_pass_two_to_the_31(gpu, make_case, device):
    """The blocks in use lie more than 2**31 elements into the pool, as they do on any large device.

    On the CPU the pool is virtual memory, of which only the touched pages exist.
    """
    case = small_case(make_case, device, [40, 33], [40, 1], torch.float16)
    options = {"scale": case.scale}
    query = decode_query(case)
    expected_prefill, expected_decode = prefill(reference, case, options), decode(reference, case, query, options)

    num_small = case.key_cache.shape[0]
    first = 2**31 // (2 * case.key_cache[0].numel())
    try:
        kv = torch.empty((first + 2 * num_small, 2, *case.key_cache.shape[1:]), dtype=torch.float16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"no room for a large pool: {error}")
    assert kv.stride(0) * first == 2**31
    key_cache, value_cache = kv[:, 0], kv[:, 1]
    kv[first:] = float("nan")

    # Write what the case's rows hold, token by token, into blocks `first + id`; then copy those blocks to other ones.
    slots = torch.arange(num_small * 16, device=device)
    keys, values = (c.transpose(1, 2).reshape(-1, 2, 64) for c in (case.key_cache, case.value_cache))
    gpu.write_kv(keys, values, key_cache, value_cache, slots + first * 16)
    ids = torch.arange(num_small, dtype=torch.int32, device=device)
    gpu.copy_blocks(kv, first + ids, first + num_small + ids)

    for shift in (first, first + num_small):
        moved = case.clone()
        moved.key_cache, moved.value_cache = key_cache, value_cache
        moved.block_tables = torch.where(case.block_tables < 0, -1, case.block_tables + shift)
        assert_matches(prefill(gpu, moved, options), expected_prefill)
        assert_matches(decode(gpu, moved, query, options), expected_decode)
