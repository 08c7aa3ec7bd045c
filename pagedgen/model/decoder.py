"""A decoder of the Llama shape on CPU: prepacked products and compiled passes between them, in place of transformers' modules.

What a step computes is what the modules compute; how often memory is touched is not. Query, key and value are one product, gate
and up another; norms, rotary embedding and activation are one pass each (`kernels/cpu/rows.py`). Rows run through a layer in
chunks, of row buckets where the products need them (see `linear.py`), so that a row's bits do not depend on the batch. The
residual stays in fp32 whatever the model's dtype, and rows whose logits nobody needs leave before the last layer's products.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels.cpu import fused
from .attention import AttentionStep, attend
from .greedy_head import make_greedy_head
from .linear import RowInvariantProduct, common_buckets, split_rows
from .products import Product, make_product
from .spec import ModelSpec

# Rows that run through a layer together where any number may: their states stay in the caches from product to product.
_LARGEST_CHUNK = 512

# Classes of transformers whose layers are exactly norm, attention with rotary embedding, norm, gated SiLU; with each the way
# to an attention module's sliding window.
_WINDOWS: dict[str, Any] = {
    "LlamaForCausalLM": lambda attention: None,
    "MistralForCausalLM": lambda attention: attention.config.sliding_window,
    "Qwen2ForCausalLM": lambda attention: attention.sliding_window,
    "Qwen3ForCausalLM": lambda attention: attention.sliding_window,
}


def may_fuse(config: Any) -> bool:
    """Return True for the config of a known class, whose model `can_fuse` may take."""
    from transformers import AutoModelForCausalLM

    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return False  # it comes with code of its own
    mapping = AutoModelForCausalLM._model_mapping
    return type(config) in mapping and getattr(mapping[type(config)], "__name__", None) in _WINDOWS


def can_fuse(model: nn.Module) -> bool:
    """Return True for a model of a known class whose sizes the compiled passes take."""
    import transformers

    name = type(model).__name__
    if name not in _WINDOWS or type(model) is not getattr(transformers, name, None):
        return False
    decoder: Any = model
    attention, mlp = decoder.model.layers[0].self_attn, decoder.model.layers[0].mlp
    sizes_fit = mlp.down_proj.in_features % 16 == 0 and mlp.down_proj.out_features % 16 == 0 and attention.head_dim % 8 == 0
    return sizes_fit and decoder.config.hidden_act in ("silu", "swish")


@dataclass(frozen=True)
class _Layer:
    """One layer's weights: norms in fp32, products prepacked."""

    input_norm: torch.Tensor
    qkv: Product
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: Product
    post_norm: torch.Tensor
    gate_up: Product
    down: Product
    window: int | None
    scale: float


@dataclass(frozen=True)
class _Buffers:
    """Work space for as many rows as any step had, kept between steps: fresh memory would cost a page fault every 4 KiB."""

    residual: torch.Tensor  # (rows, hidden) fp32
    normed: torch.Tensor  # (rows, hidden)
    query: torch.Tensor  # (rows, H, D)
    key: torch.Tensor  # (rows, Hkv, D)
    value: torch.Tensor
    attended: torch.Tensor  # (rows, H, D)
    activated: torch.Tensor  # (largest chunk, intermediate)


