"""The prefix tree against a naive twin that compares every prompt with every other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.engine.prefix_tree import PrefixTree


def common(a, b):
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def naive_shared_blocks(rows, size):
    """Full blocks that each row begins with like another one of its salt; never the block of its last token."""
    return [
        min(
            max((common(p, q) for j, (q, t) in enumerate(rows) if j != i and s == t), default=0) // size,
            max(len(p) - 1, 0) // size,
        )
        for i, (p, s) in enumerate(rows)
    ]


def naive_attainable(rows, size):
    looked_for = [(s, tuple(p[: (k + 1) * size])) for p, s in rows for k in range(max(len(p) - 1, 0) // size)]
    for_free = {(s, tuple(p)) for p, s in rows if len(p) % size == 0}  # computed by a row that has no use for them itself
    return (len(looked_for) - len(set(looked_for) - for_free)) * size


def naive_distinct(rows):
    return len({(s, tuple(p[: k + 1])) for p, s in rows for k in range(len(p))})


def tree_of(rows, size, weights=None):
    tree = PrefixTree(size)
    for i, (prompt, salt) in enumerate(rows):
        tree.add(prompt, 1 if weights is None else weights[i], salt)
    return tree


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
rows_of = st.lists(st.tuples(prompts, st.sampled_from(["", "a"])), min_size=1, max_size=14)


@given(rows=rows_of, size=st.sampled_from([1, 2, 4]), data=st.data())
@settings(max_examples=300, deadline=None)
def test_equals_the_naive_twin(rows, size, data):
    weights = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    order, shared_blocks, sharing = tree_of(rows, size, weights).plan()
    assert sorted(order) == list(range(len(rows)))
    assert shared_blocks.tolist() == naive_shared_blocks(rows, size)
    assert sharing.attainable_tokens == naive_attainable(rows, size)
    assert sharing.distinct_tokens == naive_distinct(rows)
    assert sharing.prompt_tokens == sum(len(p) for p, _ in rows)
    # Depth first: rows that begin with the same blocks stand together, for every number of blocks.
    for depth in range(1, 15):
        keys = [(rows[i][1], tuple(rows[i][0][: depth * size])) for i in order if len(rows[i][0]) >= depth * size]
        runs = [key for n, key in enumerate(keys) if n == 0 or keys[n - 1] != key]
        alone = {k for k in keys if keys.count(k) == 1}
        assert len([k for k in runs if k not in alone]) == len({k for k in keys if k not in alone})


def test_more_is_expected_first_within_a_group_and_among_groups():
    a, b = [1, 1], [2, 2]
    rows = [[*a, 5], [*b, 5], [*a, 6], [9], [*b, 6], [8], [*a, 7]]
    weights = [1, 9, 3, 5, 2, 1, 3]
    order, _, sharing = tree_of([(r, "") for r in rows], 2, weights).plan()
    assert order.tolist() == [1, 4, 3, 2, 6, 0, 5]
    assert (sharing.num_groups, sharing.num_grouped_rows) == (2, 5)
    assert sharing.group_sizes.tolist() == [3, 2]
    assert sharing.group_tokens.tolist() == [2, 2]


def test_a_group_within_a_group_stays_together():
    rows = [[1, 1, 5], [1, 1, 2, 2, 5], [1, 1, 6], [1, 1, 2, 2, 6]]
    order, shared, sharing = tree_of([(r, "") for r in rows], 2, [5, 4, 3, 1]).plan()
    assert order.tolist() == [0, 1, 3, 2]
    assert shared.tolist() == [1, 2, 1, 2]
    assert sharing.num_groups == 2
    assert sharing.attainable_tokens == 2 * 3 + 2


def test_common_tokens_short_of_a_block_make_no_group():
    order, shared, sharing = tree_of([([1, 2, 3, i], "") for i in range(5)], 4, [1, 2, 3, 4, 5]).plan()
    assert order.tolist() == [4, 3, 2, 1, 0]
    assert not shared.any()
    assert (sharing.num_groups, sharing.attainable_tokens, sharing.distinct_tokens) == (0, 0, 8)


def test_no_rows():
    order, shared, sharing = PrefixTree(16).plan()
    assert len(order) == len(shared) == sharing.num_groups == sharing.attainable_tokens == 0


@pytest.mark.parametrize("shape", ["chain", "equal", "distinct"])
def test_shapes_that_strain_it(shape):
    """Each prompt extends the one before; all are equal; none share anything. Inserted in many batches."""
    rng = np.random.default_rng(0)
    rows = {
        "chain": [list(range(n + 1)) for n in range(700)],
        "equal": [[7] * 200] * 700,
        "distinct": [[i, *rng.integers(0, 9, 200)] for i in range(700)],
    }[shape]
    order, _, sharing = tree_of([(r, "") for r in rows], 16).plan()
    assert sorted(order) == list(range(700))
    looked_for = sum((len(r) - 1) // 16 for r in rows)
    distinct_blocks = {"chain": 0, "equal": 12, "distinct": 700 * 12}[shape]
    assert sharing.attainable_tokens == 16 * (looked_for - distinct_blocks)
    assert sharing.distinct_tokens == {"chain": 700, "equal": 200, "distinct": 700 * 201}[shape]
