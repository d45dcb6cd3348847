"""Short convolution kernels: against float64, and the same bits in place, out of place and however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.device_rows import BF16, Rows, assert_bf16_near, assert_compact, chips, performed, rounded, sparse
from helpers.mutate import assert_caught, changes, seeds
from whalez.ops.conv import cuda as conv
from whalez.ops.conv import naive
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

ROWS = [1, 2, 3, 63, 64, 65, 113, 129]
WIDTHS = [(8, 0), (8, 4), (37, 3), (1, 0), (1032, 8)]  # with the gap behind a row: quads, quads, single values


class Case:
    """x [T, D] with its tail and weights, on the emulated device."""

    def __init__(self, rows, width, gap=0, seed=0):
        rng = np.random.default_rng(seed)
        self.rows, self.width = rows, width
        self.x = Rows(rng.standard_normal((rows, width)), gap=gap, beyond=1)
        self.tail = Rows(rng.standard_normal((3, width)))
        self.next_tail = Rows.poisoned(3, width)
        self.weight = Rows(rng.standard_normal((width, 4)), np.float32)
        self.out = Rows.poisoned(rows, width, gap=gap + 8, beyond=1)
        self.scratch = devices.empty(conv.short_conv_scratch_bytes(rows, width) // 2, np.uint16, align=16)
        self.wanted, self.wanted_tail = naive.short_conv(
            self.x.values.astype(float), self.tail.values.astype(float), self.weight.values
        )

    def short_conv(self, stream, in_place=False, tail="apart", order="forward"):
        out = self.x if in_place else self.out
        next_tail = {"apart": self.next_tail.address, "in place": self.tail.address, "none": 0}[tail]
        conv.short_conv(
            stream,
            self.x.address,
            self.x.stride,
            self.tail.address,
            next_tail,
            self.weight.address,
            out.address,
            out.stride,
            devices.at(self.scratch),
            self.rows,
            self.width,
        )
        performed(stream, order)
        assert_bf16_near(out.values, self.wanted, slack=4e-6)
        out.assert_rest_untouched()
        kept = {"apart": self.next_tail, "in place": self.tail}.get(tail)
        if kept:
            np.testing.assert_array_equal(kept.values.astype(float), self.wanted_tail)
        return out.values

    def conv_tail(self, stream, in_place=False, order="forward"):
        kept = self.tail if in_place else self.next_tail
        conv.conv_tail(stream, self.x.address, self.x.stride, self.tail.address, kept.address, self.rows, self.width)
        performed(stream, order)
        np.testing.assert_array_equal(kept.values.astype(float), self.wanted_tail)


def check_decode(requests, width, gap=0, in_place=False, order="forward", stream=None, slots_count=7):
    rng = np.random.default_rng(requests)
    x = Rows(rng.standard_normal((requests, width)), gap=gap, beyond=1)
    out = x if in_place else Rows.poisoned(requests, width, gap=gap + 8, beyond=1)
    tails = Rows(rng.standard_normal((slots_count, 3, width)), gap=8)
    before = tails.values.astype(float)
    slots = devices.array(rng.permutation(slots_count)[:requests], np.int64)
    weight = Rows(rng.standard_normal((width, 4)), np.float32)
    after, wanted = before.copy(), np.empty((requests, width))
    for b, slot in enumerate(slots):
        wanted[b : b + 1], after[slot] = naive.short_conv(
            x.values[b : b + 1].astype(float), before[slot], weight.values
        )
    stream = stream or devices.Stream()
    conv.short_conv_decode(
        stream,
        x.address,
        x.stride,
        tails.address,
        tails.stride,
        devices.at(slots),
        weight.address,
        out.address,
        out.stride,
        requests,
        width,
    )
    performed(stream, order)
    assert_bf16_near(out.values, wanted, slack=4e-6)
    np.testing.assert_array_equal(tails.values.astype(float), after)
    out.assert_rest_untouched()
    tails.assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "gap"), [(8, 4), (5, 0)])
def test_against_naive_in_place_and_not(rows, width, gap, order):
    apart = Case(rows, width, gap).short_conv(devices.Stream(), order=order)
    for in_place, tail in ((True, "apart"), (True, "in place"), (False, "in place"), (False, "none"), (True, "none")):
        got = Case(rows, width, gap).short_conv(devices.Stream(), in_place, tail, order)
        np.testing.assert_array_equal(got.view(np.uint16), apart.view(np.uint16))


@simt.orders()
@pytest.mark.parametrize(("width", "gap"), WIDTHS)
def test_any_width(width, gap, order):
    for in_place, tail in ((False, "apart"), (True, "in place")):
        Case(66, width, gap).short_conv(devices.Stream(), in_place, tail, order)


@simt.orders()
@pytest.mark.parametrize("rows", [0, *ROWS])
@pytest.mark.parametrize("width", [8, 5, 516])
def test_conv_tail(rows, width, order):
    for in_place in (False, True):
        Case(rows, width).conv_tail(devices.Stream(), in_place, order)


def test_no_rows_leave_the_tail():
    case = Case(0, 8)
    case.short_conv(devices.Stream())
    stream = devices.Stream()
    case.short_conv(stream, tail="in place")
    assert not stream.performed


@pytest.mark.parametrize("width", [8, 5])
def test_any_two_cuts_give_the_same_bits(width):
    """Pieces of 0, 1 and 2 rows must shift the tail, not replace it."""
    rows = 9
    whole = Case(rows, width)
    wanted = whole.short_conv(devices.Stream(), in_place=True).view(np.uint16)
    for first in range(rows + 1):
        for second in range(first, rows + 1):
            case, stream = Case(rows, width), devices.Stream()
            for start, stop in ((0, first), (first, second), (second, rows)):
                at = case.x.address + 2 * start * width
                conv.short_conv(
                    stream,
                    at,
                    width,
                    case.tail.address,
                    case.tail.address,
                    case.weight.address,
                    at,
                    width,
                    0,
                    stop - start,
                    width,
                )
            performed(stream)
            np.testing.assert_array_equal(case.x.values.view(np.uint16), wanted)
            np.testing.assert_array_equal(case.tail.values.astype(float), case.wanted_tail)


def test_tails_keep_every_bit():
    """A tail is copied, not computed with: also what is no number."""
    case = Case(2, 8)
    odd = np.array([0x7FA1, 0xFFC3, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FFF, 0x3F80], np.uint16).view(BF16)
    case.x.flat.view(np.uint16)[8:16] = odd.view(np.uint16)
    stream = devices.Stream()
    conv.conv_tail(stream, case.x.address, 8, case.tail.address, case.tail.address, 2, 8)
    performed(stream)
    np.testing.assert_array_equal(case.tail.values[2].view(np.uint16), odd.view(np.uint16))


@simt.orders()
@pytest.mark.parametrize("requests", [1, 2, 3, 65])
@pytest.mark.parametrize(("width", "gap"), [(8, 4), (5, 0), (516, 0)])
def test_decode(requests, width, gap, order):
    for in_place in (False, True):
        check_decode(requests, width, gap, in_place, order, slots_count=67)


def test_decode_continues_a_prefill():
    whole = Case(70, 8)
    wanted = whole.short_conv(devices.Stream())
    case, stream = Case(70, 8), devices.Stream()
    conv.short_conv(
        stream, case.x.address, 8, case.tail.address, case.tail.address, case.weight.address, case.x.address, 8,
        devices.at(case.scratch), 66, 8,
    )  # fmt: skip
    slots = devices.zeros(1, np.int64)
    for t in range(66, 70):
        at = case.x.address + 16 * t
        conv.short_conv_decode(
            stream, at, 8, case.tail.address, 24, devices.at(slots), case.weight.address, at, 8, 1, 8
        )
    performed(stream)
    np.testing.assert_array_equal(case.x.values.view(np.uint16), wanted.view(np.uint16))
    np.testing.assert_array_equal(case.tail.values.astype(float), case.wanted_tail)


FAR = 2**31 + 64


def far_conv(folder, stream, rows=2, width=8):
    """Rows and results behind 2^31 elements, in place."""
    space = sparse(folder / "rows", rows, FAR)
    near = Case(rows, width)
    space[:, :width] = near.x.values.view(np.uint16)
    at = devices.at(space)
    conv.short_conv(
        stream, at, FAR, near.tail.address, near.next_tail.address, near.weight.address, at, FAR, 0, rows, width
    )
    conv.conv_tail(stream, at, FAR, near.tail.address, near.tail.address, 0, width)
    performed(stream)
    assert_bf16_near(np.array(space[:, :width]).view(BF16), near.wanted, slack=4e-6)
    np.testing.assert_array_equal(near.next_tail.values.astype(float), near.wanted_tail)


def far_decode(folder, stream):
    tails = sparse(folder / "tails", 2, FAR)
    rng = np.random.default_rng(0)
    before = rounded(rng.standard_normal((3, 8)))
    tails[1, :24] = Rows(before).values.reshape(-1).view(np.uint16)
    case = Case(1, 8)
    slots = devices.array([1], np.int64)
    wanted, after = naive.short_conv(case.x.values.astype(float), before, case.weight.values)
    conv.short_conv_decode(
        stream, case.x.address, 8, devices.at(tails), FAR, devices.at(slots), case.weight.address,
        case.out.address, 8, 1, 8,
    )  # fmt: skip
    performed(stream)
    assert_bf16_near(case.out.values, wanted, slack=4e-6)
    np.testing.assert_array_equal(np.array(tails[1, :24]).view(BF16).astype(float).reshape(3, 8), after)


@pytest.mark.parametrize(
    ("kernel", "check", "old"),
    [
        (conv.short_conv_kernel, far_conv, "(i_row * x_stride)"),
        (conv.short_conv_kernel, far_conv, "(i_row * out_stride)"),
        (conv.short_conv_decode_kernel, far_decode, "g_slots[i_request] * slot_stride"),
    ],
)
def test_rows_behind_2_31_elements(tmp_path, kernel, check, old):
    assert_caught(
        lambda stream: check(tmp_path, stream),
        devices.Stream(),
        kernel,
        simt.SimtError,
        old=old,
        new=f"((({old}) << 32) >> 32)",
        nth=0,
    )


def test_a_halo_behind_2_31_elements(tmp_path):
    """The rows above the second tile, where they lie and from the scratch."""
    stride = 2**25 + 64  # 65 rows are 2.2e9 elements
    for in_place in (False, True):
        case = Case(65, 8)
        space, out = sparse(tmp_path / "x", 65, stride), sparse(tmp_path / "out", 65, stride)
        space[:, :8] = case.x.values.view(np.uint16)
        to, stream = (space if in_place else out), devices.Stream()
        conv.short_conv(
            stream, devices.at(space), stride, case.tail.address, case.next_tail.address, case.weight.address,
            devices.at(to), stride, devices.at(case.scratch), 65, 8,
        )  # fmt: skip
        performed(stream)
        assert_bf16_near(np.array(to[:, :8]).view(BF16), case.wanted, slack=4e-6)


@seeds(conv.short_conv_kernel)
@changes(
    {"old": "t_x[j] = t_x[j + 16]", "new": "t_x[j] = t_x[j + 12]"},
    {"old": "t_x[j] = t_x[j + 4]", "new": "t_x[j] = t_x[j]"},
    {"old": "t_x, 12 + 4 * j)", "new": "t_x, 12)"},
    {"old": "while i_row + 4 <= end", "new": "while i_row + 4 < end + 2"},
    {"old": "(i_tile - 1) * above_tile_stride", "new": "i_tile * above_tile_stride", "nth": 0},
    {"old": "(i_tile - 1) * above_tile_stride", "new": "i_tile * above_tile_stride", "nth": 1},
    {"old": "i_tile == 0", "new": "i_tile < 2", "nth": 0},
    {"old": "end == rows and has_next_tail", "new": "has_next_tail"},
    {"old": "a, b, c = b, c, d", "new": "a, b, c = b, d, c"},
    {"old": "t_x[i], t_x[i + 4]", "new": "t_x[i + 4], t_x[i]", "inside": "conv_row_thread"},
    {"old": "i_lane >= width", "new": "i_lane > width"},
)
def test_mistakes_in_short_conv_are_caught(change):
    def check(stream):
        for rows, width, order in ((130, 8, "forward"), (67, 8, "reverse"), (130, 5, "reverse")):
            Case(rows, width).short_conv(stream, order=order)

    assert_caught(check, devices.Stream(), conv.short_conv_kernel, simt.SimtError, **change)


@seeds(conv.conv_halos_kernel)
@changes(
    {"old": "i_tile * TILE_ROWS - TAIL + j", "new": "i_tile * TILE_ROWS - TAIL + j + 1"},
    {"old": "i_tile == 0", "new": "False", "nth": 0},
    {"old": "i_tile == 0", "new": "i_tile <= 1", "nth": 1},
    {"old": "(i_tile * TAIL + j) * width", "new": "(i_tile + j) * width"},
)
def test_mistakes_in_conv_halos_are_caught(change):
    def check(stream):
        for width in (8, 5):
            Case(130, width).short_conv(stream, in_place=True, tail="in place")

    assert_caught(check, devices.Stream(), conv.conv_halos_kernel, simt.SimtError, **change)


@pytest.mark.no_gpu
def test_in_place_without_saved_halos_is_caught():
    """What the scratch is for: some order writes the rows above a tile before the tile has read them."""

    def check_without(order):
        case = Case(130, 8)
        case.scratch = case.x.flat[61 * 8 :].view(np.uint16)  # halos of tile 1 lie where x has them
        x, stream = case.x, devices.Stream()
        stream.launch(
            conv.short_conv_kernel, (3, 1, 1), 128, 0, x.address, 8, case.tail.address, x.address + 16 * 61, 64 * 8, 8,
            case.weight.address, x.address, 8, case.next_tail.address, 1, 130, 2, 8,
        )  # fmt: skip
        performed(stream, order)
        assert_bf16_near(x.values, case.wanted, slack=4e-6)

    check_without("reverse")
    with pytest.raises(AssertionError):
        check_without("forward")


@seeds(conv.conv_tail_kernel)
@changes(
    {"old": "i_row < 0", "new": "i_row < 1", "nth": 0},
    {"old": "i_row < 0", "new": "i_row <= 0", "nth": 1},
    {"old": "(TAIL + i_row)", "new": "(TAIL - 1 + i_row)", "nth": 0},
    {"old": "rows - TAIL + j", "new": "rows - 1 - j", "nth": 0},
    {"old": "g_next_tail[j * width + i_lane]", "new": "g_tail[j * width + i_lane]"},
)
def test_mistakes_in_conv_tail_are_caught(change):
    def check(stream):
        for rows, width in ((1, 8), (3, 8), (1, 5), (3, 5)):
            for in_place in (True, False):
                Case(rows, width).conv_tail(stream, in_place)

    assert_caught(check, devices.Stream(), conv.conv_tail_kernel, simt.SimtError, **change)


@seeds(conv.short_conv_decode_kernel)
@changes(
    {"old": "g_slots[i_request] * slot_stride", "new": "i_request * slot_stride"},
    {"old": "t_x[4 * (j + 1) + k]", "new": "t_x[4 * j + k]"},
    {"old": "g_tails[tail + i_lane] = b", "new": "g_tails[tail + i_lane] = c"},
    {"old": "g_weight[w + 3]", "new": "g_weight[w]"},
)
def test_mistakes_in_decode_are_caught(change):
    def check(stream):
        check_decode(3, 8, stream=stream)
        check_decode(3, 5, stream=stream)

    assert_caught(check, devices.Stream(), conv.short_conv_decode_kernel, simt.SimtError, **change)


@pytest.mark.slow  # ptxas; `make kernels` compiles and compares every kernel, too
@pytest.mark.no_gpu
@chips
@pytest.mark.parametrize(
    ("kernel", "accesses"),
    [
        (conv.short_conv_kernel, ["LDG.128", "LDG.64", "STG.64"]),
        (conv.conv_halos_kernel, ["LDG.64", "STG.64"]),
        (conv.conv_tail_kernel, ["LDG.64", "STG.64"]),
        (conv.short_conv_decode_kernel, ["LDG.128", "LDG.64", "STG.64"]),
    ],
)
def test_machine_code(kernel, accesses, arch):
    assert_compact(kernel, accesses, arch)
