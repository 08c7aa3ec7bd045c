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

from ..kernels.cpu import attention as cpu_backend
from ..kernels.cpu import fused
from ..kernels.cpu.stack import LayerStack, LayerWeights, StackBuffers
from .attention import AttentionStep, attend
from .checkpoint import Weights
from .greedy_head import make_greedy_head
from .linear import RowInvariantLinear, RowInvariantProduct, common_buckets, split_rows
from .llama_shape import LlamaShape, Rotary
from .panels import Space
from .products import Product, as_linear, make_product
from .spec import ModelSpec

# Rows that run through a layer together where any number may: their states stay in the caches from product to product.
_LARGEST_CHUNK = 512


def can_fuse(shape: LlamaShape) -> bool:
    """Return True for sizes that the compiled passes take."""
    return shape.intermediate_size % 16 == 0 and shape.hidden_size % 16 == 0 and shape.head_dim % 8 == 0


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


@dataclass(frozen=True)
class _Buffers:
    """Work space for as many rows as any step had, kept between steps: fresh memory would cost a page fault every 4 KiB."""

    residual: torch.Tensor  # (rows, hidden) fp32
    normed: torch.Tensor  # (rows, hidden)
    query: torch.Tensor  # (rows, H, D)
    key: torch.Tensor  # (rows, Hkv, D)
    value: torch.Tensor
    attended: torch.Tensor  # (rows, H, D)
    activated: Space  # (largest chunk, intermediate)
    product: Space  # of one product at a time


@dataclass(frozen=True)
class _Chunk:
    """The rows that run through a layer together: views of the buffers, made once a step and not in every layer."""

    residual: torch.Tensor
    normed: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attended: torch.Tensor  # (rows, H * D)
    cos: torch.Tensor  # (rows, D) fp32
    sin: torch.Tensor


