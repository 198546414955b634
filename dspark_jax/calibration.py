"""Confidences that mean what they say: sequential temperature scaling, and how good it is.

The confidence head is trained on single drafts, and the scheduler multiplies its outputs: small
errors add up along a block. Sequential temperature scaling (STS; paper, section 4.1) gives each
position k a temperature T_k, fitted from left to right so that the *product* of the confidences
sigma(z_i / T_i) up to k is right, as far as the expected calibration error (ECE) can tell. The
order of drafts at one position stays as it was.

All of this runs once, on the host, in float64. Letters: N rounds, K drafts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark_jax.config import require

ECE_BINS = 20
# Temperatures that are tried: 1 is among them, neighbours differ by 1.4 %.
GRID = np.geomspace(1 / 16, 16, 401)
NEAREST_FIRST = GRID[np.argsort(abs(np.log(GRID)), kind="stable")]
CLEAR = 4.0
"""Standard errors by which a temperature must lower the ECE, or it stays 1. So many, since the best
of 401 is taken, and rounds of one text are alike."""
ORDER = 0.0025
"""AUROC that a temperature may cost at its own position: the scheduler ranks prefixes by their
survival. What it costs at later ones is not known when it is chosen."""


@dataclasses.dataclass(frozen=True)
class PrefixMetrics:
    """Quality of the survival chances a_k, by position: arrays [K] of float64.

    A position without any round, or for AUROC with one kind of outcome only, is NaN.
    """

    ece: np.ndarray
    """Expected calibration error over bins of equal width."""
    auroc: np.ndarray
    """Chance that a prefix which was accepted had the higher survival; ties count half."""
    brier: np.ndarray
    """Mean squared difference to the outcome."""
    predicted: np.ndarray
    """Mean survival."""
    observed: np.ndarray
    """Share of prefixes that were accepted."""
    count: np.ndarray
    """Rounds that the position was judged in."""


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Predicted against observed chances of one position, in bins of equal width: arrays [bins]."""

    predicted: np.ndarray
    observed: np.ndarray
    count: np.ndarray


def survival(confidence_logits: np.ndarray, temperatures: np.ndarray | None = None) -> np.ndarray:
    """Chances [N, K] that all drafts up to each are accepted: products of sigma(z_i / T_i)."""
    z = np.asarray(confidence_logits, np.float64)
    if temperatures is not None:
        z = z / temperatures
    return np.cumprod(sigmoid(z), axis=1)


