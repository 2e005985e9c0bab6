"""The fingerprint: the same for the same model, another for all that changes what KV is or where it lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_families import tiny_family
from tiny_models import tiny_model

import hetero.kv.fingerprint
from backends.ggml.models import read_config
from hetero.kv.fingerprint import FINGERPRINT_BYTES, fingerprint
from hetero.kv.open_disk import open_folder
from hetero.settings import FolderLimit
from quant.gguf import open_gguf

LAYOUT = ("layers 0 to 1", "f16")


def of(path: Path, *layout: str) -> bytes:
    with open_gguf(path) as gguf:
        return fingerprint(gguf, layout or LAYOUT)


def as_old_as(path: Path, other: os.stat_result) -> None:
    """To the nanosecond, so that the time is not what makes the difference."""
    os.utime(path, ns=(other.st_atime_ns, other.st_mtime_ns))
    assert path.stat().st_mtime_ns == other.st_mtime_ns


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model.gguf")


def test_the_name_of_the_file_does_not_matter(model: Path, tmp_path: Path) -> None:
    first = of(model)
    assert len(first) == FINGERPRINT_BYTES and first == of(model)
    (tmp_path / "elsewhere").mkdir()
    other = Path(shutil.copy2(model, tmp_path / "elsewhere" / "other.gguf"))
    assert of(other) == first


def test_whatever_changes_kv_changes_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = {
        "another seed": tiny_model(tmp_path / "seed.gguf", seed=1),
        "another rope": tiny_model(tmp_path / "rope.gguf", metadata={"llama.rope.freq_base": 5000.0}),
        "a third rope": tiny_model(tmp_path / "third.gguf", metadata={"llama.rope.freq_base": 6000.0}),
        "more layers": tiny_model(tmp_path / "layers.gguf", n_layers=3),
        "written again": Path(shutil.copy(model, tmp_path / "copy.gguf")),
    }
    for name, path in variants.items():
        if name != "written again":
            as_old_as(path, model.stat())
    found = {name: of(path) for name, path in variants.items()}
    found |= {
        "other layout": of(model, "layers 0 to 1", "q8_0"),
        "split layout": of(model, "layers 0 to 1f16"),
    }
    found["first"] = of(model)
    monkeypatch.setattr(hetero.kv.fingerprint, "__version__", "0.0.0")
    found["other version"] = of(model)
    assert len(set(found.values())) == len(found), found


def test_the_longest_context_decides_where_rope_does(tmp_path: Path) -> None:
    """LongRoPE turns the keys of long and of short contexts differently."""
    factors = {"rope_factors_short.weight": (8,), "rope_factors_long.weight": (8,)}
    path = tiny_family(
        tmp_path / "m.gguf", "phi3", {"rope.scaling.original_context_length": 64}, extra=factors
    )
    found = {}
    with open_gguf(path) as gguf:
        for context in (32, 64, 65, 512):
            plan = SimpleNamespace(groups=(), stages=(), max_model_len=context)
            host = SimpleNamespace(block_bytes=(1,))
            prepared = SimpleNamespace(gguf=gguf, config=read_config(gguf), plan=plan, host=host)
            folder = open_folder(FolderLimit(str(tmp_path / "disk"), 1 << 20), prepared)  # type: ignore[arg-type]
            found[context] = folder.fingerprint
    assert found[32] == found[64] != found[65] == found[512]


def test_a_byte_in_a_sample_changes_it(model: Path) -> None:
    """Tiny tensors are wholly in their samples."""
    before = model.stat()
    first = of(model)
    with model.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    as_old_as(model, before)
    assert of(model) != first
