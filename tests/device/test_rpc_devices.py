"""Devices behind a ggml RPC server: listed by a child process, opened here."""

from __future__ import annotations

import pytest

from backends.base import DeviceSpec
from backends.ggml import capabilities
from backends.ggml.devices import DeviceError, list_devices, open_device
from hetero.plan.devices import choose
from quant.types import TYPE_IDS


def test_its_devices_are_listed_and_opened(address: str) -> None:
    here = [device.name for device in list_devices()]
    (choice,) = choose((f"rpc={address}",), 0, list_devices())
    assert choice.label == f"rpc={address}/RPC0"
    assert choice.spec == DeviceSpec("RPC0", f"{address}/RPC0", endpoint=address)
    assert 0 < choice.device.free_bytes <= choice.device.total_bytes
    device = open_device(choice.spec)
    assert not device.is_cpu and device.cores == ()
    assert capabilities.can_multiply(device, TYPE_IDS["Q4_1"])
    device.close()
    assert [device.name for device in list_devices()] == here  # listing never depends on a server
    with pytest.raises(DeviceError, match="has 1 devices, and no RPC1"):
        open_device(DeviceSpec("RPC1", endpoint=address))
