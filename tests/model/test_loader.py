"""What can refuse a model does so by name and before weights load; what loads has no random tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import change_tensors
from safetensors.torch import load_file

from pagedgen.config import EngineConfig
from pagedgen.engine.opened import open_model
from pagedgen.errors import ModelError
from pagedgen.model import loader


def opened(path, **settings):
    return open_model(EngineConfig(model=str(path), dtype="float32", **settings))


def copied(path, target, config=None, remove=()):
    """Copy a model, change its config and drop files."""
    shutil.copytree(path, target)
    if config:
        data = json.loads((target / "config.json").read_text())
        data.update(config)
        (target / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    for name in remove:
        (target / name).unlink()
    return target


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("llama", (3, 4, 2, 16)), ("llama_mqa", (3, 4, 1, 16)), ("llama_odd_head_dim", (3, 6, 2, 20)),
        ("gpt_neox", (3, 4, 4, 16)), ("mixtral", (3, 4, 2, 16)), ("gpt_oss", (3, 4, 2, 16)), ("gpt2", (3, 4, 4, 16)),
    ],
)  # fmt: skip
def test_shapes_come_without_weights(tiny_model, tmp_path, family, want):
    source = tiny_model(family)
    bare = copied(source, tmp_path / "m")
    real = load_file(bare / "model.safetensors")
    (bare / "model.safetensors").write_bytes(b"")  # present, but there is nothing to read
    spec = opened(bare).spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == want
    assert spec.weights_bytes == sum(t.numel() for t in real.values()) * 4
    assert spec.eos_token_ids == (2,)


def test_eos_is_the_union_of_all_sources(tiny_model, tmp_path):
    path = copied(tiny_model("llama"), tmp_path / "m", {"eos_token_id": 5})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 77]}))
    assert opened(path).spec.eos_token_ids == (2, 3, 5, 77)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bert"}, "BertSelfAttention attends in both directions"),
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 8}, "latent attention"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "bloom"}, "own attention"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantized"),
    ],
)
def test_models_that_can_not_run_are_refused_by_name(tiny_model, tmp_path, config, named):
    path = copied(tiny_model("llama"), tmp_path / "m", config)
    with pytest.raises(ModelError, match=named):
        opened(path)


def test_no_model_there(tmp_path):
    with pytest.raises(ModelError, match="no such model directory"):
        opened(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"config\.json"):
        opened(tmp_path)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        opened("nobody/no-such-model")


def test_demo_model_that_was_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDGEN_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="pagedgen model get smollm2-135m"):
        opened("smollm2-135m")


def test_pickled_weights_need_a_flag(tiny_model, tmp_path, engine_run):
    path = copied(tiny_model("llama"), tmp_path / "m")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="--allow-pickle"):
        opened(path)
    want = engine_run(tiny_model("llama")).answer([[9, 8, 7]])
    assert engine_run(path, allow_pickle=True).answer([[9, 8, 7]]) == want
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no weights"):
        opened(path)


def test_remote_code_needs_a_flag(tiny_model, tmp_path):
    path = copied(tiny_model("llama"), tmp_path / "m", {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    (path / "own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    with pytest.raises(ModelError, match="--trust-remote-code"):
        opened(path)


def test_a_missing_tensor_is_an_error_that_names_it(tiny_model, tmp_path, engine_run):
    path = copied(tiny_model("llama"), tmp_path / "m")
    change_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        engine_run(path)


def test_tied_weights_load_with_and_without_a_head_and_count_once(tiny_model, tmp_path, engine_run):
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    with_head = copied(tied, tmp_path / "m")
    change_tensors(with_head, lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"].clone()))
    first, second = engine_run(tied), engine_run(with_head)
    assert first.answer([[9, 8, 7]]) == second.answer([[9, 8, 7]])
    untied = opened(tiny_model("llama")).spec.weights_bytes
    assert untied - first.engine.opened.spec.weights_bytes == 263 * 64 * 4


def test_sharded_weights_load(tiny_model, tmp_path, engine_run):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "m", max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model("llama") / name, tmp_path / "m" / name)
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    assert engine_run(tmp_path / "m").answer([[9, 8, 7]]) == engine_run(tiny_model("llama")).answer([[9, 8, 7]])


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_row_keeps_to_the_original_length(tiny_model, tmp_path, rope_type):
    """Past the original length one long row would change every other row's angles: the context stops there."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    path = copied(tiny_model("llama"), tmp_path / "m", {"rope_parameters": rope, "max_position_embeddings": 512})
    assert opened(path).config.max_model_len == 128


