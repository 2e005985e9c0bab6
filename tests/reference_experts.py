"""A mixture of experts in plain numpy, float64: what backends.ggml.models.mixture describes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.ggml.models.mixture import SMALLEST_SUM, Mixture


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def route(
    logits: np.ndarray, m: Mixture, selection_bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, shares), each [T, used], the best expert first, of equals the one with the lowest id."""
    logits = logits.astype(np.float64)
    chances = {"softmax": softmax, "sigmoid": lambda v: 1 / (1 + np.exp(-v)), "chosen": lambda v: v}[
        m.gating
    ](logits)
    scores = chances if selection_bias is None else chances + selection_bias
    if m.groups > 1:
        grouped = scores.reshape(len(scores), m.groups, -1)
        sums = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
        kept = np.argsort(-sums, axis=1, kind="stable")[:, : m.groups_used]
        hidden = np.ones(sums.shape, bool)
        np.put_along_axis(hidden, kept, False, 1)
        scores = np.where(hidden[..., None], -np.inf, grouped).reshape(scores.shape)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : m.used]
    shares = np.take_along_axis(chances, ids, 1)
    if m.gating == "chosen":
        shares = softmax(shares)
    if m.normed:
        shares = shares / np.maximum(shares.sum(1, keepdims=True), SMALLEST_SUM)
    return ids, shares * m.scale


def mixture(
    h: np.ndarray,
    w: dict[str, np.ndarray],
    b: str,
    m: Mixture,
    activate: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """What the chosen experts, and the one for all, make of h [T, n_embd]. `b`: prefix of the layer's names.

    `activate`: of a gate.
    """

    def biased(name: str, expert: int, x: np.ndarray) -> np.ndarray:
        y = w[f"{b}{name}.weight"][expert] @ x
        return y + w[f"{b}{name}.bias"][expert] if m.options.biases else y

    logits = h @ w[b + "ffn_gate_inp.weight"].T
    if m.options.biases:
        logits = logits + w[b + "ffn_gate_inp.bias"]
    selection = w[b + "exp_probs_b.bias"] if m.options.selection_bias else None
    out = np.zeros_like(h)
    for token, (ids, shares) in enumerate(zip(*route(logits, m, selection), strict=True)):
        for e, share in zip(ids, shares, strict=True):
            gate, up = (biased(f"ffn_{part}_exps", e, h[token]) for part in ("gate", "up"))
            out[token] += share * biased("ffn_down_exps", e, activate(gate) * up)
    if not m.shared:
        return out
    gate, up = (h @ w[f"{b}ffn_{part}_shexp.weight"].T for part in ("gate", "up"))
    shared = activate(gate) * up @ w[b + "ffn_down_shexp.weight"].T
    if m.options.shared_gate:
        shared = shared / (1 + np.exp(-h @ w[b + "ffn_gate_inp_shexp.weight"]))[:, None]
    return out + shared
