"""Devices of the loaded ggml: listing, opening, pinning, what they can compute, RPC endpoints that fail."""

import ctypes
import dataclasses
import json
import os
import socket
import threading

import pytest

from backends.base import DeviceSpec
from backends.ggml import capabilities, endpoint
from backends.ggml.devices import DeviceError, list_devices, open_device
from backends.ggml.lib import DEVICE_KINDS, TYPE_F16, TYPE_F32, ggml
from backends.ggml.threads import allowed_cores, pin_thread, threadpool_params
from quant.types import TYPE_IDS

CORES = allowed_cores()
needs_two_cores = pytest.mark.skipif(
    len(CORES) < 2 or not hasattr(os, "sched_getaffinity"),
    reason="needs two cores and a system that tells where a thread may run",
)


def affinity_seen(device) -> set[frozenset[int]]:
    """The core masks of the threads that compute a graph of one operator on a CPU device."""
    lib, seen = ggml(), set()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    def look(dst, ith, nth, userdata):
        seen.add((ith, nth, frozenset(os.sched_getaffinity(0))))

    context = lib.context(8, 8)
    source = lib.new_tensor_4d(context, TYPE_F32, 4, 1, 1, 1)
    lib.set_input(source)
    arguments = (ctypes.c_void_p * 1)(source)
    output = lib.custom_4d(
        context, TYPE_F32, 4, 1, 1, 1, arguments, 1, ctypes.cast(look, ctypes.c_void_p), -1, None
    )
    graph = lib.new_graph_custom(context, 8, False)
    lib.build_forward_expand(graph, output)
    allocator = lib.gallocr_new(device.buffer_type)
    lib.gallocr_alloc_graph(allocator, graph)
    device.pin_thread()
    lib.backend_graph_compute(device.backend, graph)
    lib.gallocr_free(allocator)
    lib.free(context)
    assert {ith for ith, _, _ in seen} == set(range(device.threads))
    return {mask for _, _, mask in seen}


