"""Which devices there are, and which ones to compute on: what --device means."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.base import DeviceInfo, DeviceSpec
from backends.ggml import devices as ggml_devices
from backends.ggml.devices import DeviceError
from backends.ggml.endpoint import endpoint_devices, split_address
from hetero.plan import visibility
from hetero.plan.host import core_numbers, free_memory, logical_cores, memory_limit, usable_cores

# Interfaces that reach other makers' cards too; the maker's own one is faster where it is there.
GENERIC = ("Vulkan", "OpenCL", "WebGPU")
PLACES = {"rpc": "an RPC server", "worker": "a worker"}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """One device to compute on, how a process opens it, and what the user calls it."""

    device: DeviceInfo
    spec: DeviceSpec
    label: str

    @property
    def threads(self) -> int:
        """Threads that compute on it (CPU only; 0 elsewhere)."""
        return self.spec.threads

    @property
    def own_kernels(self) -> bool:
        """Whether it computes with kernels of ours: the CPUs, unless only ggml's RPC leads there."""
        return self.device.kind == "cpu" and not self.spec.endpoint


def _worker_devices(address: str) -> list[DeviceInfo]:
    from hetero.pipeline.remote import describe
    from hetero.worker.secret import SecretError, find_secret

    try:
        return describe(address, find_secret().value)
    except SecretError as exc:
        raise DeviceError(f"worker={address}: {exc}") from None


@dataclass(frozen=True, slots=True)
class Around:
    """What `choose` looks up beside the list of devices. All of it is asked only when it matters."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    backends: Callable[[], frozenset[str]] = ggml_devices.backend_names
    cores: Callable[[], tuple[int, ...]] = core_numbers
    usable_cores: Callable[[], int] = usable_cores
    behind: Mapping[str, Callable[[str], list[DeviceInfo]]] = field(
        default_factory=lambda: {"rpc": endpoint_devices, "worker": _worker_devices}
    )


def list_devices() -> list[DeviceInfo]:
    """All devices that the loaded ggml offers, in its order. The CPU's memory is what we may use of it."""
    return [_within_container(info) if info.kind == "cpu" else info for info in ggml_devices.list_devices()]


def _within_container(info: DeviceInfo) -> DeviceInfo:
    total = min(info.total_bytes, memory_limit() or info.total_bytes)
    return replace(info, total_bytes=total, free_bytes=min(total, free_memory()))


def hiding_notes(devices: Sequence[DeviceInfo], around: Around | None = None) -> list[str]:
    """A line for each setting that should show a device which the driver did not find."""
    around = around or Around()
    return visibility.complaints(devices, around.backends(), around.environ)


def same_card(devices: Sequence[DeviceInfo]) -> dict[str, str]:
    """Names of devices that are another view of a card listed under a better name, and that name.

    Cards are told apart by PCI id; a device without one is a card of its own.
    """
    views: dict[str, list[DeviceInfo]] = {}
    for device in devices:
        if ggml_devices.PCI_ID.match(device.device_id):
            views.setdefault(device.device_id, []).append(device)
    hidden: dict[str, str] = {}
    for seen in views.values():
        best = min(seen, key=lambda d: (_generic(d), d.name))
        hidden |= {d.name: best.name for d in seen if d.backend != best.backend}
    return hidden


