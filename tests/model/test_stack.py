"""A decoder's layers in one compiled call: the bits that its layers have kernel by kernel, whatever a step holds."""

from __future__ import annotations

import json
import shutil
import weakref

import pytest
import torch
from pagedgen.kernels.api import LayerCache
from pagedgen.kernels.cpu import fused, load_kernels, stack
from recorder import recorded
from safetensors.torch import load_file, save_file

from pagedgen import threads
from pagedgen.engine.model_runner import dummy_batch
from pagedgen.model import decoder
from pagedgen.model import products as module
from pagedgen.model.panels import panels_pay
from pagedgen.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not panels_pay(torch.float32), reason="products are a library's on this machine")

FAMILIES = ["llama", "llama_mqa", "qwen2", "qwen3", "mistral_window"]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def both_ways(engine_run):
    """Run prompts by the stack and kernel by kernel; return what each recorded."""

    def run(model, prompts, **settings):
        seen = []
        for stacked in (True, False):
            made = engine_run(model, backend="cpu", block_size=8, **settings)
            forward = made.engine.runner._model
            assert forward.stack is not None
            if not stacked:
                forward.stack = None
            seen.append(recorded(made, prompts, PARAMS))
        return seen

    return run


def sharing(make_prompts):
    """Prompts of which some begin alike, for longer than a few blocks."""
    first, *others = make_prompts([40, 1, 5, 8, 23, 77])
    return [first + other for other in others] + others


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [512, 9])
def test_bits_are_those_of_the_layers_kernel_by_kernel(tiny_model, both_ways, make_prompts, family, chunk):
    stacked, by_kernel = both_ways(tiny_model(family), sharing(make_prompts), max_num_batched_tokens=chunk)
    assert stacked == by_kernel


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_in_8_bits_too(tiny_model, both_ways, make_prompts, family, settings):
    if "quantization" in settings and not panels_pay(torch.int8):
        pytest.skip("8-bit products are a library's on this machine")
    stacked, by_kernel = both_ways(tiny_model(family), sharing(make_prompts), **settings)
    assert stacked == by_kernel


def test_more_rows_than_a_chunk(tiny_model, both_ways, make_prompts, monkeypatch):
    whole, _ = both_ways(tiny_model("llama"), make_prompts([30, 41, 5]))
    monkeypatch.setattr(decoder, "_LARGEST_CHUNK", 16)
    stacked, by_kernel = both_ways(tiny_model("llama"), make_prompts([30, 41, 5]))
    assert stacked == by_kernel == whole


def test_any_number_of_threads(tiny_model, engine_run, make_prompts):
    before, seen = torch.get_num_threads(), []
    run = engine_run(tiny_model("llama"), backend="cpu")
    try:
        for count in (1, 2):
            threads.set_threads(count, "cpu")
            seen.append(recorded(run, make_prompts([3, 60, 17]), PARAMS))
    finally:
        threads.set_threads(before, "cpu")
    assert seen[0] == seen[1]


# Panels that are filled up, and a gate that ends inside a panel, where panels are 32 channels wide and not 16.
@pytest.mark.parametrize("settings", [{"hidden_size": 80, "head_dim": 16}, {"intermediate_size": 48}], ids=str)
def test_sizes_that_take_python_between_kernels(tiny_model, engine_run, reference_generate, make_prompts, settings):
    model, prompts = tiny_model("llama", **settings), make_prompts([3, 17, 30])
    run = engine_run(model, backend="cpu")
    assert (run.engine.runner._model.stack is None) == (fused.panel_width() == 32)
    assert run.answer(prompts, PARAMS) == reference_generate(model, prompts, PARAMS.max_tokens)


def test_weights_of_several_forms_and_products_of_a_library_are_not_stacked(tiny_model, engine_run, tmp_path, monkeypatch):
    shutil.copytree(tiny_model("llama"), tmp_path / "mixed")
    tensors = {name: t.bfloat16() for name, t in load_file(tmp_path / "mixed" / "model.safetensors").items()}
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.rand(64, 96)
    save_file(tensors, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())
    (tmp_path / "mixed" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert engine_run(tmp_path / "mixed", backend="cpu").engine.runner._model.stack is None
    monkeypatch.setattr(module, "panels_pay", lambda dtype: False)
    assert engine_run(tiny_model("llama"), backend="cpu").engine.runner._model.stack is None


def test_its_kernels_are_those_that_were_compiled_ahead(tiny_model, engine_run, make_prompts):
    """The functions it calls by address have the very types of the calls from Python: nothing is compiled twice."""
    run = engine_run(tiny_model("llama"), backend="cpu")
    kernels = [
        getattr(load_kernels(name)[0], kernel)
        for name, kernel in (("gemm", "product"), ("rows", "add_rms_norm"), ("rows", "rotate"), ("attend", "attend"))
    ]
    run.engine.runner._model.stack = None
    run.answer(make_prompts([3, 17]), PARAMS)
    compiled = [len(kernel.overloads) for kernel in kernels]
    stacked = engine_run(tiny_model("llama"), backend="cpu")
    assert stacked.engine.runner._model.stack is not None
    stacked.answer(make_prompts([3, 17]), PARAMS)
    assert [len(kernel.overloads) for kernel in kernels] == compiled


def test_a_pool_that_is_given_back_is_not_held(tiny_model, engine_run):
    runner = engine_run(tiny_model("llama"), backend="cpu", block_size=8).engine.runner
    runner.allocate_cache(4)
    runner.run(dummy_batch([5], 8, decodes=False))
    key = weakref.ref(runner._cache.layers[0].key)
    runner.release_cache()
    assert key() is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda key, value: (key.transpose(2, 3).bfloat16().contiguous().transpose(2, 3), value.bfloat16()),
            "pool of torch.bf",
        ),
        (lambda key, value: (key.contiguous(), value), "K transposed"),
        (lambda key, value: (key[:, :, :2], value[:, :, :2]), "block_size >= 4"),
    ],
    ids=["dtype", "layout", "size"],
)
def test_a_pool_it_can_not_read_is_refused(tiny_model, engine_run, change, said):
    runner = engine_run(tiny_model("llama"), backend="cpu", block_size=8).engine.runner
    runner.allocate_cache(4)
    runner._cache.layers = [LayerCache(*change(layer.key, layer.value)) for layer in runner._cache.layers]
    with pytest.raises(ValueError, match=said):
        runner.run(dummy_batch([5], 8, decodes=False))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where a call by address leaves what was raised
def test_a_kernel_that_fails_fails_the_step(tiny_model, engine_run, make_prompts, monkeypatch):
    """What is called by its address can't raise into its caller: the step's states would be those of before."""
    numba = pytest.importorskip("numba")

    @numba.njit
    def no_memory(qkv, cos, sin, q_norm, k_norm, query, key, value, rows, heads, kv_heads, dim, eps, threads, a, b, f32):
        if rows >= 0:
            raise MemoryError("none left")
        return True

    def with_one_that_fails(*kinds):
        functions = list(working(*kinds))
        place = next(i for i, f in enumerate(functions) if "rotate" in f.cres.fndesc.qualname)
        signature = functions[place].cres.signature.args
        no_memory.compile(signature)
        functions[place] = numba.types.CompileResultWAP(no_memory.overloads[signature])
        return tuple(functions)

    run, working = engine_run(tiny_model("llama"), backend="cpu"), stack._functions
    monkeypatch.setattr(stack, "_functions", with_one_that_fails)
    with pytest.raises(MemoryError):
        run.answer(make_prompts([3, 17]), PARAMS)
