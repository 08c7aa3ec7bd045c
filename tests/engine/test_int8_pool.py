"""`kv_cache_dtype="int8"`: codes and scales go where their blocks go, and give a row the same bits under every schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from pagedgen.kernels.api import load_backend
from recorder import recorded

from pagedgen.config import EngineConfig
from pagedgen.engine.kv_cache import KVCache
from pagedgen.engine.swap import BlockStore
from pagedgen.engine.tiers import Address, Tier, batch_moves
from pagedgen.errors import UsageError
from pagedgen.llm import LLM
from pagedgen.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
BLOCK_BYTES = 4 * 2 * 3 * 2 * (16 + 4)  # of 4 tokens: K and V, layers, heads, codes and a scale


@pytest.fixture
def int8_run(engine_run, tiny_model):
    def make(family="llama", **settings):
        return engine_run(tiny_model(family), **{"kv_cache_dtype": "int8", "block_size": 4, **settings})

    return make


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 20), (3, 7), (2, 64)])
def test_scales_go_where_their_blocks_go(tmp_path, backend, heads, head_dim):
    """Write, copy, move to host memory and disk and back: every layer's view finds codes and scales again."""
    kernels = load_backend(backend)
    cache = KVCache(
        num_blocks=5, num_layers=3, num_kv_heads=heads, block_size=8, head_dim=head_dim, dtype=torch.int8, device="cpu",
        key_transposed=kernels.KEY_TRANSPOSED,
    )  # fmt: skip
    assert cache.kv[0].numel() == 3 * 2 * heads * 8 * (head_dim + 4)
    cache.kv.fill_(-1)  # NaN, as a scale
    k, v = torch.randn(2, 3, 8, heads, head_dim, generator=torch.Generator().manual_seed(0))
    for layer, keys, values in zip(cache.layers, k, v, strict=True):
        scales = {"key_scales": layer.key_scales, "value_scales": layer.value_scales}
        kernels.write_kv(keys, values, layer.key, layer.value, torch.arange(8) + 8, **scales)  # block 1
    store = BlockStore(cache.kv, kernels, host_blocks=2, disk_blocks=2, disk_path=str(tmp_path))
    path = [
        Address(Tier.DEVICE, 1), Address(Tier.DEVICE, 4), Address(Tier.HOST, 1), Address(Tier.DISK, 0), Address(Tier.DEVICE, 2),
    ]  # fmt: skip
    assert store.move(batch_moves(list(pairwise(path)))) == (set(), [])
    store.close()
    for layer, keys, values in zip(cache.layers, k, v, strict=True):
        for codes, scales, states in ((layer.key, layer.key_scales, keys), (layer.value, layer.value_scales, values)):
            for block in (1, 4, 2):
                assert torch.equal(scales[block], states.abs().amax(-1).T / 127)
                meant = codes[block] * scales[block][..., None]
                assert ((meant - states.transpose(0, 1)).abs() <= 0.501 * scales[block][..., None]).all()
            assert scales[0].isnan().all() and scales[3].isnan().all()


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16")])
def test_bits_do_not_depend_on_swap_chunks_or_order(
    int8_run, make_prompts, eager_admission, always_worth_it, tmp_path, family, dtype
):
    """Cache on and off; no preemption, recompute, host, disk, both; in chunks; reversed: identical logits and tokens."""
    prefix, *rest = make_prompts([21, 5, 9, 30, 7, 13], seed=9)
    prompts = [prefix + tail for tail in rest] + rest[:2]
    params = [PARAMS] * 5 + [SamplingParams(n=3, temperature=1.0, max_tokens=16, ignore_eos=True)] * 2
    want = recorded(int8_run(family, dtype=dtype, enable_prefix_caching=False), prompts, params)
    host, disk = {"swap_space_bytes": 2**20}, {"disk_swap_path": str(tmp_path), "disk_swap_bytes": 2**20}
    for tiers in ({}, host, disk, {**disk, "swap_space_bytes": 4 * BLOCK_BYTES}):
        run = int8_run(family, dtype=dtype, num_gpu_blocks_override=26, **tiers)
        assert recorded(run, prompts, params) == want, tiers
        order = list(range(len(prompts)))[::-1]
        assert recorded(run, prompts[::-1], params[::-1], order) == want, tiers
        assert run.stats.preemptions > 0
        moved = run.stats.swap.moved_blocks
        assert (moved.get("host to device", 0) > 0) == ("swap_space_bytes" in tiers), tiers
        assert (moved.get("disk to device", 0) > 0) == ("disk_swap_path" in tiers), tiers
    chunked = int8_run(family, dtype=dtype, max_num_batched_tokens=11, max_num_seqs=3, cascade_attention=False)
    assert recorded(chunked, prompts, params) == want