def offered(devices: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Devices that can hold layers, each card once, in an order that no driver decides."""
    hidden = same_card(devices)
    can = [d for d in devices if d.kind in ("cpu", "gpu", "igpu") and d.name not in hidden]
    return sorted(can, key=lambda d: (d.kind == "cpu", d.device_id, d.name))


def _generic(device: DeviceInfo) -> int:
    return GENERIC.index(device.backend) + 1 if device.backend in GENERIC else 0


def choose(
    requested: Sequence[str], threads: int, devices: Sequence[DeviceInfo], around: Around | None = None
) -> tuple[DeviceChoice, ...]:
    """The devices of --device in the order given, else every graphics card, else the CPU.

    `threads` is what --threads says, 0 for nothing: it counts for a CPU that has no threads=N of its
    own. Several CPU devices share the usable cores out between them, and their threads keep to theirs.
    Raises DeviceError.
    """
    around = around or Around()
    if not requested:
        return _by_default(threads, devices, around)
    asked = [found for text in requested for found in _asked(text, devices, around)]
    _refuse_doubles(asked)
    return _with_threads(asked, threads, around)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A device with the text that asked for it; `threads` 0 when that says nothing."""

    text: str
    device: DeviceInfo
    threads: int = 0
    place: str = ""  # rpc or worker, with the address
    address: str = ""

    @property
    def label(self) -> str:
        where = f"{self.place}={self.address}/" if self.place else ""
        return f"{where}{self.device.name}" + (f":threads={self.threads}" if self.threads else "")

    def spec(self, threads: int, cores: tuple[int, ...]) -> DeviceSpec:
        where = {"rpc": "endpoint", "worker": "worker"}.get(self.place)
        address = {where: self.address} if where else {}
        return DeviceSpec(self.device.name, self.device.device_id, threads, cores, **address)


def crowded(choices: Sequence[DeviceChoice], cores: int | None = None) -> list[str]:
    """A line where more threads are to compute on this machine than can run at the same time."""
    cores = logical_cores() if cores is None else cores
    threads = sum(c.threads for c in choices if c.own_kernels and not c.spec.worker)
    return [f"{threads} threads for {cores} cores wait for each other; fewer are faster"] * (threads > cores)


def _by_default(threads: int, devices: Sequence[DeviceInfo], around: Around) -> tuple[DeviceChoice, ...]:
    problems = hiding_notes(devices, around)
    if problems:
        raise DeviceError(f"{problems[0]}; or name the devices to use with --device")
    there = offered(devices)
    found = [d for d in there if d.kind == "gpu"] or [d for d in there if d.kind == "cpu"][:1]
    if not found:
        raise DeviceError("this ggml offers no device that can hold a model")
    return _with_threads([_Asked(d.name, d) for d in found], threads, around)


def _asked(text: str, devices: Sequence[DeviceInfo], around: Around) -> list[_Asked]:
    """What one --device asks for: a device, or all that an RPC server or a worker offers by default."""
    place, equals, rest = text.partition("=")
    if not equals or place not in PLACES:
        return [_named(text, text, devices, around)]
    address, slash, name = rest.partition("/")
    try:
        split_address(address)
    except DeviceError as exc:
        raise DeviceError(f"--device {text}: {exc}") from None
    if slash and place == "rpc":
        raise DeviceError(f"--device {text}: an RPC server's devices are taken all; give rpc={address}")
    try:
        behind = around.behind[place](address)
    except DeviceError as exc:
        reason = str(exc).removeprefix(f"{place}={address}: ").removeprefix(f"{place} {address}: ")
        raise DeviceError(f"--device {text}: {reason}") from None
    if slash:
        return [replace(_named(text, name, behind, around), place=place, address=address)]
    there = offered(behind)
    found = [d for d in there if d.kind == "gpu"] or [d for d in there if d.kind == "cpu"][:1]
    if not found:
        raise DeviceError(f"--device {text}: {PLACES[place]} there has no device that can hold layers")
    return [_Asked(text, device, 0, place, address) for device in found]


def _named(text: str, wanted: str, devices: Sequence[DeviceInfo], around: Around) -> _Asked:
    name, colon, option = wanted.partition(":")
    device = next((d for d in devices if d.name.lower() == name.lower()), None)
    if device is None:
        names = ", ".join(d.name for d in devices) or "none"
        why = _why_missing(name, devices, around)
        raise DeviceError(f"--device {text}: no such device; there is {names}{why}")
    if device.kind not in ("cpu", "gpu", "igpu"):
        raise DeviceError(
            f"--device {text}: {device.name} only speeds up single operations, it holds no layers"
        )
    if not colon:
        return _Asked(text, device)
    key, _, value = option.partition("=")
    if device.kind != "cpu" or key != "threads" or not re.fullmatch("[1-9][0-9]{0,3}", value):
        raise DeviceError(f"--device {text}: the only option is CPU:threads=N, with N from 1 on")
    return _Asked(text, device, int(value))


def _why_missing(name: str, devices: Sequence[DeviceInfo], around: Around) -> str:
    """A setting that hides the device's kind, if there is one: it is the likely cause."""
    api = name.rstrip("0123456789").lower()
    backend = next((b for b in around.backends() if b.lower() == api), "")
    problem = visibility.complaint(backend, devices, around.backends(), around.environ)
    return f"; {problem}" if problem else visibility.hiding(backend, around.environ)


def _refuse_doubles(asked: Sequence[_Asked]) -> None:
    for i, one in enumerate(asked):
        for other in asked[:i]:
            if (one.place, one.address) != (other.place, other.address):
                continue
            if one.device.kind == "cpu" and not one.place:
                continue  # shared out by cores
            if one.device.name == other.device.name:
                raise DeviceError(f"--device {one.text}: {one.device.name} is given twice")
            if same_card((one.device, other.device)):
                raise DeviceError(
                    f"--device {one.text}: {one.device.name} and {other.device.name} are the same card "
                    f"({one.device.device_id}); give one of them"
                )


def _with_threads(asked: Sequence[_Asked], threads: int, around: Around) -> tuple[DeviceChoice, ...]:
    """Threads for each CPU device of this machine; cores too when there are several."""
    here = [one for one in asked if one.device.kind == "cpu" and not one.place]
    if len(here) > 1:
        shares = iter(_shared_out(here, threads, around))
    else:
        shares = iter([(one.threads or threads or around.usable_cores(), ()) for one in here])
    choices = []
    for one in asked:
        count, cores = next(shares) if one in here else (one.threads, ())
        choices.append(DeviceChoice(one.device, one.spec(count, cores), one.label))
    return tuple(choices)


def _shared_out(asked: Sequence[_Asked], threads: int, around: Around) -> list[tuple[int, tuple[int, ...]]]:
    """(threads, cores) of several CPU devices; one of them may leave its threads out and gets the rest."""
    usable, numbers = around.usable_cores(), around.cores()
    open_ones = [one for one in asked if not one.threads]
    if len(open_ones) > 1:
        raise DeviceError(f"--device {open_ones[1].text}: several CPU devices need CPU:threads=N each")
    rest = usable - sum(one.threads for one in asked)
    if rest < (threads or 1) * len(open_ones):
        names = ", ".join(one.text for one in asked)
        raise DeviceError(f"--device {names}: more threads than the {usable} cores that can be used")
    rest = threads or rest
    shares, start = [], 0
    for one in asked:
        count = one.threads or rest
        shares.append((count, numbers[start : start + count]))
        start += count
    return shares
