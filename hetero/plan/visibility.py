"""Settings of the drivers that hide devices: CUDA_VISIBLE_DEVICES and its like.

A driver answers a bad value with silence: it hides the device, or all of them. That would look as if the
card were broken, so what ggml lists is compared with what the setting asks for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.base import DeviceInfo


@dataclass(frozen=True, slots=True)
class _Variable:
    name: str
    backend: str
    entry: re.Pattern[str]
    example: str


_NUMBER = r"-?\d+"
_VARIABLES = (
    _Variable(
        "CUDA_VISIBLE_DEVICES",
        "CUDA",
        re.compile(rf"{_NUMBER}|(GPU|MIG)-[0-9A-Za-z/-]+"),
        "numbers as in 0,1, or ids as in GPU-8f3c…",
    ),
    _Variable("HIP_VISIBLE_DEVICES", "ROCm", re.compile(_NUMBER), "numbers as in 0,1"),
    _Variable(
        "ROCR_VISIBLE_DEVICES",
        "ROCm",
        re.compile(rf"{_NUMBER}|GPU-[0-9A-Za-z]+"),
        "numbers as in 0,1, or ids as in GPU-8f3c…",
    ),
    _Variable("GGML_VK_VISIBLE_DEVICES", "Vulkan", re.compile(r"\d+"), "numbers as in 0,1"),
)


def complaint(
    backend: str, devices: Sequence[DeviceInfo], backends: frozenset[str], environ: Mapping[str, str]
) -> str | None:
    """What is wrong with the settings that hide devices of `backend`; None when nothing is.

    `backends` are those that this ggml has: a setting for another one means nothing here.
    """
    listed = sum(device.backend == backend for device in devices)
    for variable in _VARIABLES if backend in backends else ():
        value = environ.get(variable.name)
        if variable.backend == backend and value is not None:
            found = _complaint(variable, value, listed)
            if found:
                return f"{variable.name}={value}: {found}"
    return None


def complaints(
    devices: Sequence[DeviceInfo], backends: frozenset[str], environ: Mapping[str, str]
) -> list[str]:
    """The complaint of each backend that has one."""
    names = dict.fromkeys(variable.backend for variable in _VARIABLES)
    found = (complaint(name, devices, backends, environ) for name in names)
    return [line for line in found if line]


def hiding(backend: str, environ: Mapping[str, str]) -> str:
    """ "; NAME=VALUE hides some" for each setting that is there, to go behind "no such device"."""
    there = [v.name for v in _VARIABLES if v.backend == backend and v.name in environ]
    return "".join(f"; {name}={environ[name]} decides which are seen" for name in there)


def _complaint(variable: _Variable, value: str, listed: int) -> str | None:
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    for entry in entries:
        if not variable.entry.fullmatch(entry):
            return f"{entry!r} is no device; give {variable.example}"
    wanted = _visible(entries)
    if listed < len(wanted):
        seen = "none" if not listed else f"only {listed}"
        return f"{variable.backend} finds {seen} of these {len(wanted)}; check that each is there, once"
    return None


def _visible(entries: Sequence[str]) -> Sequence[str]:
    """Those before the first negative number: it hides itself and the rest. Of MIG slices, one is seen."""
    for position, entry in enumerate(entries):
        if entry.startswith("-"):
            return entries[:position]
    return entries[:1] if entries and entries[0].startswith("MIG-") else entries
