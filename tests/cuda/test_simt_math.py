"""Mathematics on the harness is libdevice's own code: it agrees with Python's within rounding."""

import functools
import math

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda

from whalez.testing import simt

rng = np.random.default_rng(0)
UNARY = [
    "exp",
    "log",
    "log2",
    "log10",
    "log1p",
    "expm1",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sinh",
    "cosh",
    "asin",
    "acos",
    "atan",
    "sqrt",
    "floor",
    "ceil",
    "fabs",
    "erf",
    "lgamma",
    "gamma",
]


@functools.cache
def results(dtype, fast):
    """All functions in one kernel: most of the time goes into compiling."""
    lines = [f"    y[{i}, t] = math.{name}(x[t])" for i, name in enumerate(UNARY)]
    space = {"math": math, "cuda": cuda}
    exec("def k(x, y):\n    t = cuda.grid(1)\n" + "\n".join(lines), space)
    x = np.linspace(0.05, 0.95, 64).astype(dtype)
    y = np.zeros((len(UNARY), 64), dtype)
    simt.jit(space["k"], fastmath=fast)[2, 32](x, y)
    return x, y


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fastmath"])
@pytest.mark.parametrize("name", UNARY)
def test_function(name, dtype, fast):
    x, y = results(dtype, fast)
    want = np.array([getattr(math, name)(float(v)) for v in x])
    rtol = (2e-5 if fast else 1e-6) if dtype == "f4" else 1e-13
    np.testing.assert_allclose(y[UNARY.index(name)], want, rtol=rtol, atol=1e-6 if dtype == "f4" else 0)


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fastmath"])
def test_power_division_and_remainder(fast):
    def k(x, y, z):
        i = cuda.grid(1)
        z[i] = (
            (x[i] / y[i]) ** y[i] + math.atan2(x[i], y[i]) + math.fmod(x[i], y[i]) + round(x[i]) + 1 / math.sqrt(x[i])
        )

    x, y = rng.random(64, "f4") * 5 + 0.1, rng.random(64, "f4") + 0.5
    z = np.zeros(64, "f4")
    simt.jit(k, fastmath=fast)[2, 32](x, y, z)
    want = (x / y) ** y + np.arctan2(x, y) + np.fmod(x, y) + np.round(x) + 1 / np.sqrt(x)
    np.testing.assert_allclose(z, want, rtol=1e-4)


def test_exp_of_extremes():
    def k(x, y):
        y[cuda.threadIdx.x] = math.exp(x[cuda.threadIdx.x])

    x = np.array([-np.inf, -200, -104, 0, 88, 200, np.inf, np.nan], "f4")
    y = np.zeros(8, "f4")
    simt.jit(k)[1, 8](x, y)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(y, np.exp(x.astype("f8")).astype("f4"), rtol=1e-6, atol=1e-44)
