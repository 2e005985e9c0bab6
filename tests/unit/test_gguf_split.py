"""Models in several files: read as one, and refused by name when a part is not what it should be."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_tools import Typed, rewrite, split_gguf, write_gguf

from quant.gguf import GGUFError, open_gguf
from quant.split import PartName, parse_part_name, part_ending


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    tensors = {f"t{i}": np.full((i + 1, 40), i, np.float32) for i in range(7)}
    metadata = {"general.architecture": "llama", "words": [f"w{i}" for i in range(2000)]}
    return write_gguf(tmp_path / "whole.gguf", metadata, tensors)


@pytest.fixture
def parts(whole: Path) -> list[Path]:
    """Three files with 3, 3 and 1 tensors."""
    return split_gguf(whole, whole.with_name("model"), 3)


def refused(path: Path) -> str:
    """The error, which is one line that begins with the name of a file."""
    with pytest.raises(GGUFError) as error:
        open_gguf(path)
    message = str(error.value)
    assert "\n" not in message and message.startswith(str(path.parent))
    return Path(message.partition(": ")[0]).name + ": " + message.partition(": ")[2]


def test_read_as_one(whole: Path, parts: list[Path]):
    with open_gguf(whole) as one, open_gguf(parts[0]) as many:
        assert many.paths == parts and many.path == parts[0]
        assert many.nbytes == sum(p.stat().st_size for p in parts)
        assert list(many.tensors) == list(one.tensors)
        assert [t.part for t in many.tensors.values()] == [0, 0, 0, 1, 1, 1, 2]
        assert {**many.metadata} == {**one.metadata}
        for name, info in many.tensors.items():
            assert many.tensor_data(name).tobytes() == one.tensor_data(name).tobytes()
            out = np.zeros(info.nbytes - 8, np.uint8)
            many.read_into(name, 8, out)
            assert out.tobytes() == one.tensor_data(name)[8:].tobytes()
        assert 0 < many.head_nbytes <= many.nbytes - sum(t.nbytes for t in many.tensors.values())
        view = many.tensor_data("t6")
    assert view.view(np.float32)[0] == 6  # outlives the files
    with pytest.raises(GGUFError, match="closed"):
        many.tensor_data("t6")


def test_a_first_part_with_the_metadata_alone(whole: Path):
    empty = {"split.no": Typed("u16", 0), "split.count": Typed("u16", 2), "split.tensors.count": 1}
    first = write_gguf(whole.with_name("m-00001-of-00002.gguf"), empty, {})
    write_gguf(
        whole.with_name("m-00002-of-00002.gguf"),
        {"split.no": Typed("u16", 1), "split.count": Typed("u16", 2)},
        {"t": np.arange(8, dtype=np.float32)},
    )
    with open_gguf(first) as file:
        assert file.tensors["t"].part == 1
        assert file.tensor_data("t").view(np.float32)[5] == 5


def test_split_count_of_one_is_a_whole_file(whole: Path):
    copy = rewrite(whole, whole.with_name("a.gguf"), {"split.count": 1})
    with open_gguf(whole) as one, open_gguf(copy) as other:
        assert other.tensors.keys() == one.tensors.keys() and other.paths == [copy]


def test_a_missing_part(parts: list[Path]):
    parts[2].unlink()
    message = refused(parts[0])
    assert message.startswith("model-00003-of-00003.gguf: part 3 of 3 cannot be read")


def test_another_part_than_the_first(parts: list[Path]):
    message = refused(parts[1])
    assert message.startswith(parts[1].name) and f"load the first part, {parts[0].name}" in message


def test_a_renamed_first_part(parts: list[Path]):
    other = parts[0].rename(parts[0].with_name("other.gguf"))
    assert "must end in -00001-of-00003.gguf" in refused(other)


def test_joined_with_cat(parts: list[Path]):
    joined = parts[0].with_name("joined.gguf")
    joined.write_bytes(b"".join(p.read_bytes() for p in parts))
    assert "do not join the parts of a split model with cat" in refused(joined)


def test_parts_in_the_wrong_order(parts: list[Path]):
    swapped = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(swapped)
    assert refused(parts[0]) == (
        "model-00002-of-00003.gguf: should be part 2 of 3, and says that it is part 3 of 3; the parts are "
        "not of one model: download them again"
    )


def test_a_part_of_another_model(parts: list[Path], whole: Path):
    parts[1].write_bytes(whole.read_bytes())
    assert "model-00002-of-00003.gguf: should be part 2 of 3" in refused(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]):
    rewrite(parts[2], parts[2], {}, {"t1": None})
    write_gguf(
        parts[2],
        {"split.no": Typed("u16", 2), "split.count": Typed("u16", 3)},
        {"t1": np.zeros(8, np.float32)},
    )
    message = refused(parts[0])
    assert message.startswith(f"model-00003-of-00003.gguf: tensor 't1' occurs already in {parts[0].name}; ")


def test_a_part_without_some_of_its_tensors(parts: list[Path]):
    rewrite(parts[1], parts[1], {}, {"t4": None})
    assert "announces 7 tensors in all parts, and there are 6" in refused(parts[0])


def test_a_damaged_part(parts: list[Path]):
    parts[1].write_bytes(parts[1].read_bytes()[:-200])
    assert refused(parts[0]).startswith("model-00002-of-00003.gguf: tensor")
    parts[1].write_bytes(b"nothing of the kind")
    assert "part 2 of 3 not a GGUF file" in refused(parts[0])


@pytest.mark.parametrize(
    "number, count",
    [(3, 3), (65535, 3), (None, 3), (-1, 3), (0, -1), (0, 1 << 20), (1 << 62, 1 << 63)],
)
def test_impossible_numbers(number, count, whole: Path):
    def typed(value: int) -> Typed:
        return Typed("i64" if value < 0 else "u64", value)

    path = whole.with_name("m-00001-of-00003.gguf")
    rewrite(whole, path, {"split.no": None if number is None else typed(number), "split.count": typed(count)})
    assert f"split.no is {number} and split.count {count}" in refused(path)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_numbers_that_are_none(key: str, parts: list[Path]):
    for value in ("2", True, 2.0):
        rewrite(parts[0], parts[0], {key: value})
        assert f"{key} is not an integer" in refused(parts[0])


def test_numbers_of_another_type_than_libllama_takes(parts: list[Path]):
    for key, value in (("split.no", Typed("u32", 1)), ("split.count", Typed("i32", 3))):
        damaged = rewrite(parts[1], parts[1].with_name("model-00002-of-00003.gguf"), {key: value})
        assert f"{key} must be of type u16, not {value.type_name}" in refused(parts[0])
        rewrite(damaged, damaged, {key: Typed("u16", value.value)})


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file keeps its length")
def test_a_file_that_shrinks_while_it_is_read(whole: Path):
    with open_gguf(whole) as file, whole.open("r+b") as other:
        other.truncate(file.tensors["t6"].offset + 16)
        out = np.zeros(file.tensors["t6"].nbytes, np.uint8)
        with pytest.raises(GGUFError, match="'t6' is cut off"):
            file.read_into("t6", 0, out)


def test_names():
    assert parse_part_name("a-b-00002-of-00010.gguf") == PartName("a-b", 2, 10)
    assert "a-b" + part_ending(2, 10) == "a-b-00002-of-00010.gguf"
    for name in (
        "a.gguf",
        "a-1-of-2.gguf",
        "a-00003-of-00002.gguf",
        "-00001-of-00002.gguf",
        "a-00000-of-00002.gguf",
    ):
        assert parse_part_name(name) is None
