"""Which matmul a format gets, what doctor says about it, and how it is measured."""

from __future__ import annotations

import numpy as np
import pytest

from backends.cpu import machine, matmul
from backends.cpu.features import LEVELS, cpu_level
from backends.cpu.matmul import FORMATS, choice
from backends.cpu.measure import RepeatedProduct, median_seconds
from backends.cpu.packed import packable
from backends.ggml.lib import ggml
from hetero.plan import checks, kernels
from quant.gguf import open_gguf
from quant.types import GGML_TYPES, TYPE_IDS

has_kernels = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")


def test_the_table_has_every_format_at_every_level_with_kernels():
    assert set(choice.SPEED) == {"avx512_vnni", "avx_vnni", "avx2"} < set(LEVELS)
    names = {f.name for f in FORMATS.values()}
    for speeds in choice.SPEED.values():
        assert set(speeds) == names
        assert all(0.1 < s < 100 for pair in speeds.values() for s in pair)


def test_ours_only_where_it_was_measured_to_be_no_slower(monkeypatch):
    monkeypatch.setitem(choice.SPEED, "avx2", {"Q4_0": (1.5, 2.0), "Q5_0": (0.8, 2.0), "Q8_0": (1.5, 0.8)})
    chosen = {name: choice.kernel_for(TYPE_IDS[name], "avx2") for name in ("Q4_0", "Q5_0", "Q8_0", "Q6_K")}
    assert chosen == {"Q4_0": "ours", "Q5_0": "ggml", "Q8_0": "ggml", "Q6_K": "ggml"}
    assert choice.kernel_for(TYPE_IDS["IQ1_S"], "avx2") == "ggml"
    assert choice.kernel_for(TYPE_IDS["Q4_0"], "dotprod") == "ggml"


@pytest.mark.parametrize("level", ["dotprod", "generic"])
def test_levels_without_measured_kernels_are_ggmls(level, smollm2_path, monkeypatch):
    monkeypatch.setattr(matmul, "cpu_level", lambda: level)
    monkeypatch.setattr(choice, "cpu_level", lambda: level)
    with open_gguf(smollm2_path) as gguf:
        assert not any(packable(gguf, t.name) for t in gguf.tensors.values() if len(t.shape) > 1)
    assert {choice.kernel_for(type_id) for type_id in FORMATS} == {"ggml"}


@has_kernels
def test_a_weight_is_packed_only_where_ours_was_chosen(smollm2_path, monkeypatch):
    gguf = open_gguf(smollm2_path)
    name = "blk.0.ffn_up.weight"
    assert packable(gguf, name)
    monkeypatch.setitem(choice.SPEED, cpu_level(), {})
    assert not packable(gguf, name)
    gguf.close()


def test_chosen_kernels_cover_the_weight_formats():
    chosen = kernels.chosen_kernels()
    assert set(chosen) < {f.name for f in GGML_TYPES.values()}
    assert {"F32", "F16", "BF16", "Q2_K", *(f.name for f in FORMATS.values())} <= set(chosen)
    assert chosen["Q2_K"] == "ggml"
    assert not {"I32", "Q8_1", "Q8_K"} & set(chosen)


@has_kernels
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "F16"])
def test_repeated_products_are_products(name):
    """A copy of the weights made of zeros gives zeros, the ordinary bytes do not, and all copies are read."""
    type_id, m, k, n = TYPE_IDS[name], 64, 512, 3
    product = RepeatedProduct(type_id, m, k, n, threads=2, copies=2, repeats=4)
    try:
        product.run()
        for expect_zeros in (False, True):
            if expect_zeros:
                product.weights.reshape(2, -1)[1] = 0x80 if name == "Q8_0" else 0
                product.run()
            out = np.empty((n, m), np.float32)
            ggml().backend_tensor_get(product.last, out.ctypes.data, 0, out.nbytes)
            assert np.isfinite(out).all() and out.any() != expect_zeros
        assert median_seconds(product.run, 3) > 0
    finally:
        product.close()


@has_kernels
def test_limits_of_the_machine(monkeypatch):
    """More than any kernel reaches; a few percent of what the slowest machine with these kernels could do."""
    monkeypatch.setattr(machine, "DOT_ROUNDS", 1 << 14)
    monkeypatch.setattr(machine, "READ_BYTES", 32 << 20)
    assert 1e10 < machine.dot_peak(1) < 1e13
    assert 1e8 < machine.read_bandwidth(1) < 2e12
    assert machine.dot_peak(2) > 0 and machine.read_bandwidth(2) > 0


@has_kernels
def test_doctor_measures_the_chosen_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "ROWS", 256)
    monkeypatch.setattr(kernels, "COLUMNS", 512)
    monkeypatch.setattr(kernels, "CACHE_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "READ_BYTES", 32 << 20)
    found = {c.name: c for c in checks.run_checks(measure_kernels=True)}
    assert all(c.ok for name, c in found.items() if name in ("matmul", "limits"))
    ours = [name for name, whose in found["matmul"].facts.items() if whose == "ours"]
    assert ours and found["limits"].facts["dot_gop_s"] > 0
    for name in ours:
        facts = found[f"matmul {name}"].facts
        assert facts["format"] == name and facts["few_gop_s"] > 0 and facts["many_gop_s"] > 0
    assert not any(c.name.startswith("matmul ") for c in checks.run_checks())


def test_a_failing_measurement_is_a_failed_check(monkeypatch):
    def broken():
        raise OSError("no clock")

    monkeypatch.setattr(kernels, "measure_machine", broken)
    last = list(checks.run_checks(measure_kernels=True))[-1]
    assert (last.name, last.ok, last.detail) == ("limits", False, "no clock")
