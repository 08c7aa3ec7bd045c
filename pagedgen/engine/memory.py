"""How much memory there is, of the machine and its cgroup (Slurm sets one) or of a GPU, and what of it the pool may take."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig
from ..errors import MemoryPlanError, UsageError

_UNLIMITED = 1 << 60  # a v1 cgroup without a limit reports a huge page-aligned number


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: all of it, what is free now, and where the numbers come from."""

    total_bytes: int
    free_bytes: int
    source: str


def available_kv_bytes(memory: DeviceMemory, *, utilization: float, own_bytes: int, pending_bytes: int) -> int:
    """Return the bytes the KV pool may take; negative when there are too few even without it.

    utilization: share of *total* memory this process may use, vLLM's meaning. own_bytes: what this process already holds.
    pending_bytes: what it will still allocate besides the pool. Bounded by what is free now, whoever holds the rest.
    """
    within_share = int(memory.total_bytes * utilization) - own_bytes - pending_bytes
    within_free = memory.free_bytes - pending_bytes
    return min(within_share, within_free)


def device_memory(device: str) -> DeviceMemory:
    """Measure a device now."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(total, free, torch.cuda.get_device_name())
    return cpu_memory()


def cpu_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> DeviceMemory:
    """Measure host memory: the machine's, or less where a cgroup on the way up limits this process."""
    info = _meminfo(proc / "meminfo")
    total, free, source = info["MemTotal"], info["MemAvailable"], "host memory"
    for limit, used in _cgroup_limits(proc / "self" / "cgroup", cgroup_root):
        if limit < total:
            total, source = limit, "cgroup limit"
        free = min(free, max(0, limit - used))
    return DeviceMemory(total, free, source)


def check_swap_space(config: EngineConfig) -> None:
    """Refuse a swap space that can't be there.

    Raises:
        UsageError: the disk's directory can't be used or has too little room; MemoryPlanError: host memory has.
    """
    if config.disk_swap_path is not None:
        try:
            free = shutil.disk_usage(config.disk_swap_path).free
            with tempfile.TemporaryFile(dir=config.disk_swap_path):
                pass
        except OSError as error:
            raise UsageError(f"--disk-swap {config.disk_swap_path}: {error.strerror} (errno {error.errno})") from error
        if free < config.disk_swap_bytes:
            raise UsageError(
                f"--disk-swap {config.disk_swap_path}: {config.disk_swap_bytes:,} bytes asked for, {free:,} are free there"
            )
    free = cpu_memory().free_bytes
    if config.swap_space_bytes > free:
        raise MemoryPlanError(f"--swap-space {config.swap_space_bytes:,} bytes, but host memory has {free:,} free")


def _meminfo(path: Path) -> dict[str, int]:
    info = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        info[name] = int(rest.split()[0]) * 1024
    return info


def _cgroup_limits(self_cgroup: Path, root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that can't be reclaimed) of this process's cgroup and each one above it that has a limit."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, usage_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, usage_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        directory = base / path.lstrip("/")
        while True:
            limit = _read_int(directory / limit_file)
            if limit is not None and limit < _UNLIMITED:
                used = (_read_int(directory / usage_file) or 0) - _reclaimable(directory / "memory.stat")
                limits.append((limit, max(0, used)))
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return limits


def _reclaimable(stat: Path) -> int:
    """Return the page cache the kernel drops before it runs out."""
    try:
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def resident_bytes() -> int:
    """Return this process's resident host memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return the peak of resident host memory since the start or the last `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


def reset_peak() -> None:
    """Start a new measurement of peak resident memory, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
