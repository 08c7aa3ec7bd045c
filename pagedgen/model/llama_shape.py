"""Models of the Llama shape, known from their config alone: which tensors they have, and what each layer attends to.

These are transformers' Llama, Mistral, Qwen2 and Qwen3, whose layers are exactly norm, attention with rotary embedding, norm
and gated SiLU. For them nothing of transformers' modelling code is needed, or even imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Makes of positions (T,) their cosines and sines, each (T, head_dim) fp32.
Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class LlamaShape:
    """One model's sizes and switches."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    eps: float
    tied: bool  # the output head is the embedding
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool  # of each head's query and key
    windows: tuple[int | None, ...]  # each layer's sliding window

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Return each linear map's name, output features, input features and whether it has a bias; a tied head is none."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        found = {}
        for layer in (f"model.layers.{index}" for index in range(self.num_layers)):
            found[f"{layer}.self_attn.q_proj"] = (query, hidden, self.qkv_bias)
            found[f"{layer}.self_attn.k_proj"] = (key, hidden, self.qkv_bias)
            found[f"{layer}.self_attn.v_proj"] = (key, hidden, self.qkv_bias)
            found[f"{layer}.self_attn.o_proj"] = (hidden, query, self.out_bias)
            found[f"{layer}.mlp.gate_proj"] = (inner, hidden, self.mlp_bias)
            found[f"{layer}.mlp.up_proj"] = (inner, hidden, self.mlp_bias)
            found[f"{layer}.mlp.down_proj"] = (hidden, inner, self.mlp_bias)
        if not self.tied:
            found["lm_head"] = (self.vocab_size, hidden, False)
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of a checkpoint."""
        hidden = self.hidden_size
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for layer in (f"model.layers.{index}" for index in range(self.num_layers)):
            found[f"{layer}.input_layernorm.weight"] = found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            if self.head_norms:
                found[f"{layer}.self_attn.q_norm.weight"] = found[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
        for name, (out_features, in_features, has_bias) in self.linears().items():
            found[f"{name}.weight"] = (out_features, in_features)
            if has_bias:
                found[f"{name}.bias"] = (out_features,)
        return found


def llama_shape(config: Any) -> LlamaShape | None:
    """Return the shape of a transformers config; None where its layers aren't known to be of it, or it brings its own code."""
    kind = getattr(config, "model_type", None)
    # Not a class that only has the name: remote code's, or a subclass.
    known = kind in _FAMILIES and type(config).__module__ == f"transformers.models.{kind}.configuration_{kind}"
    if not known or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    if config.hidden_act not in ("silu", "swish") or not _rotates_all(config):
        return None
    heads = config.num_attention_heads
    has_bias = bool(getattr(config, "attention_bias", False))
    return LlamaShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=_head_dim(config),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=has_bias or kind == "qwen2",
        out_bias=has_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        head_norms=kind == "qwen3",
        windows=_windows(config),
    )


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _windows(config: Any) -> tuple[int | None, ...]:
    count = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * count
    if config.model_type == "mistral":
        return (config.sliding_window,) * count
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rotates_all(config: Any) -> bool:
    """True where one set of angles turns every pair of a head's elements."""
    rope = config.rope_parameters or {}
    return "rope_type" in rope and rope.get("partial_rotary_factor", 1.0) == 1.0


def rotary_embedding(config: Any) -> Rotary:
    """Return the rotary embedding of a config of `llama_shape`, the same to the bit as that of transformers' modules."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        width = _head_dim(config)
        powers = torch.arange(0, width, 2, dtype=torch.float) / width
        frequencies, scaling = 1.0 / (config.rope_parameters["rope_theta"] ** powers), 1.0
    else:
        # Those of "dynamic" and "longrope" change past a length that no row may reach: see `inspection._rope_limit`.
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=1)
        return angles.cos() * scaling, angles.sin() * scaling

    return rotary
