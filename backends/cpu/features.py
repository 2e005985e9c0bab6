"""What the CPU's dot-product instructions are."""

from __future__ import annotations

import functools
import os

from llvmlite import binding

LEVELS = ("avx512_vnni", "avx_vnni", "avx2", "dotprod", "generic")


@functools.cache
def cpu_level() -> str:
    """The best of `LEVELS` that this CPU has; HETERO_CPU_LEVEL names a lower one to use instead.

    avx512_vnni  u8 x i8 dot products on 512-bit registers
    avx_vnni     the same on 256-bit registers
    avx2         the same from 16-bit multiplications, with f16 conversion and fma
    dotprod      ARM i8 x i8 dot products: our matmul compiles for it and is tested in an emulator, but was
                 timed on no such machine, so ggml's matmul, which has the same instructions, is used
    generic      none of these: ggml's matmul is used
    """
    available = available_levels()
    wanted = os.environ.get("HETERO_CPU_LEVEL")
    if wanted:
        if wanted not in available:
            raise ValueError(f"HETERO_CPU_LEVEL={wanted}: this CPU has {', '.join(available)}")
        return wanted
    return available[0]


def available_levels() -> list[str]:
    """The `LEVELS` that this CPU can run, best first."""
    features = dict(binding.get_host_cpu_features())
    return [level for level in LEVELS if _has(level, features)]


def _has(level: str, features: dict[str, bool]) -> bool:
    vector = [features.get(name, False) for name in ("avx2", "fma", "f16c")]
    if level == "avx512_vnni":
        return all(features.get(f"avx512{name}", False) for name in ("f", "bw", "dq", "vl", "vnni"))
    if level == "avx_vnni":
        return all(vector) and features.get("avxvnni", False)
    if level == "avx2":
        return all(vector)
    if level == "dotprod":
        return features.get("dotprod", False)
    return level == "generic"
