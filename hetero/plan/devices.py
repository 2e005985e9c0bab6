"""What this machine can compute with: devices, cores and memory, with a container's limits respected."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from backends.base import DeviceInfo
from backends.ggml import devices as ggml_devices

CGROUP = Path("/sys/fs/cgroup")


class DeviceError(ValueError):
    """A --device that does not exist or cannot be used: one line."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """One --device: which device, and how many threads compute on it (CPU only; 0 elsewhere)."""

    device: DeviceInfo
    threads: int


def list_devices() -> list[DeviceInfo]:
    """All devices that the loaded ggml offers, in its order. The CPU's memory is what we may use of it."""
    return [_within_container(info) if info.kind == "cpu" else info for info in ggml_devices.list_devices()]


def _within_container(info: DeviceInfo) -> DeviceInfo:
    total = min(info.total_bytes, memory_limit() or info.total_bytes)
    return replace(info, total_bytes=total, free_bytes=free_memory())


def choose(requested: tuple[str, ...], threads: int, devices: list[DeviceInfo]) -> DeviceChoice:
    """The device for the whole model: the one of --device, else the CPU. Raises DeviceError."""
    if len(requested) > 1:
        raise DeviceError("--device: splitting a model over several devices is not supported yet; give one")
    name, _, option = (requested[0] if requested else "CPU").partition(":")
    if name.startswith("rpc="):
        raise DeviceError(f"--device {name}: other machines are not supported yet")
    by_name = {device.name.lower(): device for device in devices}
    device = by_name.get(name.lower())
    if device is None:
        raise DeviceError(f"--device {name}: no such device; there is {', '.join(d.name for d in devices)}")
    if option:
        key, _, value = option.partition("=")
        if device.kind != "cpu" or key != "threads" or not value.isdecimal() or int(value) < 1:
            raise DeviceError(f"--device {requested[0]}: the only option is CPU:threads=N")
        threads = int(value)
    if device.kind != "cpu":
        raise DeviceError(f"--device {device.name}: only the CPU is supported yet")
    return DeviceChoice(device, threads or usable_cores())


def usable_cores() -> int:
    """Cores for compute threads: physical ones, of those this process may run on, within a CPU quota."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        allowed = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, cpu_quota() or allowed))


def cpu_quota(root: Path = CGROUP) -> int | None:
    """Cores that the container's quota amounts to, rounded up; None without one (cgroup v2 and v1)."""
    fields = _read(root / "cpu.max").split()
    if len(fields) == 2 and fields[0].isdecimal():
        return math.ceil(int(fields[0]) / int(fields[1]))
    quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal():
        return math.ceil(int(quota) / int(period))
    return None


def memory_limit(root: Path = CGROUP) -> int | None:
    """Bytes that the container may use; None without a limit (cgroup v2 and v1)."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(root / name)
        if text.isdecimal() and int(text) < 1 << 60:  # v1 writes "no limit" as a huge number
            return int(text)
    return None


def free_memory(root: Path = CGROUP) -> int:
    """Bytes this process can still take without swapping: the machine's, within the container's limit.

    File pages that the kernel would drop first (cgroup `inactive_file`) count as free, as they do in
    psutil's `available`.
    """
    available = int(psutil.virtual_memory().available)
    limit = memory_limit(root)
    if limit is None:
        return available
    for used_name, stat_name in (
        ("memory.current", "memory.stat"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        used = _read(root / used_name)
        if used.isdecimal():
            stats = dict(line.split()[:2] for line in _read(root / stat_name).splitlines() if " " in line)
            droppable = int(stats.get("inactive_file", 0))
            return max(0, min(available, limit - int(used) + droppable))
    return min(available, limit)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
