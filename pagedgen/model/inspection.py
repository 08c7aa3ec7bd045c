"""A model's shapes and sizes from its config alone, and what refuses it before its weights load.

A model whose layers aren't known beforehand (`llama_shape.py`) is built on the meta device and run once without weights, and
its attention is asked what it wants.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ModelError
from . import attention
from .int8 import is_quantized, weight_levels
from .llama_shape import LlamaShape, llama_shape, rotary_embedding
from .loader import ModelFiles, told
from .spec import DTYPE_BYTES, ModelSpec

# Kinds of layer whose state is no per-token K/V of one shape.
_PAGEABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


@dataclass
class _Probe:
    """What each attention call of a forward on the meta device asked for."""

    layers: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)  # heads, kv_heads, key dim, value dim
    mask_only_window: int | None = None  # the smallest window that a layer leaves to a mask

    def attention(
        self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **kwargs
    ):
        attention.check_attention_call(module, attention_mask, kwargs)
        window = attention.window_in_mask_only(module, sliding_window)
        if window is not None:
            self.mask_only_window = min(window, self.mask_only_window or window)
        layer_id = int(module.layer_idx)
        if layer_id in self.layers:
            raise ModelError(f"layer {layer_id} attends twice ({type(module).__name__}); only one K/V a layer can be paged")
        self.layers[layer_id] = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        out = torch.empty(1, query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device="meta")
        return out, None


def _check_config(files: ModelFiles, config: Any) -> None:
    """Refuse what a config alone says can't run."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{files.name} ({kind}) is an encoder-decoder model; only decoder-only models can run")
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or []) - _PAGEABLE_LAYER_TYPES)
    if others:
        raise ModelError(f"{files.name} ({kind}) has layers of type {', '.join(others)}, which have no paged K/V cache")
    if getattr(text, "kv_lora_rank", None):
        raise ModelError(f"{files.name} ({kind}) uses multi-head latent attention, which is not supported yet")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelError(f"{files.name} ({kind}) shares K/V between layers, which is not supported yet")
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{files.name} ({kind}) has quantized weights, which are not supported yet")
    if text.num_hidden_layers < 1:
        raise ModelError(f"{files.name} ({kind}) has {text.num_hidden_layers} layers")


def _check_code(files: ModelFiles, config: Any) -> None:
    """Refuse a config whose causal-LM class doesn't attend through `AttentionInterface`."""
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    kind = getattr(config, "model_type", type(config).__name__)
    auto_map = getattr(config, "auto_map", None) or {}
    if files.trust_remote_code and "AutoModelForCausalLM" in auto_map:
        cls = get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], files.path, revision=files.revision)
    elif type(config) in AutoModelForCausalLM._model_mapping:
        mapped: Any = AutoModelForCausalLM._model_mapping[type(config)]
        cls = mapped[0] if isinstance(mapped, (list, tuple)) else mapped
    else:
        raise ModelError(f"{files.name} ({kind}) has no causal language model in transformers")
    source = inspect.getsource(sys.modules[cls.__module__])
    if not getattr(cls, "_supports_attention_backend", False) or "ALL_ATTENTION_FUNCTIONS" not in source:
        raise ModelError(
            f"{files.name} ({kind}): its modelling code has its own attention that can't be replaced by a paged one"
        )


def _rope_limit(text_config: Any) -> int | None:
    """Longest context whose rotary angles don't depend on the batch's longest row, or None for no such limit.

    `dynamic` and `longrope` change every row's angles once any row passes the original length.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for p in nested or [parameters]:
        if p.get("rope_type") in ("dynamic", "longrope"):
            original = p.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            return int(original or text_config.max_position_embeddings)
    return None


def _context_limit(files: ModelFiles, text_config: Any, mask_only_window: int | None) -> tuple[int, str]:
    """Return the longest row that can run, and what limits it."""
    positions = getattr(text_config, "max_position_embeddings", None)
    if not positions:
        raise ModelError(f"{files.name} ({text_config.model_type}) does not say its max_position_embeddings")
    limits = [(int(positions), "the positions the model has")]
    rope = _rope_limit(text_config)
    if rope is not None:
        limits.append((rope, "its original context: past it, one long row would change every row's rotary embedding"))
    if mask_only_window is not None:
        limits.append(
            (mask_only_window, "its sliding window, which its code applies by a mask that packed batches don't build")
        )
    return min(limits)


def inspect_model(
    files: ModelFiles, config: Any, dtype: str, eos_token_ids: tuple[int, ...], quantization: str = "none"
) -> ModelSpec:
    """Return a model's shapes and sizes from its config alone.

    Raises:
        ModelError: a family, layer kind or attention option that can't run; the message names it.
    """
    return told(files, "config", lambda: _inspect(files, config, dtype, eos_token_ids, quantization))


def _inspect(files: ModelFiles, config: Any, dtype: str, eos_token_ids: tuple[int, ...], quantization: str) -> ModelSpec:
    _check_config(files, config)
    levels = weight_levels() if quantization == "int8" else 0
    if quantization == "int8" and not levels:
        raise ModelError("--quantization int8: torch has no 8-bit products for this processor")
    shape = llama_shape(config)
    if shape is not None:
        rotary_embedding(config)  # refuses what it can't be made of
        found = _look_at_shape(shape)
    else:
        found = _look_at_modules(files, config, dtype)
    text = config.get_text_config()
    max_model_len, limited_by = _context_limit(files, text, found.mask_only_window)
    weights_bytes, head_bytes = _weights_bytes(found, DTYPE_BYTES[dtype], quantization)
    return ModelSpec(
        model_type=config.model_type,
        dtype=dtype,
        kv_cache_dtype=dtype,
        num_layers=text.num_hidden_layers,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
        head_dim=found.head_dim,
        hidden_size=text.hidden_size,
        intermediate_size=found.intermediate_size,
        vocab_size=text.vocab_size,
        max_model_len=max_model_len,
        max_model_len_limited_by=limited_by,
        weights_bytes=weights_bytes,
        tied_head_bytes=head_bytes if found.tied else 0,
        eos_token_ids=eos_token_ids,
        quantization=quantization,
        weight_levels=levels,
    )


@dataclass(frozen=True)
class _Found:
    """What is to be known of a model beside its config."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    mask_only_window: int | None
    num_parameters: int  # tied ones once
    linears: list[tuple[int, int]]  # output and input features of every linear map whose weight is its own
    head: tuple[int, int] | None  # those of the output head
    tied: bool  # its weight is the embedding's


