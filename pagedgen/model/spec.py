"""What planning needs to know of a model: shapes and sizes, as plain numbers. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4  # of the scale that each token and head of an int8 K or V has


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and sizes of one model in one dtype, its K and V in that or another."""

    model_type: str
    dtype: str
    kv_cache_dtype: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    max_model_len_limited_by: str
    weights_bytes: int  # tied weights counted once
    tied_head_bytes: int  # of an output head that shares the embedding's weight: on CPU it is packed into a copy
    eos_token_ids: tuple[int, ...]
    quantization: str = "none"  # of the weights of linear maps
    weight_levels: int = 0  # the largest quantized weight: how fine they are depends on the processor

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers: 2 x layers x kv_heads x head_dim x dtype bytes (kv_heads, not heads).

        In int8 each head has a scale as well.
        """
        head_bytes = self.head_dim * DTYPE_BYTES[self.kv_cache_dtype]
        if self.kv_cache_dtype == "int8":
            head_bytes += SCALE_BYTES
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
