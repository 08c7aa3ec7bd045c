"""The manifest: everything that shapes a job's results. A job goes on only from what the same manifest left."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .durable import file_hash, write_whole

MANIFEST_FORMAT = 1
_MODEL_SUFFIXES = (".json", ".jinja", ".safetensors", ".bin", ".pt", ".pth", ".model", ".txt", ".py")


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return what two manifests differ in, as sentences that name the field."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in [*now, *(k for k in before if k not in now)]:
            found += differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        return found
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [line for i, pair in enumerate(zip(before, now, strict=True)) for line in differences(*pair, f"{name}[{i}]")]
    return [] if before == now else [f"{name} was {_shown(before)}, is {_shown(now)}"]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def template_hash(template: Any) -> str | None:
    """Return the hash of a chat template: a text, or several by name."""
    if template is None:
        return None
    return hashlib.blake2b(json.dumps(template, sort_keys=True).encode("ascii"), digest_size=16).hexdigest()


def model_hashes(directory: Path, cache: Path) -> dict[str, str]:
    """Return the hash of every file of a model's directory that can shape a result.

    Hashing gigabytes takes a while, so hashes are kept in the file `cache`, by path, size, inode and time of the last change.
    """
    paths = sorted(p for p in directory.iterdir() if p.suffix in _MODEL_SUFFIXES and p.is_file())
    known = _read_cache(cache)
    keys = {path: _identity(path) for path in paths}
    missing = [path for path in paths if keys[path] not in known]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fresh = dict(zip(missing, pool.map(file_hash, missing), strict=True))
    hashes = {path.name: fresh.get(path) or known[keys[path]] for path in paths}
    large = {keys[path]: value for path, value in fresh.items() if path.stat().st_size > 1 << 20}
    if large:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cache, [json.dumps(known | large, indent=1).encode()])
        except Exception:  # only a cache
            return hashes
    return hashes


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()}|{status.st_size}|{status.st_ino}|{status.st_mtime_ns}|{status.st_ctime_ns}"


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}
