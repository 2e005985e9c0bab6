"""What --device means, over made-up machines."""

import json
import os
from dataclasses import replace

import pytest

from backends.base import DeviceInfo, DeviceSpec
from hetero.commands import devices as command
from hetero.plan import visibility
from hetero.plan.devices import Around, DeviceError, choose, crowded, offered, same_card

GIB = 1 << 30
CPU = DeviceInfo("CPU", "cpu", "a processor", 64 * GIB, 48 * GIB, "CPU", "CPU")
CUDA = DeviceInfo("CUDA0", "gpu", "RTX 4090", 24 * GIB, 23 * GIB, "0000:0a:00.0", "CUDA")
CUDA_TOO = DeviceInfo("CUDA1", "gpu", "RTX 3060", 12 * GIB, 11 * GIB, "0000:01:00.0", "CUDA")
SAME = DeviceInfo("Vulkan0", "gpu", "RTX 4090", 24 * GIB, 23 * GIB, "0000:0a:00.0", "Vulkan")
OTHER = DeviceInfo("Vulkan1", "gpu", "RX 7900", 20 * GIB, 19 * GIB, "0000:0b:00.0", "Vulkan")
SOFTWARE = DeviceInfo("Vulkan2", "gpu", "llvmpipe", 2 * GIB, 2 * GIB, "Vulkan2", "Vulkan")
ON_BOARD = DeviceInfo("Vulkan3", "igpu", "UHD 770", 32 * GIB, 30 * GIB, "0000:00:02.0", "Vulkan")
BLAS = DeviceInfo("BLAS", "accel", "OpenBLAS", 0, 0, "BLAS", "BLAS")
MACHINE = [CUDA, CUDA_TOO, SAME, OTHER, SOFTWARE, ON_BOARD, BLAS, CPU]
REMOTE = DeviceInfo("RPC0", "gpu", "device 0", 8 * GIB, 8 * GIB, "box:50052/RPC0", "RPC")


def behind(address: str) -> list[DeviceInfo]:
    if address == "gone:1":
        raise DeviceError("worker gone:1: cannot connect: no route")
    return [replace(CUDA, device_id="0000:05:00.0"), replace(SAME, device_id="0000:05:00.0"), CPU]


AROUND = Around(
    environ={},
    backends=lambda: frozenset({"CUDA", "Vulkan", "CPU"}),
    cores=lambda: (0, 2, 4, 6),
    usable_cores=lambda: 4,
    behind={"rpc": lambda address: [REMOTE, replace(REMOTE, name="RPC1")], "worker": behind},
)


def chosen(*texts: str, threads: int = 0, devices=MACHINE, around: Around = AROUND):
    return choose(texts, threads, devices, around)


def specs(*texts: str, **options) -> list[DeviceSpec]:
    return [choice.spec for choice in chosen(*texts, **options)]


def test_by_default_every_graphics_card_once():
    assert [c.label for c in chosen()] == ["CUDA1", "CUDA0", "Vulkan1", "Vulkan2"]
    assert [c.label for c in chosen(devices=[BLAS, ON_BOARD, CPU])] == ["CPU"]
    with pytest.raises(DeviceError, match="no device that can hold a model"):
        chosen(devices=[BLAS])


def test_a_cpu_alone_is_not_pinned():
    assert specs("CPU") == [DeviceSpec("CPU", "CPU", 4)]
    assert specs("CPU", threads=3) == [DeviceSpec("CPU", "CPU", 3)]
    assert specs("cpu:threads=5", threads=3) == [DeviceSpec("CPU", "CPU", 5)]
    assert specs(threads=3, devices=[CPU]) == [DeviceSpec("CPU", "CPU", 3)]
    assert [c.threads for c in chosen("CUDA0", "CPU", threads=2)] == [0, 2]
    assert chosen("CUDA0", "CPU")[1].spec.cores == ()


def test_more_threads_than_can_run_are_told():
    assert crowded(chosen("CPU"), cores=4) == []
    (note,) = crowded(chosen("CPU", threads=64), cores=4)
    assert note.startswith("64 threads for 4 cores")
    assert crowded(chosen("CUDA0", "CPU:threads=4", "worker=box:1/CPU:threads=64"), cores=4) == []