def _look_at_shape(shape: LlamaShape) -> _Found:
    return _Found(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        mask_only_window=None,
        num_parameters=sum(math.prod(sizes) for sizes in shape.tensors().values()),
        linears=[(out_features, in_features) for out_features, in_features, _ in shape.linears().values()],
        head=(shape.vocab_size, shape.hidden_size),
        tied=shape.tied,
    )


def _look_at_modules(files: ModelFiles, config: Any, dtype: str) -> _Found:
    """Build the model on the meta device, run it once without weights, and see what its attention asks for."""
    _check_code(files, config)
    text = config.get_text_config()
    model, probe = _probe(files, config, dtype)
    layers = probe.layers
    num_layers = text.num_hidden_layers
    if not layers:  # data-dependent code can't run without weights: take the config's word, the first batch checks it
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        layers = dict.fromkeys(
            range(num_layers), (heads, getattr(text, "num_key_value_heads", None) or heads, head_dim, head_dim)
        )
    if sorted(layers) != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(layers))
        raise ModelError(f"{files.name} ({config.model_type}): layers {missing} have no attention that can be paged")
    shapes = set(layers.values())
    heads, kv_heads, key_dim, value_dim = next(iter(shapes))
    if len({s[1:] for s in shapes}) > 1 or key_dim != value_dim:
        raise ModelError(
            f"{files.name} ({config.model_type}) has K/V of different shapes {sorted(shapes)} "
            "(heads, KV heads, key and value dimension); one shape for all layers is needed"
        )
    embeddings: Any = model
    head, embedding = embeddings.get_output_embeddings(), embeddings.get_input_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight is not embedding.weight]
    return _Found(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=key_dim,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        mask_only_window=probe.mask_only_window,
        num_parameters=sum(p.numel() for p in model.parameters()),
        linears=[(m.out_features, m.in_features) for m in linears],
        head=None if head is None else (head.weight.shape[0], head.weight.shape[1]),
        tied=head is not None and head.weight is embedding.weight,
    )


def _weights_bytes(found: _Found, dtype_bytes: int, quantization: str) -> tuple[int, int]:
    """Return the bytes of all weights, tied ones counted once, and of the output head as it is run."""

    def num_bytes(sizes: tuple[int, int]) -> int:
        out_features, in_features = sizes
        if quantization == "int8" and is_quantized(in_features):
            return out_features * in_features + 4 * out_features
        return out_features * in_features * dtype_bytes

    spared = sum(math.prod(sizes) * dtype_bytes - num_bytes(sizes) for sizes in found.linears)
    return found.num_parameters * dtype_bytes - spared, 0 if found.head is None else num_bytes(found.head)


def _probe(files: ModelFiles, config: Any, dtype: str) -> tuple[torch.nn.Module, _Probe]:
    """Build the model on the meta device and run four tokens through it, recording what its attention asks for."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    probe = _Probe()
    name = "pagedgen_probe"
    AttentionInterface.register(name, probe.attention)
    # Experts choose rows by data, which the meta device has none of; their output has the shape of their input.
    ALL_EXPERTS_FUNCTIONS.register(name, lambda module, hidden_states, *args, **kwargs: hidden_states)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=name,
            trust_remote_code=files.trust_remote_code,
        )
    model.eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation(name)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except ModelError:
        raise
    except Exception:  # whatever foreign modelling code raises on tensors without data; the first batch checks again
        probe.layers.clear()
    return model, probe