def test_padded_vocabulary_is_bounded_by_the_tokenizer(tiny_model):
    got = opened(tiny_model("llama", vocab_size=320))
    assert got.spec.vocab_size == 320
    assert got.num_token_ids == 263


def test_auto_dtype_follows_the_device():
    class Config:
        dtype = "torch.float16"

        def get_text_config(self):
            return self

    assert loader.best_dtype("cuda", Config()) == "float16"
    assert loader.best_dtype("cpu", Config()) in ("bfloat16", "float32")


@pytest.mark.parametrize("family", ["qwen2_moe_window", "phimoe_window"])
def test_a_window_that_only_a_mask_knows_limits_the_context(tiny_model, engine_run, reference_generate, make_prompts, family):
    """Their code never hands the window to its attention: rows up to the window are exact, longer ones are refused."""
    from pagedgen.errors import RowError, UsageError

    model = tiny_model(family)
    run = engine_run(model)
    assert run.engine.opened.config.max_model_len == 9
    prompts = make_prompts([1, 4, 6])
    done = run.sequences(prompts)
    want = reference_generate(model, prompts, 8)
    for row, sequence in done.items():
        assert sequence.generated_token_ids == want[row][: 9 - len(prompts[row])]
    with pytest.raises(RowError, match="max_model_len 9"):
        run.engine.opened.make_request(0, list(range(7, 17)), None)
    with pytest.raises(UsageError, match="sliding window"):
        opened(model, max_model_len=10)


def test_options_the_kernels_would_leave_out_are_refused():
    from pagedgen.model.attention import check_attention_call

    class Attention:
        is_causal = True

    tensor = torch.zeros(1)
    check_attention_call(Attention(), None, {"dropout": 0.0, "position_ids": tensor, "use_cache": False, "position_bias": None})
    for options in ({"indices": tensor}, {"position_bias": tensor}, {"sinks": tensor}):
        with pytest.raises(ModelError, match=next(iter(options))):
            check_attention_call(Attention(), None, options)
    with pytest.raises(ModelError, match="mask of its own"):
        check_attention_call(Attention(), tensor, {})
    Attention.is_causal = False
    with pytest.raises(ModelError, match="both directions"):
        check_attention_call(Attention(), None, {})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 0}, "0 layers"), ({"num_attention_heads": 0}, "config"), ({"hidden_act": "nope"}, "nope"),
        ({"num_attention_heads": 5}, "config"), ({"rope_parameters": {"rope_type": "nope"}}, "config"),
        ({"hidden_size": "wide"}, "config"),
    ],
)  # fmt: skip
def test_broken_configs_are_told(tiny_model, tmp_path, config, said):
    with pytest.raises(ModelError, match=said):
        opened(copied(tiny_model("llama"), tmp_path / "m", config))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "null", "[]", "{"])
def test_broken_json_files_are_told_or_not_needed(tiny_model, tmp_path, name, text):
    path = copied(tiny_model("llama"), tmp_path / "m")
    (path / name).write_text(text)
    error = None
    try:
        opened(path)
    except ModelError as told:
        error = told
    assert error is None or str(path) in str(error)


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "fewer layers", "other shape"])
def test_broken_weights_are_told(tiny_model, tmp_path, engine_run, damage):
    path = copied(tiny_model("llama"), tmp_path / "m", {"num_hidden_layers": 2} if damage == "fewer layers" else None)
    weights = path / "model.safetensors"
    if damage == "other shape":
        change_tensors(path, lambda t: t.__setitem__("lm_head.weight", t["lm_head.weight"][:200].clone()))
    elif damage != "fewer layers":
        data = weights.read_bytes()
        weights.write_bytes({"empty": b"", "truncated": data[:-100], "garbage": b"x" * 1000}[damage])
    with pytest.raises(ModelError, match=r"3 layers" if damage == "fewer layers" else "weights"):
        engine_run(path)
