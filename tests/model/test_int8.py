"""Int8 products against plain arithmetic on the same numbers, and models that run on them."""

from __future__ import annotations

import pytest
import torch
from recorder import recorded
from torch import nn

from pagedgen.config import EngineConfig
from pagedgen.engine.opened import open_model
from pagedgen.errors import UsageError
from pagedgen.machine import cpu_flags
from pagedgen.model import int8
from pagedgen.model import products as products_module
from pagedgen.model.decoder import FusedDecoder
from pagedgen.model.int8 import Int8Linear, inner_groups, library_levels, weight_levels
from pagedgen.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library_levels() == 0, reason="torch has no 8-bit products here")
SHAPES = [(960, 576, 1), (64, 1536, 1), (64, 1536, 6), (33, 60, 1), (263, 64, 2), (40, 96, 3)]


@pytest.fixture(params=["oneDNN's product", "our product"], autouse=True)
def products(request, monkeypatch):
    """Every test with both, whichever this machine would choose."""
    ours = request.param == "our product"
    if ours and "avx2" not in cpu_flags():
        pytest.skip("needs AVX2")
    for module in (int8, products_module):
        monkeypatch.setattr(module, "panels_pay", lambda dtype: ours)


def slow_twin(linear, x, num_groups=1):
    """Quantize both sides by their definition, multiply whole numbers in fp64, scale back, group by group."""
    weight = linear.weight.double()
    w_scale = (linear.weight.float().abs().amax(dim=1) / weight_levels()).double()
    w = torch.round(linear.weight.float() / w_scale.float()[:, None]).double()
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for part, w_part in zip(x.float().chunk(num_groups, dim=1), w.chunk(num_groups, dim=1), strict=True):
        x_scale = part.abs().amax(dim=1) / 127
        quantized = torch.round(part / x_scale[:, None]).double()
        out += quantized @ w_part.t() * w_scale * x_scale.double()[:, None]
    return out if linear.bias is None else out + linear.bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features", "num_groups"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_definition_and_is_near_the_float_product(dtype, out_features, in_features, num_groups, bias):
    torch.manual_seed(1)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(50, in_features).to(dtype)
    got = Int8Linear(linear, num_groups)(x)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), slow_twin(linear, x, num_groups), atol=tolerance, rtol=tolerance)
    wanted = linear.float()(x.float())
    assert (got.float() - wanted).norm() < 0.025 * wanted.norm()


def test_the_largest_sums_are_exact():
    linear = nn.Linear(2048, 4, bias=False).requires_grad_(False)
    linear.weight[:] = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    x = torch.ones(16, 2048)
    x[1] = -1.0
    got = Int8Linear(linear)(x)
    torch.testing.assert_close(got[0], torch.tensor([2048.0, -2048.0, 2048.0, -2048.0]), rtol=1e-6, atol=0)
    assert torch.equal(got[1], -got[0])


def test_zero_weights_and_rows_give_zero_and_not_a_number_stays_one():
    linear = nn.Linear(64, 16, bias=False).requires_grad_(False)
    linear.weight[3] = 0
    x = torch.randn(3, 64)
    x[1], x[2, 7] = 0, float("nan")
    got = Int8Linear(linear)(x)
    assert (got[0, 3], got[1].abs().max()) == (0, 0)
    assert got[2].isnan().all() and torch.isfinite(got[:2]).all()


def test_a_group_is_not_hurt_by_another_ones_outlier():
    torch.manual_seed(3)
    linear = nn.Linear(512, 64, bias=False).requires_grad_(False)
    x = torch.randn(20, 512)
    x[:, 300] = 1000.0
    want = linear(x)
    errors = [(Int8Linear(linear, groups)(x) - want).norm() for groups in (1, 2, 8)]
    assert errors[0] > 1.3 * errors[1] > 1.3 * 1.5 * errors[2]


@pytest.mark.parametrize(
    ("in_features", "groups"), [(1536, 6), (96, 1), (8960, 35), (11008, 43), (4864, 19), (4 * 1009, 1), (60, 1)]
)
def test_groups_are_equal_and_of_up_to_256(in_features, groups):
    assert inner_groups(in_features) == groups


