"""The fused decoder against transformers' modules: which models it takes, and the same logits."""

from __future__ import annotations

import json
import shutil

import numba
import numpy as np
import pytest
import torch
from pagedgen.kernels.cpu import fused, load_kernels
from recorder import recorded
from safetensors.torch import load_file, save_file

from pagedgen.config import EngineConfig
from pagedgen.engine.opened import open_model
from pagedgen.model import products as module
from pagedgen.model.decoder import FusedDecoder
from pagedgen.model.forward import ModuleForward
from pagedgen.model.llama_shape import llama_shape, rotary_embedding
from pagedgen.sampling_params import SamplingParams

FUSED = ["llama", "llama_mqa", "qwen2", "qwen3", "mistral_window"]
NOT_FUSED = ["llama_odd_head_dim", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe", "gpt2"]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(params=["library products", "own products"], autouse=True)
def products(request, monkeypatch):
    """Every test with both kinds of product, whichever this machine would choose."""
    monkeypatch.setattr(module, "panels_pay", lambda dtype: request.param == "own products")


def floats(seen):
    return {key: np.frombuffer(bits, np.float32) for key, bits in seen.items()}


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("chunk", [512, 9])
def test_logits_equal_those_of_the_modules(tiny_model, engine_run, make_prompts, family, chunk):
    settings = {"block_size": 8, "max_num_batched_tokens": chunk}
    fused = engine_run(tiny_model(family), backend="cpu", **settings)
    plain = engine_run(tiny_model(family), backend="reference", **settings)
    assert isinstance(fused.engine.runner._model, FusedDecoder)
    assert isinstance(plain.engine.runner._model, ModuleForward)
    prompts = make_prompts([1, 5, 8, 23, 40, 77])
    got, tokens = recorded(fused, prompts, PARAMS)
    want, same = recorded(plain, prompts, PARAMS)
    assert tokens == same
    got, want = floats(got), floats(want)
    for key, logits in want.items():
        np.testing.assert_allclose(got[key], logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("settings", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_a_tied_head(tiny_model, engine_run, reference_generate, make_prompts, settings):
    model = tiny_model("llama", **settings)
    run = engine_run(model)
    assert isinstance(run.engine.runner._model, FusedDecoder)
    prompts = make_prompts([3, 17, 30])
    assert run.answer(prompts, PARAMS) == reference_generate(model, prompts, PARAMS.max_tokens)


# Sizes whose square root, which Gemma multiplies embeddings with, is no short number; rotary angles that are computed in steps.
ODD = {"hidden_size": 80}
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}


@pytest.mark.parametrize(
    ("family", "stored", "settings"),
    [(family, "bfloat16", {}) for family in FUSED + NOT_FUSED]
    + [(family, stored, {}) for family in ("llama", "gemma2") for stored in ("float16", "mixed")]
    + [("gemma2", "bfloat16", ODD), ("gemma3", "bfloat16", ODD)]
    + [("llama", "bfloat16", {"rope_parameters": rope}) for rope in (LLAMA3, {"rope_type": "yarn", **ROPE})],
)
def test_a_checkpoint_in_16_bits_has_the_bits_of_its_widened_copy(
    tiny_model, tmp_path, engine_run, make_prompts, family, stored, settings
):  # fmt: skip
    """In "mixed", one tensor is wider than the config says: it must not be rounded."""
    source, seen = tiny_model(family, **settings), []
    tensors = load_file(source / "model.safetensors")
    dtype = torch.bfloat16 if stored == "mixed" else getattr(torch, stored)
    short = {name: t.to(dtype) for name, t in tensors.items()}
    if stored == "mixed":
        name = max(short)
        short[name] = tensors[name].float()
    for directory, kept in (("short", short), ("wide", {name: t.float() for name, t in short.items()})):
        shutil.copytree(source, tmp_path / directory)
        save_file(kept, tmp_path / directory / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config["dtype"] = "bfloat16" if stored == "mixed" else stored
        (tmp_path / directory / "config.json").write_text(json.dumps(config))
        seen.append(recorded(engine_run(tmp_path / directory, backend="cpu"), make_prompts([3, 17, 30]), PARAMS))
    assert seen[0] == seen[1]


def test_a_step_that_samples_nothing_has_no_logits(tiny_model, engine_run):
    """Chunks of a long prompt need none; the work space serves steps of every size."""
    run = engine_run(tiny_model("llama"), max_num_batched_tokens=16, max_num_seqs=4)
    shapes = []
    forward = run.engine.runner._model

    def watched(*args, best_among):
        logits = forward(*args)
        shapes.append(tuple(logits.shape))
        return logits

    run.engine.runner._model = watched
    run.answer([list(range(7, 57))], PARAMS)
    assert shapes[0] == (0, 263) and shapes[-1] == (1, 263)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
def test_weights_are_held_once(tiny_model, settings):
    """A layer's weights go as they are packed, whoever loaded them."""
    from transformers import AutoModelForCausalLM

    opened = open_model(EngineConfig(str(tiny_model("llama", **settings)), dtype="float32"))
    weights = dict(AutoModelForCausalLM.from_pretrained(opened.files.path, dtype=torch.float32).state_dict())
    FusedDecoder(llama_shape(opened.hf_config), rotary_embedding(opened.hf_config), weights, opened.spec)
    assert not weights


class Recorded:
    """A module of kernels that notes the types each kernel is called with."""

    def __init__(self, module, calls):
        self._module, self._calls = module, calls

    def __getattr__(self, name):
        kernel = getattr(self._module, name)
        if not callable(kernel):
            return kernel

        def call(*args):
            self._calls.add((name, *map(numba.typeof, args)))
            return kernel(*args)

        return call


def test_compiling_ahead_takes_in_all_that_a_run_calls_but_attention(tiny_model, engine_run, make_prompts, monkeypatch):
    run, calls = engine_run(tiny_model("llama"), backend="cpu"), set()
    prompts = make_prompts([3, 17, 30])
    want = run.answer(prompts, PARAMS)

    def load(name):
        module, num_threads = load_kernels(name)
        return Recorded(module, calls), num_threads

    monkeypatch.setattr(fused, "load_kernels", load)
    run.engine.runner._model.compile_products()
    compiled = set(calls)
    assert {"add_rms_norm", "rotate"} <= {name for name, *_ in compiled}
    run.engine.runner._model.stack = None  # kernel by kernel, where each call is seen; test_stack.py has the one call's types
    assert run.answer(prompts, PARAMS) == want
    assert calls == compiled
