"""What is known of models of the Llama shape without transformers' modelling code, against that code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import change_tensors
from recorder import recorded
from safetensors.torch import load_file

from pagedgen.model import inspection, loader
from pagedgen.model.checkpoint import open_checkpoint
from pagedgen.model.decoder import FusedDecoder, can_fuse
from pagedgen.model.llama_shape import llama_shape, rotary_embedding
from pagedgen.sampling_params import SamplingParams

KNOWN = ["llama", "llama_mqa", "llama_odd_head_dim", "qwen2", "qwen3", "mistral_window"]
OTHERS = ["gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe", "gpt2"]
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def found(path):
    files = loader.locate(str(path), revision=None, trust_remote_code=False, allow_pickle=False)
    return files, loader.load_config(files)


@pytest.mark.parametrize(
    ("family", "settings"),
    [(family, {}) for family in KNOWN]
    + [("llama", s) for s in ({"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 24})]
    + [
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ],
)
def test_shapes_are_those_of_the_modules(tiny_model, family, settings):
    files, config = found(tiny_model(family, **settings))
    shape = llama_shape(config)
    got, want = inspection._look_at_shape(shape), inspection._look_at_modules(files, config, "float32")
    assert sorted(got.linears) == sorted(want.linears)
    assert got == replace(want, linears=got.linears)
    for quantization in ("none", "int8"):
        assert inspection._weights_bytes(got, 4, quantization) == inspection._weights_bytes(want, 4, quantization)
    stored = {name: tuple(t.shape) for name, t in load_file(files.path + "/model.safetensors").items()}
    assert shape.tensors() == stored


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("mistral_window", {}),
        ("qwen3", {}),
    ],
)
def test_windows_and_scale_are_those_of_the_modules(tiny_model, family, settings):
    from transformers import AutoModelForCausalLM

    _, config = found(tiny_model(family, **settings))
    shape, layers = llama_shape(config), AutoModelForCausalLM.from_config(config).model.layers
    of_config = config.sliding_window if family == "mistral_window" else None
    assert shape.windows == tuple(getattr(layer.self_attn, "sliding_window", of_config) for layer in layers)
    assert {shape.scale} == {layer.self_attn.scaling for layer in layers}


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_are_not_taken(tiny_model, family):
    assert llama_shape(found(tiny_model(family))[1]) is None


def test_what_only_looks_like_it_is_not_taken(tiny_model):
    from transformers import LlamaConfig

    _, config = found(tiny_model("llama"))
    assert can_fuse(llama_shape(config))
    assert not can_fuse(llama_shape(found(tiny_model("llama_odd_head_dim"))[1]))
    other_class = type("LlamaConfig", (LlamaConfig,), {})
    assert llama_shape(other_class(**config.to_dict())) is None
    for setting in ({"hidden_act": "gelu"}, {"auto_map": {"AutoModelForCausalLM": "own.Own"}}):
        assert llama_shape(LlamaConfig(**config.to_dict() | setting)) is None
    half = config.rope_parameters | {"partial_rotary_factor": 0.5}
    assert llama_shape(LlamaConfig(**config.to_dict() | {"rope_parameters": half})) is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", **ROPE}, {"rope_type": "yarn", **ROPE},
        {"rope_type": "dynamic", **ROPE}, {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE},
        {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, **ROPE},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_angles_are_those_of_the_modules(tiny_model, rope):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    _, config = found(tiny_model("llama", rope_parameters=rope))
    positions = torch.tensor([0, 1, 2, 17, 63, 40])
    want = LlamaRotaryEmbedding(config)(torch.empty(1, 6, 64), positions[None])
    for got, expected in zip(rotary_embedding(config)(positions), want, strict=True):
        assert torch.equal(got, expected[0])


def test_a_checkpoint_with_more_in_it_is_read_by_transformers(tiny_model, tmp_path, engine_run, make_prompts):
    """Old checkpoints store the rotary frequencies as well. The model is the same one, to the bit."""
    path = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), path)
    change_tensors(path, lambda t: t.__setitem__("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    shape = llama_shape(found(path)[1])
    assert open_checkpoint([path / "model.safetensors"], shape.tensors()) is None
    runs = [engine_run(tiny_model("llama")), engine_run(path)]
    assert all(isinstance(run.engine.runner._model, FusedDecoder) for run in runs)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first, second = (recorded(run, make_prompts([3, 17, 30]), params) for run in runs)
    assert first == second


@pytest.mark.parametrize("change", ["lacks one", "other shape", "whole numbers", "cut off", "not there"])
def test_a_checkpoint_of_anything_else_is_left_to_transformers(tiny_model, tmp_path, change):
    path = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), path)
    weights, name = path / "model.safetensors", "model.norm.weight"
    shape = llama_shape(found(path)[1])
    assert open_checkpoint([weights], shape.tensors()) is not None
    if change == "lacks one":
        change_tensors(path, lambda t: t.pop(name))
    elif change == "other shape":
        change_tensors(path, lambda t: t.__setitem__(name, torch.ones(3)))
    elif change == "whole numbers":
        change_tensors(path, lambda t: t.__setitem__(name, t[name].to(torch.int8)))
    elif change == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.unlink()
    assert open_checkpoint([weights], shape.tensors()) is None


LOAD = """
import sys
from dataclasses import replace
from pagedgen import LLM
llm = LLM(sys.argv[1], dtype="float32", backend="cpu", kv_cache_memory_bytes=2**20, max_model_len=64)
print(type(llm._engine.runner._model).__name__, "transformers.modeling_utils" in sys.modules)
"""


@pytest.mark.parametrize("where", ["directory", "hub cache"])
def test_a_known_model_loads_without_modelling_code(tiny_model, tmp_path, where):
    """Importing that takes longer than reading a small model's weights; one from the hub is in its cache the second time."""
    name = str(tiny_model("llama"))
    if where == "hub cache":
        kept = tmp_path / "models--someone--tiny"
        shutil.copytree(name, kept / "snapshots" / "c0ffee")
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("c0ffee")
        name = "someone/tiny"
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD, name], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["FusedDecoder", "False"], done.stderr