def test_a_copied_block_has_its_scales(int8_run, make_prompts):
    """Samples fork in the middle of a block. Each one's logits are those of its tokens as a prompt, with no block copied."""
    prompt = make_prompts([14])[0]
    run = int8_run()
    params = SamplingParams(n=3, temperature=1.0, max_tokens=9, ignore_eos=True)
    logits, tokens = recorded(run, [prompt], params)
    assert run.stats.swap.moved_blocks["device to device"] > 0
    alone = int8_run(enable_prefix_caching=False)
    for sample in range(3):
        so_far = prompt + tokens[0, sample][:-1]
        again, _ = recorded(alone, [so_far], SamplingParams(max_tokens=1))
        assert again[0, 0, len(so_far)] == logits[0, sample, len(so_far)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "llama_odd_head_dim"])
def test_the_cpu_kernels_give_the_tokens_of_the_reference(int8_run, make_prompts, family):
    prompts = make_prompts([3, 17, 40])
    assert int8_run(family).answer(prompts, PARAMS) == int8_run(family, backend="reference").answer(prompts, PARAMS)


def test_logits_are_near_those_of_an_exact_pool(int8_run, make_prompts):
    prompts, one = make_prompts([30, 50]), SamplingParams(max_tokens=1)
    rounded, exact = (recorded(int8_run(kv_cache_dtype=kv), prompts, one)[0] for kv in ("int8", "auto"))
    for key, bits in rounded.items():
        got, want = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (bits, exact[key]))
        assert 0 < (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_key_that_is_no_number_ends_its_row_with_an_error(int8_run, make_prompts, monkeypatch, kv_cache_dtype):
    run, backend = int8_run(kv_cache_dtype=kv_cache_dtype), load_backend("cpu")
    run.engine.runner._model.stack = None  # in one call of all layers there is nothing to spoil
    prompts = make_prompts([5, 9])
    want = run.answer(prompts, PARAMS)
    write_kv, calls = backend.write_kv, []

    def spoiled(key, *args, **kwargs):
        calls.append(len(key))
        if len(calls) == 1:
            key = key.clone()
            key[0, 0, 3] = float("nan")
        write_kv(key, *args, **kwargs)

    monkeypatch.setattr(backend, "write_kv", spoiled)
    done = run.sequences(prompts, PARAMS)
    bad = [row for row in done if getattr(done[row], "code", None) == "nan_logits"]
    assert len(bad) == 1
    assert done[1 - bad[0]].generated_token_ids == want[1 - bad[0]]


def test_the_pool_has_the_planned_bytes(int8_run):
    run = int8_run()
    spec = run.engine.opened.spec
    assert spec.bytes_per_block(4) == BLOCK_BYTES
    run.engine.runner.allocate_cache(7)
    pool = run.engine.runner._cache.kv
    assert pool.numel() * pool.element_size() == 7 * BLOCK_BYTES
    run.engine.runner.release_cache()


def test_the_library_takes_it(tiny_model):
    llm = LLM(str(tiny_model("llama")), kv_cache_dtype="int8", dtype="float32")
    assert llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids


def test_what_it_runs_on():
    def resolve(**settings):
        config = EngineConfig(model="m", kv_cache_dtype="int8", **settings)
        return config.resolve(device=config.device, dtype="bfloat16", max_model_len=64, limited_by="x", threads=1)

    assert resolve(device="cpu").backend == "cpu"
    assert resolve(device="cuda", backend="reference").kv_cache_dtype == "int8"
    with pytest.raises(UsageError, match="--kv-cache-dtype int8 runs on the cpu and reference backends only"):
        resolve(device="cuda")
    with pytest.raises(UsageError, match="--kv-cache-dtype fp8 is not one of auto, int8"):
        EngineConfig(model="m", kv_cache_dtype="fp8")
