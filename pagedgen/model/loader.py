"""From a model's name to its files, its shapes and its weights. Everything that can refuse a model does so before weights load.

`MODEL` is a local directory, the name of a demo model (`pagedgen model get`), or a Hugging Face id (`HF_HUB_OFFLINE` honoured).
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import ModelError, PagedgenError
from ..machine import cpu_flags
from . import attention, demo
from .decoder import FusedDecoder, can_fuse
from .forward import Forward, ModuleForward
from .int8 import is_quantized, replace_linears, weight_levels
from .linear import make_row_invariant
from .spec import DTYPE_BYTES, ModelSpec

T = TypeVar("T")

# Kinds of layer whose state is no per-token K/V of one shape.
_PAGEABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are and how they may be read."""

    name: str
    path: str  # a directory, or a hub id
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    @property
    def hub_options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def locate(name: str, *, revision: str | None, trust_remote_code: bool, allow_pickle: bool) -> ModelFiles:
    """Find a model by directory, demo name or hub id.

    Raises:
        ModelError: a path that is not a model, or a demo model that was not fetched yet.
    """
    path = name
    if name in demo.DEMO_MODELS:
        directory = demo.cache_path(name)
        if not (directory / "config.json").is_file():
            raise ModelError(f"the demo model {name} is not in the cache; fetch it with: pagedgen model get {name}")
        path = str(directory)
    elif Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"{name} is a directory without config.json: not a transformers model")
    elif close := difflib.get_close_matches(name.lower(), demo.DEMO_MODELS, n=1, cutoff=0.8):
        raise ModelError(f"no model directory and no demo model {name}; did you mean {close[0]}?")
    elif Path(name).exists():
        raise ModelError(f"{name} is a file, not a model directory")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"no such model directory: {name}")
    files = ModelFiles(name, path, revision, trust_remote_code, allow_pickle)
    if Path(path).is_dir():
        _check_weight_files(files)
    return files


def _check_weight_files(files: ModelFiles) -> None:
    names = sorted(os.listdir(files.path))
    if any(n.endswith(".safetensors") for n in names):
        return
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
    if pickles and not files.allow_pickle:
        raise ModelError(
            f"{files.name} has only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them to safetensors, or pass --allow-pickle if you trust them"
        )
    if not pickles:
        raise ModelError(f"{files.name} has no weights (*.safetensors)")


def _told(files: ModelFiles, what: str, load: Callable[[], T]) -> T:
    """Run foreign code over a model's files and turn whatever it raises on broken ones into one sentence."""
    try:
        return load()
    except PagedgenError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{files.name} comes with its own code; pass --trust-remote-code to run it if you trust it"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        offline = "; HF_HUB_OFFLINE is set, so only cached models can be used" if _offline(files) else ""
        raise ModelError(f"can't use the {what} of {files.name}: {reason:.400}{offline}") from error


def _offline(files: ModelFiles) -> bool:
    return not Path(files.path).is_dir() and os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def load_config(files: ModelFiles) -> Any:
    """Return the transformers config.

    Raises:
        ModelError: no such model, or remote code without --trust-remote-code.
    """
    from transformers import AutoConfig

    return _told(files, "config", lambda: AutoConfig.from_pretrained(files.path, **files.hub_options))


def load_tokenizer(files: ModelFiles) -> Any:
    """Return the tokenizer.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    return _told(files, "tokenizer", lambda: AutoTokenizer.from_pretrained(files.path, **files.hub_options))


def load_eos_token_ids(files: ModelFiles, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the union of the EOS ids that generation_config, config and tokenizer name, sorted.

    Raises:
        ModelError: a generation_config.json that can't be used.
    """
    return _told(files, "EOS token ids", lambda: _eos_token_ids(files, config, tokenizer))


def _eos_token_ids(files: ModelFiles, config: Any, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    found: set[int] = set()
    sources = [config.get_text_config(), tokenizer]
    try:
        sources.append(GenerationConfig.from_pretrained(files.path, revision=files.revision or "main"))
    except OSError:
        pass  # a model without generation_config.json
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(int(i) for i in found))


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


def _check_family(files: ModelFiles, config: Any) -> type:
    """Return the causal-LM class of a config whose modelling code goes through `AttentionInterface`."""
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

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
    return cls


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


def _context_limit(files: ModelFiles, text_config: Any, probe: _Probe) -> tuple[int, str]:
    """Return the longest row that can run, and what limits it."""
    positions = getattr(text_config, "max_position_embeddings", None)
    if not positions:
        raise ModelError(f"{files.name} ({text_config.model_type}) does not say its max_position_embeddings")
    limits = [(int(positions), "the positions the model has")]
    rope = _rope_limit(text_config)
    if rope is not None:
        limits.append((rope, "its original context: past it, one long row would change every row's rotary embedding"))
    if probe.mask_only_window is not None:
        limits.append(
            (probe.mask_only_window, "its sliding window, which its code applies by a mask that packed batches don't build")
        )
    return min(limits)


