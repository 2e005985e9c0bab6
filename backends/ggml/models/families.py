"""What sets one model family apart from the next. A new family is a row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backends.ggml.models.mixture import MixtureOptions


@dataclass(frozen=True, slots=True)
class Family:
    """Options of the transformer block in `block.py`. Biases are none: where a file has them, they are added.

    `models`: who uses it, for people. `rope_neox`: rotate pairs (i, i + n_rot / 2) instead of (2i, 2i + 1).
    `norm`: "rms" or "layer" (mean removed). `qk_norm`: RMS norm before RoPE, of each query and key head, of
    the whole row, or of heads where the file has weights for it. `pre_norms`, `post_norms`: of what enters a
    sublayer, of what leaves it. `ffn_norm`: name of the feed-forward's pre-norm. `parallel`: attention and
    feed-forward both read the block's one norm. `activation`: "silu", "gelu" (tanh form) or "oai" (of
    gpt-oss); `ffn`: "gated" (activation(gate) * up), "fused" (the same, gate and up in one matrix), "plain"
    (no gate). `scale_embeddings`: by sqrt(n_embd).
    `window_pattern`: every n-th layer attends everything, the others a sliding window, when the file gives a
    window but no pattern (0: the family has no windows); `window`: its size when the file does not say (0:
    none). `window_rope_base`: RoPE base of the windowed layers when the file does not say, None: that of the
    others; `window_rope_scaled`: whether RoPE scaling is for them too.
    `no_rope`: layers without RoPE: every fourth, those without a window, or all if the file switches it off.
    `wide_layers`: with so many layers, queries are scaled by the square root of n_embd / n_head.
    `attention_softcap`, `logit_softcap`: where the file does not say. `divide_logits`: by the file's logit
    scale; else they are multiplied. `mixture`: what the family's mixtures of experts have, None if it has
    none. `sinks`: attention has a sink for each head. `value_norm`: RMS norm of value heads, without a
    weight, and keys in place of values where a layer has none. `unscaled_scores`: of attention.
    `window_heads`: layers with a window have heads of their own sizes. `layer_inputs`: tokens
    have an input for each layer beside their embedding (layer_inputs.py), where the file says how wide.
    `shared_kv`: the last layers, as many as the file says, attend keys and values of earlier ones.
    `recurrent`: most layers are gated delta nets (delta_net.py). `gated_attention`: the query matrix gives a
    gate for each head's output too.
    """

    architecture: str
    models: str
    rope_neox: bool
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: Literal["none", "heads", "row", "file"] = "none"
    pre_norms: bool = True
    post_norms: bool = False
    ffn_norm: str = "ffn_norm"
    parallel: bool = False
    activation: Literal["silu", "gelu", "oai"] = "silu"
    ffn: Literal["gated", "fused", "plain"] = "gated"
    scale_embeddings: bool = False
    window_pattern: int = 0
    window: int = 0
    window_rope_base: float | None = None
    window_rope_scaled: bool = True
    no_rope: Literal["none", "fourth", "unwindowed", "switch"] = "none"
    wide_layers: int = 0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    divide_logits: bool = False
    mixture: MixtureOptions | None = None
    recurrent: bool = False
    gated_attention: bool = False
    sinks: bool = False
    value_norm: bool = False
    unscaled_scores: bool = False
    window_heads: bool = False
    layer_inputs: bool = False
    shared_kv: bool = False


FAMILIES: dict[str, Family] = {
    f.architecture: f
    for f in (
        Family(
            "llama",
            "Llama 2 to 3.x, Mistral, SmolLM, Yi and others; Mixtral",
            rope_neox=False,
            mixture=MixtureOptions(required=False),
        ),
        Family(
            "mistral3",
            "Ministral 3, Mistral Small 3",
            rope_neox=False,
            mixture=MixtureOptions(required=False),
        ),
        Family("qwen2", "Qwen 1.5 to 2.5", rope_neox=True),
        Family("qwen3", "Qwen 3", rope_neox=True, qk_norm="heads"),
        Family(
            "qwen2moe",
            "Qwen 1.5 and 2 with experts",
            rope_neox=True,
            mixture=MixtureOptions(divided=True, normed=False, shared=True, shared_gate=True),
        ),
        Family(
            "qwen3moe",
            "Qwen 3 with experts",
            rope_neox=True,
            qk_norm="heads",
            mixture=MixtureOptions(divided=True),
        ),
        Family(
            "gemma2",
            "Gemma 2",
            rope_neox=True,
            post_norms=True,
            activation="gelu",
            scale_embeddings=True,
            window_pattern=2,
            window=4096,
            wide_layers=46,
            attention_softcap=50.0,
            logit_softcap=30.0,
        ),
        Family(
            "gemma3",
            "Gemma 3 (text)",
            rope_neox=True,
            qk_norm="heads",
            post_norms=True,
            activation="gelu",
            scale_embeddings=True,
            window_pattern=6,
            window_rope_base=10000.0,
            window_rope_scaled=False,
            wide_layers=62,
        ),
        Family(
            "gemma4",
            "Gemma 4 (text)",
            rope_neox=True,
            qk_norm="heads",
            value_norm=True,
            unscaled_scores=True,
            post_norms=True,
            activation="gelu",
            scale_embeddings=True,
            window_pattern=6,
            window_rope_base=10000.0,
            window_rope_scaled=False,
            window_heads=True,
            logit_softcap=30.0,
            layer_inputs=True,
            shared_kv=True,
            mixture=MixtureOptions(required=False, beside=True),
        ),
        Family("phi3", "Phi 3 to 4", rope_neox=True, ffn="fused"),
        Family("granite", "Granite 3 to 4", rope_neox=False, no_rope="switch", divide_logits=True),
        Family(
            "granitemoe",
            "Granite 3 with experts",
            rope_neox=False,
            divide_logits=True,
            mixture=MixtureOptions(shared=True),
        ),
        Family("glm4", "GLM 4 (2024-04-14)", rope_neox=False, post_norms=True, ffn="fused"),
        Family(
            "glm4moe",
            "GLM 4.5 to 4.7",
            rope_neox=True,
            qk_norm="file",
            ffn_norm="post_attention_norm",
            mixture=MixtureOptions(gating="sigmoid", normed=None, shared=True, selection_bias=True),
        ),
        Family(
            "gpt-oss",
            "gpt-oss",
            rope_neox=True,
            ffn_norm="post_attention_norm",
            activation="oai",
            window_pattern=2,
            mixture=MixtureOptions(gating="chosen", normed=False, biases=True),
            sinks=True,
        ),
        Family(
            "starcoder2",
            "StarCoder 2",
            rope_neox=True,
            norm="layer",
            activation="gelu",
            ffn="plain",
        ),
        Family(
            "olmo2",
            "OLMo 2 and 3",
            rope_neox=True,
            qk_norm="row",
            pre_norms=False,
            post_norms=True,
            window_pattern=4,
            window_rope_scaled=False,
        ),
        Family("smollm3", "SmolLM 3", rope_neox=False, no_rope="fourth"),
        Family("seed_oss", "Seed-OSS", rope_neox=True, ffn_norm="post_attention_norm"),
        Family(
            "qwen35",
            "Qwen 3.5 and 3.6",
            rope_neox=True,
            qk_norm="heads",
            ffn_norm="post_attention_norm",
            recurrent=True,
            gated_attention=True,
        ),
        Family(
            "qwen35moe",
            "Qwen 3.5 and 3.6 with experts",
            rope_neox=True,
            qk_norm="heads",
            ffn_norm="post_attention_norm",
            mixture=MixtureOptions(divided=True, shared=True, shared_gate=True),
            recurrent=True,
            gated_attention=True,
        ),
        Family(
            "cohere2",
            "Command R7B, Command A",
            rope_neox=False,
            norm="layer",
            parallel=True,
            window_pattern=4,
            no_rope="unwindowed",
        ),
    )
}