def test_several_cpu_devices_have_cores_of_their_own():
    first, second = chosen("CPU:threads=1", "cpu:threads=2")
    assert first.spec == DeviceSpec("CPU", "CPU", 1, (0,))
    assert second.spec == DeviceSpec("CPU", "CPU", 2, (2, 4))
    assert (first.label, second.label) == ("CPU:threads=1", "CPU:threads=2")


def test_one_of_several_cpu_devices_takes_the_rest():
    assert specs("CPU", "CUDA0", "CPU:threads=1") == [
        DeviceSpec("CPU", "CPU", 3, (0, 2, 4)),
        DeviceSpec("CUDA0", CUDA.device_id),
        DeviceSpec("CPU", "CPU", 1, (6,)),
    ]
    assert [s.threads for s in specs("CPU", "CPU:threads=1", threads=2)] == [2, 1]


def test_where_nothing_can_be_pinned_cpu_devices_still_have_their_threads():
    around = replace(AROUND, cores=lambda: ())
    assert specs("CPU:threads=1", "CPU:threads=3", around=around) == [
        DeviceSpec("CPU", "CPU", 1),
        DeviceSpec("CPU", "CPU", 3),
    ]


def test_the_order_given_is_the_order_of_stages():
    assert [c.device for c in chosen("vulkan1", "CPU", "cuda1")] == [OTHER, CPU, CUDA_TOO]


def test_the_same_card_through_two_interfaces():
    assert same_card(MACHINE) == {"Vulkan0": "CUDA0"}
    assert SAME not in offered(MACHINE) and BLAS not in offered(MACHINE)
    assert specs("Vulkan0") == [DeviceSpec("Vulkan0", SAME.device_id)]
    for pair in (("CUDA0", "Vulkan0"), ("Vulkan0", "CUDA0")):
        with pytest.raises(DeviceError, match=r"are the same card \(0000:0a:00.0\); give one of them"):
            chosen(*pair)


def test_parts_of_a_card_are_devices_of_their_own():
    parts = [replace(CUDA, name=name, backend="ROCm") for name in ("ROCm0", "ROCm1")]
    assert same_card(parts) == {}
    assert len(chosen("ROCm0", "ROCm1", devices=parts)) == 2


def test_all_devices_of_an_rpc_server():
    assert specs("rpc=box:50052") == [
        DeviceSpec("RPC0", REMOTE.device_id, endpoint="box:50052"),
        DeviceSpec("RPC1", REMOTE.device_id, endpoint="box:50052"),
    ]
    assert [c.label for c in chosen("rpc=box:50052", "rpc=box:50053")] == [
        f"rpc=box:{port}/{name}" for port in (50052, 50053) for name in ("RPC0", "RPC1")
    ]


def test_a_workers_devices():
    assert specs("worker=box:8090") == [DeviceSpec("CUDA0", "0000:05:00.0", worker="box:8090")]
    (choice,) = chosen("worker=box:8090/cpu:threads=2")
    assert choice.spec == DeviceSpec("CPU", "CPU", 2, worker="box:8090")
    assert choice.label == "worker=box:8090/CPU:threads=2"
    # its card and its CPU are others than those here, and its threads take no core of ours
    both = specs("CUDA0", "CPU:threads=4", "worker=box:8090/CUDA0", "worker=box:8090/CPU")
    assert [s.threads for s in both] == [0, 4, 0, 0] and both[1].cores == ()


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["CUDA7"], "--device CUDA7: no such device; there is CUDA0, .*, CPU"),
        ([""], "--device : no such device"),
        (["CPU:threads=0"], "the only option is CPU:threads=N"),
        (["CPU:threads=-1"], "the only option is CPU:threads=N"),
        (["CPU:threads=99999"], "the only option is CPU:threads=N"),
        (["CPU:threads"], "the only option is CPU:threads=N"),
        (["CPU:"], "the only option is CPU:threads=N"),
        (["CPU:cores=2"], "the only option is CPU:threads=N"),
        (["CUDA0:threads=2"], "the only option is CPU:threads=N"),
        (["BLAS"], "BLAS only speeds up single operations"),
        (["CUDA0", "cuda0"], "--device cuda0: CUDA0 is given twice"),
        (["CPU", "CPU"], "several CPU devices need CPU:threads=N"),
        (["CPU:threads=3", "CPU:threads=2"], "CPU:threads=3, CPU:threads=2: more threads than the 4 cores"),
        (["CPU:threads=4", "CPU"], "more threads than the 4 cores"),
        (["rpc=box"], "--device rpc=box: 'box' is not HOST:PORT"),
        (["rpc=box:1/RPC0"], "an RPC server's devices are taken all; give rpc=box:1"),
        (["rpc=box:1", "rpc=box:1"], "--device rpc=box:1: RPC0 is given twice"),
        (["worker="], "--device worker=: '' is not HOST:PORT"),
        (["worker=gone:1"], "^--device worker=gone:1: cannot connect: no route"),
        (["worker=box:1/CUDA3"], "no such device; there is CUDA0, Vulkan0, CPU"),
        (["worker=box:1/CUDA0", "worker=box:1/Vulkan0"], "are the same card"),
        (["worker=box:1/CPU:threads=1", "worker=box:1/CPU"], "CPU is given twice"),
        (["other=box:1"], "no such device"),
    ],
)
def test_what_cannot_be_meant(texts, says):
    with pytest.raises(DeviceError, match=says) as error:
        chosen(*texts)
    assert "\n" not in str(error.value) and str(error.value).startswith("--device ")


