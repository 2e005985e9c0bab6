"""Files that `hetero quantize` made, computed by our stage and by libllama."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from distance import relative

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from reference import forward
from tiny_models import libllama_logits

from quant.blocks import dequantize
from quant.gguf import GGUFFile
from quant.types import GGML_TYPES

TOKENS = 64
# Both sides multiply the same weights by activations rounded to 8 bits, which through 12 layers moves
# the logits by 3.8 % (of norms) from the exact ones, and libllama with flash attention as far from libllama
# without. We may be no farther from either than that, with this much room for chance.
SPREAD_ROOM = 1.25
ROUNDED_ACTIVATIONS_BOUND = 0.06  # in case all three were to go wrong together
TOP1_ROOM = 0.1  # of the tokens; the best of 49,152 random logits are close


class Decoded:
    """A model's weights as float32, in the form that `forward` reads."""

    def __init__(self, file: GGUFFile):
        self._file, self.tensors = file, file.tensors

    def tensor_data(self, name: str) -> np.ndarray:
        t = self.tensors[name]
        return (
            dequantize(t.type, self._file.tensor_data(name), t.shape[::-1]).astype(np.float32).view(np.uint8)
        )


@pytest.mark.parametrize("type_name", ["Q5_K_M", "Q6_K"])
def test_logits_of_quantized_models(type_name: str, quantized: Callable[[str], Path]):
    path = quantized(type_name)
    driver = Driver(path)
    ids = np.random.default_rng(0).integers(3, driver.config.n_vocab, TOKENS).tolist()
    matrices = [t for t in driver.gguf.tensors.values() if len(t.shape) > 1]
    assert sum(t.shape[0] * t.shape[1] for t in matrices) > 100e6
    types = {GGML_TYPES[t.type].name for t in matrices}
    assert types == ({"Q5_K", "Q6_K"} if type_name == "Q5_K_M" else {"Q6_K"})
    ours = driver.logits(ids)
    exact = forward(Decoded(driver.gguf), driver.config, ids, np.float16)  # type: ignore[arg-type]
    driver.close()
    plain, flash = libllama_logits(path, ids), libllama_logits(path, ids, flash=True)
    spread = relative(flash, plain)
    print(f"ours to libllama {relative(ours, plain):.4f}, libllama to itself {spread:.4f}")
    print(f"to exact: ours {relative(ours, exact):.4f}, libllama {relative(plain, exact):.4f}")
    best, agree = plain.argmax(1), (flash.argmax(1) == plain.argmax(1)).mean()
    print(f"same best token: ours {(ours.argmax(1) == best).mean():.2f}, libllama with itself {agree:.2f}")
    assert relative(ours, plain) <= min(SPREAD_ROOM * spread, ROUNDED_ACTIVATIONS_BOUND)
    assert relative(ours, exact) <= SPREAD_ROOM * relative(plain, exact)
    assert (ours.argmax(1) == best).mean() >= agree - TOP1_ROOM
