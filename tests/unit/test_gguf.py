import random
import struct
import time
import tracemalloc

import numpy as np
import pytest
from gguf_tools import Raw, Typed, head, kv, rewrite, string, tensor_info, write_gguf

from quant.gguf import MAX_ALIGNMENT, GGUFError, LazyArray, open_gguf
from quant.types import TYPE_IDS

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.u8": Typed("u8", 255),
    "a.i8": Typed("i8", -1),
    "a.u16": Typed("u16", 65535),
    "a.i16": Typed("i16", -2),
    "a.u32": 2**32 - 1,
    "a.i32": Typed("i32", -3),
    "a.u64": Typed("u64", 2**64 - 1),
    "a.i64": -4,
    "a.f32": 0.5,
    "a.f64": Typed("f64", 0.1),
    "a.text": "日本 \n x",
    "a.none": [],
    "a.strings": ["", "é", "b"],
    "a.floats": np.array([1.5, -2.5], np.float32),
    "a.bools": [True, False, True],
}


def small(path, **kwargs):
    tensors = {
        "x": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.ones((2, 2, 8), np.float16),
        "q": Raw("Q8_0", (64, 2), bytes(range(136))),
    }
    return write_gguf(path, METADATA, tensors, **kwargs)


def refused(path, data: bytes | None = None) -> str:
    """The message, having checked that it is one line that names the file."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(GGUFError) as error:
        open_gguf(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message[len(f"{path}: ") :]


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_reads_what_was_written(tmp_path, alignment):
    with open_gguf(small(tmp_path / "a.gguf", alignment=alignment)) as gguf:
        assert gguf.version == 3
        assert gguf.architecture == "llama"
        for key, value in METADATA.items():
            got = gguf.metadata[key]
            want = value.value if isinstance(value, Typed) else value
            assert got == (want.tolist() if isinstance(want, np.ndarray) else want), key
            assert isinstance(got, bool) == isinstance(want, bool)
        assert gguf.metadata.get("missing", 3) == 3
        assert list(gguf.tensors) == ["x", "half", "q"]
        info = gguf.tensors["x"]
        assert (info.shape, info.type, info.nbytes) == ((4, 3), 0, 48)
        assert info.offset % (alignment or 32) == 0
        data = gguf.tensor_data("x")
        assert not data.flags.writeable and data.dtype == np.uint8
        assert data.view(np.float32).tolist() == list(range(12))
        assert gguf.tensors["half"].shape == (8, 2, 2)
        assert gguf.tensor_data("q").tobytes() == bytes(range(136))
        assert gguf.tensors["q"].type == TYPE_IDS["Q8_0"]


def test_version_2_and_a_file_without_padding_or_tensors(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(head(0, 1, version=2) + kv("general.architecture", "str", string("x")))
    with open_gguf(path) as gguf:
        assert gguf.version == 2 and gguf.architecture == "x" and not gguf.tensors
    path.write_bytes(head(0, 0))
    with open_gguf(path) as gguf:
        assert gguf.architecture == ""


def test_the_last_tensor_needs_no_padding_and_a_tail_is_ignored(tmp_path):
    body = head(1, 0) + tensor_info("t", (3,))
    body += bytes(-len(body) % 32) + struct.pack("<3f", 1, 2, 3)
    path = tmp_path / "a.gguf"
    for tail in (b"", b"tail"):
        path.write_bytes(body + tail)
        with open_gguf(path) as gguf:
            assert gguf.tensor_data("t").view(np.float32).tolist() == [1, 2, 3]


def test_views_outlive_close(tmp_path):
    gguf = open_gguf(small(tmp_path / "a.gguf"))
    data = gguf.tensor_data("x")
    gguf.close()
    assert data.view(np.float32)[5] == 5
    with pytest.raises(GGUFError, match="closed"):
        gguf.tensor_data("x")


def test_long_arrays_are_lazy_sequences(tmp_path):
    words = [f"w{i}é" for i in range(3000)]
    numbers = np.arange(3000, dtype=np.int32)
    path = write_gguf(tmp_path / "a.gguf", {"words": words, "numbers": numbers, "few": [1, 2]}, {})
    with open_gguf(path) as gguf:
        lazy = gguf.metadata["words"]
        assert isinstance(lazy, LazyArray) and lazy.element == "str"
        assert len(lazy) == 3000 and lazy[7] == "w7é" and lazy[-2:] == words[-2:] and lazy == words
        assert list(gguf.metadata["numbers"]) == list(range(3000))
        assert gguf.metadata["few"] == [1, 2] and gguf.metadata["few"].element == "u32"


def test_zero_length_key(tmp_path):  # llama.cpp#24884
    path = tmp_path / "g01.gguf"
    assert refused(path, head(0, 1) + kv("", "u8", b"\x01")) == (
        "the key of metadata entry 0 has 0 bytes; it must have 1 to 65535; the file is damaged or has not "
        "arrived whole: download it again"
    )


@pytest.mark.parametrize(
    "type_name, value, words",
    [
        ("u32", 0, "general.alignment is 0"),
        ("u32", 3, "general.alignment is 3"),
        ("u32", 2**31, f"power of two up to {MAX_ALIGNMENT}"),
        ("i32", 32, "general.alignment must be of type u32, not i32"),
        ("str", None, "general.alignment must be of type u32, not str"),
    ],
)
def test_bad_alignment(tmp_path, type_name, value, words):  # candle#3876, llama.cpp#24997
    payload = string("32") if value is None else struct.pack("<I", value)
    data = head(1, 1) + kv("general.alignment", type_name, payload) + tensor_info("t.weight", (32,))
    assert words in refused(tmp_path / "a.gguf", data + bytes(256))


def test_realigned_model_has_the_same_content(tmp_path):
    original = small(tmp_path / "a.gguf")
    changed = rewrite(original, tmp_path / "b.gguf", {"general.alignment": 64, "a.bool": None})
    with open_gguf(original) as a, open_gguf(changed) as b:
        assert {**a.metadata, "general.alignment": 64} == {**b.metadata, "a.bool": True}
        assert all(t.offset % 64 == 0 for t in b.tensors.values())
        for name in a.tensors:
            assert a.tensor_data(name).tobytes() == b.tensor_data(name).tobytes()


def test_foreign_byte_order(tmp_path):  # llama.cpp#13943
    message = refused(tmp_path / "g07.gguf", b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert message.startswith("the byte order of this file does not match this machine; convert it with")


@pytest.mark.parametrize("version", [0, 1, 4, 2**31 + 1])
def test_unknown_version(tmp_path, version):
    assert f"GGUF version {version}" in refused(tmp_path / "a.gguf", head(0, 0, version=version))


def test_not_gguf(tmp_path):
    for data in (b"", b"GG", b"ggml" + bytes(100), b"\x80\x02}q\x00"):
        assert refused(tmp_path / "a.gguf", data).startswith("not a GGUF file; other formats have to be")
    assert "cannot be read" in refused(tmp_path / "missing.gguf")
    assert "cannot be read" in refused(tmp_path)


def entry(type_id: int, payload: bytes) -> bytes:
    return head(0, 1) + string("k") + struct.pack("<I", type_id) + payload + bytes(64)


U64_MAX = struct.pack("<Q", 2**64 - 1)


@pytest.mark.parametrize(
    "data, words",
    [
        (head(0, 2**64 - 1), "metadata entries"),
        (head(2**64 - 1, 0), "tensors, more than"),
        (head(0, 1) + U64_MAX + bytes(9), "the key of metadata entry 0"),
        (head(0, 1) + struct.pack("<Q", 60000) + bytes(50), "announces 60000 bytes"),
        (head(0, 1) + kv(b"\xff\xfe", "u8", b"\x01"), "not valid UTF-8"),
        (head(0, 1) + kv("a\nb", "u8", b"\x01"), "control characters"),
        (head(0, 2) + kv("k", "u8", b"\x01") * 2, "'k' occurs twice"),
        (entry(13, b""), "unknown type 13"),
        (entry(7, b"\x02"), "neither true nor false"),
        (entry(8, U64_MAX), "announces"),
        (entry(9, struct.pack("<I", 8) + U64_MAX), "strings, more than"),
        (entry(9, struct.pack("<I", 4) + U64_MAX), "elements, more than"),
        (entry(9, struct.pack("<IQ", 8, 4) + U64_MAX), "cut off at string 1 of 4"),
        (entry(9, struct.pack("<IQ", 8, 1) + U64_MAX), "cut off in its last string"),
        (entry(9, struct.pack("<IQ", 9, 1)), "array of arrays"),
        (entry(9, struct.pack("<IQ", 77, 0)), "unknown type 77"),
        (head(0, 1) + kv("general.architecture", "u32", bytes(4)), "general.architecture is not a string"),
        (head(0, 1) + kv("general.architecture", "str", string("a\nb")), "is 'a\\nb', which is no family's"),
        (head(0, 1) + kv("split.count", "str", string("2")), "split.count is not an integer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_metadata(tmp_path, data, words):
    assert words in refused(tmp_path / "a.gguf", data)


@pytest.mark.parametrize(
    "info, words",
    [
        (tensor_info("", (32,)), "the name of tensor 0"),
        (tensor_info("n" * 64, (32,)), "the name of tensor 0 has 64 bytes"),
        (tensor_info("t", ()), "0 dimensions"),
        (tensor_info("t", (1, 1, 1, 1, 1)), "5 dimensions"),
        (tensor_info("t", (32, 0)), "empty dimension"),
        (tensor_info("t", (32,), type_id=4), "removed type 4"),
        (tensor_info("t", (32,), type_id=2**32 - 1), "unknown or removed type"),
        (tensor_info("t", (33,), type_id=8), "33 elements is not a whole number of Q8_0 blocks"),
        (tensor_info("t", (2**63, 2, 2, 2)), "more than the whole file"),
        (tensor_info("t", (2**32, 2**32)), "more than the whole file"),
        (tensor_info("t", (-1,)), "more than the whole file"),
        (tensor_info("t", (32,), offset=2**64 - 32), "truncated?"),
        (tensor_info("t", (32,), offset=2**40), "truncated?"),
        (tensor_info("t", (32,), offset=8), "not a multiple of 32"),
        (tensor_info("t", (99999,)), "more than the whole file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_tensors(tmp_path, info, words):
    assert words in refused(tmp_path / "a.gguf", head(1, 0) + info + bytes(512))


def test_tensors_may_not_repeat_or_overlap(tmp_path):
    path = tmp_path / "a.gguf"
    twice = tensor_info("t", (8,)) + tensor_info("t", (8,), offset=32)
    assert "'t' occurs twice" in refused(path, head(2, 0) + twice + bytes(512))
    over = tensor_info("a", (16,)) + tensor_info("b", (8,), offset=32)
    assert "'a' and 'b' overlap" in refused(path, head(2, 0) + over + bytes(512))


def test_every_truncation_is_refused(tmp_path):
    data = small(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    end = len(data) - 24  # where the last tensor ends: 136 bytes, padded to 160
    for length in range(0, end, 5):
        refused(path, data[:length])
    path.write_bytes(data[:end])
    open_gguf(path).close()


def test_random_damage_gives_an_error_or_a_sound_file(tmp_path):
    data = small(tmp_path / "a.gguf").read_bytes()
    path, rng = tmp_path / "b.gguf", random.Random(1)
    special = [b"\xff" * 8, bytes(8), struct.pack("<Q", 2**63), struct.pack("<Q", 2**31), b"\x09\0\0\0"]
    opened = 0
    tracemalloc.start()
    start = time.process_time()
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(4, len(data) - 8)
            new = rng.choice(special) if rng.random() < 0.4 else rng.randbytes(rng.choice((1, 1, 4, 8)))
            damaged[at : at + len(new)] = new
        path.write_bytes(damaged)
        try:
            gguf = open_gguf(path)
        except GGUFError as error:
            assert "\n" not in str(error)
            continue
        with gguf:
            opened += 1
            for name, info in gguf.tensors.items():
                assert len(gguf.tensor_data(name)) == info.nbytes
            for value in gguf.metadata.values():
                assert isinstance(value, (bool, int, float, str, list, LazyArray))
    assert time.process_time() - start < 20
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert 0 < opened < 1500


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_real_models(model, request):
    path = request.getfixturevalue(model)  # which may have to be made
    start = time.process_time()
    with open_gguf(path) as gguf:
        assert time.process_time() - start < 0.3
        assert gguf.architecture in ("llama", "gemma3")
        rows = gguf.tensors["token_embd.weight"].shape[1]
        tokens = gguf.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == rows == len(set(tokens))
        assert len(gguf.metadata["tokenizer.ggml.token_type"]) == rows
