"""What the operators of a mixture of experts (routing, arranging, experts) share: sizes, and the words of
their parameters.
"""

from __future__ import annotations

from numba import njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.matmul.activations import TOKEN_BLOCK
from backends.cpu.matmul.drive import SCRATCH_BYTES as MATMUL_SCRATCH_BYTES
from backends.cpu.simd import F32, I32, Emitter, Value, kernel
from backends.cpu.words import load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC
from backends.ggml.models.mixture import Gating

SEGMENT = TOKEN_BLOCK
UNIT = 256  # columns: eight panels of weights, whole blocks of activations of every kind
PRODUCT_BYTES = SEGMENT * UNIT * 2 * 4  # gate | up of a unit; before that, what a thread sorts with
SCRATCH_BYTES = PRODUCT_BYTES + MATMUL_SCRATCH_BYTES  # of each thread

# Words of the operators' parameters, of which each uses some. K, WIDTH: of the products' inputs and outputs.
# ROW: bytes of an arranged row, in all its kinds. Kinds, those of the tokens and of the arranged rows, are
# bits (1 << BLOCKWISE, ...); KIND is the one that `gate` quantizes to. MODE: as in linear.py. Then
# the address of the bias of selection, or 0, and the numbers of a Mixture; that of what each expert's output
# is multiplied with, or 0.
(P_COUNT_AT, P_EXPERTS, P_USED, P_SCRATCH, P_K, P_WIDTH, P_ROW) = range(7)
(P_SOURCE_KINDS, P_KINDS, P_KIND, P_MODE, P_COUNTER) = range(7, 12)
(P_SELECTION_BIAS, P_GATING, P_NORMED, P_SCALE, P_GROUPS, P_GROUPS_USED) = range(12, 18)
P_EXPERT_SCALES, P_MATRICES = 18, 19
SOFTMAX, SIGMOID, CHOSEN = range(3)  # values of P_GATING
GATINGS: dict[Gating, int] = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "chosen": CHOSEN}


@kernel(returns=types.float32)
def load_f32(x: Emitter, address: Value) -> Value:
    return x.load(address, 0, F32, 4)


@kernel
def store_i32(x: Emitter, address: Value, value: Value) -> None:
    x.store(x.b.trunc(value, I32), address, 0, 4)


@njit(nogil=True, cache=True)
def source_of(tensor, index):
    """Address of a source's data."""
    return load_i64((load_i64((tensor + 8 * (WORD_SRC + index),)) + 8 * WORD_DATA,))


SIGNATURE = types.void(types.int64, types.int32, types.int32, types.int64)
