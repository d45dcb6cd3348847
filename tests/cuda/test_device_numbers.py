"""bf16 in registers: every one of the 65536 values, every tie, on the harness and against numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda
from numba.cuda import types

from helpers.mutate import mutate
from whalez.ops.device.kernel import Kernel
from whalez.ops.device.ptx import cvt_bf16_f32, cvt_bf16x2_f32, ex2_approx_f32, f32_from_bf16, f32_from_bits
from whalez.ops.device.types import bf16p, f32p, i64, u32p
from whalez.testing import simt

ALL = np.arange(1 << 16, dtype=np.uint16)
NAN = np.uint16(0x7FFF)
BLOCK = 256


def nearest(values: np.ndarray) -> np.ndarray:
    """bf16 bits by ties to even, in integers; the one NaN of the hardware."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), NAN, rounded)


def hard_values() -> np.ndarray:
    """f32: every bf16, the tie above it, and the neighbours of both."""
    upper = ALL.astype(np.uint32) << 16
    return np.concatenate([upper + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)


def widen_body(g_bits: Any, g_values: Any, n: Any) -> None:
    i = cuda.grid(1)
    if i < n:
        g_values[i] = f32_from_bf16(g_bits[i])


def round_body(g_values: Any, g_bits: Any, n: Any) -> None:
    i = cuda.grid(1)
    if i < n:
        g_bits[i] = cvt_bf16_f32(g_values[i])


def round_pairs_body(g_values: Any, g_pairs: Any, n: Any) -> None:
    i = cuda.grid(1)
    if i < n:
        g_pairs[i] = cvt_bf16x2_f32(g_values[2 * i], g_values[2 * i + 1])


def unpack_body(g_pairs: Any, g_values: Any, n: Any) -> None:
    i = cuda.grid(1)
    if i < n:
        g_values[2 * i] = f32_from_bits(types.uint32(g_pairs[i] << 16))
        g_values[2 * i + 1] = f32_from_bits(types.uint32(g_pairs[i] & 0xFFFF0000))


def exponent_body(g_values: Any, g_out: Any, n: Any) -> None:
    i = cuda.grid(1)
    if i < n:
        g_out[i] = ex2_approx_f32(g_values[i])


def kernel_of(body: Any, *pointers: Any) -> Kernel:
    return Kernel(body.__name__, body, (*pointers, i64), (BLOCK, 1, 1))


WIDEN = kernel_of(widen_body, bf16p, f32p)
ROUND = kernel_of(round_body, f32p, bf16p)
ROUND_PAIRS = kernel_of(round_pairs_body, f32p, u32p)
UNPACK = kernel_of(unpack_body, u32p, f32p)
EXPONENT = kernel_of(exponent_body, f32p, f32p)


def ran(kernel: Kernel, given: np.ndarray, count: int, dtype: Any, n: int) -> np.ndarray:
    out = simt.empty(count, dtype)
    simt.jit(kernel)[-(-n // BLOCK), BLOCK](simt.array(given), out, n)
    return np.array(out)


def test_every_bf16_widens_to_its_value() -> None:
    got = ran(WIDEN, ALL, ALL.size, np.float32, ALL.size)
    np.testing.assert_array_equal(got.view(np.uint32), ALL.astype(np.uint32) << 16)
    np.testing.assert_array_equal(got, ALL.view(ml_dtypes.bfloat16).astype(np.float32))


def test_rounds_to_nearest_even() -> None:
    values = hard_values()
    got = ran(ROUND, values, values.size, np.uint16, values.size)
    np.testing.assert_array_equal(got, nearest(values))
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(got[numbers], values[numbers].astype(ml_dtypes.bfloat16).view(np.uint16))


def test_every_bf16_comes_back() -> None:
    values = ran(WIDEN, ALL, ALL.size, np.float32, ALL.size)
    got = ran(ROUND, values, ALL.size, np.uint16, ALL.size)
    np.testing.assert_array_equal(got, np.where(np.isnan(values), NAN, ALL))


def check_pairs(kernel: Kernel) -> None:
    values = np.random.default_rng(0).permutation(hard_values())[:4096]
    pairs = ran(kernel, values, values.size // 2, np.uint32, values.size // 2)
    np.testing.assert_array_equal(pairs.view(np.uint16), nearest(values))  # the first value lies lower in memory


def test_pairs() -> None:
    check_pairs(ROUND_PAIRS)


def test_swapped_pairs_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_pairs(mutate(ROUND_PAIRS, "g_values[2 * i], g_values[2 * i + 1]", "g_values[2 * i + 1], g_values[2 * i]"))


def test_pairs_unpack() -> None:
    got = ran(UNPACK, ALL.view(np.uint32), ALL.size, np.float32, ALL.size // 2)
    np.testing.assert_array_equal(got.view(np.uint32), ALL.astype(np.uint32) << 16)


def test_exponential() -> None:
    values = np.concatenate([np.linspace(-126, 127.9, 4001), [-np.inf, -127.0, -3e38, 0.0, np.inf]]).astype(np.float32)
    got = ran(EXPONENT, values, values.size, np.float32, values.size)
    exact = np.exp2(values.astype(np.float64))
    normal = (values >= -126) & np.isfinite(values)
    np.testing.assert_allclose(got[normal], exact[normal], rtol=2.0**-22)
    assert (got[values < -126] < 2.0**-126).all() and got[values == -np.inf] == 0 and got[values == np.inf] == np.inf
