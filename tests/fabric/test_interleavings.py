"""Every order of steps: the sleeper protocol and the reuse of single buffers, as models searched to the end.

Each model also runs with one step left out or moved; the search must then find the fault, or it would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# ---- the sleeper protocol -------------------------------------------------------------------------------------
RINGER = ("store bell", "count", "look at mark")
SLEEPER = ("mark", "read counter", "look at bell", "sleep")


def sleeper_is_lost(ringer: tuple[str, ...], sleeper: tuple[str, ...]) -> bool:
    """Is there an order in which the ringer is through and the sleeper sleeps for ever?

    One step of one side at a time: what sequential consistency allows. Two steps that weaker orders would let pass
    each other are modelled by exchanging them in the argument.
    """
    # ringer's step, sleeper's step, bell, counter, mark, counter as read, asleep
    todo = [(0, 0, False, 0, False, 0, False)]
    seen = set(todo)
    while todo:
        state = todo.pop()
        if state[0] == len(ringer) and state[-1]:
            return True
        for next_state in _ring(ringer, state), _sleep(sleeper, state):
            if next_state is not None and next_state not in seen:
                seen.add(next_state)
                todo.append(next_state)
    return False


State = tuple[int, int, bool, int, bool, int, bool]


def _ring(steps: tuple[str, ...], state: State) -> State | None:
    i, j, bell, counter, mark, read, asleep = state
    if i == len(steps):
        return None
    match steps[i]:
        case "store bell":
            bell = True
        case "count":
            counter += 1
        case "look at mark":
            asleep = asleep and not mark  # futex wake
    return i + 1, j, bell, counter, mark, read, asleep


def _sleep(steps: tuple[str, ...], state: State) -> State | None:
    i, j, bell, counter, mark, read, asleep = state
    if asleep or j > len(steps):
        return None
    if j == len(steps):  # woken or refused: from the start
        return i, 0, bell, counter, False, read, False
    match steps[j]:
        case "mark":
            mark = True
        case "read counter":
            read = counter
        case "look at bell":
            if bell:
                return i, len(steps) + 1, bell, counter, False, read, False
        case "sleep":
            asleep = counter == read  # the kernel compares and sleeps in one step
    return i, j + 1, bell, counter, mark, read, asleep


def test_no_ring_is_lost() -> None:
    assert not sleeper_is_lost(RINGER, SLEEPER)


@pytest.mark.parametrize(
    ("ringer", "sleeper"),
    [
        pytest.param(RINGER, ("look at bell", "mark", "read counter", "sleep"), id="looks before it marks"),
        pytest.param(RINGER, ("mark", "look at bell", "read counter", "sleep"), id="looks before it reads"),
        pytest.param(RINGER, SLEEPER[1:], id="no mark"),
        pytest.param(("store bell", "look at mark", "count"), SLEEPER, id="look passes count"),
        pytest.param(("count", "store bell", "look at mark"), SLEEPER, id="count passes bell"),
        pytest.param(("store bell", "look at mark"), SLEEPER, id="no count"),
    ],
)
def test_any_other_order_loses_one(ringer: tuple[str, ...], sleeper: tuple[str, ...]) -> None:
    assert sleeper_is_lost(ringer, sleeper)


# ---- single buffers of the paired exchange --------------------------------------------------------------------
EXCHANGE = ("write dispatch", "ring dispatch", "wait dispatch", "read dispatch")
EXCHANGE += ("write combine", "ring combine", "wait combine", "read combine")


def torn_reads(program: tuple[str, ...], world: int, rounds: int) -> Iterator[str]:
    """Reads that met another round's bytes, over all orders of `world` ranks that each run `program` `rounds` times.

    A read is one step per peer, so a peer may get on between two of them.
    """
    # Per rank: (step, peers already read); a buffer holds the round it was last written in.
    length = len(program)
    start = ((0, 0),) * world
    todo = [start]
    seen = {start}
    while todo:
        state = todo.pop()
        for rank in range(world):
            step, read = state[rank]
            if step == rounds * length:
                continue
            action, kind = program[step % length].split()
            turn = step // length
            if action == "wait" and not all(_passed(program, state[p][0], "ring", kind) > turn for p in range(world)):
                continue
            if action == "read":
                found = _passed(program, state[read][0], "write", kind) - 1
                if found != turn:
                    yield f"rank {rank} reads {kind} {turn} of rank {read}, finds {found}: {state}"
                    return
            is_last = action != "read" or read == world - 1
            after = (step + 1, 0) if is_last else (step, read + 1)
            next_state = (*state[:rank], after, *state[rank + 1 :])
            if next_state not in seen:
                seen.add(next_state)
                todo.append(next_state)
    assert any(all(step == rounds * length for step, _ in state) for state in seen), "stuck"


def _passed(program: tuple[str, ...], step: int, action: str, kind: str) -> int:
    """How often a rank at `step` has done it."""
    at = program.index(f"{action} {kind}")
    return (step - at - 1) // len(program) + 1


@pytest.mark.parametrize(("world", "rounds"), [(2, 4), (3, 3)])
def test_one_buffer_each_is_enough(world: int, rounds: int) -> None:
    assert list(torn_reads(EXCHANGE, world, rounds)) == []


@pytest.mark.parametrize("missing", ["wait dispatch", "wait combine"])
def test_without_a_wait_it_is_not(missing: str) -> None:
    assert list(torn_reads(tuple(step for step in EXCHANGE if step != missing), 2, 3))


@pytest.mark.parametrize(("early", "late"), [("read dispatch", "ring combine"), ("write dispatch", "ring dispatch")])
def test_a_ring_before_the_work_it_tells_of_is_found(early: str, late: str) -> None:
    swapped = {early: late, late: early}
    assert list(torn_reads(tuple(swapped.get(step, step) for step in EXCHANGE), 2, 3))


# ---- the first window of a whale, written without a free ------------------------------------------------------
# The worst case: the last reads of one whale come after the last pairing of its superstep, the first write of the next
# whale before the first pairing of its own. What is left is the launch between.
WHALES = ("write window", "ring window", "wait window", "read window", "ring between", "wait between")


@pytest.mark.parametrize(("world", "rounds"), [(2, 4), (3, 3)])
def test_the_launch_between_two_whales_frees_every_region(world: int, rounds: int) -> None:
    assert list(torn_reads(WHALES, world, rounds)) == []


def test_two_whales_without_a_launch_between_would_tear() -> None:
    assert list(torn_reads(WHALES[:4], 2, 3))
