"""The gated delta net: a layer that keeps a state of fixed size instead of keys and values.

    q | k | v = silu(conv(W_qkv x)), a causal convolution of each channel over the last tokens
    g = exp(a softplus(W_alpha x + dt)), b = sigmoid(W_beta x), of each value head
    S <- g S;  S <- S + b (v - S k) k^T;  y = S q / sqrt(dim), with q and k of length one
    out = W_out (rms_norm(y) * silu(W_z x))

A value head h has the query and key of head h modulo their number. Source: Gated Delta Networks (arXiv
2412.06464), Qwen 3.5; build_layer_attn_linear of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.ggml.models.metadata import Metadata, ModelError

if TYPE_CHECKING:
    from backends.ggml.models.tensors import Shapes

LANES = 16  # of the CPU's vectors: heads are whole ones
F32_BYTES = 4
CONVOLUTION = "ssm_conv1d.weight"  # of a few values for each channel, and no matrix
PROJECTIONS = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the recurrent layers. `dim` is that of all heads, `taps` the width of the convolution."""

    dim: int
    key_heads: int
    value_heads: int
    taps: int

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q | k | v."""
        return self.dim * (2 * self.key_heads + self.value_heads)

    @property
    def value_width(self) -> int:
        return self.dim * self.value_heads

    @property
    def conv_floats(self) -> int:
        """Of a state: what the convolution still needs of the last tokens."""
        return (self.taps - 1) * self.conv_width

    @property
    def matrix_floats(self) -> int:
        """Of a state: a matrix for each value head."""
        return self.value_heads * self.dim * self.dim

    @property
    def state_bytes(self) -> int:
        """Of one layer's state, in float32."""
        return F32_BYTES * (self.conv_floats + self.matrix_floats)

    def tensors(self, n_embd: int) -> Shapes:
        """A recurrent layer's tensors beside norms and feed-forward, by name without `blk.N.`."""
        return {
            "attn_qkv.weight": (n_embd, self.conv_width),
            "attn_gate.weight": (n_embd, self.value_width),
            "ssm_alpha.weight": (n_embd, self.value_heads),
            "ssm_beta.weight": (n_embd, self.value_heads),
            CONVOLUTION: (self.taps, self.conv_width),
            "ssm_dt.bias": (self.value_heads,),
            "ssm_a": (self.value_heads,),
            "ssm_norm.weight": (self.dim,),
            "ssm_out.weight": (self.value_width, n_embd),
        }


def read_delta_net(meta: Metadata) -> DeltaNet:
    """From metadata. Raises ModelError naming the key at fault."""
    net = DeltaNet(
        dim=meta.size("ssm.state_size", LANES, 1024),
        key_heads=meta.size("ssm.group_count", 1, 1024),
        value_heads=meta.size("ssm.time_step_rank", 1, 1024),
        taps=meta.size("ssm.conv_kernel", 2, 16),
    )
    if net.dim % LANES:
        raise meta.error("ssm.state_size", net.dim, f"a multiple of {LANES}")
    if net.value_heads % net.key_heads:
        raise meta.error("ssm.time_step_rank", net.value_heads, f"a multiple of {net.key_heads}")
    meta.size("ssm.inner_size", net.value_width, net.value_width)
    return net


def recurrent_layers(meta: Metadata, n_layer: int) -> tuple[bool, ...]:
    """Which layers are recurrent: as the file lists them, else all but every n-th."""
    listed = meta.get("attention.recurrent_layers")
    if isinstance(listed, list) and len(listed) >= n_layer:
        flags = tuple(bool(flag) for flag in listed[:n_layer])
    else:
        every = meta.size("full_attention_interval", 1, 4096, 4)
        flags = tuple((layer + 1) % every != 0 for layer in range(n_layer))
    if all(flags):
        raise ModelError(f"{meta.file}: none of the {n_layer} layers attends, which is not built")
    return flags


__all__ = ["PROJECTIONS", "DeltaNet", "read_delta_net", "recurrent_layers"]
