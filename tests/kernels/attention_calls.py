"""A backend called on a `conftest.PagedCase`, and how near two backends must come."""

from __future__ import annotations

import torch


def prefill(backend, case, **options):
    out = torch.full_like(case.query, float("nan"))
    tables = (case.block_tables, case.cu_seqlens_q, case.seq_lens_kv)
    how = {"scale": case.scale, "max_seqlen_q": max(case.q_lens), **case.scales, **options}
    backend.paged_prefill(case.query, case.key_cache, case.value_cache, *tables, out, **how)
    return out


def decode(backend, case, **options):
    out = torch.full_like(case.query, float("nan"))
    how = {"scale": case.scale, **case.scales, **options}
    backend.paged_decode(case.query, case.key_cache, case.value_cache, case.block_tables, case.seq_lens_kv, out, **how)
    return out


def assert_within(tolerance, got, want):
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


def lengths_around(block_size):
    return [1, block_size - 1, block_size, block_size + 1, 3 * block_size - 1, 3 * block_size, 3 * block_size + 1, 67]
