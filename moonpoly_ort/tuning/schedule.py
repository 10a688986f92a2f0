"""The order of measuring: time goes evenly to dtypes and layouts, in each to what tells most."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .conv_shapes import LIGHT_KINDS
from .shapes import LIGHT
from .work import AnyShape

Group = tuple[str, str, bool]


def weight(group: Group) -> float:
    """A group's share of the time, relative to others; `layout` is a kind of convolutions, too."""
    _, layout, batched = group
    return (0.25 if layout in (*LIGHT, *LIGHT_KINDS) else 1.0) * (0.3 if batched else 1.0)


class Schedule:
    """Hands out shapes: always the next of the group that had least of its share of time so far."""

    def __init__(
        self, groups: Mapping[Group, list[AnyShape]], done: Collection[AnyShape] = ()
    ) -> None:
        self._left = {
            group: [shape for shape in shapes if shape not in done]
            for group, shapes in groups.items()
        }
        self._spent = dict.fromkeys(groups, 0.0)
        # What was done before counts like the time that shapes of its group take now.
        self._before = {g: len(groups[g]) - len(self._left[g]) for g in groups}
        self._taken = dict.fromkeys(groups, 0)

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def next(self) -> AnyShape | None:
        """The next shape, or None when all are done."""
        waiting = [group for group, shapes in self._left.items() if shapes]
        if not waiting:
            return None
        group = min(waiting, key=self._share)
        return self._left[group].pop(0)

    def _share(self, group: Group) -> float:
        pace = self._spent[group] / self._taken[group] if self._taken[group] else 1e-9
        return (self._spent[group] + self._before[group] * pace) / weight(group)

    def spent(self, shape: AnyShape, seconds: float) -> None:
        """What measuring a shape took."""
        self._spent[shape.group] += seconds
        self._taken[shape.group] += 1
