"""Names of the mixtures of tensor types that a whole file can be quantized to.

Source: `enum llama_ftype` in llama.h; a test compares each id with llama_cpp's constants. A mixture gives
most tensors one type and the sensitive ones more bits: Q4_K_M, for one, is Q4_K with some Q6_K.
"""

from __future__ import annotations

FTYPES: dict[str, int] = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K_M": 17,
    "Q5_K_S": 16,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "Q4_1": 3,
    "Q4_0": 2,
    "Q3_K_L": 13,
    "Q3_K_M": 12,
    "Q3_K_S": 11,
    "Q2_K": 10,
    "Q2_K_S": 21,
    "Q2_0": 41,
    "Q1_0": 40,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "IQ3_M": 27,
    "IQ3_S": 26,
    "IQ3_XS": 22,
    "IQ3_XXS": 23,
    "IQ2_M": 29,
    "IQ2_S": 28,
    "IQ2_XS": 20,
    "IQ2_XXS": 19,
    "IQ1_M": 31,
    "IQ1_S": 24,
    "TQ2_0": 37,
    "TQ1_0": 36,
    "MXFP4_MOE": 38,
}

# Plain float files: every matrix gets this one type, so single tensors cannot be given another.
FLOAT_FTYPES = frozenset({"F32", "F16", "BF16"})

# What `--tensor-type` may ask for: the types that ggml_quantize_chunk writes (ggml.c).
TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
    "MXFP4", "NVFP4", "Q1_0", "Q2_0",
)  # fmt: skip
