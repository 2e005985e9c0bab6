"""What of this machine's cores and memory the process may use, with a container's limits respected."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

from backends.ggml.threads import allowed_cores

CGROUP = Path("/sys/fs/cgroup")
CORES = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Cores for compute threads: physical ones, of those this process may run on, within a CPU quota."""
    allowed = len(allowed_cores()) or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, cpu_quota() or allowed))


def logical_cores() -> int:
    """Threads that this process can run at the same time: those of its cores, within a CPU quota."""
    allowed = len(allowed_cores()) or os.cpu_count() or 1
    return max(1, min(allowed, cpu_quota() or allowed))


def core_numbers(root: Path = CORES) -> tuple[int, ...]:
    """The logical cores to pin compute threads to, one of each physical core; () where none can be pinned.

    As many as usable_cores: a quota leaves out the last ones.
    """
    taken: set[str] = set()
    numbers = []
    for position, core in enumerate(allowed_cores()):
        siblings = _read(root / f"cpu{core}/topology/thread_siblings_list") or _siblings(position)
        if siblings not in taken:
            taken.add(siblings)
            numbers.append(core)
    return tuple(numbers[: usable_cores()])


def _siblings(position: int) -> str:
    """Where the system does not tell (Windows): it numbers the threads of a physical core in a row."""
    logical, physical = psutil.cpu_count() or 1, psutil.cpu_count(logical=False) or 1
    return str(position // max(1, logical // physical))


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