def in_thread(function):
    """The function's result, from a thread of its own: pinning stays with the thread."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_every_device_is_listed_with_its_memory():
    found = list_devices()
    assert "CPU" in {d.name for d in found} and len({d.name for d in found}) == len(found)
    for device in found:
        assert device.kind in DEVICE_KINDS.values() and device.description and device.backend
        assert 0 <= device.free_bytes <= device.total_bytes and device.device_id


def test_a_spec_survives_json_and_opens_its_device():
    spec = DeviceSpec("CPU", "CPU", threads=1, cores=CORES[:1])
    back = json.loads(json.dumps(dataclasses.asdict(spec)))
    again = DeviceSpec(**{**back, "cores": tuple(back["cores"])})
    assert again == spec
    device = open_device(again)
    assert (device.info.name, device.threads, device.is_cpu) == ("CPU", 1, True)
    device.close()
    device.close()  # twice is once


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (DeviceSpec("CUDA9"), "CUDA9 is not there; this machine has: .*CPU"),
        (DeviceSpec("CUDA0", "0000:01:00.0"), r"CUDA0 \(0000:01:00.0\) is not there"),
        (DeviceSpec("CPU", "another id"), r"CPU \(another id\) is not there"),
        (DeviceSpec("CPU", worker="box:1"), "belongs to the worker box:1"),
        (DeviceSpec("CPU", threads=1, cores=(511,)), "may not run on core 511"),
    ],
)
def test_what_cannot_be_opened(spec, says):
    if spec.cores and not CORES:
        pytest.skip("nothing can be pinned here")
    with pytest.raises(DeviceError, match=says):
        open_device(spec)


@needs_two_cores
def test_two_cpu_devices_of_one_thread_run_on_different_cores():
    masks = []
    for core in CORES[:2]:
        device = open_device(DeviceSpec("CPU", threads=1, cores=(core,)))
        masks.append(in_thread(lambda device=device: affinity_seen(device)))
        device.close()
    assert masks == [{frozenset(CORES[:1])}, {frozenset(CORES[1:2])}]


@needs_two_cores
def test_all_threads_of_a_pinned_device_keep_to_its_cores_whoever_drives_it():
    device = open_device(DeviceSpec("CPU", threads=3, cores=CORES[1:2]))
    for _ in range(2):
        assert in_thread(lambda: affinity_seen(device)) == {frozenset(CORES[1:2])}
    device.close()


@needs_two_cores
def test_a_thread_may_drive_devices_in_turn():
    first, second = (open_device(DeviceSpec("CPU", threads=1, cores=(core,))) for core in CORES[:2])
    free = open_device("CPU", 1)
    turns = in_thread(lambda: [affinity_seen(d) for d in (first, second, first, free)])
    assert turns == [{frozenset(cores)} for cores in (CORES[:1], CORES[1:2], CORES[:1], CORES)]
    for device in (first, second, free):
        device.close()


def test_a_device_that_is_not_pinned_leaves_the_thread_alone():
    device = open_device("CPU", 1)
    assert device.cores == ()
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    device.pin_thread()
    pin_thread(())
    assert before is None or os.sched_getaffinity(0) == before
    device.close()


@needs_two_cores
def test_closing_a_device_sets_its_thread_free():
    def drive() -> set[int]:
        device = open_device(DeviceSpec("CPU", threads=1, cores=CORES[:1]))
        device.pin_thread()
        device.close()
        return os.sched_getaffinity(0)

    assert in_thread(drive) == set(CORES)


def test_the_layout_of_thread_pool_parameters():
    params = threadpool_params(3, (1, 4))
    assert params.n_threads == 3 and params.paused and not params.strict_cpu
    assert [i for i, on in enumerate(params.cpumask) if on] == [1, 4]


@pytest.fixture(scope="module")
def cpu():
    device = open_device("CPU", 1)
    yield device
    device.close()


def test_the_cpu_can_do_what_ggml_has_kernels_for(cpu):
    for name in ("F32", "F16", "Q4_1", "Q5_K", "Q6_K", "Q8_0"):
        type_id = TYPE_IDS[name]
        assert capabilities.can_multiply(cpu, type_id) and capabilities.can_look_up(cpu, type_id)
        assert capabilities.can_multiply_experts(cpu, type_id)
    assert capabilities.can_store(cpu, TYPE_F16)
    assert capabilities.can_flash_attend(cpu, 64, 64, 9, 3)


def test_a_device_is_asked_with_its_weights_in_its_own_buffer(cpu, monkeypatch):
    asked = []

    def refuse(handle, operator):
        asked.append(handle)
        return False

    monkeypatch.setattr(ggml(), "backend_dev_supports_op", refuse)
    assert not capabilities.can_multiply(cpu, TYPE_F16)
    assert not capabilities.can_multiply_experts(cpu, TYPE_F16)
    assert not capabilities.can_flash_attend(cpu, 64, 64, 9, 3)
    assert asked == [cpu.handle] * 3


@pytest.mark.parametrize(
    "address", ["", "box", "box:", "box:0", "box:65536", ":50052", "a:b:1", "a b:1", "[x]:1"]
)
def test_addresses_that_are_none(address):
    with pytest.raises(DeviceError, match="not HOST:PORT"):
        endpoint.split_address(address)


def test_addresses():
    assert endpoint.split_address("box.lan:50052") == ("box.lan", 50052)
    assert endpoint.split_address("[fe80::1]:80") == ("fe80::1", 80)


def test_nobody_listens_at_the_endpoint():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for ask in (
            lambda: endpoint.endpoint_devices(address),
            lambda: open_device(DeviceSpec("RPC0", endpoint=address)),
        ):
            with pytest.raises(DeviceError, match=f"rpc={address}: cannot connect"):
                ask()


def test_a_server_of_another_kind_does_not_end_the_process():
    def answer(listener):
        for _ in range(2):  # the plain connection, then ggml's
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        with pytest.raises(DeviceError, match="not a ggml RPC server"):
            endpoint.endpoint_devices(address)


def test_a_stopped_server_is_given_up(monkeypatch):
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connects by itself, never answers
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DeviceError, match="does not answer; it serves one client"):
            endpoint.endpoint_devices(address)


def test_ggmls_rpc_speaks_ipv4():
    with pytest.raises(DeviceError, match="IPv4"):
        endpoint.endpoint_devices("[::1]:50052")