@pytest.mark.parametrize("num_groups", [1, 3])
def test_rows_are_independent_of_their_number_and_of_threads(num_groups):
    torch.manual_seed(2)
    linear = Int8Linear(nn.Linear(576, 960, bias=False).requires_grad_(False), num_groups)
    x = torch.randn(600, 576)
    whole = linear(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, before):
            torch.set_num_threads(threads)
            for rows in (1, 2, 15, 16, 17, 64, 100, 511):
                assert torch.equal(linear(x[50 : 50 + rows]), whole[50 : 50 + rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mixtral", "gpt_oss"])
def test_bits_do_not_depend_on_the_batch(tiny_model, engine_run, make_prompts, family):
    """Fused models and those that run through their modules; alone, chunked and together."""
    model, params = tiny_model(family), SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = make_prompts([1, 9, 30, 41])
    run = engine_run(model, quantization="int8", block_size=8)
    want, tokens = recorded(run, prompts, params)
    chunked = engine_run(model, quantization="int8", block_size=8, max_num_batched_tokens=7)
    assert recorded(chunked, prompts[::-1], params, [3, 2, 1, 0]) == (want, tokens)
    assert recorded(run, [prompts[2]], params, [2])[1] == {2: tokens[2]}
    plain, _ = recorded(engine_run(model, block_size=8), prompts, params)
    assert plain.keys() == want.keys()
    assert plain != want


def test_both_ways_to_run_a_model_agree(tiny_model, engine_run, make_prompts):
    """Fused, and through the modules on the reference backend: the same quantized numbers."""
    prompts, params = make_prompts([4, 19, 33]), SamplingParams(max_tokens=6, ignore_eos=True)
    fused = engine_run(tiny_model("qwen2"), quantization="int8")
    plain = engine_run(tiny_model("qwen2"), quantization="int8", backend="reference")
    assert isinstance(fused.engine.runner._model, FusedDecoder)
    got, want = recorded(fused, prompts, params)[0], recorded(plain, prompts, params)[0]
    for key in [k for k in want if k[2] == len(prompts[k[0]])]:  # later ones may follow another token
        a, b = (torch.frombuffer(bytearray(side[key]), dtype=torch.float32) for side in (got, want))
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_plan_counts_the_bytes_that_are_held(tiny_model, tied):
    model = str(tiny_model("llama", tie_word_embeddings=tied))
    plain = open_model(EngineConfig(model=model, dtype="float32")).spec
    quantized = open_model(EngineConfig(model=model, dtype="float32", quantization="int8")).spec
    linears = 3 * (64 * 64 * 2 + 32 * 64 * 2 + 96 * 64 * 3)
    channels = 3 * (64 * 2 + 32 * 2 + 96 * 2 + 64)
    head, head_channels = 263 * 64, 263
    saved = 3 * linears - 4 * channels + (0 if tied else 3 * head - 4 * head_channels)
    assert plain.weights_bytes - quantized.weights_bytes == saved
    assert quantized.tied_head_bytes == (head + 4 * head_channels if tied else 0)


def test_maps_back_from_the_feed_forward_network_have_groups(tiny_model, engine_run):
    for family in ("llama", "gemma2"):
        model = tiny_model(family, intermediate_size=512)
        forward = engine_run(model, quantization="int8").engine.runner._model
        products = (
            [getattr(layer, name) for layer in forward._layers for name in ("qkv", "out", "gate_up", "down")]
            if isinstance(forward, FusedDecoder)
            else [m for m in forward._model.modules() if hasattr(m, "buckets")]
        )
        assert all(isinstance(p, Int8Linear) for p in products)
        assert sorted(p._num_groups for p in products if p.in_features == 512) == [2] * 3
        assert all(p._num_groups == 1 for p in products if p.in_features != 512)


def test_other_devices_and_names_are_refused(tiny_model):
    with pytest.raises(UsageError, match="--quantization int4 is not one of none, int8"):
        EngineConfig(model="x", quantization="int4")
    config = EngineConfig(model=str(tiny_model("llama")), quantization="int8", device="cuda")
    with pytest.raises(UsageError, match="--quantization int8 runs on --device cpu only"):
        open_model(config, planning=True)
