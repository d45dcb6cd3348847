"""The vector functions against float64, on the whole range and at its edges; the GEMM on strided rows."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from whalez.ops.fastmath import exp_f32, f32_at, sgemm, sigmoid_f32, silu_f32, softplus_f32


@njit
def apply_all(x, exp, sigmoid, silu, softplus):
    for i in range(x.size):
        exp[i] = exp_f32(x[i])
        sigmoid[i] = sigmoid_f32(x[i])
        silu[i] = silu_f32(x[i])
        softplus[i] = softplus_f32(x[i])


def evaluate(x):
    outs = [np.full_like(x, np.nan) for _ in range(4)]
    apply_all(x, *outs)
    return outs


def relative(got, wanted):
    return np.max(np.abs(got - wanted) / np.abs(wanted))


def test_relative_error_over_the_normal_range():
    x = np.linspace(-86.5, 88.0, 400_003).astype(np.float32)
    wide = x.astype(np.float64)
    exp, sigmoid, silu, softplus = evaluate(x)
    assert relative(exp, np.exp(wide)) < 2e-7
    assert relative(sigmoid, 1 / (1 + np.exp(-wide))) < 4e-7
    assert relative(softplus, np.logaddexp(0, wide)) < 4e-7
    nonzero = x != 0
    assert relative(silu[nonzero], (wide / (1 + np.exp(-wide)))[nonzero]) < 4e-7


def test_softplus_is_the_identity_above_20():
    x = np.linspace(20, 1000, 1001).astype(np.float32)
    assert np.array_equal(evaluate(x)[3], x)


def test_exp_just_below_overflow():
    x = np.float32([88.4, 88.7, 88.722])
    assert relative(evaluate(x)[0], np.exp(x.astype(np.float64))) < 2e-7


@pytest.mark.parametrize(
    ("x", "exp", "sigmoid", "softplus"),
    [
        (-np.inf, 0, 0, 0),
        (-1e30, 0, 0, 0),
        (-104, 0, 0, 0),
        (0, 1, 0.5, np.log(2)),
        (89, np.inf, 1, 89),
        (1e30, np.inf, 1, 1e30),
        (np.inf, np.inf, 1, np.inf),
        (np.nan, np.nan, np.nan, np.nan),
    ],
)
def test_edges(x, exp, sigmoid, softplus):
    got = evaluate(np.full(33, x, np.float32))  # 33: vector body and scalar rest
    for value, wanted in zip((got[0], got[1], got[3]), (exp, sigmoid, softplus), strict=True):
        np.testing.assert_allclose(value, np.full(33, wanted), rtol=2e-7, atol=1e-37)


@njit
def multiply(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    sgemm(trans_a, trans_b, m, n, k, np.float32(alpha), a, lda, b, ldb, np.float32(beta), c, ldc)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (64, 128, 33)])
def test_gemm_on_strided_rows_writes_its_tile_only(trans_a, trans_b, m, n, k):
    rng = np.random.default_rng(m)
    a = rng.standard_normal((k, m + 9) if trans_a else (m, k + 9)).astype(np.float32)
    b = rng.standard_normal((n, k + 5) if trans_b else (k, n + 5)).astype(np.float32)
    c = np.full((m + 1, n + 2), np.nan, np.float32)
    left = (a[:, :m].T if trans_a else a[:, :k]).astype(np.float64)
    right = (b[:, :k].T if trans_b else b[:, :n]).astype(np.float64)

    def run(alpha, beta):
        addresses = (a.ctypes.data, a.shape[1], b.ctypes.data, b.shape[1], beta, c.ctypes.data, c.shape[1])
        multiply(trans_a, trans_b, m, n, k, alpha, *addresses)

    run(2.0, 0.0)  # c is NaN: beta 0 must not read it
    np.testing.assert_allclose(c[:m, :n], 2 * left @ right, atol=2e-5)
    run(-1.0, 1.0)
    np.testing.assert_allclose(c[:m, :n], left @ right, atol=3e-5)
    assert np.isnan(c[m]).all()
    assert np.isnan(c[:, n:]).all()


@njit
def double(address, count):
    p = f32_at(address)
    for i in range(count):
        p[i] = p[i] * np.float32(2)


def test_pointer_reads_and_writes_at_an_address():
    x = np.arange(6, dtype=np.float32)
    double(x[1:].ctypes.data, 3)
    assert x.tolist() == [0, 2, 4, 6, 4, 5]
