"""How far one model's predictions are from another's: perplexity, KL divergence, top-1 agreement.

With p and q the softmax of the reference's and the other model's logits at a position, and t the
token that follows there:

    negative log-likelihood  -ln p(t), -ln q(t);  perplexity = exp(mean over positions)
    KL(p || q)               sum over v of p(v) (ln p(v) - ln q(v)), in nats
    top-1                    whether p and q are largest at the same token (lowest id of equals)

Everything is float64. With x = logits - max and S = sum of e^x, ln p = x - ln S, so that

    KL(p || q) = (sum e^x_p (x_p - x_q)) / S_p - ln S_p + ln S_q

takes one exponential for each logit and is exactly 0 for equal logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK_ROWS = 4  # rows in float64 at a time: some MiB for the largest vocabularies


class NotFiniteError(ValueError):
    """Logits hold NaN or infinities. `of_reference`: whose; `row`: where in the rows that were added."""

    def __init__(self, of_reference: bool, row: int):
        super().__init__(f"logits of row {row} are not finite")
        self.of_reference, self.row = of_reference, row


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its standard error; the error is 0 where there are too few samples to tell."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a comparison found over `tokens` positions. KL divergences in nats, `top1` from 0 to 1.

    `ppl_ratio` is other / reference; its error is of the paired differences, so it is far smaller
    than what the two perplexities' own errors suggest.
    """

    tokens: int
    reference_ppl: Estimate
    other_ppl: Estimate
    ppl_ratio: Estimate
    kl_mean: Estimate
    kl_p90: float
    kl_p99: float
    kl_max: float
    top1: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a comparison must keep to; None: anything. `max_kl` is about the mean."""

    max_kl: float | None = None
    max_ppl_ratio: float | None = None
    min_top1: float | None = None

    def broken(self, found: Summary) -> list[str]:
        """One sentence for each bound that does not hold, starting with the option that sets it."""
        lines = []
        # written so that a bound or a result that is not a number counts as broken
        if self.max_kl is not None and not found.kl_mean.value <= self.max_kl:
            lines.append(f"--max-kl {self.max_kl:g}: the mean KL divergence is {found.kl_mean.value:.6g}")
        if self.max_ppl_ratio is not None and not found.ppl_ratio.value <= self.max_ppl_ratio:
            lines.append(
                f"--max-ppl-ratio {self.max_ppl_ratio:g}: the perplexity is {found.ppl_ratio.value:.6g} "
                "times the reference's"
            )
        if self.min_top1 is not None and not found.top1 >= self.min_top1:
            lines.append(f"--min-top1 {self.min_top1:g}: the likeliest token agrees in {found.top1:.6g}")
        return lines


class Comparison:
    """Takes in logits of both models, some positions at a time; keeps four numbers of each."""

    def __init__(self) -> None:
        self._nll: list[np.ndarray] = []  # float64 [2, L] each: reference, other
        self._kl: list[np.ndarray] = []  # float64 [L]
        self._same: list[np.ndarray] = []  # bool [L]

    @property
    def tokens(self) -> int:
        return sum(len(part) for part in self._kl)

    def add(self, reference: np.ndarray, other: np.ndarray, targets: np.ndarray) -> None:
        """Logits float32 [L, V] of both models, and the int [L] ids of the tokens that follow.

        Raises NotFiniteError, and then counts none of the rows.
        """
        assert reference.shape == other.shape and len(targets) == len(reference)
        for of_reference, logits in ((True, reference), (False, other)):
            wrong = ~np.isfinite(logits).all(axis=1)
            if wrong.any():
                raise NotFiniteError(of_reference, int(wrong.argmax()))
        if not len(targets):
            return
        self._same.append(reference.argmax(axis=1) == other.argmax(axis=1))
        blocks = [
            _compare(*(a[i : i + BLOCK_ROWS] for a in (reference, other, targets)))
            for i in range(0, len(targets), BLOCK_ROWS)
        ]
        self._nll.append(np.concatenate([nll for nll, _ in blocks], axis=1))
        self._kl.append(np.concatenate([kl for _, kl in blocks]))

    def summary(self) -> Summary:
        """Raises ValueError when nothing was added."""
        if not self._kl:
            raise ValueError("no positions were compared")
        nll, kl = np.concatenate(self._nll, axis=1), np.concatenate(self._kl)
        p90, p99 = np.quantile(kl, (0.9, 0.99))
        return Summary(
            tokens=len(kl),
            reference_ppl=_exp(_mean(nll[0])),
            other_ppl=_exp(_mean(nll[1])),
            ppl_ratio=_exp(_mean(nll[1] - nll[0])),
            kl_mean=_mean(kl),
            kl_p90=float(p90),
            kl_p99=float(p99),
            kl_max=float(kl.max()),
            top1=float(np.concatenate(self._same).mean()),
        )

    def check_invariants(self) -> None:
        sizes = [len(part) for part in self._kl]
        assert [part.shape for part in self._nll] == [(2, n) for n in sizes]
        assert [part.shape for part in self._same] == [(n,) for n in sizes]
        assert all((part >= 0).all() for part in (*self._nll, *self._kl))


def _compare(reference: np.ndarray, other: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihoods [2, L] and KL divergences [L] of a few rows."""
    x, y = (
        a - a.max(axis=1, keepdims=True) for a in (reference.astype(np.float64), other.astype(np.float64))
    )
    rows = np.arange(len(targets))
    at_target = np.stack([x[rows, targets], y[rows, targets]])
    weights = np.exp(x)
    total = weights.sum(axis=1)
    log_sums = np.log(np.stack([total, np.exp(y).sum(axis=1)]))
    x -= y
    x *= weights
    kl = x.sum(axis=1) / total - log_sums[0] + log_sums[1]
    return log_sums - at_target, np.maximum(kl, 0.0)  # rounding may leave some 1e-15 below zero


def _mean(values: np.ndarray) -> Estimate:
    count = len(values)
    error = float(values.std(ddof=1)) / count**0.5 if count > 1 else 0.0
    return Estimate(float(values.mean()), error)


def _exp(estimate: Estimate) -> Estimate:
    """e to the estimate, its error to first order; infinite from e^710."""
    with np.errstate(over="ignore"):
        value = float(np.exp(estimate.value))
    return Estimate(value, value * estimate.error if estimate.error else 0.0)
