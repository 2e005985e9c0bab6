"""The inner loops: 32 rows of packed or unpacked weights times a tile of 1 to 8 tokens.

Every path computes one output element by the same float operations in the same order, along k, whatever the
tile, the chunk or the thread: a token's result does not depend on its batch. With i the integer dot product
of a block's codes (exact), a the activations' scale, and the weights' d, m, s as layout.py names them:

    OFFSET     y = fma(i, d * a, y)                              i starts at -offset * sum
    AFFINE     y = fma(i, d * a, y);  y = fma(m, a * sum, y)
    K_AFFINE   z = fma(i, s, z) over 8 blocks;  y = fma(fma(z, d, -(dmin * mins)), a, y)
    K_OFFSET   z = fma(i, s, z) over 16 half blocks;  y = fma(z * d, a, y)
    K_LEVELS   z = fma(i, s, z) over 8 blocks;  y = fma(z * d, a, y)

    FLOAT      z = fma(w, x, z) over 32 weights;  y = y + z

where mins is the integer dot product of the superblock's m and its activation sums.
"""

from __future__ import annotations

from backends.cpu.matmul.activations import LARGEST_TILE, REGION_BYTES, sum_region
from backends.cpu.matmul.codes import (
    GROUPS,
    PerGroup,
    Words,
    counts_as_signed,
    decode_words,
    dot_bytes,
    dot_pairs,
    load_words,
)
from backends.cpu.matmul.layout import BF16, BLOCK, F16, F32, FORMATS, PANEL_ROWS, Format, Scaling
from backends.cpu.matmul.scales import Scales
from backends.cpu.simd import LANES, Emitter, Value, kernel_family

TILES = (1, 2, 3, 4, 6, 8)
UNPACKED = 16  # added to a tile's size: the weights are unpacked, and in the first cache
NEAR, FAR = 4096, 12288  # bytes ahead that are fetched to the first and to the second cache


