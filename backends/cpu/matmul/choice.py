"""Which matmul serves a weight format at a CPU level, ours or ggml's: what was measured.

SPEED[level][format] is how many times as fast ours was as the faster of ggml's two (plain, CPU_REPACK): the
lowest at 1 to 64 tokens, and at 512; one thread, weights of 4096x4096. A weight always goes through one
kernel, since results must not depend on the batch, so ours has to be no slower at both; a tenth is noise.

    avx512_vnni   python tests/bench/kernels.py --threads 1, on a Zen 5 (which has avx512_bf16 too)
    avx_vnni      the same machine with HETERO_CPU_LEVEL=avx_vnni and HETERO_GGML_LIBS naming a ggml built for
                  AVX2 and AVX-VNNI, since a CPU that has no more would run that one
    avx2          likewise, with a ggml built for AVX2

There is no row for dotprod (ARM), where everything goes through ggml's kernels: tests/unit/test_arm.py shows
in an emulator that our inner loops give the same bits there, but nobody has timed them on such a machine.

Medians of one to five runs, on a machine with other work: repeat them before concluding from a few percent.
With one token F16, F32 and BF16 only read memory, ours as fast as ggml's; from there on they differ (BF16
at avx512_vnni loses to avx512_bf16 from 16 tokens on). F16 at one token is 0.93 of a ggml kernel that could
not be used as it is: its bits for one row are not those for two, so graphs would be padded to two (see
ggml/probe.py).
"""

from __future__ import annotations

from typing import Literal

from backends.cpu.features import cpu_level
from backends.cpu.matmul.layout import FORMATS

NOISE = 0.9

SPEED: dict[str, dict[str, tuple[float, float]]] = {
    "avx512_vnni": {
        "Q4_0": (1.41, 2.33),
        "Q4_1": (4.70, 12.28),
        "Q5_0": (2.82, 5.80),
        "Q5_1": (5.04, 14.51),
        "Q8_0": (1.79, 4.74),
        "Q4_K": (1.36, 1.43),
        "Q5_K": (1.72, 1.43),
        "Q6_K": (1.30, 1.78),
        "IQ4_NL": (1.36, 2.50),
        "IQ4_XS": (1.74, 1.51),
        "MXFP4": (1.26, 2.89),
        "F16": (0.93, 1.08),
        "BF16": (0.74, 0.81),
        "F32": (1.02, 1.75),
    },
    "avx_vnni": {
        "Q4_0": (0.98, 3.17),
        "Q4_1": (4.50, 6.82),
        "Q5_0": (2.71, 5.25),
        "Q5_1": (4.58, 7.84),
        "Q8_0": (1.87, 3.20),
        "Q4_K": (1.35, 2.46),
        "Q5_K": (1.51, 2.40),
        "Q6_K": (1.21, 2.36),
        "IQ4_NL": (1.19, 2.63),
        "IQ4_XS": (2.31, 2.89),
        "MXFP4": (1.58, 2.58),
        "F16": (1.10, 1.30),
        "BF16": (1.10, 1.75),
        "F32": (1.11, 1.60),
    },
    "avx2": {
        "Q4_0": (1.60, 3.76),
        "Q4_1": (3.96, 7.28),
        "Q5_0": (2.90, 6.53),
        "Q5_1": (4.74, 8.42),
        "Q8_0": (1.36, 1.34),
        "Q4_K": (1.44, 2.44),
        "Q5_K": (1.40, 2.57),
        "Q6_K": (1.38, 2.71),
        "IQ4_NL": (0.98, 1.44),
        "IQ4_XS": (1.28, 1.42),
        "MXFP4": (1.80, 3.88),
        "F16": (0.95, 1.29),
        "BF16": (1.08, 1.71),
        "F32": (1.24, 1.65),
    },
}


def kernel_for(type_id: int, level: str | None = None) -> Literal["ours", "ggml"]:
    """Whose matmul weights of a ggml type go through, at a level of features.LEVELS (this CPU's if None)."""
    fmt = FORMATS.get(type_id)
    speeds = SPEED.get(level or cpu_level(), {})
    if fmt is None or fmt.name not in speeds or min(speeds[fmt.name]) < NOISE:
        return "ggml"
    return "ours"


__all__ = ["SPEED", "kernel_for"]
