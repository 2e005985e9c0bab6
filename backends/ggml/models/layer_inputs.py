"""What each layer takes in beside the hidden rows, in families whose tokens have an input for every layer.

Of a token with id t, whose embedding as it enters the first layer is x, layer i takes in

    p_i = (norm(W x / sqrt(n_embd))_i + sqrt(width) * E[t]_i) / sqrt(2)            [width]

where W x and E[t] are as many such parts side by side as the model has layers, each normed by itself. At its
end, after attention and feed-forward, a layer makes of its hidden row h

    h + norm(W_out (gelu(W_in h) * p_i))

E has as many columns as all layers' inputs together, and is as large as the rest of a small model: its rows
are looked up in the mapped file, on no device. Source: gemma4.cpp of llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.ggml.graph import GraphBuilder

EMBEDDINGS = "per_layer_token_embd.weight"
PROJECTION, NORM = "per_layer_model_proj.weight", "per_layer_proj_norm.weight"


def build_layer_inputs(g: GraphBuilder, embedded: int, looked_up: int) -> int:
    """All p_i of each row: [width, n_layer, T]. `embedded`: [n_embd, T]; `looked_up`: rows of E, [.., T]."""
    c, lib, ctx = g.config, g.lib, g.context
    shape = (c.layer_input, c.n_layer, g.rows)
    projected = g.scaled(g.linear(embedded, PROJECTION), c.n_embd**-0.5)
    projected = g.norm(lib.reshape_3d(ctx, projected, *shape), NORM)
    own = g.scaled(lib.reshape_3d(ctx, looked_up, *shape), c.layer_input**0.5)
    return g.scaled(g.add(projected, own), 0.5**0.5)


def add_layer_input(g: GraphBuilder, layer: int, x: int, keep: int | None) -> int:
    """x plus what a layer makes of its input. `keep`: rows of the step that x has, None for all."""
    c, lib, ctx = g.config, g.lib, g.context
    width, row = c.layer_input, 4 * c.layer_input * c.n_layer
    strides = (row, row * g.rows, row * g.rows)
    own = lib.cont(ctx, lib.view_4d(ctx, g.layer_inputs, width, g.rows, 1, 1, *strides, 4 * width * layer))
    if keep is not None:
        own = g.select(own, keep)
    w_in, w_out, norm = (f"blk.{layer}.{name}.weight" for name in ("inp_gate", "proj", "post_norm"))
    gated = lib.mul(ctx, lib.gelu(ctx, g.linear(x, w_in)), own)
    return g.add(g.norm(g.linear(gated, w_out), norm), x)


__all__ = ["EMBEDDINGS", "NORM", "PROJECTION", "add_layer_input", "build_layer_inputs"]
