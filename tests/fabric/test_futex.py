"""The system call itself: what it answers, and that its answers are errno values."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest
from numba import njit

from whalez.fabric.futex import futex_wait, futex_wake, monotonic_ns


@pytest.fixture
def word() -> np.ndarray:
    return np.array([7, 0], np.uint32)


def test_returns_at_once_when_the_word_differs(word: np.ndarray) -> None:
    assert futex_wait(word.ctypes.data, 8, 60 * 10**9) == -errno.EAGAIN


def test_a_step_of_the_whole_word_is_compared_in_32_bits(word: np.ndarray) -> None:
    word[0] = 2**32 - 1
    assert futex_wait(word.ctypes.data, 2**32 - 1, 10**6) == -errno.ETIMEDOUT


def test_times_out_not_before_its_time(word: np.ndarray) -> None:
    begun_ns = time.monotonic_ns()
    assert futex_wait(word.ctypes.data, 7, 20 * 10**6) == -errno.ETIMEDOUT
    assert time.monotonic_ns() - begun_ns >= 20 * 10**6


@pytest.mark.parametrize("timeout_ns", [0, -1])
def test_no_time_means_no_sleep(word: np.ndarray, timeout_ns: int) -> None:
    assert futex_wait(word.ctypes.data, 7, timeout_ns) == -errno.ETIMEDOUT


def test_mistakes_are_errno_values(word: np.ndarray) -> None:
    assert futex_wait(8, 7, 10**6) == -errno.EFAULT
    assert futex_wait(word.ctypes.data + 1, 7, 10**6) == -errno.EINVAL


def test_wake_counts_sleepers(word: np.ndarray) -> None:
    assert futex_wake(word.ctypes.data, 1) == 0


def test_clock_is_pythons() -> None:
    @njit
    def read() -> int:
        return monotonic_ns()  # type: ignore[no-any-return]

    read()
    before = time.monotonic_ns()
    between = read()
    assert before <= between <= time.monotonic_ns()