@pytest.mark.parametrize(
    ("value", "listed", "says"),
    [
        (None, 2, None),
        ("", 0, None),
        ("1", 1, None),
        ("1,0", 2, None),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1, None),
        ("MIG-1a, MIG-2b", 1, None),
        ("-1", 0, None),
        ("0,-1,1", 1, None),
        ("one", 0, "'one' is no device"),
        ("0;1", 0, "'0;1' is no device"),
        ("7", 0, "CUDA finds none of these 1"),
        ("0,7", 1, "CUDA finds only 1 of these 2"),
        ("0,0", 0, "CUDA finds none of these 2"),
    ],
)
def test_settings_that_hide_devices(value, listed, says):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    devices = [CUDA, CUDA_TOO][:listed]
    found = visibility.complaint("CUDA", devices, frozenset({"CUDA"}), environ)
    assert found is None if says is None else found.startswith(f"CUDA_VISIBLE_DEVICES={value}: {says}")
    assert visibility.complaints(devices, frozenset({"CPU", "Vulkan"}), environ) == []


def test_a_bad_setting_stops_the_default_and_explains_a_missing_name():
    around = replace(AROUND, environ={"CUDA_VISIBLE_DEVICES": "9"})
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES=9: .*; or name the devices"):
        chosen(devices=[OTHER, CPU], around=around)
    with pytest.raises(DeviceError, match="no such device; there is CPU; CUDA_VISIBLE_DEVICES=9: CUDA finds"):
        chosen("cuda0", devices=[CPU], around=around)
    assert [c.label for c in chosen("CPU", devices=[CPU], around=around)] == ["CPU"]
    hidden = replace(AROUND, environ={"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(DeviceError, match="there is CPU; CUDA_VISIBLE_DEVICES= decides which are seen"):
        chosen("CUDA0", devices=[CPU], around=hidden)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr("hetero.prepare.list_devices", lambda: MACHINE)
    monkeypatch.setattr("hetero.plan.devices.Around", lambda: replace(AROUND, environ=os.environ))
    for variable in ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


def test_the_command_prints_a_table(machine, capsys, monkeypatch):
    assert command.devices(as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "kind", "memory", "backend", "id", "description"]
    assert [line.split()[0] for line in lines[1:]] == [d.name for d in MACHINE]
    assert lines[3].endswith("0000:0a:00.0  RTX 4090 (the same card as CUDA0)")
    assert "23.0 GiB of 24.0 GiB free" in lines[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert command.devices(as_json=False) == 0
    assert "note: CUDA_VISIBLE_DEVICES=0,1,2: CUDA finds only 2" in capsys.readouterr().out


def test_the_command_prints_json(machine, capsys):
    assert command.devices(as_json=True) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["same_as"] for row in table] == [None, None, "CUDA0", None, None, None, None, None]
    assert table[0]["device_id"] == CUDA.device_id and table[0]["free_bytes"] == CUDA.free_bytes


def test_the_command_fails_without_ggml(monkeypatch, capsys):
    from hetero.prepare import LaunchError

    def fail():
        raise LaunchError("ggml not found")

    monkeypatch.setattr("hetero.prepare.list_devices", fail)
    assert command.devices(as_json=False) == 1
    assert capsys.readouterr().err == "hetero: ggml not found\n"