class FusedDecoder:
    """The forward pass of one model in the spec's dtype; the model's own may be shorter, as a checkpoint stores it.

    Takes the model's weights over: the modules are not usable after it is made.
    """

    def __init__(self, model: Any, spec: ModelSpec):
        invariant = RowInvariantProduct()

        def product(*linears: nn.Linear) -> Product:
            return make_product(_joined(*linears) if len(linears) > 1 else linears[0], spec, invariant)

        decoder = model.model
        self._dtype = getattr(torch, spec.dtype)
        self._eps = float(model.config.rms_norm_eps)
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._intermediate = spec.intermediate_size
        self._embedding = decoder.embed_tokens.weight.detach()
        self._rotary = decoder.rotary_emb
        self._head = product(model.lm_head)
        self._greedy_head = make_greedy_head(model.lm_head, self._head, self._dtype)
        window = _WINDOWS[type(model).__name__]
        self._layers = []
        for index, layer in enumerate(decoder.layers):
            self._layers.append(_take_layer(layer, window(layer.self_attn), product))
            decoder.layers[index] = nn.Identity()  # the weights are packed: these go
        self._norm = decoder.norm.weight.detach().float()
        self._products = (self._layers[0].qkv, self._layers[0].out, self._layers[0].gate_up, self._layers[0].down)
        self._buffers: _Buffers | None = None

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_positions: torch.Tensor,
        step: AttentionStep,
        *,
        best_among: int | None = None,
    ) -> torch.Tensor:
        """See `forward.Forward.__call__`."""
        buckets = common_buckets(p.buckets() for p in self._products)
        chunks = _chunks(input_ids.shape[0], buckets)
        rows = chunks[-1][1]
        ids, places = input_ids.new_zeros(rows), positions.new_zeros(rows)
        ids[: input_ids.shape[0]], places[: positions.shape[0]] = input_ids, positions
        work = self._work_space(rows)
        residual = work.residual[:rows].copy_(self._embedding[ids])
        cos, sin = (t[0].contiguous() for t in self._rotary(residual, places[None]))
        for start, end in chunks:
            fused.add_rms_norm(residual[start:end], None, None, self._layers[0].input_norm, work.normed[start:end], self._eps)
            self._project(0, start, end, cos, sin, work)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = work.attended[:rows]
            attend(
                step, index, work.query[:rows], work.key[:rows], work.value[:rows], attended,
                scale=layer.scale, sliding_window=layer.window, softcap=None, sinks=None,
            )  # fmt: skip
            if index == last:
                break
            for start, end in chunks:
                delta = self._mix(layer, residual[start:end], attended[start:end], work.normed[start:end], work.activated)
                next_norm = self._layers[index + 1].input_norm
                fused.add_rms_norm(residual[start:end], *delta, next_norm, work.normed[start:end], self._eps)
                self._project(index + 1, start, end, cos, sin, work)
        return self._answer(residual, attended, sample_positions, buckets, work, best_among)

    def thin(self) -> FusedDecoder:
        """See `forward.Forward.thin`: the last layer alone."""
        other = copy(self)
        other._layers, other._buffers = self._layers[-1:], None
        return other

    def _project(self, index: int, start: int, end: int, cos: torch.Tensor, sin: torch.Tensor, work: _Buffers) -> None:
        """Compute query, key and value of the rows [start, end) from their normed states."""
        layer = self._layers[index]
        qkv = layer.qkv.rows(work.normed[start:end])
        query, key, value = work.query[start:end], work.key[start:end], work.value[start:end]
        fused.rotate(*qkv, cos[start:end], sin[start:end], layer.head_norms, query, key, value, self._eps)

    def _mix(
        self, layer: _Layer, residual: torch.Tensor, attended: torch.Tensor, normed: torch.Tensor, activated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add attention's output to the residual; return the feed-forward network's, yet to be added, and its rows' scales."""
        fused.add_rms_norm(residual, *layer.out.rows(attended.flatten(1)), layer.post_norm, normed, self._eps)
        activated = activated[: residual.shape[0]]
        layer.gate_up.gated(normed, activated)
        return layer.down.rows(activated)

    def _answer(
        self,
        residual: torch.Tensor,
        attended: torch.Tensor,
        sampled: torch.Tensor,
        buckets: tuple[int, ...],
        work: _Buffers,
        best_among: int | None,
    ) -> torch.Tensor:
        """Run the last layer's products and the head on the rows that are sampled: return their logits or best ids."""
        layer = self._layers[-1]
        parts = []
        for start, end in _chunks(sampled.shape[0], buckets):
            taken = sampled[start:end]
            rows = torch.cat([taken, taken.new_zeros(end - start - taken.shape[0])])  # filled up with any row
            states = residual[rows]
            delta = self._mix(layer, states, attended[rows], work.normed[: end - start], work.activated)
            fused.add_rms_norm(states, *delta, self._norm, work.normed[: end - start], self._eps)
            states = work.normed[: end - start]
            if best_among is None or self._greedy_head is None:
                parts.append(self._head(states)[: taken.shape[0]])
            else:
                parts.append(self._greedy_head(states, best_among)[: taken.shape[0]])
        if not parts:
            return residual.new_empty(0, self._head.out_features)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _work_space(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.residual.shape[0] < rows:
            heads, kv_heads, head_dim = self._heads
            hidden = self._embedding.shape[1]

            def empty(*shape: int) -> torch.Tensor:
                return torch.empty(shape, dtype=self._dtype)

            self._buffers = None  # the old one goes before the new one comes
            self._buffers = _Buffers(
                residual=torch.empty(rows, hidden),
                normed=empty(rows, hidden),
                query=empty(rows, heads, head_dim),
                key=empty(rows, kv_heads, head_dim),
                value=empty(rows, kv_heads, head_dim),
                attended=empty(rows, heads, head_dim),
                activated=empty(_LARGEST_CHUNK, self._intermediate),
            )
        return self._buffers


def _chunks(num_rows: int, buckets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the (start, end) of consecutive chunks: of bucket sizes, the last one maybe past the rows, or the rows' own."""
    if buckets:
        sizes = split_rows(num_rows, buckets)
    else:
        full, rest = divmod(num_rows, _LARGEST_CHUNK)
        sizes = (_LARGEST_CHUNK,) * full + ((rest,) if rest else ())
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return bounds


def _take_layer(layer: Any, window: int | None, product: Callable[..., Product]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight.detach().float(), attention.k_norm.weight.detach().float())
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv=product(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        out=product(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate_up=product(mlp.gate_proj, mlp.up_proj),
        down=product(mlp.down_proj),
        window=window,
        scale=float(attention.scaling),
    )


def _joined(*linears: nn.Linear) -> nn.Linear:
    """Return one linear map whose output is that of several, side by side."""
    joined = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases: list[torch.Tensor] = [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
        ]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
