"""Scales of a packed or unpacked superblock in registers, float unless said."""

from __future__ import annotations

from llvmlite import ir

from backends.cpu.matmul.codes import GROUPS, I16X32, PerGroup
from backends.cpu.matmul.layout import MXFP4, Format, Scaling
from backends.cpu.simd import F32X16, I8, I8X16, I32X16, Emitter, Value

I8X32 = ir.VectorType(I8, 32)


class Scales:
    """Reads the header at an address. Offsets are those of layout.py's tables."""

    def __init__(self, x: Emitter, fmt: Format, header: Value, unpacked: bool) -> None:
        self.x, self.fmt, self.header, self.unpacked = x, fmt, header, unpacked
        self.subs = 16 if fmt.scaling is Scaling.K_OFFSET else 8  # sub-block scales of a K format

    def _vector(self, index: int) -> PerGroup:
        """The `index`-th [32] of an unpacked header's floats, or of a packed header's halves."""
        if self.unpacked:
            return [self.x.load(self.header, 128 * index + 64 * g, F32X16, 64) for g in range(GROUPS)]
        load = self.x.load_bf16 if self.fmt.type_id == MXFP4 else self.x.load_f16
        return [load(self.header, 64 * index + 32 * g) for g in range(GROUPS)]

    def factor(self) -> PerGroup:
        """d."""
        return self._vector(self.subs if self.unpacked and self.fmt.blocks > 1 else 0)

    def minimum(self) -> PerGroup:
        """m, or dmin of a K format."""
        return self._vector(self.subs + 1 if self.unpacked and self.fmt.blocks > 1 else 1)

    def sub_scales(self, at: Value, index: int) -> PerGroup:
        """s of sub-block `index`, counted from the address `at` that `sub_address` gave."""
        x = self.x
        if self.unpacked:
            return [x.load(at, 128 * index + 64 * g, F32X16, 64) for g in range(GROUPS)]
        widen = x.b.zext if self.fmt.scaling is Scaling.K_AFFINE else x.b.sext
        raw = [x.load(at, 32 * index + 16 * g, I8X16) for g in range(GROUPS)]
        return [x.to_f32(widen(v, I32X16)) for v in raw]

    @property
    def sub_bytes(self) -> int:
        """Bytes from one sub-block's scales to the next one's."""
        return 128 if self.unpacked else 32

    def sub_address(self) -> Value:
        """Where the sub-block scales begin."""
        if self.unpacked:
            return self.header
        return self.x.add(self.header, 128 if self.fmt.scaling is Scaling.K_AFFINE else 64)

    def mins(self, pair: int) -> PerGroup:
        """m of sub-blocks 2 pair and 2 pair + 1, <32 x i16>."""
        x = self.x
        if self.unpacked:
            at = 128 * (self.subs + 2 + pair)
            return [x.load(self.header, at + 64 * g, I16X32, 64) for g in range(GROUPS)]
        raw = [x.load(self.header, 384 + 64 * pair + 32 * g, I8X32) for g in range(GROUPS)]
        return [x.b.zext(v, I16X32) for v in raw]