def inspect_model(
    files: ModelFiles, config: Any, dtype: str, eos_token_ids: tuple[int, ...], quantization: str = "none"
) -> ModelSpec:
    """Return a model's shapes and sizes from its config alone, by building it and running it once without weights.

    Raises:
        ModelError: a family, layer kind or attention option that can't run; the message names it.
    """
    return _told(files, "config", lambda: _inspect(files, config, dtype, eos_token_ids, quantization))


def _inspect(files: ModelFiles, config: Any, dtype: str, eos_token_ids: tuple[int, ...], quantization: str) -> ModelSpec:
    _check_family(files, config)
    levels = weight_levels() if quantization == "int8" else 0
    if quantization == "int8" and not levels:
        raise ModelError("--quantization int8: torch has no 8-bit products for this processor")
    text = config.get_text_config()
    if text.num_hidden_layers < 1:
        raise ModelError(f"{files.name} ({config.model_type}) has {text.num_hidden_layers} layers")
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
    max_model_len, limited_by = _context_limit(files, text, probe)
    embeddings: Any = model
    head = embeddings.get_output_embeddings()
    tied_head = head is not None and head.weight is embeddings.get_input_embeddings().weight
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    weights_bytes, head_bytes = _weights_bytes(model, head, dtype, quantization, inner)
    return ModelSpec(
        model_type=config.model_type,
        dtype=dtype,
        kv_cache_dtype=dtype,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=key_dim,
        hidden_size=text.hidden_size,
        intermediate_size=inner,
        vocab_size=text.vocab_size,
        max_model_len=max_model_len,
        max_model_len_limited_by=limited_by,
        weights_bytes=weights_bytes,
        tied_head_bytes=head_bytes if tied_head else 0,
        eos_token_ids=eos_token_ids,
        quantization=quantization,
        weight_levels=levels,
    )


def _weights_bytes(model: Any, head: Any, dtype: str, quantization: str, intermediate_size: int) -> tuple[int, int]:
    """Return the bytes of all weights, tied ones counted once, and of the output head as it is run."""
    sizes = {id(p): p.numel() * DTYPE_BYTES[dtype] for p in model.parameters()}
    head_bytes = 0 if head is None else sizes[id(head.weight)]
    if quantization == "int8":
        embedding = model.get_input_embeddings().weight
        for module in (m for m in model.modules() if isinstance(m, torch.nn.Linear) and is_quantized(m, intermediate_size)):
            packed = module.weight.numel() + 4 * module.out_features
            if module is head:
                head_bytes = packed
            if module.weight is not embedding:  # a tied head's weight stays beside its packed copy
                sizes[id(module.weight)] = packed
    return sum(sizes.values()), head_bytes


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


def best_dtype(device: str, config: Any) -> str:
    """Return the dtype "auto" stands for.

    On GPU the checkpoint's (bf16 for an fp32 one); on CPU bf16 where the processor has bf16 arithmetic, else fp32.
    """
    if device == "cuda":
        stored = str(getattr(config.get_text_config(), "dtype", None) or "bfloat16").removeprefix("torch.")
        return stored if stored in ("float16", "bfloat16") else "bfloat16"
    flags = cpu_flags()
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def load_model(files: ModelFiles, config: Any, spec: ModelSpec, device: str, *, row_invariant: bool, fused: bool) -> Forward:
    """Load the weights; return the model's forward pass with paged attention on its device.

    With `row_invariant` every product runs in agreeing row buckets (see `linear.py`). `fused`: by our own passes on CPU where
    they know the model (see `decoder.py`), else by transformers' modules.

    Raises:
        ModelError: tensors are missing from the checkpoint (they would be random), or it can't be read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    attention.register()
    logging.disable_progress_bar()
    loaded: Any = _told(  # with output_loading_info a pair, which its type doesn't say
        files,
        "weights",
        lambda: AutoModelForCausalLM.from_pretrained(
            files.path,
            config=config,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=attention.ATTENTION_NAME,
            use_safetensors=None if files.allow_pickle else True,
            output_loading_info=True,
            **files.hub_options,
        ),
    )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"the checkpoint of {files.name} lacks {', '.join(missing[:5])}; it would be random, so it is not run")
    layers = [int(n) for key in info["unexpected_keys"] for n in re.findall(r"\.(?:layers|h)\.(\d+)\.", key)]
    num_layers = config.get_text_config().num_hidden_layers
    if max(layers, default=0) >= num_layers:
        raise ModelError(f"the checkpoint of {files.name} has {max(layers) + 1} layers, its config {num_layers}")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    model.eval().requires_grad_(False)
    model.to(device)
    if fused and can_fuse(model):
        return FusedDecoder(model, spec.quantization)
    if spec.quantization == "int8":
        replace_linears(model, spec.intermediate_size)
    return ModuleForward(model, make_row_invariant(model) if row_invariant else {})
