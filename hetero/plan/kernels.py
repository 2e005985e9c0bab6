"""Which matmul each weight format gets, and how fast ours are here: for `hetero doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero.plan.devices import usable_cores
from quant.types import GGML_TYPES

ROWS = COLUMNS = 2048  # of the matrix that is measured
FEW, MANY = 1, 64  # tokens: memory is the limit, arithmetic is the limit
NO_WEIGHTS = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}  # integers, and ggml's activations
CACHE_BYTES = 96 << 20  # weights that few tokens read in turn are at least as large


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits on `threads` threads: operations and bytes a second."""

    threads: int
    dot_gop_s: float
    read_gb_s: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one format: billions of operations a second, and bytes of weights a second with few tokens."""

    format: str
    few_gop_s: float
    few_gb_s: float
    many_gop_s: float


def chosen_kernels() -> dict[str, str]:
    """Format name: "ours" or "ggml", for every format that weights can have."""
    from backends.cpu.matmul.choice import kernel_for

    return {f.name: kernel_for(type_id) for type_id, f in GGML_TYPES.items() if f.name not in NO_WEIGHTS}


def measure_machine() -> Machine:
    """About a second."""
    from backends.cpu.machine import dot_peak, read_bandwidth

    threads = usable_cores()
    return Machine(threads, dot_peak(threads) * 1e-9, read_bandwidth(threads) * 1e-9)


def measure_kernels() -> Iterator[Speed]:
    """Our matmul in each format that it is chosen for. The first time ever, each is compiled."""
    from backends.cpu.matmul import FORMATS, packed_nbytes
    from backends.cpu.matmul.choice import kernel_for

    for type_id, fmt in FORMATS.items():
        if kernel_for(type_id) == "ours":
            few, many = _seconds(type_id, FEW), _seconds(type_id, MANY)
            operations = 2e-9 * ROWS * COLUMNS
            nbytes = packed_nbytes(type_id, ROWS, COLUMNS) * 1e-9
            yield Speed(fmt.name, FEW * operations / few, nbytes / few, MANY * operations / many)


def _seconds(type_id: int, tokens: int) -> float:
    """Time of one product."""
    from backends.cpu.matmul import packed_nbytes
    from backends.cpu.measure import RepeatedProduct, median_seconds

    copies = -(-CACHE_BYTES // packed_nbytes(type_id, ROWS, COLUMNS)) if tokens == FEW else 1
    repeats = max(copies, 4)
    product = RepeatedProduct(type_id, ROWS, COLUMNS, tokens, usable_cores(), copies, repeats)
    try:
        return median_seconds(product.run, 5) / repeats
    finally:
        product.close()


__all__ = ["Machine", "Speed", "chosen_kernels", "measure_kernels", "measure_machine"]
