"""Streams of several ranks, performed together: order, waits, kernels that meet, and reports of those that do not."""

import itertools

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from types import SimpleNamespace

from numba import cuda
from numba.cuda import types
from numba.cuda.types import float32, int64, uint32, uint64

from helpers.ptx_asm import ld_acquire_u64, st_release_u64
from whalez.testing import simt
from whalez.testing.simt.queue import reached

f32p, u64 = types.CPointer(float32), uint64
TOP = 2**63 - 1  #: releases every wait for an ordinary value


def kernel(*signature):
    def make(function):
        return SimpleNamespace(name=function.__name__, function=function, signature=signature, block=(256, 1, 1))

    return make


@kernel(f32p, f32p, int64, float32)
def scale(x, y, n, a):
    i = cuda.grid(1)
    if i < n:
        y[i] = a * x[i]


@kernel(u64, u64)
def ring_bell(address, value):
    st_release_u64(address, value)


@kernel(u64, u64, f32p, float32)
def wait_then_set(address, value, out, a):
    while ld_acquire_u64(address) < value:
        pass
    out[cuda.threadIdx.x] = a


@kernel(u64, u64, u64, types.int64)
def meet(mine, theirs, value, rounds):
    """Both sides raise their own word and spin on the other's."""
    if cuda.threadIdx.x == 0:
        for i in range(rounds):
            st_release_u64(mine, value + uint64(i))
            while ld_acquire_u64(theirs) < value + uint64(i):
                cuda.nanosleep(uint32(20))


def address(a, i=0):
    return a.ctypes.data + i * a.itemsize


@simt.orders()
@pytest.mark.parametrize("resident", [True, False])
def test_ring_over_four_ranks(order, resident):
    """Each step a rank scales its row into its successor's slab, rings, and waits for its predecessor's bell."""
    n, size, steps = 4, 40, 3
    rows = [simt.array(np.full(size, r + 1.0, "f4")) for r in range(n)]
    slabs = [[simt.empty(size) for _ in range(steps)] for _ in range(n)]
    bells = [simt.zeros(1, "u8") for _ in range(n)]
    streams = [simt.SimtStream(r) for r in range(n)]
    for r, s in enumerate(streams):
        nxt = (r + 1) % n
        for step in range(steps):
            s.launch(scale, 2, 32, 0, address(rows[r]), address(slabs[nxt][step]), size, 2.0)
            s.launch(ring_bell, 1, 1, 0, address(bells[nxt]), step + 1)
            s.wait_value((address(bells[r]), step + 1))
            s.copy(address(rows[r]), address(slabs[r][step]), size * 4)
            s.zero(address(slabs[r][step]), size * 4)
    simt.run_queues(streams, order=order, resident=resident)
    for r in range(n):
        assert not streams[r].queue
        assert len(streams[r].performed) == 5 * steps
        assert (rows[r] == ((r - steps) % n + 1) * 8.0).all()
        assert not any(x.any() for x in slabs[r])
        assert bells[r][0] == steps


def test_wait_that_never_comes_is_reported_with_every_head():
    bells = [simt.zeros(2, "u8") for _ in range(3)]
    x, y = simt.zeros(8), simt.empty(8)
    streams = [simt.SimtStream(r) for r in range(3)]
    streams[0].wait_value((address(bells[0]), 7), (address(bells[0], 1), 0))
    streams[0].launch(scale, 1, 32, 0, address(x), address(y), 8, 1.0)
    streams[1].write_value(address(bells[0]), 6)
    streams[1].write_value(address(bells[1]), 3)
    streams[1].wait_value((address(bells[1]), 5))
    with pytest.raises(simt.SimtError) as caught:
        simt.run_queues(streams)
    said = str(caught.value).splitlines()
    assert said[0].startswith("deadlock")
    assert "rank 0, after 0 entries: wait for" in said[2]
    assert "expected 7 seen 6 (blocked), " in said[2]
    assert said[2].endswith("expected 0 seen 0, 1 more behind it")
    assert f"rank 1, after 2 entries: wait for [{address(bells[1]):#x}] expected 5 seen 3 (blocked)" in said[3]
    assert said[4].strip() == "rank 2, after 0 entries: empty"

    streams[2].write_value(address(bells[0]), 7)  # the queues are as they were: what was missing lets them go on
    streams[2].write_value(address(bells[1]), TOP)
    simt.run_queues(streams)
    assert not y.any()


