"""Which shapes get a CUDA graph, and sessions that replay, on a provider that only pretends to."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import onnxruntime as ort
import pytest
from capturing_session import CapturingSession, model
from hypothesis import given
from hypothesis import strategies as st

from moonpoly_ort import ArgumentError, GraphLimits
from moonpoly_ort.graph_policy import Policy
from moonpoly_ort.graph_threads import HOMES, Gate, Turns


def see(policy: Policy, key: object, size: int = 1) -> str:
    """A run of this shape, as `GraphCache` makes it: replayed, captured or neither."""
    if policy.find(key) is not None:
        return "replay"
    admitted = policy.admit(key, size) if policy.repeats(key) else None
    if admitted is None:
        policy.note(key)
        return "run"
    policy.captured()
    return "capture"


def feed(rows: int, k: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng([rows, k, seed]).standard_normal((rows, 8), np.float32)
    return {"x": x, "k": np.array([k], np.int64)}


@pytest.fixture(scope="module")
def plain() -> ort.InferenceSession:
    return ort.InferenceSession(model(), providers=["CPUExecutionProvider"])


def test_the_second_sight_captures_the_third_replays() -> None:
    policy = Policy(GraphLimits(2))
    assert [see(policy, "a") for _ in range(4)] == ["run", "capture", "replay", "replay"]


def test_the_least_recently_used_is_dropped() -> None:
    policy = Policy(GraphLimits(2))
    for key in "aabbaa":
        see(policy, key)
    assert policy.ids == [2, 1]
    assert [see(policy, "c"), see(policy, "c")] == ["run", "capture"]
    assert policy.ids == [1, 3]  # b went
    assert see(policy, "a") == "replay"


def test_many_shapes_in_turn_do_not_displace_each_other() -> None:
    policy = Policy(GraphLimits(4, captures=1000))
    answers = [see(policy, key) for _ in range(20) for key in range(10)]
    assert answers.count("capture") == 4
    assert answers.count("replay") == 18 * 4


def test_graphs_that_fell_out_of_use_make_room() -> None:
    policy = Policy(GraphLimits(4, captures=1000))
    for key in [*range(4)] * 3 + [*range(10, 14)] * 3:
        see(policy, key)
    assert all(see(policy, key) == "replay" for key in range(10, 14))


def test_captures_are_bounded_over_a_life() -> None:
    policy = Policy(GraphLimits(1, captures=3))
    answers = [see(policy, key) for key in "aabbccddee"]
    assert answers.count("capture") == 3
    assert see(policy, "c") == "replay"


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 5, 40])), max_size=60),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_graphs_and_bytes_stay_within_limits(
    runs: list[tuple[int, int]], graphs: int, room: int
) -> None:
    policy = Policy(GraphLimits(graphs, buffer_bytes=room))
    sizes: dict[object, int] = {}
    live: dict[int, object] = {}
    for shape, size in runs:
        key = shape, size
        sizes[key] = size
        before = set(policy.ids)
        answer = see(policy, key, size)
        if answer == "capture":
            (new,) = set(policy.ids) - before
            assert new not in live, "an id is used again"
            live[new] = key
        held = [sizes[live[graph_id]] for graph_id in policy.ids]
        assert len(held) <= graphs
        assert sum(held) == policy.size <= room
        assert answer != "capture" or policy.find(key) == policy.ids[-1]


@pytest.mark.parametrize("wanted", [-1, True, 1.5, "8"])
def test_wrong_limits_are_refused(wanted: object) -> None:
    with pytest.raises(ArgumentError, match="cuda_graphs ="):
        GraphLimits.of(wanted)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="buffer_bytes = 0"):
        GraphLimits(buffer_bytes=0)
    assert GraphLimits.of(0) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 2), st.sampled_from([None, ["z"], ["z", "y"]])),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 3),
)
def test_any_sequence_of_shapes_equals_plain_runs(
    runs: list[tuple[int, int, list[str] | None]], graphs: int
) -> None:
    session = CapturingSession(GraphLimits(graphs))
    reference = ort.InferenceSession(model(), providers=["CPUExecutionProvider"])
    kept = []
    for seed, (rows, k, names) in enumerate(runs):
        given_feed = feed(rows, k, seed)
        kept.append((session.run(names, given_feed), reference.run(names, given_feed)))
        assert len(session.cache.policy.ids) <= graphs
        assert set(session.cache._graphs) == set(session.cache.policy.ids)
    for got, want in kept:  # only now: later runs must not have touched them
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_repeats_replay_and_inputs_on_the_host_are_part_of_the_shape(
    plain: ort.InferenceSession,
) -> None:
    session = CapturingSession(GraphLimits(8))
    for seed in range(5):
        for k in (1, 2):
            (got, _) = session.run(None, feed(3, k, seed))
            np.testing.assert_array_equal(got, plain.run(["y"], feed(3, k, seed))[0])
    assert len(session.captured) == 2
    assert session.replays == 2 * 3


def test_views_and_other_layouts_are_copied_right(plain: ort.InferenceSession) -> None:
    session = CapturingSession(GraphLimits(8))
    wide = np.random.default_rng(0).standard_normal((8, 6), np.float32)
    for offset in range(3):
        given_feed = {"x": wide[:, offset::3].T, "k": np.array([2], np.int64)}
        np.testing.assert_array_equal(
            session.run(["y"], given_feed)[0], plain.run(["y"], given_feed)[0]
        )
    assert session.replays == 1


def test_threads_take_turns_and_share_graphs(plain: ort.InferenceSession) -> None:
    session = CapturingSession(GraphLimits(4))
    want = {rows: plain.run(None, feed(rows, 2))[0] for rows in range(1, 5)}

    def ask(me: int) -> None:
        for i in range(60):
            rows = 1 + (i + me) % 4
            np.testing.assert_array_equal(session.run(None, feed(rows, 2))[0], want[rows])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert 4 <= len(session.captured) <= 4 * (HOMES + 1)
    assert session.replays == 240 - 4 - len(session.captured)


def in_a_new_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_the_threads_of_runs(plain: ort.InferenceSession) -> None:
    """The caller's, then that of a second caller, then a worker's; graphs are captured on each."""
    session = CapturingSession(GraphLimits(4))
    before = set(threading.enumerate())
    binding = session.io_binding()
    x, y = values(5, 2)
    binding.bind_ortvalue_input("x", x)
    binding.bind_cpu_input("k", np.array([2], np.int64))
    binding.bind_ortvalue_output("y", y)

    def ask() -> None:
        for _ in range(2):
            (got, _) = session.run(None, feed(3, 2))
            np.testing.assert_array_equal(got, plain.run(["y"], feed(3, 2))[0])
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(y.numpy(), plain.run(["y"], feed(5, 2))[0])

    for _ in range(3):
        ask()
    assert set(threading.enumerate()) == before
    assert {thread for thread, _ in session.captured} == {threading.get_ident()}
    for change in range(1, 4):
        replays = session.replays
        in_a_new_thread(ask)
        ask_again = session.replays - replays
        # Captured anew in place of a first replay each; after the last change the worker stays.
        assert ask_again == (2 if change < HOMES + 1 else 4), change
        assert len(session.captured) == 2 * min(change + 1, HOMES + 1)
    (worker,) = set(threading.enumerate()) - before
    assert sum(thread == worker.ident for thread, _ in session.captured) == 2
    assert len({graph_id for _, graph_id in session.captured}) == 2 * (HOMES + 1)
    assert len(session.cache._graphs) == len(session.cache._bound) == 1


def test_a_thread_with_the_number_of_one_that_ended_is_another_one() -> None:
    turns, numbers = Turns(), []
    for _ in range(HOMES):
        in_a_new_thread(lambda: numbers.append(turns.call(threading.get_ident)))
    assert turns.epoch == HOMES  # whether the number came again (it mostly does) or not
    in_a_new_thread(lambda: numbers.append(turns.call(threading.get_ident)))
    assert turns.epoch == HOMES + 1


@given(st.lists(st.sampled_from("abcde!"), max_size=40), st.integers(1, 3))
def test_graphs_that_are_lost_are_captured_again_beyond_the_budget(
    runs: list[str], graphs: int
) -> None:
    policy = Policy(GraphLimits(graphs, captures=graphs))
    lost: set[str] = set()
    live: set[str] = set()
    used: set[int] = set()
    for key in runs:
        if key == "!":
            ids = policy.forget()
            assert len(ids) == len(live)
            assert not used & set(ids), "lost twice"
            used.update(ids)
            lost, live = lost | live, set()
            assert policy.ids == []
            assert policy.size == 0
            continue
        answer = see(policy, key)
        assert (answer == "replay") == (key in live)
        if key in lost and len(live) < graphs and policy.captures < policy.budget:
            assert answer in ("capture", "replay")
        if answer == "capture":
            live.add(key)
            lost.discard(key)
        live = {key for key in live if key in policy._live}
    assert policy.captures <= graphs + len(used)


def test_sessions_do_not_run_while_another_one_captures(plain: ort.InferenceSession) -> None:
    sessions = [CapturingSession(GraphLimits(3, captures=1000)) for _ in range(3)]

    def ask(me: int) -> None:
        for i in range(120):  # the shapes in use change, so that captures go on
            given_feed = feed(1 + i // 9 + i % 3, 1, i)
            np.testing.assert_array_equal(
                sessions[me].run(["y"], given_feed)[0], plain.run(["y"], given_feed)[0]
            )

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(3)))
    assert all(len(session.captured) > 10 for session in sessions)


def test_a_thread_inside_the_gate_passes_it_again_while_a_capture_waits() -> None:
    gate, order = Gate(), []

    def capture() -> None:
        with gate.capture():
            order.append("capture")

    with gate.run():
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join(0.05)
        with gate.run():
            order.append("inner")
    thread.join(5)
    assert order == ["inner", "capture"]


def test_a_capture_that_fails_leaves_a_plain_run(
    plain: ort.InferenceSession, caplog: pytest.LogCaptureFixture
) -> None:
    session = CapturingSession(GraphLimits(4))
    session.failures = 1
    for seed in range(4):  # runs, fails, captures, replays
        np.testing.assert_array_equal(
            session.run(["y"], feed(2, 1, seed))[0], plain.run(["y"], feed(2, 1, seed))[0]
        )
    assert session.replays == 1
    assert "could not be captured" in caplog.text
    session.failures = 100
    for seed in range(9):
        session.run(None, feed(3, 1, seed))
    assert session.failures == 97
    assert "none is tried any more" in caplog.text


def test_errors_come_back_and_leave_the_session_usable() -> None:
    session = CapturingSession(GraphLimits(4))
    for _ in range(3):
        with pytest.raises(Exception, match="nput"):
            session.run(None, {"x": np.zeros((2, 7), np.float32), "k": np.ones(1, np.int64)})
    assert session.run(["y"], feed(2, 1))[0].shape == (2, 4)
    assert not session.captured


def values(rows: int, k: int) -> tuple[ort.OrtValue, ort.OrtValue]:
    x = ort.OrtValue.ortvalue_from_shape_and_type([rows, 8], np.float32)
    x.update_inplace(feed(rows, k)["x"])
    return x, ort.OrtValue.ortvalue_from_shape_and_type([rows, 4], np.float32)


def test_bound_memory_is_replayed_in_place(plain: ort.InferenceSession) -> None:
    session = CapturingSession(GraphLimits(4))
    tensors = [values(3, 1), values(3, 1)]
    bindings = []
    sizes = np.array([2], np.int64)
    for x, y in tensors:
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x)
        binding.bind_cpu_input("k", sizes)
        binding.bind_ortvalue_output("y", y)
        bindings.append(binding)
    for seed in range(4):
        for binding, (x, y) in zip(bindings, tensors, strict=True):
            x.update_inplace(feed(3, 2, seed)["x"])
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(y.numpy(), plain.run(["y"], feed(3, 2, seed))[0])
    assert len(session.captured) == 2
    assert session.replays == 4
    sizes[:] = 0  # another graph than with 2, at the same address
    for _ in range(3):
        session.run_with_iobinding(bindings[0])
        assert not tensors[0][1].numpy().any()


def test_other_memory_bound_to_the_same_binding_is_another_graph(
    plain: ort.InferenceSession,
) -> None:
    session = CapturingSession(GraphLimits(4))
    (x, y), (_, other) = values(3, 1), values(3, 1)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_cpu_input("k", np.array([1], np.int64))
    for target in (y, other, y):
        binding.bind_ortvalue_output("y", target)
        for seed in range(3):
            x.update_inplace(feed(3, 1, seed)["x"])
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(target.numpy(), plain.run(["y"], feed(3, 1, seed))[0])
    assert len(session.captured) == 2
    binding.clear_binding_outputs()
    with pytest.raises(Exception, match="utput"):
        session.run_with_iobinding(binding)


def test_what_would_lie_in_the_arena_is_refused() -> None:
    session = CapturingSession(GraphLimits(4))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", values(3, 1)[0])
    binding.bind_cpu_input("k", np.array([2], np.int64))
    binding.bind_output("y")
    with pytest.raises(ArgumentError, match="output 'y' is bound to memory that ONNX Runtime"):
        session.run_with_iobinding(binding)
    with pytest.raises(ArgumentError, match="io_binding"):
        session.run_with_iobinding(ort.IOBinding(session))
    with pytest.raises(ArgumentError, match="no run_async"):
        session.run_async(None, feed(1, 1), print, None)


@pytest.mark.parametrize(
    ("entry", "value"), [("gpu_graph_id", "3"), ("memory.enable_memory_arena_shrinkage", "gpu:0")]
)
def test_run_options_that_do_not_fit_are_refused(entry: str, value: str) -> None:
    session = CapturingSession(GraphLimits(4))
    options = ort.RunOptions()
    options.add_run_config_entry(entry, value)
    with pytest.raises(ArgumentError, match=entry):
        session.run(None, feed(1, 1), options)
    session.run(None, feed(1, 1), ort.RunOptions())


def test_a_session_that_is_given_up_frees_its_graphs_and_thread() -> None:
    others = set(threading.enumerate())
    session = CapturingSession(GraphLimits(4))
    for _ in range(HOMES):
        in_a_new_thread(partial(session.run, None, feed(1, 1)))
    session.run(None, feed(1, 1))
    (worker,) = set(threading.enumerate()) - others
    for _ in range(3):
        session.run(None, feed(1, 1))
        with pytest.raises(Exception, match="nput"):
            session.run(None, {"y": np.zeros(3)})
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        worker.join(5)
        assert gone() is None, "something keeps it in a cycle"
    finally:
        gc.enable()
    assert not worker.is_alive()