class _Tile:
    """Generates the work of one superblock for `size` tokens; accumulators are [group][token]."""

    def __init__(self, x: Emitter, fmt: Format, size: int, cached: bool) -> None:
        self.x, self.fmt, self.size, self.cached = x, fmt, size, cached
        self.unpacked = unpacked = cached and fmt.bits < 8
        self.signed = counts_as_signed(fmt)
        self.code_bytes = BLOCK * PANEL_ROWS if unpacked else fmt.code_bytes
        self.header_bytes = fmt.unpacked_header_bytes if unpacked else fmt.header_bytes
        self.superblock_bytes = fmt.unpacked_bytes if unpacked else fmt.packed_bytes

    def splat(self, value: Value) -> list[PerGroup]:
        return [[value] * self.size for _ in range(GROUPS)]

    def nested(self, flat: list[Value]) -> list[PerGroup]:
        return [list(flat[g * self.size : (g + 1) * self.size]) for g in range(GROUPS)]

    def words(self, codes: Value) -> Words:
        """A block's eight words."""
        if self.unpacked:
            return load_words(self.x, codes, range(8))
        return decode_words(self.x, self.fmt, codes)

    def fetch_ahead(self, w: Value, block: Value | int = 0) -> None:
        """Fetch a block's share of the superblocks to come (header included), where it comes from memory."""
        if self.cached:
            return
        share = self.superblock_bytes // self.fmt.blocks
        at = self.x.add(w, self.x.mul(block, share) if self.fmt.blocks > 1 else 0)
        for line in range(0, share, 64):
            self.x.prefetch(at, FAR + line, 2)
            self.x.prefetch(at, NEAR + line, 3)

    def dot(self, total: list[PerGroup], word: int, weights: PerGroup, activations: Value) -> None:
        for t in range(self.size):
            token = self.x.broadcast_i32(activations, 4 * (word * self.size + t))
            for g in range(GROUPS):
                total[g][t] = dot_bytes(self.x, total[g][t], weights[g], token, self.signed)

    def block(self, w: Value, activations: Value, a: Value, sums: Value, y: list[PerGroup]) -> None:
        """y += one block of an OFFSET or AFFINE format."""
        x, affine = self.x, self.fmt.scaling is Scaling.AFFINE
        self.fetch_ahead(w)
        scales = Scales(x, self.fmt, w, self.unpacked)
        total = self.splat(x.splat_i32(0))
        if not (affine or self.signed):
            starts = [x.broadcast_i32(sums, 4 * t) for t in range(self.size)]
            if self.fmt.offset_bits < 7:
                starts = [x.b.ashr(v, x.splat_i32(7 - self.fmt.offset_bits)) for v in starts]
            total = [list(starts) for _ in range(GROUPS)]
        for word, weights in self.words(x.add(w, self.header_bytes)):
            self.dot(total, word, weights, activations)
        d = scales.factor()
        m = scales.minimum() if affine else []
        for t in range(self.size):
            scale = x.broadcast_f32(a, 4 * t)
            sum_ = x.broadcast_f32(sums, 4 * t) if affine else None
            for g in range(GROUPS):
                y[g][t] = x.fma(x.to_f32(total[g][t]), x.fmul(d[g], scale), y[g][t])
                if affine:
                    y[g][t] = x.fma(m[g], sum_, y[g][t])

    def floats(self, w: Value, activations: Value, y: Value) -> None:
        """y += 32 weights of each row that are floats; y is an address."""
        x, load = self.x, {F16: self.x.load_f16, BF16: self.x.load_bf16, F32: self.x.load}[self.fmt.type_id]
        row_bytes = self.fmt.bits // 8
        if not self.cached:  # one request a line: with two, 8 tokens were half as fast
            ahead = NEAR if self.size == 1 else FAR
            for line in range(0, self.superblock_bytes, 64):
                x.prefetch(w, ahead + line, 3)
        z = self.splat(x.splat_f32(0.0))
        for i in range(BLOCK):
            weights = [load(w, row_bytes * (PANEL_ROWS * i + LANES * g)) for g in range(GROUPS)]
            for t in range(self.size):
                token = x.broadcast_f32(activations, 4 * (i * self.size + t))
                for g in range(GROUPS):
                    z[g][t] = x.fma(weights[g], token, z[g][t])
        for t in range(self.size):
            for g in range(GROUPS):
                at = 128 * t + 64 * g
                x.store(x.fadd(x.load(y, at), z[g][t]), y, at)

    def superblock(self, w: Value, activations: Value, a: Value, sums: Value, y: Value) -> None:
        """y += one superblock of a K format; y is an address."""
        x, size, affine = self.x, self.size, self.fmt.scaling is Scaling.K_AFFINE
        scales = Scales(x, self.fmt, w, self.unpacked)
        halves = 2 if self.fmt.scaling is Scaling.K_OFFSET else 1

        def block(i: Value, carried: list[Value]) -> list[Value]:
            self.fetch_ahead(w, i)
            codes, s, activations, starts, *flat = carried
            z = self.nested(flat)
            total = self.superblock_start(starts, 0)
            for word, weights in self.words(codes):
                if halves == 2 and word == 4:
                    total = self.superblock_start(starts, 1)
                self.dot(total, word, weights, activations)
                if word == 7 or (halves == 2 and word == 3):
                    sub = scales.sub_scales(s, word // 4 if halves == 2 else 0)
                    for g in range(GROUPS):
                        z[g] = [x.fma(x.to_f32(total[g][t]), sub[g], z[g][t]) for t in range(size)]
            following = starts if affine else x.add(starts, 4 * 2 * size)
            return [
                x.add(codes, self.code_bytes),
                x.add(s, halves * scales.sub_bytes),
                x.add(activations, BLOCK * size),
                following,
                *z[0],
                *z[1],
            ]

        start = [x.add(w, self.header_bytes), scales.sub_address(), activations, sums]
        carried = x.loop(self.fmt.blocks, [*start, *[x.splat_f32(0.0)] * (GROUPS * size)], block)
        self.finish(scales, self.nested(carried[4:]), a, sums, y)

    def superblock_start(self, starts: Value, half: int) -> list[PerGroup]:
        """A block's (or half block's) first accumulators; `starts` has -32 * each half's activation sum."""
        x, size = self.x, self.size
        if self.fmt.scaling is Scaling.K_AFFINE or self.signed:
            return self.splat(x.splat_i32(0))
        tokens = [x.broadcast_i32(starts, 4 * (half * size + t)) for t in range(size)]
        if self.fmt.scaling is Scaling.K_LEVELS:
            others = [x.broadcast_i32(starts, 4 * (size + t)) for t in range(size)]
            tokens = [x.shift_right(x.b.add(*both), -2) for both in zip(tokens, others, strict=True)]
        return [list(tokens) for _ in range(GROUPS)]

    def finish(self, scales: Scales, z: list[PerGroup], a: Value, sums: Value, y: Value) -> None:
        """Apply a superblock's own scales, and its mins where it has some."""
        x, affine = self.x, self.fmt.scaling is Scaling.K_AFFINE
        mins = self.splat(x.splat_i32(0))
        if affine:
            for pair in range(4):
                m = scales.mins(pair)
                for t in range(self.size):
                    sum_ = x.broadcast_i32(sums, 4 * (pair * self.size + t))
                    for g in range(GROUPS):
                        mins[g][t] = dot_pairs(x, mins[g][t], m[g], sum_)
        d = scales.factor()
        dmin = scales.minimum() if affine else []
        for t in range(self.size):
            scale = x.broadcast_f32(a, 4 * t)
            for g in range(GROUPS):
                value = x.fmul(z[g][t], d[g])
                if affine:
                    less = x.b.fneg(x.fmul(dmin[g], x.to_f32(mins[g][t])))
                    value = x.fma(z[g][t], d[g], less)
                at = 128 * t + 64 * g
                x.store(x.fma(value, scale, x.load(y, at)), y, at)


def _multiply_tile(
    x: Emitter,
    kind: int,
    variant: int,
    weights: Value,
    activations: Value,
    a: Value,
    sums: Value,
    y: Value,
    superblocks: Value,
) -> None:
    """y[token][32 rows] += panel . tile; `variant` is the tile's size, plus `UNPACKED` for such weights."""
    fmt, size = FORMATS[kind], variant % UNPACKED
    tile = _Tile(x, fmt, size, variant >= UNPACKED)
    region_bytes = REGION_BYTES[fmt.activation_kind]
    in_memory = fmt.blocks > 1 or fmt.scaling is Scaling.FLOAT  # y between steps

    def step(_: Value, carried: list[Value]) -> list[Value]:
        w, activations, a, sums, *flat = carried
        if fmt.scaling is Scaling.FLOAT:
            tile.floats(w, activations, y)
        elif fmt.blocks == 1:
            values = tile.nested(flat)
            tile.block(w, activations, a, sums, values)
            flat = [*values[0], *values[1]]
        else:
            tile.superblock(w, activations, a, sums, y)
        return [
            x.add(w, tile.superblock_bytes),
            x.add(activations, region_bytes[0] * size),
            x.add(a, region_bytes[1] * size),
            x.add(sums, region_bytes[sum_region(fmt)] * size),
            *flat,
        ]

    pointers = [weights, activations, a, sums]
    if in_memory:
        x.loop(superblocks, pointers, step)
        return
    values = [x.load(y, 128 * t + 64 * g) for g in range(GROUPS) for t in range(size)]
    for i, value in enumerate(x.loop(superblocks, [*pointers, *values], step)[4:]):
        x.store(value, y, 128 * (i % size) + 64 * (i // size))


@kernel_family
def multiply_tile(
    x: Emitter,
    kind: int,
    unpacked: int,
    size: Value,
    weights: Value,
    scratch: Value,
    activations: Value,
    a: Value,
    sums: Value,
    y: Value,
    superblocks: Value,
) -> None:
    """y[token][32 rows] += panel . tile over `superblocks` superblocks; `kind` is a type id, y in rows of 32.

    `size` is one of the tile sizes up to LARGEST_TILE. With `unpacked` the same superblocks lie unpacked at
    `scratch` (those of a format that is stored in bytes, as they are); small tiles still read `weights`.
    """
    b = x.b
    done = b.append_basic_block("end")
    impossible = b.append_basic_block("impossible")
    switch = b.switch(size, impossible)
    for tile in (t for t in TILES if t <= LARGEST_TILE):
        case = b.append_basic_block(f"tile{tile}")
        switch.add_case(x.const(tile), case)
        b.position_at_end(case)
        from_scratch = bool(unpacked) and tile >= min(4, LARGEST_TILE)
        arguments = [scratch if from_scratch else weights, activations, a, sums, y, superblocks]
        x.call_family(_multiply_tile, kind, tile + UNPACKED * from_scratch, arguments)
        b.branch(done)
    b.position_at_end(impossible)
    b.unreachable()
    b.position_at_end(done)
