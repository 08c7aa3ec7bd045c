"""Cases for the Triton kernels, and the device they run on: a GPU, or the CPU when TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def _load_case_maker() -> ModuleType:
    """Load tests/kernels/conftest.py by its path: test folders are not packages."""
    name = "paged_cases_for_gpu_tests"
    path = Path(__file__).resolve().parents[1] / "kernels" / "conftest.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Spec:
    """A packed batch, and the options of its attention."""

    name: str
    seq_lens: list[int]
    q_lens: list[int]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


# Lengths stand around multiples of block_size, of the kernels' tiles (32 and 64) and of the decode kernel's splits
# (512).
SPECS = [
    Spec("one token", [1], [1]),
    Spec("group 1", [15, 33], [15, 2], heads=(2, 2)),
    Spec("group 3", [17, 63], [17, 1], heads=(9, 3)),
    Spec("group 4", [65, 16], [65, 16], heads=(4, 1)),
    Spec("group 7", [31, 40], [31, 40], heads=(14, 2)),
    Spec("group 8", [47, 20], [30, 1], heads=(8, 1)),
    Spec("group 71", [20], [5], heads=(71, 1)),
    Spec("head_dim 80", [33, 5], [33, 1], head_dim=80, block_size=4),
    Spec("head_dim 96", [31, 65], [31, 3], head_dim=96, block_size=32),
    Spec("head_dim 100", [15, 3], [15, 1], head_dim=100, block_size=4),
    Spec("head_dim 128", [129, 64], [70, 64], head_dim=128, block_size=32),
    Spec("head_dim 160", [17, 33], [17, 2], head_dim=160),
    Spec("head_dim 256", [31, 33], [31, 1], head_dim=256, block_size=32),
    Spec("block_size 4", [3, 4, 5, 67], [3, 4, 5, 40], block_size=4),
    Spec("block_size 256", [255, 257], [2, 3], block_size=256),
    Spec("q_len 0 and 1 and more", [20, 7, 33, 0, 150], [0, 1, 33, 0, 140], heads=(2, 1)),
    Spec("many rows", [1 + 3 * i for i in range(12)], [1 + i % 3 for i in range(12)], heads=(2, 1)),
    Spec("window 1", [20], [20], options={"sliding_window": 1}),
    Spec("window 20", [150, 19], [100, 19], options={"sliding_window": 20}),
    Spec("window larger than the row", [40], [40], options={"sliding_window": 64}),
    Spec("softcap", [70, 33], [70, 1], options={"softcap": 2.0}),
    Spec("sinks", [40, 1], [40, 1], options={"sinks": True}),
    Spec("window, softcap and sinks", [90, 33], [60, 1], options={"sliding_window": 33, "softcap": 5.0, "sinks": True}),
    Spec("two splits and one", [513, 30, 512], [1, 1, 1]),
    Spec("ten splits and an empty row", [4700, 0, 1], [1, 0, 1], heads=(2, 1), block_size=32),
    Spec("splits, window and sinks", [1100, 600, 1025], [1, 1, 1], options={"sliding_window": 514, "sinks": True}),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@pytest.fixture(scope="session")
def make_case():
    return _load_case_maker().build_case


@pytest.fixture(scope="session")
def share_blocks():
    return _load_case_maker().share_blocks


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETING else "cuda"


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if INTERPRETING and request.param == "bfloat16":
        pytest.skip("Triton's interpreter computes bf16 wrongly")
    return getattr(torch, request.param)
