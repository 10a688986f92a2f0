"""The blocks of a tile that add up its parts together, in every order that their steps can take."""

from __future__ import annotations

from typing import Any

import gluon_model as model
import pytest

RUNS = 7  # of a tile's elements


class _NextStep(Exception):
    """What a block does to the tile's word next."""


def _block(slices: Any, part: int, parts: int, answers: tuple[int, ...]) -> tuple[Any, set[int]]:
    """(next update of the word or None, runs added up so far) of a block that has had `answers`
    from the word."""
    left = iter(answers)
    runs: set[int] = set()

    def step(*update: Any) -> Any:
        try:
            return next(left)
        except StopIteration:
            raise _NextStep(update) from None

    slices.gl.atomic_add = lambda word, value, sem: step("add", value)
    slices.gl.store = lambda word, value: step("set", value)
    try:
        ready, present, first, stride = slices.parts_ready(None, part, parts)
        if ready:
            runs = set(range(first, RUNS, stride))
            if present:
                slices.leave(None, parts)
    except _NextStep as update:
        return update.args[0], runs
    return None, runs


@pytest.mark.parametrize(("parts", "polls"), [(2, 3), (3, 2), (4, 1)])
def test_whatever_comes_first_every_run_is_added_up_and_nobody_waits_for_ever(
    parts: int, polls: int
) -> None:
    slices = model.source("ws_slices")
    slices.POLLS = polls
    seen: set[Any] = set()
    outcomes: set[tuple[frozenset[int], ...]] = set()
    states: list[tuple[int, tuple[tuple[int, ...], ...]]] = [(0, ((),) * parts)]
    while states:
        state = states.pop()
        if state in seen:
            continue
        seen.add(state)
        word, answers = state
        blocks = [_block(slices, part, parts, answers[part]) for part in range(parts)]
        if any(runs for _, runs in blocks):
            assert all(answers), "parts are added up that are not stored yet"
        for part, (update, _) in enumerate(blocks):
            if update is None:
                continue
            assert len(answers[part]) < polls + 4, "a block that does not end"
            action, value = update
            longer = (*answers[:part], (*answers[part], word), *answers[part + 1 :])
            states.append((word + value if action == "add" else value, longer))
        if all(update is None for update, _ in blocks):
            assert word == 0
            assert set().union(*(runs for _, runs in blocks)) == set(range(RUNS))
            outcomes.add(tuple(frozenset(runs) for _, runs in blocks))
    shares = tuple(frozenset(range(part, RUNS, parts)) for part in range(parts))
    assert shares in outcomes, "nobody has to wait long, and each has its share"
    alone = (frozenset(range(RUNS)), *(frozenset() for _ in range(parts - 1)))
    assert alone in outcomes, "the others are gone when the last one comes"
