"""The maker of mutants: it changes what it is asked to, nothing else, and refuses to change nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda

from helpers import devices
from helpers.mutate import SEEDED, assert_caught, changes, is_quick, mutate, seeds, source_of
from whalez.ops.device.kernel import KERNELS, Kernel
from whalez.ops.device.types import f32, f32p, i64
from whalez.testing import simt

FACTOR = 2.0


@cuda.jit(device=True)
def scaled_thread(x: Any) -> Any:
    return x * f32(FACTOR)


@cuda.jit(device=True)
def shifted_thread(x: Any) -> Any:
    return scaled_thread(x) + f32(1.0)


def scale_kernel(g_x: Any, count: Any) -> None:
    i = i64(cuda.threadIdx.x)
    if i < count:
        g_x[i] = shifted_thread(g_x[i])


KERNEL = Kernel("scale_kernel", scale_kernel, (f32p, i64))


def result_of(kernel: Any) -> list[float]:
    x = simt.array([1.0, 2.0, 3.0], np.float32)
    stream = simt.SimtStream()
    stream.launch(kernel, 1, 32, 0, x.ctypes.data, 3)
    simt.run_queues([stream])
    return x.tolist()


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"old": "i < count", "new": "i + 1 < count"}, [3, 5, 3]),
        ({"old": "g_x[i]", "new": "g_x[0]", "nth": 0}, [7, 2, 3]),
        ({"old": "x * f32(FACTOR)", "new": "x - f32(FACTOR)", "inside": "scaled_thread"}, [0, 1, 2]),
        ({"old": "+ f32(1.0)", "new": "", "inside": "shifted_thread"}, [2, 4, 6]),
        ({"constants": {"FACTOR": 10.0}}, [11, 21, 31]),
        ({"old": "x * ", "new": "x + ", "inside": "scaled_thread", "constants": {"FACTOR": 10.0}}, [12, 13, 14]),
    ],
)
def test_what_is_asked_changes_and_nothing_else(change, result):
    assert result_of(mutate(KERNEL, **change)) == result
    assert result_of(KERNEL) == [3, 5, 7]
    assert all("mutant" not in name for name in KERNELS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "no such text", "new": ""}, "found it 0 times"),
        ({"old": "g_x[i]", "new": ""}, "found it 2 times"),
        ({"old": "g_x[i]", "new": "", "nth": 2}, "more than 2 times"),
        ({"old": "x", "new": "", "inside": "nobody"}, "no device function named nobody"),
        ({"constants": {"NOBODY": 1}}, "no constant named NOBODY"),
    ],
)
def test_a_change_of_nothing_is_refused(change, said):
    with pytest.raises(LookupError, match=said):
        mutate(KERNEL, **change)


def check(stream: Any) -> None:
    x = simt.array([1.0, 2.0], np.float32)
    stream.launch(KERNEL, 1, 32, 0, x.ctypes.data, 2)
    simt.run_queues([stream])
    assert x.tolist() == [3, 5]


def test_wrong_results_and_faults_count_as_caught():
    assert_caught(check, simt.SimtStream(), KERNEL, old="i < count", new="i == 0")
    assert_caught(check, simt.SimtStream(), KERNEL, simt.SimtError, old="i < count", new="i <= count")


def test_what_is_not_caught_fails():
    with pytest.raises(pytest.fail.Exception):
        assert_caught(check, simt.SimtStream(), KERNEL, old="i < count", new="i < count and i < 5")
    with pytest.raises(LookupError, match="never launched"):
        assert_caught(fails_second_time(), simt.SimtStream(), KERNEL, old="i < count", new="i == 0")


def fails_second_time() -> Callable[[Any], None]:
    calls: list[Any] = []

    def check_nothing(stream: Any) -> None:
        calls.append(stream)
        assert len(calls) == 1

    return check_nothing


def test_a_mutant_that_does_not_compile_is_not_caught():
    with pytest.raises(Exception, match="Failed in") as raised:
        assert_caught(check, simt.SimtStream(), KERNEL, simt.SimtError, old="i < count", new="nobody < count")
    assert not isinstance(raised.value, AssertionError)


# ---- every kernel has one ------------------------------------------------------------------------------------------
def test_every_kernel_has_a_seeded_mistake():
    """A new kernel comes with a mutation that its test catches."""
    for path in sorted(Path(__file__).parent.glob("test_*kernels*.py")):
        importlib.import_module(path.stem)
    ours = {source_of(kernel) for kernel in devices.all_kernels() if kernel.function.__module__.startswith("whalez.")}
    assert ours and ours - SEEDED.keys() == set()
    late = {source for source in ours if not any(map(is_quick, SEEDED[source]))}
    assert not late, "no mistake in these is seeded before the long tier"


SLOW = pytest.param("n", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("decorators", "wanted"),
    [
        ([], True),
        ([pytest.mark.slow], False),
        ([changes({}, {}, quick=1)], True),
        ([changes({}, {}, quick=0)], False),
        ([changes({}, {}), pytest.mark.parametrize("kernel", ["m", "n"])], True),
        ([changes({}, {}), pytest.mark.parametrize("kernel", ["m", SLOW])], False),  # that kernel has none
    ],
)
def test_what_is_quick(decorators: list[Any], wanted: bool) -> None:
    def test() -> None:
        pass

    for each in decorators:
        test = each(test)
    assert is_quick(test) == wanted


def test_a_test_that_seeds_nothing_fails():
    @seeds(KERNEL)
    def honest():
        mutate(KERNEL, "i < count", "i == 0")

    @seeds(KERNEL)
    def idle():
        pass

    honest()
    with pytest.raises(AssertionError, match="seeded nothing"):
        idle()
    assert [test.__name__ for test in SEEDED.pop(source_of(KERNEL))] == ["honest", "idle"]
