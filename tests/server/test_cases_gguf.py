"""Reported cases of hostile, damaged and unusual model files, as `hetero serve` meets them."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf_tools import head, kv, rewrite, split_gguf, tensor_info

from .real import ROOT, Oracle, refusal_of

ONE_GIGABYTE = 1 << 30
BOUNDED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
sys.argv = ["hetero", "serve", {path!r}]
try:
    runpy.run_module("cli", run_name="__main__")
finally:
    status = open("/proc/self/status").read()  # ru_maxrss would count the parent before exec
    print(status.partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


def test_g01_a_key_of_no_length_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "g01.gguf"
    path.write_bytes(head(0, 1) + kv("", "u8", b"\x01"))
    line, seconds = refusal_of("serve", str(path))
    assert "g01.gguf" in line and "entry 0" in line
    assert seconds < 1.0


@pytest.mark.parametrize("name", ["zero", "three", "i32", "huge"])
def test_g03_a_bad_alignment_is_refused(name: str, tmp_path: Path) -> None:
    type_name, value = {"zero": ("u32", 0), "three": ("u32", 3), "huge": ("u32", 2**31), "i32": ("i32", 32)}[
        name
    ]
    path = tmp_path / f"g03_{name}.gguf"
    path.write_bytes(
        head(1, 1)
        + kv("general.alignment", type_name, struct.pack("<I", value))
        + tensor_info("t.weight", (32,))
    )
    line, seconds = refusal_of("serve", str(path))
    assert seconds < 1.0 and path.name in line
    if name != "huge":  # that one may be refused for what it leads to
        assert "general.alignment" in line and (name if name == "i32" else str(value)) in line


@pytest.mark.skipif(sys.platform != "linux", reason="address space limits")
@pytest.mark.parametrize("value", [0, 3, 2**31])
def test_g03_within_a_gigabyte_of_address_space(value: int, tmp_path: Path) -> None:
    path = tmp_path / "g03.gguf"
    path.write_bytes(
        head(1, 1) + kv("general.alignment", "u32", struct.pack("<I", value)) + tensor_info("t.weight", (32,))
    )
    program = BOUNDED.format(limit=ONE_GIGABYTE, path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
    )
    line, peak_kilobytes = done.stderr.splitlines()
    assert done.returncode == 1 and "g03.gguf" in line
    assert int(peak_kilobytes) < 200_000


def test_g03_another_alignment_gives_the_same_tokens(smollm2_path: Path, oracle: Oracle, tmp_path: Path):
    path = rewrite(smollm2_path, tmp_path / "ok64.gguf", {"general.alignment": 64})
    other = Oracle(path)
    try:
        for prompt in ("Once upon a time", "def fibonacci(n):"):
            assert other(prompt, 32) == oracle(prompt, 32)
    finally:
        other.close()


@pytest.fixture
def g05(smollm2_path: Path, tmp_path: Path) -> list[Path]:
    return split_gguf(smollm2_path, tmp_path / "g05", 3)


def test_g05_a_split_model_gives_the_same_tokens(g05: list[Path], oracle: Oracle) -> None:
    other = Oracle(g05[0])
    try:
        for prompt in ("Once upon a time", "def fibonacci(n):"):
            assert other(prompt, 32) == oracle(prompt, 32)
    finally:
        other.close()


@pytest.mark.parametrize("case", ["part 2", "missing", "cat", "renamed"])
def test_g05_parts_that_cannot_be_served(case: str, g05: list[Path]) -> None:
    served, words = g05[0], [g05[2].name, "No such file"]
    if case == "part 2":
        served, words = g05[1], ["load the first part", g05[0].name]
    elif case == "missing":
        g05[2].unlink()
    elif case == "cat":
        served, words = g05[0].with_name("g05_cat.gguf"), ["g05_cat.gguf", "do not join"]
        served.write_bytes(b"".join(p.read_bytes() for p in g05))
    else:
        served, words = g05[0].rename(g05[0].with_name("other.gguf")), ["other.gguf", "-00001-of-00003.gguf"]
    line, seconds = refusal_of("serve", str(served))
    assert [w for w in words if w not in line] == [], line
    assert seconds < 2.0


def test_g07_the_other_byte_order_is_named(tmp_path: Path) -> None:
    path = tmp_path / "g07.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    line, seconds = refusal_of("serve", str(path))
    assert "byte order" in line and seconds < 1.0