def test_entries_of_one_queue_run_in_order():
    word, out = simt.zeros(1, "u8"), simt.zeros(1)
    values = simt.array(np.arange(1, 6, dtype="f4"))
    s = simt.SimtStream(0)
    s.launch(scale, 1, 32, 0, address(values), address(out), 1, 10.0)
    s.copy(address(values, 1), address(out), 4)
    s.zero(address(out), 4)
    s.write_value(address(word), 41)
    s.wait_value((address(word), 41))
    s.write_value(address(word), 42)
    s.launch(scale, 1, 32, 0, address(values, 1), address(values, 2), 1, 2.0)
    expected = [str(e) for e in s.queue]
    simt.run_queues([s])
    assert [type(e).__name__ for e in s.performed] == [
        "LaunchEntry", "CopyEntry", "ZeroEntry", "WriteEntry", "WaitEntry", "WriteEntry", "LaunchEntry",
    ]  # fmt: skip
    assert len(expected) == len(s.performed)
    assert values.tolist() == [1, 10, 20, 4, 5]
    assert out[0] == 0
    assert word[0] == 42


def test_a_stand_in_runs_when_its_turn_comes():
    """It sees what the launches and copies before it left, and those behind it see what it did; another rank waits."""
    x, y, bell = simt.array(np.arange(1, 33, dtype="f4")), simt.empty(32), simt.zeros(1, "u8")
    a, b = simt.SimtStream(0), simt.SimtStream(1)
    seen = []

    def product():
        seen.append((y.tolist(), int(bell[0])))
        y[:] = y[::-1].copy()

    b.wait_value((address(bell), 7))
    b.stand_in("a product", product)
    b.launch(scale, 1, 32, 0, address(y), address(x), 32, 10.0)
    a.launch(scale, 1, 32, 0, address(x), address(y), 32, 2.0)
    a.write_value(address(bell), 7)
    assert seen == []
    simt.run_queues([a, b])
    assert seen == [([2.0 * i for i in range(1, 33)], 7)]
    assert x.tolist() == [20.0 * i for i in range(32, 0, -1)]
    assert [str(e) for e in b.performed][1] == "stand-in for a product"


def test_a_stand_in_that_fails_is_named_with_its_rank():
    s = simt.SimtStream(5)
    s.stand_in("a product", lambda: np.zeros(2) @ np.zeros(3))
    s.write_value(8, 0)
    with pytest.raises(simt.SimtError, match=r"stand-in for a product: .*[\s\S]*rank 5, after 0 entries: stand-in for"):
        simt.run_queues([s])
    assert len(s.queue) == 2


@pytest.mark.parametrize(
    ("seen", "value", "is_over"),
    [
        (5, 5, True),
        (4, 5, False),
        (6, 5, True),
        (TOP, 5, True),
        (TOP, 0, True),
        (2**63, 0, False),
        (TOP, TOP, True),
        (TOP - 1, TOP, False),
        (2**63, TOP, True),
        (2**63 + 4, 5, True),
        (2**64 - 1, 5, False),
        (2**64 - 1, 2**63, True),
        (3, 2**64 - 2, True),
        (2**64 - 2, 3, False),
    ],
)
def test_comparison_is_cyclic(seen, value, is_over):
    assert reached(seen, value) is is_over
    with np.errstate(over="ignore"):
        assert bool((np.uint64(seen) - np.uint64(value)).astype(np.int64) >= 0) is is_over
    word = simt.array([seen], "u8")
    s = simt.SimtStream(0)
    s.wait_value((address(word), value))
    if is_over:
        simt.run_queues([s])
    else:
        with pytest.raises(simt.SimtError, match="deadlock"):
            simt.run_queues([s])


@simt.orders()
def test_kernels_that_spin_on_each_other_run_side_by_side(order):
    words = [simt.zeros(1, "u8") for _ in range(3)]
    streams = [simt.SimtStream(r) for r in range(3)]
    for (a, b), first in zip(itertools.permutations(range(3), 2), (1, 11, 1, 21, 11, 21), strict=True):
        streams[a].launch(meet, 1, 64, 0, address(words[a]), address(words[b]), first, 5)
    with pytest.raises(simt.SimtError, match="livelock"):
        simt.run_queues(streams, resident=False, order=order, spin_limit=300)
    for w in words:
        w[0] = 0
    simt.run_queues(streams, order=order)
    assert [int(w[0]) for w in words] == [15, 25, 25]


@simt.orders()
def test_a_spinning_kernel_does_not_hold_up_other_queues(order):
    """What frees rank 0's kernel lies behind two kernels and a wait in rank 1's queue."""
    word, other, x, y, out = simt.zeros(1, "u8"), simt.zeros(1, "u8"), simt.zeros(40), simt.empty(40), simt.zeros(32)
    a, b, c = (simt.SimtStream(r) for r in range(3))
    a.launch(wait_then_set, 1, 32, 0, address(word), 9, address(out), 4.0)
    b.launch(scale, 2, 32, 0, address(x), address(y), 40, 1.0)
    b.wait_value((address(other), 1))
    b.launch(scale, 2, 32, 0, address(y), address(x), 40, 1.0)
    b.write_value(address(word), 9)
    c.launch(ring_bell, 1, 1, 0, address(other), 1)
    simt.run_queues([a, b, c], order=order)
    assert (out == 4).all()


