"""What of the machine may be used: a container's limits, and which cores are worth pinning to."""

import psutil

from hetero.plan import host

GIB = 1 << 30


def test_container_limits(tmp_path):
    assert host.memory_limit(tmp_path) is None and host.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB - (200 << 20)}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 20}\n")
    assert host.cpu_quota(tmp_path) == 2
    assert host.memory_limit(tmp_path) == GIB
    assert host.free_memory(tmp_path) == min(300 << 20, psutil.virtual_memory().available)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.memory_limit(tmp_path) is None and host.cpu_quota(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.memory_limit(tmp_path) is None


def test_of_each_physical_core_one_logical_core_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "allowed_cores", lambda: (0, 1, 2, 5))
    monkeypatch.setattr(host, "usable_cores", lambda: 8)
    for core, siblings in {0: "0,4", 1: "1,5", 2: "2,6", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert host.core_numbers(tmp_path) == (0, 1, 2)
    monkeypatch.setattr(host, "usable_cores", lambda: 2)  # a quota
    assert host.core_numbers(tmp_path) == (0, 1)


def test_threads_of_a_core_stand_side_by_side_where_nothing_tells_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "allowed_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(host, "usable_cores", lambda: 8)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4 if logical else 2)
    assert host.core_numbers(tmp_path) == (0, 2)


def test_nothing_to_pin_to_where_threads_cannot_be_pinned(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "allowed_cores", lambda: ())
    assert host.core_numbers(tmp_path) == ()
