"""The process that quantizes: whatever ends it, no part of a file is left; and how its log is read."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp.llama_cpp as llama
import psutil
import pytest
from tiny_models import tiny_model

from hetero import quantizer
from hetero.quantizer import Job, QuantizeError, Quantizer
from quant.ftypes import FTYPES, TENSOR_TYPES
from quant.gguf import open_gguf
from quant.types import TYPE_IDS

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "cli", "quantize"]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory) -> Path:
    """F32, rows of 256 and 512."""
    options = {"n_embd": 256, "n_ff": 512, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32}
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **options)


@pytest.fixture(scope="module")
def slow_path(tmp_path_factory) -> Path:
    """F16, big enough that IQ4_XS takes seconds."""
    options = {"n_embd": 1024, "n_ff": 4096, "n_heads": 16, "n_kv_heads": 16, "head_dim": 64}
    return tiny_model(tmp_path_factory.mktemp("slow") / "slow.gguf", weight_type="F16", **options)


def begin(source: Path, out: Path) -> tuple[psutil.Popen, list[psutil.Process]]:
    """A slow `hetero quantize` that has begun to write, and its children."""
    command = [*COMMAND, str(source), str(out), "IQ4_XS", "--threads", "1"]
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(out.parent.glob(".*.part")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.01)
    return process, process.children(recursive=True)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("case", ["child killed", "interrupted", "terminated", "parent killed"])
def test_nothing_is_left_behind(case: str, slow_path: Path, tmp_path: Path):
    process, children = begin(slow_path, tmp_path / "o.gguf")
    if case == "child killed":
        (child,) = (c for c in children if "resource_tracker" not in " ".join(c.cmdline()))
        child.kill()
    elif case == "parent killed":
        process.kill()
    else:
        process.send_signal(signal.SIGINT if case == "interrupted" else signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [] and list(tmp_path.iterdir()) == []
    if case != "parent killed":
        assert process.returncode == 1 and "Traceback" not in err
        assert ("ended abnormally" if case == "child killed" else "interrupted") in err.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="file size limits")
def test_a_write_that_fails(tiny_path: Path, tmp_path: Path):
    import resource

    limit = tiny_path.stat().st_size // 16

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [*COMMAND, str(tiny_path), str(tmp_path / "o.gguf"), "Q8_0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 1 and "tiny.gguf" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_too_little_space(tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(quantizer.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(QuantizeError, match=r"2.0 KiB are needed in .*, 1000 B are free"):
        quantizer.write_atomically(tmp_path / "o.gguf", 2048, False, lambda part: part.write_text("x"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_comes_into_being_meanwhile_is_kept(tmp_path: Path):
    out = tmp_path / "o.gguf"

    def write(part: Path) -> None:
        part.write_text("ours")
        out.write_text("theirs")

    with pytest.raises(QuantizeError, match="--force"):
        quantizer.write_atomically(out, 1, False, write)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("o.gguf", "theirs")]
    quantizer.write_atomically(out, 1, True, write)
    assert out.read_text() == "ours"


@pytest.fixture
def job(tiny_path: Path):
    with open_gguf(tiny_path) as source:
        yield source, Job(tiny_path, FTYPES["Q6_K"], threads=1)


def test_progress_goes_from_nothing_to_all(job, tmp_path: Path):
    source, work = job
    seen: list[float] = []
    with Quantizer(source, work) as child:
        child.write(tmp_path / "o.gguf", child.plan(), seen.append)
    assert len(seen) == len(source.tensors) + 1
    assert seen[0] == 0 and seen[-1] == 1 and seen == sorted(set(seen))


def test_an_assertion_in_ggml_is_one_line(job, tmp_path: Path):
    """Q8_K is for activations: ggml aborts when it is to write it. The command refuses it before."""
    source, work = job
    work = dataclasses.replace(work, overrides=(("attn_q", TYPE_IDS["Q8_K"]),))
    with (
        Quantizer(source, work) as child,
        pytest.raises(QuantizeError, match="GGML_ASSERT") as error,
    ):
        child.write(tmp_path / "o.gguf", child.plan(), lambda done: None)
    assert "\n" not in str(error.value)


def test_another_file_than_planned_is_noticed(job, tmp_path: Path):
    source, work = job
    with Quantizer(source, work) as child:
        plan = child.plan()
        wrong = dataclasses.replace(plan.tensors[3], target="Q4_0")
        plan = dataclasses.replace(plan, tensors=(*plan.tensors[:3], wrong, *plan.tensors[4:]))
        with pytest.raises(QuantizeError, match=f"than planned, first at tensor '{wrong.name}'"):
            child.write(tmp_path / "o.gguf", plan, lambda done: None)


def test_names_are_libllamas():
    for name, value in FTYPES.items():
        names = (f"LLAMA_FTYPE_MOSTLY_{name}", f"LLAMA_FTYPE_ALL_{name}")
        assert [v for n in names if (v := getattr(llama, n, None)) is not None] == [value]
    assert set(TENSOR_TYPES) <= set(TYPE_IDS)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_log_may_come_in_pieces(size: int):
    text = (
        "warning: blk.0.a.weight                       - ncols     14 not divisible by 256 (required for type"
        "    q4_K) (WARNING: must use F16 due to unusual shape) -> falling back to     f16\n"
        "[   1/   2] blk.0.a.weight                       - [    14,     3,     1,     1], type =    f32, "
        "size =     0.00 MiB ->     0.00 MiB (f16)\n"
        "[   2/   2] b.weight                             - [    32,     3,     1,     1], type =   q4_K, "
        "size =    0.000 MiB\nllama_model_quantize: failed to quantize: no luck\n"
    )
    begun: list[str] = []
    log = quantizer._Log(begun.append)
    for i in range(0, len(text), size):
        log.feed(text[i : i + size])
    if size < 100:
        assert begun == ["blk.0.a.weight", "b.weight"]
    assert log.targets == {"blk.0.a.weight": "F16", "b.weight": "Q4_K"}
    assert log.fallbacks == [quantizer.Fallback("blk.0.a.weight", 14, "Q4_K", "F16")]
    assert log.failure == "no luck"
