"""From a model's name to its files, its shapes and its weights. Everything that can refuse a model does so before weights load.

`MODEL` is a local directory, the name of a demo model (`pagedgen model get`), or a Hugging Face id (`HF_HUB_OFFLINE` honoured).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import ModelError, PagedgenError
from ..machine import cpu_flags
from . import attention, demo
from .checkpoint import Weights, open_checkpoint
from .decoder import FusedDecoder, can_fuse
from .forward import Forward, ModuleForward
from .llama_shape import llama_shape, rotary_embedding
from .products import make_row_invariant
from .spec import ModelSpec

if TYPE_CHECKING:
    from ..kernels.cpu.precompile import Precompilation as Precompilation

T = TypeVar("T")


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


def told(files: ModelFiles, what: str, load: Callable[[], T]) -> T:
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

    return told(files, "config", lambda: AutoConfig.from_pretrained(files.path, **files.hub_options))


def load_tokenizer(files: ModelFiles) -> Any:
    """Return the tokenizer.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    return told(files, "tokenizer", lambda: AutoTokenizer.from_pretrained(files.path, **files.hub_options))


def load_eos_token_ids(files: ModelFiles, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the union of the EOS ids that generation_config, config and tokenizer name, sorted.

    Raises:
        ModelError: a generation_config.json that can't be used.
    """
    return told(files, "EOS token ids", lambda: _eos_token_ids(files, config, tokenizer))


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
    shape = llama_shape(config) if fused else None
    if shape is None or not can_fuse(shape):
        model = _load_modules(files, config, spec)
        model.to(device)
        return ModuleForward(model, make_row_invariant(model, spec) if row_invariant else {})
    # Other than exactly the tensors it should have, transformers may know how to read, or says what is wrong with it.
    weights: Weights | None = open_checkpoint(_weight_files(files, config), shape.tensors())
    if weights is None:
        weights = dict(_load_modules(files, config, spec).state_dict())
    return FusedDecoder(shape, rotary_embedding(config), weights, spec)


def _weight_files(files: ModelFiles, config: Any) -> list[Path]:
    """Return the safetensors files of a model that are on this machine, or none."""
    whole = _local(files, config, "model.safetensors")
    if whole is not None:
        return [whole]
    index = _local(files, config, "model.safetensors.index.json")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index is not None else ()
        paths = [_local(files, config, name) for name in sorted(names)]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # a broken index: transformers says how
        return []
    return [path for path in paths if path is not None]


def _local(files: ModelFiles, config: Any, name: str) -> Path | None:
    directory = Path(files.path)
    if directory.is_dir():
        path = directory / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(files.path, name, revision=getattr(config, "_commit_hash", None))
    return Path(found) if isinstance(found, str) else None


def _load_modules(files: ModelFiles, config: Any, spec: ModelSpec) -> Any:
    """Return transformers' model with its weights, in the spec's dtype, its attention replaced by ours."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    attention.register()
    logging.disable_progress_bar()
    loaded: Any = told(  # with output_loading_info a pair, which its type doesn't say
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
    return model.eval().requires_grad_(False)


def start_precompilation(spec: ModelSpec, block_size: int) -> Precompilation | None:
    """Start compiling attention on CPU for a model; see `kernels.cpu.precompile`."""
    from ..kernels.cpu import precompile  # only where kernels run

    return precompile.start_precompilation(spec.dtype, spec.kv_cache_dtype, block_size, spec.head_dim)
