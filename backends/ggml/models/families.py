"""What sets one model family apart from the next. A new family is a row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Options of the transformer block in `block.py`.

    `rope_neox`: rotate pairs (i, i + n_rot/2) instead of (2i, 2i + 1). `activation`: of the gated
    feed-forward, "silu" (SwiGLU) or "gelu" (GeGLU, tanh form). `qk_norm`: RMS norm of each query
    and key head before RoPE. `post_norms`: RMS norm of each sublayer's output before it is added.
    `scale_embeddings`: multiply embeddings by sqrt(n_embd). `window_pattern`: every n-th layer
    attends everything, the others a sliding window, when the file gives a window but no pattern
    (0: the family has no windows). `window_rope_base`: RoPE base of the windowed layers when the
    file does not say. `experts`: whether the feed-forward may be a mixture of experts, or must be.
    """

    architecture: str
    rope_neox: bool
    activation: str = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    scale_embeddings: bool = False
    window_pattern: int = 0
    window_rope_base: float | None = None
    experts: Literal["none", "optional", "required"] = "none"


FAMILIES: dict[str, Family] = {
    f.architecture: f
    for f in (
        Family("llama", rope_neox=False, experts="optional"),
        Family("qwen3moe", rope_neox=True, qk_norm=True, experts="required"),
        Family(
            "gemma3",
            rope_neox=True,
            activation="gelu",
            qk_norm=True,
            post_norms=True,
            scale_embeddings=True,
            window_pattern=6,
            window_rope_base=10000.0,
        ),
    )
}