def fit_sts(
    confidence_logits: np.ndarray, prefix_accepted: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """Temperatures [K] float64 of sequential temperature scaling, by grid search on the ECE.

    Args:
      confidence_logits: z [N, K] of rounds that the drafter was not trained on.
      prefix_accepted: [N, K], whether drafts 1..k were all accepted.
      mask: [N, K], which of them were judged; default: all. What a row holds elsewhere is ignored.
    Returns:
      For each position, from left to right, the temperature of the least ECE of the product with
      the positions before it, among those that do not spoil the order there; of equals, the
      one nearest to 1. 1 where nothing was judged, and where the gain is no more than noise.
    Raises:
      InputError: the arrays do not fit.
    """
    z, accepted, mask = _checked(confidence_logits, prefix_accepted, mask)
    before, temperatures = np.ones(len(z)), np.ones(z.shape[1])
    for k, judged in enumerate(mask.T):
        if judged.any():
            temperatures[k] = _temperature(before[judged], z[judged, k], accepted[judged, k])
        before = before * sigmoid(z[:, k] / temperatures[k])
    return temperatures


def _temperature(before: np.ndarray, z: np.ndarray, accepted: np.ndarray) -> float:
    """That of one position; `before` [N] are the chances of the drafts before it."""

    def chances(t: float) -> np.ndarray:
        return before * sigmoid(z / t)

    def noise(chances: np.ndarray) -> float:
        return np.sqrt((chances * (1 - chances)).sum()) / len(chances)

    errors, raw = np.array([_ece(chances(t), accepted) for t in NEAREST_FIRST]), chances(1.0)
    least_order = _auroc(raw, accepted) - ORDER
    for i in np.argsort(errors, kind="stable"):
        scaled = chances(NEAREST_FIRST[i])
        # Of chances near 0 and 1 there is hardly any, whether they are right or not.
        if errors[i] >= errors[0] - CLEAR * max(noise(scaled), noise(raw)):
            continue
        if not _auroc(scaled, accepted) < least_order:  # NaN: there is no order to spoil
            return NEAREST_FIRST[i]
    return 1.0


def prefix_metrics(
    confidence_logits: np.ndarray,
    prefix_accepted: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    temperatures: np.ndarray | None = None,
) -> PrefixMetrics:
    """ECE, AUROC and Brier score of the survival chances by position; arguments as `fit_sts`.

    Args:
      temperatures: [K] to apply first; default: raw confidences.
    """
    z, accepted, mask = _checked(confidence_logits, prefix_accepted, mask)
    if temperatures is not None:
        divisors = np.asarray(temperatures, np.float64)
        require(
            divisors.shape == z.shape[1:] and bool((divisors > 0).all()),
            f"temperatures {temperatures}: expected {z.shape[1]} numbers above 0",
        )
    chances = survival(z, temperatures)
    columns = [_metrics(chances[mask[:, k], k], accepted[mask[:, k], k]) for k in range(z.shape[1])]
    return PrefixMetrics(*np.array(columns).reshape(-1, 6).T)


def reliability(chances: np.ndarray, accepted: np.ndarray, bins: int = ECE_BINS) -> Reliability:
    """Means in bins of equal width of chances [N] and outcomes [N]; NaN in an empty bin."""
    which = bin_of(chances, bins)
    count = np.bincount(which, minlength=bins)
    sums = [np.bincount(which, weights=x, minlength=bins) for x in (chances, accepted)]
    with np.errstate(invalid="ignore"):
        predicted, observed = (s / count for s in sums)
    return Reliability(predicted, observed, count)


def bin_of(chances: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each, of `bins` bins of equal width; a chance of 1 is in the last."""
    return np.minimum((chances * bins).astype(int), bins - 1)


def _metrics(chances: np.ndarray, accepted: np.ndarray) -> tuple[float, ...]:
    if not len(chances):
        return (*[np.nan] * 5, 0)
    return (
        _ece(chances, accepted),
        _auroc(chances, accepted),
        float(np.mean((chances - accepted) ** 2)),
        float(chances.mean()),
        float(accepted.mean()),
        len(chances),
    )


def _ece(chances: np.ndarray, accepted: np.ndarray) -> float:
    """Mean over the rounds of |predicted - observed| of their bin."""
    gaps = np.bincount(bin_of(chances, ECE_BINS), weights=chances - accepted, minlength=ECE_BINS)
    return float(abs(gaps).sum() / len(chances))


def _auroc(chances: np.ndarray, accepted: np.ndarray) -> float:
    """From the ranks of those accepted (Mann-Whitney), equal chances sharing their mean rank."""
    _, group, size = np.unique(chances, return_inverse=True, return_counts=True)
    rank = (np.cumsum(size) - (size - 1) / 2)[group]
    yes = int(accepted.sum())
    no = len(accepted) - yes
    if not (yes and no):
        return np.nan
    return float((rank[accepted].sum() - yes * (yes + 1) / 2) / (yes * no))


def sigmoid(z: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-z)), of any z."""
    # exp of what is never positive cannot overflow.
    small = np.exp(-abs(z))
    return np.where(z >= 0, 1, small) / (1 + small)


def _checked(
    confidence_logits: np.ndarray, prefix_accepted: np.ndarray, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    z = np.asarray(confidence_logits, np.float64)
    accepted = np.asarray(prefix_accepted, bool)
    judged = np.ones(z.shape, bool) if mask is None else np.asarray(mask, bool)
    require(z.ndim == 2, f"confidence logits of shape {z.shape}: expected [N, K]")
    for name, array in (("prefix_accepted", accepted), ("mask", judged)):
        require(
            array.shape == z.shape,
            f"{name} of shape {array.shape}: expected that of the confidence logits, {z.shape}",
        )
    require(bool(np.isfinite(z[judged]).all()), "confidence logits: expected finite numbers")
    return np.where(judged, z, 0), accepted, judged
