"""Medians, and what may be said of their ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

__all__ = ["CONFIDENCE", "geometric_mean", "median", "speedup"]

CONFIDENCE = 0.95
RESAMPLES = 2000


def speedup(ours: Sequence[float], other: Sequence[float]) -> list[float | None]:
    """median(other) / median(ours), and the bounds of its 95 % confidence interval.

    The i-th samples were taken one after the other, so that they are resampled as pairs (a percentile bootstrap, with
    the same random numbers every time). Without bounds (None) for fewer than two pairs.
    """
    ratio = median(other) / median(ours)
    if len(ours) < 2:
        return [ratio, None, None]
    import numpy
    from scipy.stats import bootstrap

    def statistic(x: numpy.ndarray, y: numpy.ndarray, axis: int = -1) -> numpy.ndarray:
        return numpy.median(y, axis=axis) / numpy.median(x, axis=axis)

    interval = bootstrap(
        (ours, other),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=numpy.random.default_rng(0),
    ).confidence_interval
    return [ratio, float(interval.low), float(interval.high)]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs))
