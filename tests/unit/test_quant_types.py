import ctypes
import sys
from pathlib import Path

import llama_cpp
import pytest

from quant.types import GGML_TYPES, TYPE_IDS, row_bytes


@pytest.fixture(scope="module")
def ggml():
    folder = Path(llama_cpp.__file__).parent / "lib"
    names = {"win32": "ggml-base.dll", "darwin": "libggml-base.dylib"}
    lib = ctypes.CDLL(str(folder / names.get(sys.platform, "libggml-base.so")))
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_type_size.restype = ctypes.c_size_t
    lib.ggml_blck_size.restype = ctypes.c_int64
    return lib


def test_every_type_is_as_libggml_has_it(ggml):
    for type_id, fmt in GGML_TYPES.items():
        assert ggml.ggml_type_name(type_id).decode().upper() == fmt.name.upper()
        assert ggml.ggml_blck_size(type_id) == fmt.elements, fmt.name
        assert ggml.ggml_type_size(type_id) == fmt.nbytes, fmt.name


def test_ids_left_out_are_those_libggml_removed(ggml):
    for type_id in range(max(GGML_TYPES)):
        assert (type_id in GGML_TYPES) == (ggml.ggml_type_size(type_id) != 0), type_id


def test_names_lead_back_to_ids():
    assert {TYPE_IDS[fmt.name]: fmt for fmt in GGML_TYPES.values()} == GGML_TYPES


def test_row_bytes():
    assert row_bytes(TYPE_IDS["F32"], 7) == 28
    assert row_bytes(TYPE_IDS["Q4_1"], 576) == 360
    assert row_bytes(TYPE_IDS["Q6_K"], 512) == 420
    assert row_bytes(TYPE_IDS["Q6_K"], 0) == 0


@pytest.mark.parametrize(
    "type_id, n, words",
    [(TYPE_IDS["Q6_K"], 576, "Q6_K"), (TYPE_IDS["Q8_0"], -32, "Q8_0"), (4, 32, "unknown"), (999, 1, "999")],
)
def test_row_bytes_refuses_broken_rows(type_id, n, words):
    with pytest.raises(ValueError, match=words):
        row_bytes(type_id, n)
