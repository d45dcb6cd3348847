"""The scheduler as tables: who runs, who waits, who owns what; and a property that nothing is ever lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalez.engine.scheduler import Chunk, LaunchPlan, Phase, Scheduler
from whalez.errors import LocalProtocolError
from whalez.rendezvous.effects import LaunchKind


def make(**changes: int) -> Scheduler:
    return Scheduler(**({"slots": 2, "pages": 10, "page_tokens": 4, "chunk_tokens": 8, "armed_rows": 3} | changes))


def test_a_request_waits_for_slot_and_pages_for_its_whole_length() -> None:
    s = make(pages=4)
    s.add("a", 9, 3, whale=False)  # 12 tokens, 3 pages
    s.add("b", 4, 4, whale=False)  # 2 pages, one is free
    assert [e.request_id for e in s.admit()] == ["a"]
    assert (s.waiting_count, s.pages_used) == (1, 3)
    s.remove("a")
    assert [e.request_id for e in s.admit()] == ["b"]
    assert s.entry("b").pages == (0, 1)


def test_requests_are_admitted_in_order_of_arrival() -> None:
    s = make(pages=4)
    s.add("large", 15, 1, whale=False)
    s.admit()
    s.add("also large", 15, 1, whale=False)
    s.add("small", 1, 1, whale=False)
    assert s.admit() == []  # the small one would fit; passing it would starve the large one


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(LaunchKind.ORDINARY, 8), (LaunchKind.ARMED, 3), (LaunchKind.SUPERSTEP, 0), (LaunchKind.STOP, 0)],
)
def test_prompt_rows_of_a_launch_are_bounded_by_its_kind(kind: LaunchKind, rows: int) -> None:
    s = make()
    s.add("a", 20, 4, whale=False)
    s.admit()
    assert sum(chunk.length for chunk in s.compose(kind).chunks) == rows


def test_decodes_go_on_in_every_launch_but_the_last() -> None:
    s = make()
    s.add("a", 2, 4, whale=False)
    s.admit()
    assert s.compose(LaunchKind.ORDINARY) == LaunchPlan((), (Chunk("a", 0, 2),))
    assert s.prefilled(Chunk("a", 0, 2))
    for kind in (LaunchKind.ORDINARY, LaunchKind.ARMED, LaunchKind.SUPERSTEP):
        assert s.compose(kind).decodes == ("a",)
    assert s.compose(LaunchKind.STOP) == LaunchPlan()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    s = make()
    s.add("long", 20, 4, whale=False)
    s.admit()
    s.add("short", 2, 2, whale=False)
    s.admit()
    assert s.compose(LaunchKind.ORDINARY).chunks == (Chunk("short", 0, 2), Chunk("long", 0, 6))


def test_short_prompts_leave_half_of_the_rows_to_a_long_one() -> None:
    s = make(slots=9, pages=99)
    s.add("long", 20, 4, whale=False)
    for i in range(4):
        s.add(f"short {i}", 3, 1, whale=False)
    s.admit()
    chunks = s.compose(LaunchKind.ORDINARY).chunks
    assert chunks == (Chunk("short 0", 0, 3), Chunk("short 1", 0, 1), Chunk("long", 0, 4))


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", [LaunchKind.ORDINARY, LaunchKind.ARMED])
@pytest.mark.parametrize("longs", [1, 3])
def test_a_stream_of_short_prompts_starves_no_long_one_and_is_not_starved(
    rows: int, kind: LaunchKind, longs: int
) -> None:
    s = make(slots=20, pages=200, chunk_tokens=rows, armed_rows=rows)
    for i in range(longs):
        s.add(f"long {i}", 60, 1, whale=False)
    shorts, launches, waited, waited_most = 0, 0, 0, 0
    while f"long {longs - 1}" in s:
        if not any(f"short {i}" in s for i in range(shorts)):
            s.add(f"short {shorts}", 1, 1, whale=False)
            shorts, waited = shorts + 1, 0
        s.admit()
        for chunk in s.compose(kind).chunks:
            if s.prefilled(chunk):
                s.remove(chunk.request_id)
        launches, waited = launches + 1, waited + 1
        waited_most = max(waited_most, waited)
        assert launches <= 2 * 60 * longs + 2
    assert waited_most <= 4  # turn of a long one, whose last row is then a short prompt; turn of the next


def test_a_posted_whale_holds_its_slot_and_runs_nothing_here() -> None:
    s = make()
    s.add("w", 16, 4, whale=True)
    assert [e.phase for e in s.admit()] == [Phase.POSTED]
    assert s.compose(LaunchKind.ORDINARY) == LaunchPlan()
    assert not s.has_work
    s.whale_prefilled("w")
    assert s.compose(LaunchKind.ORDINARY).decodes == ("w",)


def test_a_post_that_ends_is_prefilled_here() -> None:
    s = make()
    s.add("w", 16, 4, whale=True)
    s.admit()
    s.post_ended("w")
    assert s.compose(LaunchKind.ORDINARY).chunks == (Chunk("w", 0, 8),)


@pytest.mark.parametrize("call", ["post_ended", "whale_prefilled"])
def test_a_step_out_of_turn_is_refused_and_changes_nothing(call: str) -> None:
    s = make()
    s.add("a", 4, 4, whale=False)
    s.admit()
    before = s.compose(LaunchKind.ORDINARY)
    with pytest.raises(LocalProtocolError):
        getattr(s, call)("a")
    assert s.compose(LaunchKind.ORDINARY) == before


def test_the_same_name_twice_is_refused() -> None:
    s = make()
    s.add("a", 4, 4, whale=False)
    with pytest.raises(LocalProtocolError):
        s.add("a", 4, 4, whale=False)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8), st.booleans()), min_size=1, max_size=12), st.data())
def test_every_request_ends_and_everything_comes_back(
    requests: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """Prompt rows are covered once and in order, budgets hold, and slots and pages are whole at the end."""
    s = make(slots=3, pages=12)
    left: dict[str, int] = {}
    for i, (prompt, generate, whale) in enumerate(requests):
        s.add(f"r{i}", prompt, generate, whale=whale)
        left[f"r{i}"] = generate
    covered: dict[str, int] = {}
    for _ in range(2000):
        if s.is_empty:
            break
        for entry in s.admit():
            assert len(entry.pages) * 4 >= entry.prompt_tokens + entry.max_tokens
            if entry.phase is Phase.POSTED:
                (s.post_ended if data.draw(st.booleans()) else s.whale_prefilled)(entry.request_id)
        kind = data.draw(st.sampled_from([LaunchKind.ORDINARY, LaunchKind.ARMED]))
        plan = s.compose(kind)
        assert sum(c.length for c in plan.chunks) <= (8 if kind is LaunchKind.ORDINARY else 3)
        done = [c.request_id for c in plan.chunks if s.prefilled(c)]
        for chunk in plan.chunks:
            assert chunk.start == covered.get(chunk.request_id, 0)
            covered[chunk.request_id] = chunk.start + chunk.length
        for request_id in (*plan.decodes, *done):
            left[request_id] -= 1
            if left[request_id] == 0:
                s.remove(request_id)
    assert s.is_empty
    assert (s.pages_used, s.waiting_count, s.running_count) == (0, 0, 0)
