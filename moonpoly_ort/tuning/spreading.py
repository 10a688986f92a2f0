"""The order in which shapes are measured: every prefix covers the range of all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["farthest_first"]


def farthest_first(points: NDArray[Any]) -> list[int]:
    """The rows of `points` (count, coordinates; at least one) by index: that nearest to the middle,
    then each as far as possible from those before it."""
    order = [int(np.argmin(((points - points.mean(axis=0)) ** 2).sum(axis=1)))]
    distance = ((points - points[order[0]]) ** 2).sum(axis=1)
    while len(order) < len(points):
        distance[order] = -1
        order.append(int(np.argmax(distance)))
        distance = np.minimum(distance, ((points - points[order[-1]]) ** 2).sum(axis=1))
    return order
