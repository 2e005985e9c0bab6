"""Unpack a panel's part to bytes and float scales, and move accumulators."""

from __future__ import annotations

from backends.cpu.matmul.codes import GROUPS, PerGroup, decode_words
from backends.cpu.matmul.layout import BLOCK, FORMATS, PANEL_ROWS, Format, Scaling
from backends.cpu.matmul.scales import Scales
from backends.cpu.matmul.tiles import NEAR
from backends.cpu.simd import F32, Emitter, Value, kernel, kernel_family


@kernel_family
def unpack_superblocks(x: Emitter, kind: int, variant: int, packed: Value, out: Value, count: Value) -> None:
    """Unpack superblocks of a panel to `out`, in the layout that layout.py gives. `variant` is unused."""
    fmt = FORMATS[kind]

    def superblock(_: Value, carried: list[Value]) -> list[Value]:
        w, out = carried
        for i, vector in enumerate(_header(x, fmt, w)):
            x.store(vector, out, 64 * i, 64)

        def block(_: Value | int, carried: list[Value]) -> list[Value]:
            codes, to = carried
            for line in range(0, fmt.code_bytes, 64):
                x.prefetch(codes, NEAR + line, 2)
            for word, registers in decode_words(x, fmt, codes):
                for g in range(GROUPS):
                    x.store(registers[g], to, 128 * word + 64 * g, 64)
            return [x.add(codes, fmt.code_bytes), x.add(to, BLOCK * PANEL_ROWS)]

        start = [x.add(w, fmt.header_bytes), x.add(out, fmt.unpacked_header_bytes)]
        if fmt.blocks == 1:
            block(0, start)
        else:
            x.loop(fmt.blocks, start, block)
        return [x.add(w, fmt.packed_bytes), x.add(out, fmt.unpacked_bytes)]

    x.loop(count, [packed, out], superblock)


def _header(x: Emitter, fmt: Format, w: Value) -> list[Value]:
    """The registers of an unpacked superblock's header, in order."""
    scales = Scales(x, fmt, w, unpacked=False)
    vectors: list[PerGroup] = []
    if fmt.blocks > 1:
        at = scales.sub_address()
        vectors += [scales.sub_scales(at, sub) for sub in range(scales.subs)]
    vectors.append(scales.factor())
    if fmt.scaling in (Scaling.AFFINE, Scaling.K_AFFINE):
        vectors.append(scales.minimum())
    if fmt.scaling is Scaling.K_AFFINE:
        vectors += [scales.mins(pair) for pair in range(4)]
    return [register for vector in vectors for register in vector]


@kernel
def clear_rows(x: Emitter, rows: Value, count: Value) -> None:
    """Zero `count` rows of 32 floats."""

    def row(_: Value, carried: list[Value]) -> list[Value]:
        for g in range(GROUPS):
            x.store(x.splat_f32(0.0), carried[0], 64 * g)
        return [x.add(carried[0], 128)]

    x.loop(count, [rows], row)


@kernel
def copy_rows(x: Emitter, rows: Value, target: Value, target_stride: Value, count: Value) -> None:
    """Copy `count` rows of 32 floats to `target`, whose rows are `target_stride` bytes apart."""

    def row(_: Value, carried: list[Value]) -> list[Value]:
        for g in range(GROUPS):
            x.store(x.load(carried[0], 64 * g), carried[1], 64 * g)
        return [x.add(carried[0], 128), x.add(carried[1], target_stride)]

    x.loop(count, [rows, target], row)


@kernel
def copy_floats(x: Emitter, source: Value, target: Value, count: Value) -> None:
    """Copy `count` float32."""

    def one(i: Value, carried: list[Value]) -> list[Value]:
        x.store(x.load(carried[0], 0, F32, 4), carried[1], 0, 4)
        return [x.add(carried[0], 4), x.add(carried[1], 4)]

    x.loop(count, [source, target], one)


@kernel
def prefetch_lines(x: Emitter, address: Value, lines: Value) -> None:
    """Fetch cache lines to the second level."""

    def line(_: Value, carried: list[Value]) -> list[Value]:
        x.prefetch(carried[0], 0, 2)
        return [x.add(carried[0], 64)]

    x.loop(lines, [address], line)


@kernel
def prefetch_rows(x: Emitter, rows: Value, stride: Value, count: Value) -> None:
    """Fetch `count` rows of 32 floats, `stride` bytes apart, for writing; count may be 0."""

    def row(_: Value, carried: list[Value]) -> list[Value]:
        for g in range(GROUPS):
            x.prefetch(carried[0], 64 * g, 3, write=True)
        return [x.add(carried[0], stride)]

    x.loop_maybe(count, [rows], row)
