"""Imports run one way, planning needs no torch, the wheel holds every package, and `--help` is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "pagedgen": ROOT / "pagedgen",
    "pagedgen.cli": ROOT / "cli",
    "pagedgen.kernels": ROOT / "kernels",
    "pagedgen.recipes": ROOT / "recipes",
}
LEAVES = {
    "pagedgen.errors",
    "pagedgen.sampling_params",
    "pagedgen.request",
    "pagedgen.config",
    "pagedgen.threads",
    "pagedgen.machine",
    "pagedgen.stats",
}
# Who may import whom, within the package; a folder may always import itself and the leaves.
ALLOWED = {
    "pagedgen.cli": {"pagedgen", "pagedgen.job", "pagedgen.jobs.merge", "pagedgen.model.demo", "pagedgen.stopping"},
    "pagedgen.kernels": set(),
    "pagedgen.recipes": {"pagedgen.kernels.api", "pagedgen.model", "pagedgen.engine", "pagedgen.rows", "pagedgen.jobs"},
    "pagedgen.job": {"pagedgen.rows", "pagedgen.engine", "pagedgen.jobs", "pagedgen.stopping"},
    "pagedgen.jobs": {
        "pagedgen",
        "pagedgen.rows",
        "pagedgen.prompts",
        "pagedgen.engine",
        "pagedgen.model.demo",
        "pagedgen.stopping",
    },
    "pagedgen.stopping": {"pagedgen.engine.feed"},
    "pagedgen.llm": {"pagedgen.prompts", "pagedgen.engine"},
    "pagedgen.rows": set(),
    "pagedgen.prompts": set(),
    "pagedgen.engine": {
        "pagedgen.sampling",
        "pagedgen.model",
        "pagedgen.kernels.api",
        "pagedgen.kernels.compiled",
        "pagedgen.kernels.disk_cache",
    },
    "pagedgen.sampling": set(),
    "pagedgen.model": {"pagedgen.kernels.api", "pagedgen.kernels.cpu"},
}
NO_TORCH = [
    f"pagedgen.engine.{m}"
    for m in (
        "scheduler",
        "block_manager",
        "block_pool",
        "leaders",
        "pacing",
        "prefix_cache",
        "tiers",
        "planner",
        "batch",
        "block_map",
        "feed",
        "cascade",
        "prefix_tree",
        "radix",
        "order",
        "output_lengths",
        "admission",
        "search",
        "simulation",
        "forecast",
        "profile",
    )
]


def modules():
    """Yield (dotted name, path) of every module that is shipped."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            yield ".".join(p for p in parts if p != "__init__"), path


def imports_of(name, path):
    """Return every module named by an import statement, relative ones resolved; the lazy ones inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
            found.add(base)
    return found


def group_of(name):
    """Return the folder (or single module) whose rule covers a module."""
    return max((g for g in ALLOWED if name == g or name.startswith(g + ".")), key=len, default=None)


KNOWN = {name for name, _ in modules()}


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_run_one_way(name, path):
    ours = {i for i in imports_of(name, path) if i in KNOWN and i != "pagedgen"}
    if name in LEAVES:
        assert ours <= LEAVES, f"{name} is a leaf"
        return
    if name == "pagedgen":
        return
    group = group_of(name)
    assert group, f"{name} has no rule"
    for imported in ours:
        same = imported == group or imported.startswith(group + ".")
        allowed = any(imported == a or imported.startswith(a + ".") for a in ALLOWED[group] if a != "pagedgen")
        assert same or allowed or imported in LEAVES, f"{name} must not import {imported}"


@pytest.mark.parametrize("name", NO_TORCH)
def test_planning_modules_load_no_torch(name):
    code = f"import sys, {name}; assert 'torch' not in sys.modules, 'torch was loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; sys.argv = ['pagedgen', '--help']\n"
        "from pagedgen.cli.main import main\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'numba', 'datasets', 'triton', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )

    def seconds(program):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        return time.perf_counter() - start, done.stdout

    helps = [seconds(code) for _ in range(3)]
    assert all("run" in text and "plan" in text for _, text in helps)
    # Half a second; on a machine that is slow just now, a few times what its two libraries take to import.
    libraries = min(seconds("import typer, rich.console, rich.table, rich.panel, rich.markdown")[0] for _ in range(3))
    assert min(helps)[0] < max(0.5, 4 * libraries)


def test_every_package_is_in_the_wheel():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {name for name, path in modules() if path.name == "__init__.py"}
    assert declared == found