class FusedDecoder:
    """The forward pass of one model in the spec's dtype; its weights may be shorter, as a checkpoint stores them."""

    def __init__(self, shape: LlamaShape, rotary: Rotary, weights: Weights, spec: ModelSpec):
        """Take the weights, named as in `shape.tensors`; a tied head may come as `lm_head.weight` or not at all."""
        self._dtype = getattr(torch, spec.dtype)
        invariant = RowInvariantProduct()

        def take(name: str) -> torch.Tensor:
            weight = weights.pop(name)
            return weight if spec.dtype == "float32" else weight.to(self._dtype)

        def linear(name: str) -> nn.Linear:
            return as_linear(take(f"{name}.weight"), take(f"{name}.bias") if f"{name}.bias" in weights else None)

        def product(*names: str) -> Product:
            linears = [linear(name) for name in names]
            return make_product(_joined(*linears) if len(linears) > 1 else linears[0], spec, invariant)

        self._eps = shape.eps
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._intermediate = shape.intermediate_size
        self._scale = shape.scale
        self._rotary = rotary
        self._layers = [_take_layer(index, shape, take, product) for index in range(shape.num_layers)]
        self._norm = take("model.norm.weight").float()
        self._embedding = take("model.embed_tokens.weight")
        head = linear("lm_head") if "lm_head.weight" in weights else as_linear(self._embedding, None)
        self._head = make_product(head, spec, invariant)
        self._greedy_head = make_greedy_head(head, self._head, self._dtype)
        self._products = (self._layers[0].qkv, self._layers[0].out, self._layers[0].gate_up, self._layers[0].down)
        self.stack = self._make_stack()  # without one, layers run kernel by kernel
        self._buffers: _Buffers | None = None

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_positions: torch.Tensor,
        step: AttentionStep | None,
        *,
        best_among: int | None = None,
    ) -> torch.Tensor:
        """See `forward.Forward.__call__`. Without a step the layers attend to nothing."""
        buckets = common_buckets(p.buckets() for p in self._products)
        chunks = _chunks(input_ids.shape[0], buckets)
        rows = chunks[-1][1]
        ids, places = input_ids.new_zeros(rows), positions.new_zeros(rows)
        ids[: input_ids.shape[0]], places[: positions.shape[0]] = input_ids, positions
        work = self._work_space(rows)
        residual = work.residual[:rows].copy_(self._embedding[ids])
        cos, sin = self._rotary(places)
        if self.stack is not None and step is not None and step.backend is cpu_backend:
            self._run_stack(self.stack, step, rows, cos, sin, work)
        else:
            self._run_layers(step, chunks, cos, sin, work)
        return self._answer(residual, work.attended[:rows].flatten(1), sample_positions, buckets, work, best_among)

    def _run_layers(
        self, step: AttentionStep | None, chunks: list[tuple[int, int]], cos: torch.Tensor, sin: torch.Tensor, work: _Buffers
    ) -> None:
        """Run all layers, kernel by kernel, but for the last one's products after attention."""
        rows = chunks[-1][1]
        views = [_view(work, start, end, cos, sin) for start, end in chunks]
        query, key, value, attended = (t[:rows] for t in (work.query, work.key, work.value, work.attended))
        delta: torch.Tensor | None
        for index, layer in enumerate(self._layers):
            for chunk in views:
                delta = (
                    self._mix(self._layers[index - 1], chunk.residual, chunk.attended, chunk.normed, work) if index else None
                )
                fused.add_rms_norm(chunk.residual, delta, layer.input_norm, chunk.normed, self._eps)
                qkv = layer.qkv.rows(chunk.normed, work.product)
                fused.rotate(qkv, chunk.cos, chunk.sin, layer.head_norms, chunk.query, chunk.key, chunk.value, self._eps)
            if step is None:
                attended.zero_()
            else:
                attend(
                    step, index, query, key, value, attended,
                    scale=self._scale, sliding_window=layer.window, softcap=None, sinks=None,
                )  # fmt: skip

    def _run_stack(
        self, stack: LayerStack, step: AttentionStep, rows: int, cos: torch.Tensor, sin: torch.Tensor, work: _Buffers
    ) -> None:
        """What `_run_layers` does, bit for bit, in one call."""
        chunk = min(rows, _LARGEST_CHUNK)
        buffers = StackBuffers(
            residual=work.residual[:rows],
            normed=work.normed[:rows],
            query=work.query[:rows],
            key=work.key[:rows],
            value=work.value[:rows],
            attended=work.attended[:rows],
            cos=cos,
            sin=sin,
            activated=work.activated.rows(chunk, self._intermediate, self._dtype),
            product=work.product.rows(chunk, self._widest_product, self._dtype),
        )
        stack.run(buffers, step)

    def _make_stack(self) -> LayerStack | None:
        """Return the layers as one call; None where products are a library's, or need a step between them in Python."""
        found, forms = [], set[Any]()
        for layer in self._layers:
            products = [_whole_panels(p) for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            panels = [p for p in products if p is not None]
            if len(panels) < len(products) or self._dtype != torch.float32 or self._intermediate % fused.panel_width():
                return None
            forms.update(fused.tag_of_panels(p).dtype for p in panels)
            found.append(LayerWeights(layer.input_norm, layer.post_norm, layer.head_norms, layer.window, *panels))
        return LayerStack(found, heads=self._heads, eps=self._eps, scale=self._scale) if len(forms) == 1 else None

    @property
    def _widest_product(self) -> int:
        """Of those whose outputs are kept."""
        num_heads, num_kv_heads, head_dim = self._heads
        return max(self._embedding.shape[1], (num_heads + 2 * num_kv_heads) * head_dim)

    def compile_products(self) -> None:
        """See `Forward.compile_products`: one row through the last layer."""
        first = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            for best_among in (None, 1):
                self.thin()(first, first, first, None, best_among=best_among)

    def thin(self) -> FusedDecoder:
        """See `forward.Forward.thin`: the last layer alone."""
        other = copy(self)
        other._layers, other._buffers = self._layers[-1:], None
        other.stack = other._make_stack()
        return other

    def _mix(
        self, layer: _Layer, residual: torch.Tensor, attended: torch.Tensor, normed: torch.Tensor, work: _Buffers
    ) -> torch.Tensor:
        """Add attention's output to the residual; return the feed-forward network's, yet to be added."""
        fused.add_rms_norm(residual, layer.out.rows(attended, work.product), layer.post_norm, normed, self._eps)
        activated = work.activated.rows(normed.shape[0], self._intermediate, self._dtype)
        layer.gate_up.gated(normed, activated, work.product)
        return layer.down.rows(activated, work.product)

    def _answer(
        self,
        residual: torch.Tensor,
        attended: torch.Tensor,
        sampled: torch.Tensor,
        buckets: tuple[int, ...],
        work: _Buffers,
        best_among: int | None,
    ) -> torch.Tensor:
        """Run the last layer's products and the head on the rows that are sampled: return their logits or best ids.

        residual (T, hidden), attended (T, H * D).
        """
        parts = []
        for start, end in _chunks(sampled.shape[0], buckets):
            taken = sampled[start:end]
            rows = torch.cat([taken, taken.new_zeros(end - start - taken.shape[0])])  # filled up with any row
            added_to, states = residual[rows], work.normed[: end - start]
            delta = self._mix(self._layers[-1], added_to, attended[rows], states, work)
            fused.add_rms_norm(added_to, delta, self._norm, states, self._eps)
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
                activated=Space(_LARGEST_CHUNK * self._intermediate),
                product=Space(_LARGEST_CHUNK * self._widest_product),
            )
        return self._buffers


def _whole_panels(product: Product) -> fused.Panels | None:
    """Return the weight of a product of our own, unless its panels are filled up."""
    panels = None if isinstance(product, RowInvariantLinear) else product.panels
    return panels if panels is not None and panels.width == product.out_features else None


def _view(work: _Buffers, start: int, end: int, cos: torch.Tensor, sin: torch.Tensor) -> _Chunk:
    """Return the buffers' rows [start, end) as a chunk."""
    rows = slice(start, end)
    return _Chunk(
        residual=work.residual[rows],
        normed=work.normed[rows],
        query=work.query[rows],
        key=work.key[rows],
        value=work.value[rows],
        attended=work.attended[rows].flatten(1),
        cos=cos[rows],
        sin=sin[rows],
    )


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


def _take_layer(index: int, shape: LlamaShape, take: Callable[[str], torch.Tensor], product: Callable[..., Product]) -> _Layer:
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"

    def norm(name: str) -> torch.Tensor:
        return take(f"{name}.weight").float()

    return _Layer(
        input_norm=norm(f"model.layers.{index}.input_layernorm"),
        qkv=product(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        head_norms=(norm(f"{attention}.q_norm"), norm(f"{attention}.k_norm")) if shape.head_norms else None,
        out=product(f"{attention}.o_proj"),
        post_norm=norm(f"model.layers.{index}.post_attention_layernorm"),
        gate_up=product(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=product(f"{mlp}.down_proj"),
        window=shape.windows[index],
    )


def _joined(*linears: nn.Linear) -> nn.Linear:
    """Return one linear map whose output is that of several, side by side; all have a bias or none has."""
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weights: list[torch.Tensor] = [linear.weight for linear in linears]
    return as_linear(torch.cat(weights), torch.cat(biases) if biases else None)
