"""Which matmul serves a weight format at a CPU level, ours or ggml's: what was measured.

SPEED[level][format] is how many times as fast ours was as the faster of ggml's two (plain, CPU_REPACK): the
lowest at 1 to 64 tokens, and at 512; one thread, weights of 4096x4096. A weight always goes through one
kernel, since results must not depend on the batch, so ours has to be no slower at both.

    avx512_vnni   python tests/bench/kernels.py --threads 1 --shapes 4096x4096 --types ..., on a Zen 5 (which
                  has avx512_bf16 too)
    avx_vnni      the same machine with HETERO_CPU_LEVEL=avx_vnni and HETERO_GGML_LIBS naming a ggml built for
                  AVX2 and AVX-VNNI, since a CPU that has no more would run that one
    avx2          likewise, with a ggml built for AVX2

There is no row for dotprod (ARM), where everything goes through ggml's kernels: tests/unit/test_arm.py shows
in an emulator that our inner loops give the same bits there, but nobody has timed them on such a machine.

Fastest runs, which take turns, in the thread's own time; one to two measurements. With one token ours reads
the weights at nearly the memory's bandwidth, and ggml's best are not far from it: at F16 both are there (0.94
and 1.06 in two measurements, 1.0 here). BF16 at avx512_vnni loses to avx512_bf16 from 64 tokens on.
"""

from __future__ import annotations

from typing import Literal

from backends.cpu.features import cpu_level
from backends.cpu.matmul.layout import FORMATS

SPEED: dict[str, dict[str, tuple[float, float]]] = {
    "avx512_vnni": {
        "Q4_0": (1.36, 2.43),
        "Q4_1": (4.29, 13.12),
        "Q5_0": (2.73, 6.54),
        "Q5_1": (4.65, 13.87),
        "Q8_0": (2.00, 5.19),
        "Q4_K": (1.27, 1.53),
        "Q5_K": (1.60, 1.50),
        "Q6_K": (1.25, 1.71),
        "IQ4_NL": (1.31, 2.43),
        "IQ4_XS": (1.82, 1.55),
        "MXFP4": (1.41, 2.51),
        "F16": (1.00, 1.03),
        "BF16": (0.81, 0.84),
        "F32": (1.02, 1.66),
    },
    "avx_vnni": {
        "Q4_0": (1.39, 2.66),
        "Q4_1": (4.36, 7.02),
        "Q5_0": (2.77, 5.51),
        "Q5_1": (4.85, 7.85),
        "Q8_0": (2.06, 3.15),
        "Q4_K": (1.39, 2.51),
        "Q5_K": (1.71, 2.50),
        "Q6_K": (1.33, 2.51),
        "IQ4_NL": (1.30, 2.66),
        "IQ4_XS": (2.22, 2.86),
        "MXFP4": (1.53, 2.61),
        "F16": (1.08, 1.08),
        "BF16": (1.16, 1.75),
        "F32": (1.18, 1.72),
    },
    "avx2": {
        "Q4_0": (1.53, 3.46),
        "Q4_1": (4.25, 7.16),
        "Q5_0": (2.76, 6.43),
        "Q5_1": (4.60, 8.48),
        "Q8_0": (1.22, 1.17),
        "Q4_K": (1.39, 2.57),
        "Q5_K": (1.74, 2.61),
        "Q6_K": (1.29, 2.56),
        "IQ4_NL": (1.09, 1.12),
        "IQ4_XS": (1.43, 1.35),
        "MXFP4": (1.53, 3.52),
        "F16": (1.17, 1.36),
        "BF16": (1.13, 1.68),
        "F32": (1.28, 1.65),
    },
}


def kernel_for(type_id: int, level: str | None = None) -> Literal["ours", "ggml"]:
    """Whose matmul weights of a ggml type go through, at a level of features.LEVELS (this CPU's if None)."""
    fmt = FORMATS.get(type_id)
    speeds = SPEED.get(level or cpu_level(), {})
    if fmt is None or fmt.name not in speeds or min(speeds[fmt.name]) < 1:
        return "ggml"
    return "ours"


__all__ = ["SPEED", "kernel_for"]
