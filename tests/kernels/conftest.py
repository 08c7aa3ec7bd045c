"""Random paged-attention cases: shuffled block tables, NaN in every slot that no row owns, both key layouts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pagedgen.kernels.api import SharedPrefixes
from pagedgen.kernels.reference import quantize


@dataclass
class PagedCase:
    """One packed batch over a pool. `q_lens[i]` new tokens of row i end at position `seq_lens[i] - 1`."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens_kv: torch.Tensor
    q_lens: list[int]
    scale: float
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}

    def clone(self) -> PagedCase:
        return PagedCase(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(self).items()})


def build_case(
    seq_lens: list[int],
    q_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    key_transposed: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> PagedCase:
    """Fill a pool with random K/V for rows of the given lengths; every slot no row owns holds NaN."""
    gen = torch.Generator().manual_seed(seed)
    blocks_per_row = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks_per_row) + 3
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"))
    value_cache = key_cache.clone()
    ids = torch.randperm(num_blocks, generator=gen).tolist()
    tables = torch.full((len(seq_lens), max([*blocks_per_row, 1]) + 1), -1, dtype=torch.int32)
    for row, length in enumerate(seq_lens):
        for j in range(blocks_per_row[row]):
            block_id = ids.pop()
            tables[row, j] = block_id
            n = min(block_size, length - j * block_size)
            key_cache[block_id, :, :n] = torch.randn(num_kv_heads, n, head_dim, generator=gen)
            value_cache[block_id, :, :n] = torch.randn(num_kv_heads, n, head_dim, generator=gen)
    key_cache, value_cache = key_cache.to(dtype), value_cache.to(dtype)
    if key_transposed:
        key_cache = key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    cu = torch.zeros(len(q_lens) + 1, dtype=torch.int32)
    cu[1:] = torch.tensor(q_lens).cumsum(0)
    query = torch.randn(int(cu[-1]), num_heads, head_dim, generator=gen).to(dtype)
    case = PagedCase(
        query, key_cache, value_cache, tables, cu, torch.tensor(seq_lens, dtype=torch.int32), q_lens, head_dim**-0.5
    )
    for name, value in vars(case).items():
        if isinstance(value, torch.Tensor):
            setattr(case, name, value.to(device))
    if key_transposed and device != "cpu":
        raise ValueError("the transposed layout is the cpu backend's")
    return case


def quantize_case(case: PagedCase, *, key_transposed: bool = True) -> PagedCase:
    """Return the case with int8 caches. Slots no row owns have NaN scales and random codes."""
    case = case.clone()
    gen = torch.Generator().manual_seed(4)
    for name in ("key", "value"):
        cache = getattr(case, f"{name}_cache")
        codes, scales = quantize(cache)
        unowned = cache[..., 0].isnan()
        assert torch.equal(scales.isnan(), unowned)
        codes[unowned] = torch.randint(-128, 128, codes[unowned].shape, generator=gen).to(torch.int8)
        if key_transposed and name == "key":
            codes = codes.transpose(2, 3).contiguous().transpose(2, 3)
        setattr(case, f"{name}_cache", codes)
        setattr(case, f"{name}_scales", scales)
    return case


def share_blocks(case: PagedCase, groups: list[tuple[int, int]]) -> SharedPrefixes:
    """Let the rows of each group (rows, blocks) begin with its first row's blocks; those given up become NaN."""
    bounds, tables = [0], case.block_tables
    for num_rows, num_blocks in groups:
        first, end = bounds[-1], bounds[-1] + num_rows
        for cache in (case.key_cache, case.value_cache) if case.key_scales is None else case.scales.values():
            cache[tables[first + 1 : end, :num_blocks].flatten().long()] = float("nan")
        tables[first + 1 : end, :num_blocks] = tables[first, :num_blocks].clone()
        bounds.append(end)
    assert bounds[-1] == tables.shape[0]
    ints = {"dtype": torch.int32, "device": tables.device}
    return SharedPrefixes(
        row_bounds=torch.tensor(bounds, **ints),
        num_shared_blocks=torch.tensor([num_blocks for _, num_blocks in groups], **ints),
        num_rows=bounds[-1],
        max_shared_blocks=max(num_blocks for _, num_blocks in groups),
    )


@pytest.fixture
def make_case():
    return build_case


@pytest.fixture
def make_int8_case():
    def make(*args, key_transposed=True, **kwargs):
        return quantize_case(build_case(*args, **kwargs), key_transposed=key_transposed)

    return make


@pytest.fixture(name="share_blocks")
def share_blocks_fixture():
    return share_blocks
