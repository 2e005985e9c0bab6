"""What has to be known of a model before libllama loads it: sizes for the plan, what its memory can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.base import KVHeads
from backends.ggml.models import ModelError
from quant.gguf import GGUFFile

F32_BYTES = 4
NO_TEXT = "it computes embeddings and generates no text; take a model that does"
NOT_SERVED: dict[str, str] = {
    "clip": "a vision file (mmproj) describes images for another model, and images are not supported; "
    "name that model's own .gguf file",
    **dict.fromkeys(("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert"), NO_TEXT),
    **dict.fromkeys(("jina-bert-v2", "jina-bert-v3", "gemma-embedding", "llama-embed", "clef"), NO_TEXT),
    **dict.fromkeys(
        ("dream", "llada", "llada-moe", "rnd1"),
        "a diffusion model does not generate token after token; take a model that does",
    ),
    **dict.fromkeys(
        ("t5", "t5encoder"), "models with an encoder are not supported; take one that only decodes"
    ),
    **dict.fromkeys(
        ("wavtokenizer-dec", "pockettts", "qwen3tts"), "it makes sound, not text; take a text model"
    ),
    **dict.fromkeys(
        ("eagle3", "dflash", "gemma4-assistant"),
        "it only guesses for another model, by that one's inner values; take a model that works alone",
    ),
}
# Their layers keep a state in place of keys and values, all or some of them (llm_arch_is_recurrent,
# llm_arch_is_hybrid). Others are told by their metadata.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID = frozenset(
    {"jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
    | {"qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp"}
    | {"deepseek4", "minimax-01"}
)
STATE_KEYS = ("ssm.", "wkv.", "kda.", "shortconv.")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """`kv_widths[i]`: elements of keys and of values that layer i keeps of a token, 0 where it keeps a state.

    `state_bytes`: of a sequence's states in all layers, bounded from above. `keeps_prefixes` as in LlamaSpec.
    """

    architecture: str
    name: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_ff: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    kv_widths: tuple[tuple[int, int], ...]
    state_bytes: int
    keeps_prefixes: bool

    def heads_of(self, layer: int) -> KVHeads:
        """The most that a layer has."""
        return KVHeads(self.n_head_kv, self.head_dim_k, self.head_dim_v)

    def kv_layer(self, layer: int) -> int:
        return layer

    @property
    def keeps_tokens(self) -> bool:
        """Whether what it keeps grows with the tokens of a sequence."""
        return any(keys or values for keys, values in self.kv_widths)


def refusal(architecture: str) -> str | None:
    """Why such a model cannot be served at all, with the remedy; None where libllama may know it."""
    return NOT_SERVED.get(architecture)


def read_llama_config(gguf: GGUFFile) -> LlamaConfig:
    """Read what the plan needs. Raises ModelError naming the key at fault."""
    reason = refusal(gguf.architecture)
    if reason is not None:
        raise ModelError(f"{gguf.path.name}: model family {gguf.architecture!r}: {reason}")
    meta = _Metadata(gguf)
    n_layer = meta.size("block_count", 1, 4096)
    n_embd = meta.size("embedding_length", 1, 1 << 20)
    heads = meta.sizes("attention.head_count", n_layer, 0)
    kv_heads = meta.sizes("attention.head_count_kv", n_layer, None) or heads
    states = meta.has_states
    dim = n_embd // max(1, *heads)
    dim_k, dim_v = (meta.size(f"attention.{name}_length", 0, 1 << 16, dim) for name in ("key", "value"))
    if states and not any(heads):
        kv_heads = [0] * n_layer
    return LlamaConfig(
        architecture=gguf.architecture,
        name=str(gguf.metadata.get("general.name", gguf.path.stem)),
        n_layer=n_layer,
        n_ctx_train=meta.size("context_length", 1, 1 << 30),
        n_embd=n_embd,
        n_vocab=_vocabulary(gguf),
        n_ff=max(meta.sizes("feed_forward_length", n_layer, 4 * n_embd) or [4 * n_embd]),
        n_head_kv=max(kv_heads),
        head_dim_k=dim_k,
        head_dim_v=dim_v,
        kv_widths=tuple((n * dim_k, n * dim_v) for n in kv_heads),
        state_bytes=F32_BYTES * _state(meta, n_embd, heads) * _stateful(states, kv_heads),
        keeps_prefixes=not states,
    )


def _stateful(states: bool, kv_heads: list[int]) -> int:
    """Layers that have a state, bounded from above."""
    return (kv_heads.count(0) or len(kv_heads)) if states else 0


def _state(meta: _Metadata, n_embd: int, heads: list[int]) -> int:
    """Elements of a layer's state. Source: n_embd_r and n_embd_s of llama-hparams.cpp."""
    if head := meta.number("wkv.head_size"):
        return n_embd * (meta.number("token_shift_count", 2) + head)
    if length := meta.number("shortconv.l_cache"):
        return n_embd * length
    conv, inner, state = (meta.number(f"ssm.{name}") for name in ("conv_kernel", "inner_size", "state_size"))
    if head := meta.number("kda.head_dim"):
        return max(heads) * head * (head + 3 * max(3, conv))
    if not inner:  # lightning attention: head by head
        return max(heads) * (n_embd // max(1, *heads)) ** 2
    return conv * (inner + 2 * max(1, meta.number("ssm.group_count")) * state) + state * inner


class _Metadata:
    """`<architecture>.<key>`, with errors that name the key."""

    def __init__(self, gguf: GGUFFile):
        self._file, self._prefix = gguf.path.name, gguf.architecture
        self._values: Mapping[str, Any] = gguf.metadata

    @property
    def has_states(self) -> bool:
        keys = tuple(f"{self._prefix}.{key}" for key in STATE_KEYS)
        return self._prefix in RECURRENT | HYBRID or any(key.startswith(keys) for key in self._values)

    def size(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(f"{self._prefix}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._error(key, value, f"an integer between {low} and {high}")
        return value

    def number(self, key: str, default: int = 0) -> int:
        return self.size(key, 0, 1 << 24, default)

    def sizes(self, key: str, count: int, default: int | None) -> list[int]:
        """A number for each layer; the file may have one for all. [] where there is none, nor a default."""
        value = self._values.get(f"{self._prefix}.{key}", default)
        if value is None:
            return []
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value] * count
        try:
            found = [n for n in value if type(n) is int and 0 <= n < 1 << 24]
        except TypeError:
            found = []
        if len(found) < count:
            raise self._error(key, value, f"a number below {1 << 24}, or {count} of them")
        return found[:count]

    def _error(self, key: str, value: Any, want: str) -> ModelError:
        found = "missing" if value is None else f"{str(value)[:40]!r}"
        where = f"{self._file}: {self._prefix}.{key}"
        return ModelError(f"{where} must be {want}, it is {found}; convert or download the model again")


def _vocabulary(gguf: GGUFFile) -> int:
    """As libllama counts: the tokens of the vocabulary."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not hasattr(tokens, "__len__") or not len(tokens):
        what = "tokenizer.ggml.tokens is missing, it has no vocabulary"
        raise ModelError(f"{gguf.path.name}: {what}; convert or download the model again")
    return len(tokens)


__all__ = ["LlamaConfig", "read_llama_config", "refusal"]
