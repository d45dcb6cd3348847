"""Rows on the device of a test: guarded, poisoned, with strides; and how near to float64 a bf16 result has to be."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers import devices
from helpers.devices import sparse as sparse
from whalez.ops.device import compile as compiler

BF16 = ml_dtypes.bfloat16
HALF_UNIT = 2.0**-8  # of a value: what rounding to bf16 may cost


class Rows:
    """Rows [T, ...], `gap` poisoned elements behind each, `beyond` more rows that nobody may write, then a page fault.

    The array ends with its last value, so a vector that reaches behind a row of width 37 is a fault or spoils the gap.
    """

    def __init__(
        self, values: Any, dtype: Any = BF16, *, gap: int = 0, beyond: int = 0, lead: int = 0, align: int = 16
    ) -> None:
        values = np.asarray(values).astype(dtype)
        self.shape, self.dtype = values.shape, np.dtype(dtype)
        self.width = math.prod(values.shape[1:])
        self.stride = self.width + gap
        count = values.shape[0] + beyond
        self.flat = devices.empty(lead + count * self.stride - (gap if count else 0), self.dtype, align=align)
        self._lead = lead
        self._index = lead + np.arange(values.shape[0])[:, None] * self.stride + np.arange(self.width)
        self.flat[self._index] = values.reshape(values.shape[0], self.width)
        self._before = self.flat.copy()

    @classmethod
    def poisoned(cls, *shape: int, dtype: Any = BF16, **how: Any) -> Rows:
        """Rows without values yet, to be written."""
        return cls(np.full(shape, np.nan), dtype, **how)

    @property
    def address(self) -> int:
        return devices.at(self.flat) + self._lead * self.dtype.itemsize

    @property
    def values(self) -> np.ndarray:
        return self.flat[self._index].reshape(self.shape)

    def assert_rest_untouched(self) -> None:
        """Everything but the rows, bit by bit."""
        now, before = self.flat.copy(), self._before.copy()
        now[self._index] = before[self._index] = 0
        assert now.tobytes() == before.tobytes()


def performed(stream: Any, order: str = "forward", **how: Any) -> None:
    """Run what the stream was told, under one thread order."""
    devices.run_queues([stream], order=order, **how)


def assert_bf16_near(got: np.ndarray, wanted: np.ndarray, slack: float = 1e-5) -> None:
    """Within the rounding of one store, and `slack` of the row's largest value for the f32 arithmetic before it."""
    got, wanted = got.astype(np.float64), np.asarray(wanted, np.float64)
    assert np.isfinite(got).all()
    largest = np.max(np.abs(wanted), axis=-1, keepdims=True, initial=0.0)
    excess = np.abs(got - wanted) - (HALF_UNIT * np.abs(wanted) + slack * largest)
    assert np.max(excess, initial=-1.0) <= 0, f"off by {np.max(np.abs(got - wanted))}"


def rounded(values: Any) -> np.ndarray:
    """f64 values that bf16 holds exactly."""
    return np.asarray(values, np.float32).astype(BF16).astype(np.float64)


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal values that bf16 holds exactly, rows of very different size."""
    scale = 10.0 ** rng.uniform(-3, 3, (shape[0],) + (1,) * (len(shape) - 1))
    return rounded(scale * rng.standard_normal(shape))


chips = pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100"))]
)


def assert_compact(kernel: Any, accesses: list[str], arch: str) -> None:
    """No stack, no spills, and these vector accesses (e.g. LDG.128) in the machine code."""
    cubin = compiler.compile_cubin(kernel, arch)
    usage = compiler.resource_usage(cubin)
    assert (usage.stack_bytes, usage.spill_bytes) == (0, 0), usage
    sass = compiler._inspect(cubin, "nvdisasm", "-c")
    found = {f"{name}.{width}" for name, width in re.findall(r"\b(LDG|STG)[.\w]*?\.(64|128)\b", sass)}
    assert set(accesses) <= found, sorted(found)
