"""From the setting disk_cache to a tier that is ready to be used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hetero.kv.disk_cache import DiskCache
from hetero.kv.disk_entry import HEADER_BYTES
from hetero.kv.disk_folder import DiskFolder
from hetero.kv.disk_tier import DiskTier
from hetero.kv.fingerprint import fingerprint
from hetero.settings import FolderLimit
from hetero.sizes import format_size

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager
    from hetero.prepare import Prepared

log = logging.getLogger(__name__)


class SlotsLike(Protocol):
    """backends.base.HostMemoryView"""

    def slot_bytes(self, group: int, /) -> int: ...

    def view(self, group: int, slot: int, /) -> np.ndarray: ...


class RunnerLike(Protocol):
    @property
    def host_memories(self) -> Sequence[SlotsLike | None]: ...

    @property
    def unavailable(self) -> str | None: ...


class DiskCacheError(Exception):
    """The folder cannot be used: one line for the user."""


def open_folder(setting: FolderLimit, prepared: Prepared) -> DiskFolder:
    """The setting's folder, for a model and where its layers lie. Raises DiskCacheError."""
    layout = [f"{group.layers} {group.window}" for group in prepared.plan.groups]
    for stage in prepared.plan.stages:
        choice = prepared.choices[stage.index]
        if choice.spec.worker:
            raise DiskCacheError(
                f"--disk-cache: the contexts of {choice.label} are out of reach on another machine"
            )
        layout.append(f"{stage.layers} {stage.kv_types} {choice.own_kernels}")
    ropes = getattr(prepared.config, "layer_ropes", ())  # libllama keeps its own contexts
    if any(rope is not None and rope.is_long(prepared.plan.max_model_len) for rope in ropes):
        layout.append("RoPE for long contexts")
    least = HEADER_BYTES + sum(prepared.host.block_bytes)
    if setting.nbytes < least:
        raise DiskCacheError(f"--disk-cache {setting}: one block of this model takes {format_size(least)}")
    try:
        return DiskFolder(Path(setting.folder), setting.nbytes, fingerprint(prepared.gguf, layout))
    except (FileExistsError, NotADirectoryError):
        raise DiskCacheError(f"--disk-cache {setting.folder}: is not a folder") from None
    except OSError as exc:
        raise DiskCacheError(f"--disk-cache {setting.folder}: {exc.strerror or exc}") from None


def open_disk(folder: DiskFolder, kv: KVManager, runner: RunnerLike) -> DiskCache:
    """A cache in a folder for what `kv` has in the host memory of the runner's stages."""
    if None in runner.host_memories:
        log.warning("--disk-cache: no memory can be shared with a device's process, so nothing is kept")

    def parts_of(group: int, slot: int) -> list[np.ndarray]:
        parts = []
        for memory in runner.host_memories:
            if memory is None:
                raise LookupError("a stage is lost, or its host memory is out of reach")
            if memory.slot_bytes(group):
                parts.append(memory.view(group, slot))
        if (lost := runner.unavailable) is not None:  # it may be back already, and its slots empty
            raise LookupError(lost)
        return parts

    return DiskCache(kv, DiskTier(folder, len(kv.groups), parts_of))


__all__ = ["DiskCacheError", "SlotsLike", "open_disk", "open_folder"]
