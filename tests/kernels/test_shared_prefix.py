"""Decode attention with shared prefixes: on the CPU the same bits as without, in `reference.py` the same within rounding.

Blocks that a row gave up for its group's are NaN: a kernel that read them, or a neighbour's own blocks, would show it.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from attention_calls import decode
from pagedgen.kernels.api import load_backend

from pagedgen.threads import set_threads

reference = load_backend("reference")
cpu = load_backend("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(2, 2), (9, 3), (4, 1), (8, 1)]
HEAD_DIMS = [16, 64, 80, 128]


def random_groups(rng, num_groups):
    """Return groups (rows, shared blocks), every third without any."""
    return [(rng.choice([1, 2, 3, 7, 11, 40]), rng.randint(1, 20) if g % 3 != 2 else 0) for g in range(num_groups)]


def build(make_case, share_blocks, rng, groups, heads, head_dim, block_size, dtype, *, key_transposed=True):
    """Return (case, shared): each row has its group's blocks and 1 to 3 of its own, often up to the edge of a block."""
    lengths = []
    for num_rows, num_blocks in groups:
        for _ in range(num_rows):
            own = rng.choice([1, block_size - 1, block_size, block_size + 1, 2 * block_size, rng.randint(1, 3 * block_size)])
            lengths.append(num_blocks * block_size + own)
    case = make_case(
        lengths, [1] * len(lengths), num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size,
        dtype=dtype, key_transposed=key_transposed,
    )  # fmt: skip
    return case, share_blocks(case, groups)


def random_options(rng, num_heads):
    sinks = torch.linspace(-2, 4, num_heads) if rng.random() < 0.5 else None
    return {"softcap": rng.choice([None, 3.0]), "sinks": sinks}


@pytest.fixture
def on_threads():
    """Run a function on a number of threads."""

    def run(num_threads, function, *args, **kwargs):
        before = torch.get_num_threads()
        try:
            set_threads(num_threads, "cpu")
            return function(*args, **kwargs)
        finally:
            set_threads(before, "cpu")

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_sharing_does_not_change_a_bit(make_case, share_blocks, on_threads, dtype, block_size):
    """Every head configuration and head_dim once, with groups, lengths and options drawn anew."""
    rng = random.Random(f"{dtype} {block_size}")
    for heads in HEADS:
        for head_dim in HEAD_DIMS:
            groups = random_groups(rng, rng.randint(1, 4))
            case, shared = build(make_case, share_blocks, rng, groups, heads, head_dim, block_size, dtype)
            options = random_options(rng, heads[0])
            alone = decode(cpu, case, **options)
            assert not alone.isnan().any()
            for num_threads in (1, 2):
                together = on_threads(num_threads, decode, cpu, case, shared=shared, **options)
                assert torch.equal(together, alone), (heads, head_dim, groups, options, num_threads)


@pytest.mark.parametrize("num_rows", [*range(1, 13), 40])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 40])
def test_groups_of_every_size(make_case, share_blocks, num_rows, group):
    """Around the number of rows that one work item takes, down to one: 40 query heads are more than it has lines."""
    rng = random.Random(num_rows)
    case, shared = build(make_case, share_blocks, rng, [(num_rows, 3)], (group, 1), 16, 8, torch.float32)
    assert torch.equal(decode(cpu, case, shared=shared), decode(cpu, case))


def test_a_row_may_end_with_its_shared_blocks(make_case, share_blocks):
    case = make_case(
        [32, 35, 32], [1] * 3, num_heads=3, num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, key_transposed=True
    )
    shared = share_blocks(case, [(3, 2)])
    assert torch.equal(decode(cpu, case, shared=shared), decode(cpu, case))
    torch.testing.assert_close(decode(reference, case, shared=shared), decode(reference, case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("sliding_window", [1, 20, 60])
def test_a_window_is_right_beside_shared_blocks(make_case, share_blocks, backend, sliding_window):
    case, shared = build(make_case, share_blocks, random.Random(0), [(5, 4), (2, 0)], (4, 2), 16, 16, torch.float32)
    want = decode(reference, case, sliding_window=sliding_window)
    got = decode(backend, case, sliding_window=sliding_window, shared=shared)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
def test_shared_blocks_are_read_through_the_first_row_alone(make_case, share_blocks, on_threads, backend):
    """A kernel that ignored `shared` would fail. In this batch on one thread, each group is one work item."""
    groups = [(4, 2), (3, 1), (13, 0)]
    case, shared = build(make_case, share_blocks, random.Random(0), groups, (3, 1), 16, 16, torch.float32)
    want = decode(backend, case)
    nan_block = int(case.key_cache[:, 0, 0, 0].isnan().nonzero()[0])
    case.block_tables[1:4, :2] = case.block_tables[5:7, :1] = nan_block
    got = on_threads(1, decode, backend, case, shared=shared)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_a_group_is_cut_into_items_for_all_threads(make_case, share_blocks):
    """One group of one KV head still gives each of two threads half of its rows."""
    numba = pytest.importorskip("numba")
    from pagedgen.kernels.cpu.items import plan_items

    case, shared = build(make_case, share_blocks, random.Random(0), [(16, 20)], (1, 1), 16, 16, torch.float32)
    cut = cpu.cut_rows(
        case.block_tables, None, case.seq_lens_kv, shared, max_seqlen_q=1, num_heads=1, num_kv_heads=1, num_threads=2
    )
    items, bounds = numba.njit(lambda *args: plan_items(*args))(
        cut.cu_seqlens_q, cut.seq_lens_kv, cut.row_bounds, cut.num_shared_blocks, 1, cut.heads_per_item, 16,
        cut.queries_per_item, 0, 2,
    )  # fmt: skip
    rows = [int((items[a:b, 1] - items[a:b, 0]).sum()) for a, b in pairwise(bounds)]
    assert rows == [8, 8]
    assert int((items[: bounds[-1], 1] - items[: bounds[-1], 0]).max()) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_in_two_parts_is_the_reference(make_case, share_blocks, dtype):
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    rng = random.Random(str(dtype))
    for heads in HEADS:
        groups = random_groups(rng, 3)
        case, shared = build(make_case, share_blocks, rng, groups, heads, 64, 16, dtype, key_transposed=False)
        options = random_options(rng, heads[0])
        want = decode(reference, case, **options)
        torch.testing.assert_close(decode(reference, case, shared=shared, **options), want, atol=tolerance, rtol=tolerance)


def test_blocks_of_each_row(make_case, share_blocks):
    _, shared = build(make_case, share_blocks, random.Random(0), [(3, 5), (1, 0), (2, 7)], (2, 2), 16, 4, torch.float32)
    assert shared.row_shared_blocks.tolist() == [5, 5, 5, 0, 7, 7]
    assert shared.row_shared_blocks.dtype == torch.int32