def test_stuck_kernel_is_named_with_its_line_and_the_heads():
    word, out = simt.zeros(1, "u8"), simt.zeros(32)
    a, b = simt.SimtStream(0), simt.SimtStream(5)
    a.launch(wait_then_set, 1, 32, 0, address(word), 9, address(out), 4.0)
    b.wait_value((address(word), 8))
    with pytest.raises(simt.SimtError) as caught:
        simt.run_queues([a, b], spin_limit=300)
    said = str(caught.value)
    assert "livelock (only spinning): block (0,0,0) rank 0: [0..31 spinning (wait_then_set, " in said
    assert "rank 0, after 0 entries: launch of wait_then_set grid (1, 1, 1) block (32, 1, 1) (running)" in said
    assert "rank 5, after 0 entries: wait for" in said


def test_failing_kernel_is_named_with_its_rank():
    x, word = simt.zeros(8), simt.zeros(1, "u8")
    s = [simt.SimtStream(r) for r in (3, 4)]
    s[0].wait_value((address(word), 0))
    s[1].launch(scale, 1, 32, 0, address(x), address(x), 9, 1.0)
    with pytest.raises(simt.SimtError, match=r"invalid memory access .* thread \(8,0,0\) .* rank 4 at \(scale, "):
        simt.run_queues(s)


def test_raising_the_awaited_word_releases_a_wait():
    """What a watchdog does to a blocked stream; 2^64 - 1 would not release it."""
    word = simt.zeros(1, "u8")
    s = simt.SimtStream(0)
    s.wait_value((address(word), 12345))
    word[0] = 2**64 - 1
    with pytest.raises(simt.SimtError, match="deadlock"):
        simt.run_queues([s])
    word[0] = TOP
    simt.run_queues([s])


def test_copies_fault_and_misuse_is_refused():
    x = simt.zeros(8)
    s = simt.SimtStream(0)
    for call, said in (
        (lambda: s.copy(address(x), address(x, 1), 8), "overlapping"),
        (lambda: s.copy(address(x), address(x), 4), "overlapping"),
        (lambda: s.copy(0, 64, -1), "copy of -1 bytes"),
        (lambda: s.zero(0, -1), "zeroing of -1 bytes"),
        (lambda: s.wait_value((address(x) + 4, 1)), "not a multiple of 8"),
        (lambda: s.write_value(address(x) + 4, 1), "not a multiple of 8"),
    ):
        with pytest.raises(simt.SimtError, match=said):
            call()
    assert not s.queue
    for call in (
        lambda: s.copy(address(x, 4), address(x) + (1 << 40), 8),
        lambda: s.zero(address(x, 4), 20),
        lambda: s.wait_value((address(x, 8), 0)),
        lambda: s.write_value(8, 0),
    ):
        call()
        with pytest.raises(simt.SimtError, match="invalid memory access by"):
            simt.run_queues([s])
        s.queue.clear()


def test_one_kernel_at_a_time_takes_turns():
    log, counter = simt.zeros(12, "u8"), simt.zeros(1, "u8")

    @kernel(types.CPointer(uint64), types.CPointer(uint64), u64)
    def note(log, counter, rank):
        log[counter[0]] = rank
        counter[0] += uint64(1)

    streams = [simt.SimtStream(r) for r in range(3)]
    for s in streams:
        for _ in range(4):
            s.launch(note, 1, 1, 0, log, counter, s.rank)
    simt.run_queues(streams, resident=False)
    assert log.tolist() == [0, 1, 2] * 4


def test_all_blocks_of_a_grid_can_be_live():
    words = simt.zeros(2, "u8")

    @kernel(u64)
    def between_blocks(p):
        mine = p + uint64(8) * uint64(cuda.blockIdx.x)
        theirs = p + uint64(8) * uint64(1 - cuda.blockIdx.x)
        st_release_u64(mine, uint64(1))
        while ld_acquire_u64(theirs) == uint64(0):
            pass

    s = simt.SimtStream(0)
    s.launch(between_blocks, 2, 1, 0, address(words))
    with pytest.raises(simt.SimtError, match="livelock"):
        simt.run_queues([s], spin_limit=300)
    words[:] = 0
    simt.run_queues([s], blocks=0)
    assert words.tolist() == [1, 1]


def test_queue_is_a_stream_of_the_ops():
    protocol = pytest.importorskip("whalez.ops.device.stream", reason="no ops for devices here").Stream
    import inspect

    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            want = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(simt.SimtStream, name)).parameters) == want
