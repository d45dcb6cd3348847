"""Every emulated statement of inline PTX against numpy, written from the PTX ISA; a statement without a test fails."""

import math
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda
from numba.cuda import types
from numba.cuda.types import float32, uint16, uint32, uint64

from helpers.ptx_asm import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    from_constraints,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    mma,
    mma_swapped,
    shared_u32,
)
from whalez.testing import simt
from whalez.testing.simt.emulation import REGISTRY, Site, find

rng = np.random.default_rng(0)
DTYPES = {"h": "u2", "r": "u4", "l": "u8", "f": "f4", "d": "f8"}
N = 32  # one warp


def bf16_bits(x):
    u = np.asarray(x, "f4").view("u4")
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("u2")


def bf16_value(u):
    return (np.asarray(u).astype("u4") << 16).view("f4")


def execute(text, constraints, *inputs):
    """One warp executes the statement; each lane its element of every input. Returns the outputs."""
    parts = [c for c in constraints.split(",") if c and not c.startswith("~")]
    outs = [c[1:] for c in parts if c.startswith("=")]
    s = from_constraints(text, constraints)
    names = [f"i{k}" for k in range(len(inputs))]
    results = [f"o{k}" for k in range(len(outs))]
    call = f"s({', '.join(f'{n}[t]' for n in names)})"
    body = [f"r = {call}", *(f"o{k}[t] = r{f'[{k}]' if len(outs) > 1 else ''}" for k in range(len(outs)))]
    lines = "".join(
        f"    {line}\n" for line in (["t = cuda.threadIdx.x", *body] if outs else ["t = cuda.threadIdx.x", call])
    )
    space = {"s": s, "cuda": cuda}
    exec(f"def k({', '.join(names + results)}):\n{lines}", space)
    ins = [c for c in parts if not c.startswith("=")]
    arrays = [np.ascontiguousarray(np.broadcast_to(x, N), DTYPES[c]) for x, c in zip(inputs, ins, strict=True)]
    out = [np.zeros(N, DTYPES[c]) for c in outs]
    simt.jit(space["k"])[1, N](*arrays, *out)
    return out


def words(n=N, bits=32):
    return (
        rng.integers(0, 1 << 63, n, dtype="u8") >> np.uint64(64 - bits)
        if bits < 64
        else rng.integers(0, 1 << 63, n, "u8")
    )


SPECIALS = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        -1e-40,
        3.4e38,
        65520.0,
        2.0**-25,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
    ],
    "f4",
)
FLOATS = np.concatenate([SPECIALS, rng.standard_normal(N - len(SPECIALS)).astype("f4")])
POSITIVE = np.exp2(rng.uniform(-20, 20, N)).astype("f4")
LANE = np.arange(N, dtype="u4")

# ----------------------------------------------------------------------------- statements from registers to registers
PRMT_SELECTORS = np.array([0x3210, 0x7654, 0x5410, 0x7632, 0x0123, 0xBA98, 0x8888, 0x1C4D] * 4, "u4")


def prmt(a, b, sel):
    pool = np.stack([a, b], 1).astype("<u4").view("u1")
    out = np.zeros((N, 4), "u1")
    for lane in range(N):
        for i in range(4):
            s = int(sel[lane]) >> (4 * i)
            byte = pool[lane, s & 7]
            out[lane, i] = (0xFF if byte & 0x80 else 0) if s & 8 else byte
    return out.view("<u4")[:, 0]


def rounded_to_bf16(x):
    return np.where(np.isnan(x), 0x7FFF, bf16_bits(x)).astype("u2")


def f16_bits(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, "f4").astype("f2").view("u2")


def joined(high, low):
    return high.astype("u4") << 16 | low


def tf32_bits(x):
    """To nearest of 2^-10 relative, ties away from zero, by exact arithmetic."""
    out = []
    for v in np.asarray(x, "f4"):
        if not np.isfinite(v) or v == 0:
            out.append(np.float32(v))
            continue
        e = max(math.frexp(abs(float(v)))[1], -125)  # denormals keep the exponent of the smallest normal number
        unit = math.ldexp(1.0, e - 11)
        out.append(np.float32(math.copysign(math.floor(abs(float(v)) / unit + 0.5) * unit, v)))
    return np.array(out, "f4")


A, B, C = (words().astype("u4") for _ in range(3))
L = rng.integers(0, 1 << 63, N, "u8") * np.uint64(2) + np.uint64(1)
H, H2 = (words(bits=16).astype("u2") for _ in range(2))
Y = rng.standard_normal(N).astype("f4")
D, E, F = rng.standard_normal((3, N))
ALL = 0xFFFFFFFF
NUMBERS = np.where(np.isnan(FLOATS), np.float32(1), FLOATS)


def fused(a, b, c):
    return np.array(
        [float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)]
    )


def toward(direction, exact, t):
    """exact (f8 or long double) rounded to type t towards zero, down or up."""
    near = exact.astype(t)
    wide = near.astype(exact.dtype)
    down = np.where(wide > exact, np.nextafter(near, t(-np.inf)), near)
    up = np.where(wide < exact, np.nextafter(near, t(np.inf)), near)
    return {"rm": down, "rp": up, "rz": np.where(exact > 0, down, up)}[direction]


REGISTER_CASES = [
    ("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", (FLOATS, Y), [joined(rounded_to_bf16(FLOATS), rounded_to_bf16(Y))]),
    ("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", (FLOATS, Y), [joined(rounded_to_bf16(Y), rounded_to_bf16(FLOATS))]),
    ("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", (Y,), [joined(rounded_to_bf16(Y), rounded_to_bf16(Y))]),
    ("cvt.rn.bf16.f32 $0, $1;", "=h,f", (FLOATS,), [rounded_to_bf16(FLOATS)]),
    ("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", (Y * 1e3, Y), [joined(f16_bits(Y * 1e3), f16_bits(Y))]),
    ("cvt.rn.f16.f32 $0, $1;", "=h,f", (Y * 1e4,), [f16_bits(Y * 1e4)]),
    ("cvt.f32.bf16 $0, $1;", "=f,h", (H,), [bf16_value(H)]),
    ("cvt.f32.f16 $0, $1;", "=f,h", (H,), [H.view("f2").astype("f4")]),
    ("cvt.rna.tf32.f32 $0, $1;", "=r,f", (NUMBERS,), [tf32_bits(NUMBERS).view("u4")]),
    ("cvt.rna.tf32.f32 $0, $1;", "=f,f", (Y,), [tf32_bits(Y)]),
    ("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (A, B, PRMT_SELECTORS), [prmt(A, B, PRMT_SELECTORS)]),
    ("prmt.b32 $0, $3, $1, $2;", "=r,r,r,r", (B, PRMT_SELECTORS, A), [prmt(A, B, PRMT_SELECTORS)]),
    ("mov.b32 $0, {$2, $1};", "=r,h,h", (H2, H), [joined(H2, H)]),
    ("mov.b32 $0, {$1, $2};", "=r,h,h", (H, H2), [joined(H2, H)]),
    ("mov.b64 $0, {$1, $2};", "=l,r,r", (A, B), [B.astype("u8") << np.uint64(32) | A]),
    ("mov.b64 $0, {$1,$2,$3,$4};", "=l,h,h,h,h", (H, H2, H2, H), [np.stack([H, H2, H2, H], 1).view("u8")[:, 0]]),
    ("mov.b32 {$0, $1}, $2;", "=h,=h,r", (A,), [A.astype("u2"), (A >> 16).astype("u2")]),
    ("mov.b64 {$0, $1}, $2;", "=r,=r,l", (L,), [L.astype("u4"), (L >> np.uint64(32)).astype("u4")]),
    ("mov.b32 $0, $1;", "=r,f", (FLOATS,), [FLOATS.view("u4")]),
    ("mov.b32 $0, $1;", "=f,r", (A,), [A.view("f4")]),
    ("mov.u32 $0, %laneid;", "=r", (), [LANE]),
    ("mov.u32 $0, %lanemask_eq;", "=r", (), [1 << LANE]),
    ("mov.u32 $0, %lanemask_lt;", "=r", (), [(1 << LANE) - 1]),
    ("mov.u32 $0, %lanemask_le;", "=r", (), [((2 << LANE.astype("u8")) - 1).astype("u4")]),
    ("mov.u32 $0, %lanemask_gt;", "=r", (), [ALL - ((2 << LANE.astype("u8")) - 1)]),
    ("mov.u32 $0, %lanemask_ge;", "=r", (), [ALL - ((1 << LANE.astype("u8")) - 1)]),
    ("mov.u32 $0, %dynamic_smem_size;", "=r", (), [np.zeros(N)]),
    ("mov.u32 $0, %smid;", "=r", (), [np.zeros(N)]),
    ("activemask.b32 $0;", "=r", (), [np.full(N, ALL)]),
    ("cvta.to.shared.u64 $0, $1;", "=l,l", (L,), [L]),
    ("cvta.to.global.u64 $0, $1;", "=l,l", (L,), [L]),
    ("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", "=r,l", (L,), [L.astype("u4")]),
    ("bfind.shiftamt.u32 $0, $1;", "=r,r", (A >> LANE,), [[32 - int(x).bit_length() if x else ALL for x in A >> LANE]]),
    ("sub.rn.f32 $0, $1, $2;", "=f,f,f", (FLOATS, Y), [FLOATS - Y]),
    ("sub.rn.f32 $0, $2, $1;", "=f,f,f", (FLOATS, Y), [Y - FLOATS]),
    ("sub.rn.f64 $0, $1, $2;", "=d,d,d", (D, E), [D - E]),
    *(
        (f"sub.{m}.f32 $0, $1, $2;", "=f,f,f", (Y, POSITIVE), [toward(m, Y.astype("f8") - POSITIVE, np.float32)])
        for m in ("rz", "rm", "rp")
    ),
    *(
        (f"sub.{m}.f64 $0, $1, $2;", "=d,d,d", (D, E / 7), [toward(m, D.astype("g") - (E / 7), np.float64)])
        for m in ("rz", "rm", "rp")
    ),
    ("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (Y, POSITIVE, -Y * POSITIVE), [fused(Y, POSITIVE, -Y * POSITIVE)]),
    ("fma.rn.f64 $0, $1, $2, $3;", "=d,d,d,d", (D, E, -D * E), [fused(D, E, -D * E)]),
]  # fmt: skip
APPROXIMATE_CASES = [  # a GPU is within a few units in the last place; here they are as exact as f32 allows
    ("ex2.approx.ftz.f32 $0, $1;", np.linspace(-100, 100, N, dtype="f4"), np.exp2),
    ("lg2.approx.ftz.f32 $0, $1;", POSITIVE, np.log2),
    ("tanh.approx.f32 $0, $1;", Y, np.tanh),
    ("sqrt.approx.ftz.f32 $0, $1;", POSITIVE, np.sqrt),
    ("sqrt.rn.f32 $0, $1;", POSITIVE, np.sqrt),
    ("rcp.approx.ftz.f32 $0, $1;", Y, np.reciprocal),
    ("rcp.rn.f32 $0, $1;", Y, np.reciprocal),
    ("rsqrt.approx.ftz.f32 $0, $1;", POSITIVE, lambda x: 1 / np.sqrt(x)),
    ("rsqrt.approx.f32 $0, $1;", POSITIVE, lambda x: 1 / np.sqrt(x)),
]


def case_id(case):
    return f"{case[0].split(';')[0].replace('$', '')} {case[1] if isinstance(case[1], str) else ''}"


@pytest.mark.parametrize("case", REGISTER_CASES, ids=case_id)
def test_registers(case):
    text, constraints, inputs, want = case
    for got, w in zip(execute(text, constraints, *inputs), want, strict=True):
        w = np.asarray(w).astype(got.dtype)
        np.testing.assert_array_equal(got, w)
        if got.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(w[~np.isnan(w)]))


def test_lane_is_counted_across_the_axes_of_a_block():
    lane = from_constraints("mov.u32 $0, %laneid;", "=r")

    def k(o):
        o[cuda.threadIdx.y, cuda.threadIdx.x] = lane()

    o = np.zeros((10, 8), "u4")
    simt.jit(k)[1, (8, 10)](o)
    np.testing.assert_array_equal(o.ravel(), np.arange(80) % 32)


@pytest.mark.parametrize("case", APPROXIMATE_CASES, ids=lambda c: c[0].split(" ")[0])
def test_approximations_are_exact(case):
    text, x, function = case
    (got,) = execute(text, "=f,f", x)
    np.testing.assert_allclose(got, function(x.astype("f8")), rtol=2.4e-7)


def test_rsqrt_of_doubles():
    (got,) = execute("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", np.abs(D))
    np.testing.assert_allclose(got, 1 / np.sqrt(np.abs(D)), rtol=1e-15)


# --------------------------------------------------------------------------------------------------- loads and stores
def elements(dtype, n=N):
    raw = rng.integers(0, 256, n * np.dtype(dtype).itemsize, "u1")
    x = raw.view(dtype).copy()
    if x.dtype.kind == "f":
        x[~np.isfinite(x)] = 1
    return x


LOADS = [  # text, constraint of the register, type in memory, elements of one thread, offset in bytes
    ("ld.global.f32 {}, [{}];", "f", "f4", 1, 0),
    ("ld.global.f32 {}, [{}+8];", "f", "f4", 1, 8),
    ("ld.global.f32 {}, [{} + 0x10];", "f", "f4", 1, 16),
    ("ld.global.nc.f64 {}, [{}];", "d", "f8", 1, 0),
    ("ld.global.nc.L1::no_allocate.v4.f32 {}, [{}];", "f", "f4", 4, 0),
    ("ld.global.v2.b64 {}, [{}+16];", "l", "u8", 2, 16),
    ("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {}, [{}];", "r", "u4", 4, 0),
    ("ld.global.cg.u16 {}, [{}];", "h", "u2", 1, 0),
    ("ld.global.u8 {}, [{}];", "h", "u1", 1, 0),
    ("ld.global.s8 {}, [{}];", "r", "i1", 1, 0),
    ("ld.global.s16 {}, [{}];", "r", "i2", 1, 0),
    ("ld.global.v2.u16 {}, [{}];", "h", "u2", 2, 0),
    ("ld.volatile.global.u32 {}, [{}];", "r", "u4", 1, 0),
    ("ld.volatile.f32 {}, [{}];", "f", "f4", 1, 0),
    ("ld.relaxed.gpu.global.s32 {}, [{}];", "r", "i4", 1, 0),
    ("ld.acquire.cta.u64 {}, [{}];", "l", "u8", 1, 0),
    ("ld.acquire.sys.global.u64 {}, [{}];", "l", "u8", 1, 0),
]  # fmt: skip


def registers(n, constraint, first=0):
    names = [f"${first + i}" for i in range(n)]
    return (names[0] if n == 1 else "{" + ", ".join(names) + "}"), ",".join([constraint] * n)


@pytest.mark.parametrize("case", LOADS, ids=lambda c: c[0].split(" {")[0])
def test_load(case):
    text, c, dtype, n, offset = case
    data = simt.array(elements(dtype, N * n + offset // np.dtype(dtype).itemsize), align=16)
    destination, cons = registers(n, f"={c}")
    size = np.dtype(dtype).itemsize
    where = data.ctypes.data + np.arange(N, dtype="u8") * np.uint64(size * n)
    got = execute(text.format(destination, f"${n}"), f"{cons},l,~{{memory}}", where)
    want = data[offset // size :].reshape(N, n)
    for i in range(n):
        wide = want[:, i] if want.dtype.kind == "f" else want[:, i].astype("i8")
        np.testing.assert_array_equal(got[i], wide.astype(got[i].dtype))


STORES = [
    ("st.global.f32 [{}], {};", "f", "f4", 1),
    ("st.global.v4.f32 [{}], {};", "f", "f4", 4),
    ("st.global.wt.v2.b64 [{}], {};", "l", "u8", 2),
    ("st.global.L1::no_allocate.v4.u32 [{}], {};", "r", "u4", 4),
    ("st.global.u16 [{}], {};", "h", "u2", 1),
    ("st.global.u8 [{}], {};", "r", "u1", 1),
    ("st.global.f64 [{}], {};", "d", "f8", 1),
    ("st.global.b32 [{}], {};", "f", "u4", 1),
    ("st.volatile.global.u64 [{}], {};", "l", "u8", 1),
    ("st.relaxed.gpu.u32 [{}], {};", "r", "u4", 1),
    ("st.release.sys.global.u64 [{}], {};", "l", "u8", 1),
]  # fmt: skip


@pytest.mark.parametrize("case", STORES, ids=lambda c: c[0].split(" [")[0])
def test_store(case):
    text, c, dtype, n = case
    size = np.dtype(dtype).itemsize
    data = simt.empty(N * n, dtype, align=16)
    source, cons = registers(n, c, 1)
    values = [elements(DTYPES[c]) for _ in range(n)]
    where = data.ctypes.data + np.arange(N, dtype="u8") * np.uint64(size * n)
    execute(text.format("$0", source), f"l,{cons},~{{memory}}", where, *values)
    want = np.stack([v.view(f"u{v.itemsize}").astype(f"u{size}") for v in values], 1).ravel()
    np.testing.assert_array_equal(data.view(f"u{size}"), want)


def test_store_of_a_literal_and_address_in_shared_memory():
    put = from_constraints("st.shared.u32 [$0], 77;", "r,~{memory}")
    get = from_constraints("ld.shared.u32 $0, [$1+4];", "=r,r,~{memory}")

    def k(o):
        s = cuda.shared.array(34, uint32)
        base = shared_u32(s)
        put(uint32(base + 4 * (cuda.threadIdx.x + 1)))
        o[cuda.threadIdx.x] = get(uint32(base + 4 * cuda.threadIdx.x))

    o = np.zeros(N, "u4")
    simt.jit(k)[1, N](o)
    assert (o == 77).all()


ATOMICS = [  # text, constraint, type in memory, numpy: from (old, operands) to new
    ("atom.acq_rel.sys.global.add.u64", "l", "u8", lambda old, x: old + x),
    ("atom.relaxed.gpu.global.add.u32", "r", "u4", lambda old, x: old + x),
    ("atom.global.add.f32", "f", "f4", lambda old, x: old + x),
    ("atom.exch.b64", "l", "u8", lambda old, x: x),
    ("atom.global.exch.b32", "r", "u4", lambda old, x: x),
    ("atom.global.min.s32", "r", "i4", min),
    ("atom.global.max.u64", "l", "u8", max),
    ("atom.global.max.s64", "l", "i8", max),
    ("atom.global.and.b32", "r", "u4", lambda old, x: old & x),
    ("atom.global.or.b32", "r", "u4", lambda old, x: old | x),
    ("atom.global.xor.b64", "l", "u8", lambda old, x: old ^ x),
    ("atom.global.inc.u32", "r", "u4", lambda old, x: 0 if old >= x else old + 1),
    ("atom.global.dec.u32", "r", "u4", lambda old, x: x if old == 0 or old > x else old - 1),
]


@pytest.mark.parametrize(
    ("case", "kind"),
    [(c, k) for c in ATOMICS for k in ("atom", "red") if k == "atom" or "exch" not in c[0]],  # there is no red.exch
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_atomic(case, kind):
    """Forward order: lane after lane, each sees what the one before it left."""
    text, c, dtype, function = case
    data = elements(dtype, 1)
    x = elements(dtype)
    want_old, value = [], data[0]
    with np.errstate(over="ignore"):
        for v in x:
            want_old.append(value)
            value = np.dtype(dtype).type(function(value, v))
    where = np.full(N, data.ctypes.data, "u8")
    text = text.replace("atom", kind, 1)
    if kind == "atom":
        (old,) = execute(f"{text} $0, [$1], $2;", f"={c},l,{c},~{{memory}}", where, x.view(DTYPES[c]))
        np.testing.assert_array_equal(old.view(dtype), np.array(want_old, dtype))
    else:
        execute(f"{text} [$0], $1;", f"l,{c},~{{memory}}", where, x.view(DTYPES[c]))
    np.testing.assert_array_equal(data[0], value)


def test_compare_and_swap():
    data = np.array([5], "u4")
    where, compare = np.full(N, data.ctypes.data, "u8"), np.where(LANE == 3, 5, np.where(LANE == 9, 40, 1)).astype("u4")
    swap = np.where(LANE == 3, 40, 60).astype("u4")
    (old,) = execute("atom.acquire.gpu.global.cas.b32 $0, [$1], $2, $3;", "=r,l,r,r,~{memory}", where, compare, swap)
    assert old.tolist() == [5] * 4 + [40] * 6 + [60] * 22
    assert data[0] == 60


@pytest.mark.parametrize("text", ["fence.acq_rel.sys;", "fence.sc.gpu;", "membar.sys;", "fence.proxy.async;"])
def test_fences_pass(text):
    """They order nothing here that was not ordered: the limit of this machine. Their text is tested elsewhere."""
    execute(text, "~{memory}")


def test_clock_moves_on_and_sleep_takes_its_time():
    for register in ("%globaltimer", "%clock64"):
        now = from_constraints(f"mov.u64 $0, {register};", "=l,~{memory}")
        sleep = from_constraints("nanosleep.u32 $0;", "r,~{memory}")
        sleep_500 = from_constraints("nanosleep.u32 500;", "~{memory}")

        def k(o):
            o[0] = now()  # noqa: B023
            o[1] = now()  # noqa: B023
            sleep(uint32(100_000))  # noqa: B023
            o[2] = now()  # noqa: B023
            sleep_500()  # noqa: B023
            o[3] = now()  # noqa: B023

        o = np.zeros(4, "u8")
        simt.jit(k)[1, 1](o)
        gaps = np.diff(o)
        assert 0 < gaps[0] < 1000
        assert 100_000 <= gaps[1] < 101_000
        assert 500 <= gaps[2] < 1500


# -------------------------------------------------------------------------------------------------------- tensor cores
def mma_kernel(use):
    """A 16xK and B Kx8 as bf16 bits; the fragments are put together by hand from the ISA's figures."""

    def k(A, B, D):
        lane = cuda.threadIdx.x
        g, t = lane // 4, lane % 4
        c0 = c1 = c2 = c3 = float32(0)
        for k0 in range(0, A.shape[1], 16):
            a0 = uint32(A[g, k0 + 2 * t]) | (uint32(A[g, k0 + 2 * t + 1]) << uint32(16))
            a1 = uint32(A[g + 8, k0 + 2 * t]) | (uint32(A[g + 8, k0 + 2 * t + 1]) << uint32(16))
            a2 = uint32(A[g, k0 + 2 * t + 8]) | (uint32(A[g, k0 + 2 * t + 9]) << uint32(16))
            a3 = uint32(A[g + 8, k0 + 2 * t + 8]) | (uint32(A[g + 8, k0 + 2 * t + 9]) << uint32(16))
            b0 = uint32(B[k0 + 2 * t, g]) | (uint32(B[k0 + 2 * t + 1, g]) << uint32(16))
            b1 = uint32(B[k0 + 2 * t + 8, g]) | (uint32(B[k0 + 2 * t + 9, g]) << uint32(16))
            c0, c1, c2, c3 = use(uint32(a0), uint32(a1), uint32(a2), uint32(a3), uint32(b0), uint32(b1), c0, c1, c2, c3)
        D[g, 2 * t], D[g, 2 * t + 1] = c0, c1
        D[g + 8, 2 * t], D[g + 8, 2 * t + 1] = c2, c3

    return k


good_mma_kernel = mma_kernel(mma)


@simt.orders()
def test_mma_m16n8k16_bf16(order):
    A, B = bf16_bits(rng.standard_normal((16, 64))), bf16_bits(rng.standard_normal((64, 8)))
    D = np.zeros((16, 8), "f4")
    simt.jit(good_mma_kernel)[1, 32](A, B, D, order=order)
    np.testing.assert_allclose(D, bf16_value(A) @ bf16_value(B), rtol=1e-5, atol=1e-5)


def test_wrong_order_of_operands_in_the_text_is_caught():
    A, B = bf16_bits(rng.standard_normal((16, 16))), bf16_bits(rng.standard_normal((16, 8)))
    D = np.zeros((16, 8), "f4")
    simt.jit(mma_kernel(mma_swapped))[1, 32](A, B, D)
    assert not np.allclose(D, bf16_value(A) @ bf16_value(B), atol=1e-2)


def fragment_mma(text, a, b, c):
    """The statement on fragments (32, registers): a, b as u32, c as f32. Returns d."""
    n, m = a.shape[1], b.shape[1]
    names = [f"${i}" for i in range(4 + n + m + 4)]
    groups = [names[:4], names[4 : 4 + n], names[4 + n : 4 + n + m], names[4 + n + m :]]
    operands = ", ".join("{" + ", ".join(x) + "}" for x in groups)
    constraints = ",".join(["=f"] * 4 + ["r"] * (n + m) + ["f"] * 4)
    return np.stack(execute(f"{text} {operands};", constraints, *a.T, *b.T, *c.T), 1)


def pack_pairs(x):
    return (bf16_bits(x[..., 0]).astype("u4")) | (bf16_bits(x[..., 1]).astype("u4") << 16)


G, T = LANE.astype(int) // 4, LANE.astype(int) % 4
C_ROWS, C_COLS = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)


@pytest.mark.parametrize("k", [8, 16])
def test_mma_bf16_adds_to_c(k):
    A, B, C = (bf16_value(bf16_bits(rng.standard_normal(s))) for s in ((16, k), (k, 8), (16, 8)))
    columns = [2 * T, 2 * T + 1]
    a = [pack_pairs(np.stack([A[G + r, c + o] for c in columns], 1)) for o in range(0, k, 8) for r in (0, 8)]
    b = [pack_pairs(np.stack([B[c + o, G] for c in columns], 1)) for o in range(0, k, 8)]
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.bf16.bf16.f32"
    d = fragment_mma(text, np.stack(a, 1), np.stack(b, 1), C[C_ROWS, C_COLS])
    np.testing.assert_allclose(d, (C + A @ B)[C_ROWS, C_COLS], rtol=1e-5, atol=1e-5)


def test_mma_tf32_ignores_the_low_bits():
    A, B, C = (rng.standard_normal(s).astype("f4") for s in ((16, 8), (8, 8), (16, 8)))
    a = np.stack([A[G, T], A[G + 8, T], A[G, T + 4], A[G + 8, T + 4]], 1).view("u4")
    b = np.stack([B[T, G], B[T + 4, G]], 1).view("u4")
    d = fragment_mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", a, b, C[C_ROWS, C_COLS])
    cut = lambda x: (x.view("u4") & 0xFFFFE000).view("f4")  # noqa: E731
    np.testing.assert_allclose(d, (C + cut(A) @ cut(B))[C_ROWS, C_COLS], rtol=1e-5, atol=1e-6)
    assert np.abs(d - (C + A @ B)[C_ROWS, C_COLS]).max() > 1e-4


@pytest.mark.parametrize("trans", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ldmatrix(n, trans):
    """Lane 8m + r names row r of matrix m; lane l gets elements (l/4, 2(l%4)) and the one beside it, of each matrix."""
    suffix = ".trans" if trans else ""
    destination, cons = registers(n, "=r")
    load = from_constraints(
        f"ldmatrix.sync.aligned.m8n8.x{n}{suffix}.shared.b16 {{{destination.strip('{}')}}}, [${n}];",
        f"{cons},r,~{{memory}}",
    )
    take = "\n".join(f"    o[t, {i}] = r{f'[{i}]' if n > 1 else ''}" for i in range(n))
    space = {"cuda": cuda, "load": load, "shared_u32": shared_u32, "uint16": uint16, "uint32": uint32}
    exec(
        "def k(x, row, o):\n"
        "    s = cuda.shared.array(512, uint16, 16)\n"
        "    t = cuda.threadIdx.x\n"
        "    for i in range(t, 512, 32):\n"
        "        s[i] = x[i]\n"
        "    cuda.syncthreads()\n"
        f"    r = load(uint32(shared_u32(s) + row[t] * 16))\n{take}\n",
        space,
    )
    x = rng.integers(0, 1 << 16, 512).astype("u2")
    row = rng.permutation(64)[:32].astype("i8")
    o = np.zeros((32, n), "u4")
    simt.jit(space["k"])[1, 32](x, row, o)
    for m in range(n):
        M = x.reshape(64, 8)[row[8 * m : 8 * m + 8]]
        M = M.T if trans else M
        want = M[G, 2 * T].astype("u4") | M[G, 2 * T + 1].astype("u4") << 16
        np.testing.assert_array_equal(o[:, m], want)


@simt.orders()
def test_cp_async_then_ldmatrix_then_mma(order):
    def k(A, B, D, pA):
        sA = cuda.shared.array((16, 16), uint16, 16)
        sB = cuda.shared.array((16, 8), uint16, 16)
        lane = cuda.threadIdx.x
        base = shared_u32(sA)
        cp_async_16(uint32(base + lane * 16), uint64(pA + lane * 16))
        cp_async_commit()
        for i in range(lane, 128, 32):
            sB[i // 8, i % 8] = B[i // 8, i % 8]
        cp_async_wait_0()
        cuda.syncthreads()
        a = ldmatrix_x4(uint32(base + (lane % 16) * 32 + (lane // 16) * 16))
        b = ldmatrix_x2_trans(uint32(shared_u32(sB) + (lane % 16) * 16))
        z = float32(0)
        d = mma(a[0], a[1], a[2], a[3], b[0], b[1], z, z, z, z)
        g, t = lane // 4, lane % 4
        D[g, 2 * t], D[g, 2 * t + 1], D[g + 8, 2 * t], D[g + 8, 2 * t + 1] = d[0], d[1], d[2], d[3]

    A = simt.array(bf16_bits(rng.standard_normal((16, 16))))
    B = bf16_bits(rng.standard_normal((16, 8)))
    D = np.zeros((16, 8), "f4")
    simt.jit(k)[1, 32](A, B, D, np.uint64(A.ctypes.data), order=order)
    np.testing.assert_allclose(D, bf16_value(A) @ bf16_value(B), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ asynchronous copies
def copy_kernel(wait):
    def k(src, dst):
        s = cuda.shared.array(128, uint32, 16)
        t = cuda.threadIdx.x
        cp_async_16(uint32(shared_u32(s) + t * 16), uint64(src + t * 16))
        cp_async_commit()
        if wait:
            cp_async_wait_0()
        cuda.syncthreads()
        for i in range(4):
            dst[t + 32 * i] = s[t + 32 * i]

    return k


copy_kernels = {wait: copy_kernel(wait) for wait in (True, False)}


@simt.orders()
@pytest.mark.parametrize("wait", [True, False])
def test_missing_wait_of_cp_async_is_caught(wait, order):
    src, dst = simt.array(rng.integers(0, 1 << 30, 128), "u4", align=16), np.zeros(128, "u4")
    simt.jit(copy_kernels[wait])[1, 32](np.uint64(src.ctypes.data), dst, order=order)
    if wait or order == "reverse":  # reverse lets copies land at once
        assert (dst == src).all()
    else:
        assert (dst == 0xFFFFFFFF).any()
        assert ((dst == 0xFFFFFFFF) | (dst == src)).all()


def test_copy_into_a_buffer_that_is_still_read_is_caught():
    """The other freedom: the copy lands before another warp has read what was there."""

    def k(src, dst):
        s = cuda.shared.array(256, uint32, 16)
        t = cuda.threadIdx.x
        s[t] = uint32(t)
        cuda.syncthreads()
        if t >= 32:  # no barrier: warp 1 refills what warp 0 may not have read yet
            cp_async_16(uint32(shared_u32(s)), uint64(src))
            cp_async_commit()
        else:
            dst[t] = s[t]
        cp_async_wait_0()

    src, caught = simt.zeros(4, "u4", align=16), {}
    for order in simt.ORDERS:
        dst = np.full(32, 9, "u4")
        simt.jit(k)[1, 64](np.uint64(src.ctypes.data), dst, order=order)
        caught[order] = not (dst == LANE).all()
    assert caught["reverse"]
    assert not caught["forward"]


def test_groups_of_cp_async_land_in_order():
    def k(src, dst):
        s = cuda.shared.array(12, uint32, 16)
        for i in range(3):
            cp_async_16(uint32(shared_u32(s) + 16 * i), uint64(src + 16 * i))
            if i < 2:
                cp_async_commit()
        cp_async_wait_1()  # the first group only
        for i in range(12):
            dst[0, i] = s[i]
        cp_async_wait_0()  # both; the third copy was never committed
        for i in range(12):
            dst[1, i] = s[i]
        wait_all()
        for i in range(12):
            dst[2, i] = s[i]

    wait_all = from_constraints("cp.async.wait_all;", "~{memory}")
    src, dst = simt.array(np.arange(12), "u4", align=16), np.zeros((3, 12), "u4")
    simt.jit(k)[1, 1](np.uint64(src.ctypes.data), dst)
    for row, landed in zip(dst, (4, 8, 12), strict=True):
        assert row.tolist() == [*range(landed), *[0xFFFFFFFF] * (12 - landed)]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_of_every_size_and_with_zeros(size):
    kind = "cg" if size == 16 else "ca"
    plain = from_constraints(f"cp.async.{kind}.shared.global [$0], [$1], {size};", "r,l,~{memory}")
    partial = from_constraints(f"cp.async.{kind}.shared.global.L2::128B [$0], [$1], {size}, $2;", "r,l,r,~{memory}")

    def k(src, dst, n):
        s = cuda.shared.array(32, types.uint8, 16)
        plain(uint32(shared_u32(s)), uint64(src))
        partial(uint32(shared_u32(s) + 16), uint64(src), uint32(n))
        cp_async_commit()
        cp_async_wait_0()
        for i in range(32):
            dst[i] = s[i]

    src, dst = simt.array(np.arange(1, size + 1), "u1", align=16), np.zeros(32, "u1")
    for n in (size, size // 2, 0):
        simt.jit(k)[1, 1](np.uint64(src.ctypes.data), dst, n)
        assert dst[:size].tolist() == list(range(1, size + 1))
        assert (dst[size:16] == 255).all()
        assert dst[16 : 16 + size].tolist() == [*range(1, n + 1), *[0] * (size - n)]


# ---------------------------------------------------------------------------------------- several statements, barriers
WIDE = {
    "add": ("add.cc.u32", 4, lambda a, b: a + b),
    "sub": ("sub.cc.u32", 4, lambda a, b: a - b),
}


def pairs(x):
    return np.array([v & (2**64 - 1) for v in x], "u8"), np.array([v >> 64 & (2**64 - 1) for v in x], "u8")


def random_wide(bits):
    return [int.from_bytes(rng.bytes(bits // 8), "little") for _ in range(N)]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "mad"])
def test_128_bit_arithmetic_of_libdevice(name):
    """The texts are those of libdevice, shortened to what tells them apart."""
    x, y = random_wide(128), random_wide(128)
    u, v, w = random_wide(64), random_wide(64), random_wide(64)
    if name in ("add", "sub"):
        text = f"{{ .reg .u32 r0,r1,r2,r3; {name}.cc.u32 r0, r0, r1; }}"
        inputs = [*pairs(x), *pairs(y)]
        want = [(a + b if name == "add" else a - b) % (1 << 128) for a, b in zip(x, y, strict=True)]
    elif name == "mul":
        text = "{ .reg .u32 r0,r1; mov.b64 {alo,ahi}, $2; mov.b64 {blo,bhi}, $3; mul.lo.u32 r0, alo, blo; }"
        inputs = [np.array(u, "u8"), np.array(v, "u8")]
        want = [a * b for a, b in zip(u, v, strict=True)]
    else:
        text = "{ .reg .u32 r0,r1; mov.b64 {blo,bhi}, $3; mov.b64 {clo,chi}, $4; mad.lo.cc.u32 r0, alo, blo, clo; }"
        inputs = [np.array(u, "u8"), np.array(v, "u8"), np.array(w, "u8")]
        want = [(a * b + c) % (1 << 128) for a, b, c in zip(u, v, w, strict=True)]
    low, high = execute(text, "=l,=l," + ",".join(["l"] * len(inputs)), *inputs)
    want_low, want_high = pairs(want)
    np.testing.assert_array_equal(low, want_low)
    np.testing.assert_array_equal(high, want_high)


def test_mad_wide_of_libdevice():
    text = "{ mad.lo.cc.u32 $0, $2, $3, $4; madc.hi.u32 $1, $2, $3, 0; }"
    low, high = execute(text, "=r,=r,r,r,r", A, B, C)
    want = A.astype("u8") * B + C
    np.testing.assert_array_equal(high.astype("u8") << np.uint64(32) | low, want)


def test_select_if_equal_or_unordered_of_libdevice():
    text = "{ .reg .pred p; setp.equ.f64 p, $1, $2; selp.f64 $0, $3, $4, p; }"
    x = np.array([1.0, 2.0, np.nan, 0.0] * 8)
    y = np.array([1.0, 3.0, 1.0, -0.0] * 8)
    (got,) = execute(text, "=d,d,d,d,d", x, y, D, E)
    np.testing.assert_array_equal(got, np.where((x == y) | np.isnan(x), D, E))


@pytest.mark.parametrize("text", ["bar.sync 0;", "barrier.sync 0;", "barrier.cta.sync.aligned 0;", "bar.sync 3, 64;"])
def test_barrier_forms(text):
    bar = from_constraints(text, "~{memory}")

    def k(o):
        s = cuda.shared.array(64, uint32)
        t = cuda.threadIdx.x
        if t >= 32:
            cuda.nanosleep(uint32(5000))  # the first warp is at the barrier long before
        s[t] = uint32(t)
        bar()
        o[t] = s[63 - t]

    for order in simt.ORDERS:
        o = np.zeros(64, "u4")
        simt.jit(k)[1, 64](o, order=order)
        np.testing.assert_array_equal(o, np.arange(64)[::-1])


def test_unaligned_barrier_may_be_reached_at_two_places():
    bar, arrive = (from_constraints(f"barrier.{x} 0{n};", "~{memory}") for x, n in (("sync", ""), ("arrive", ", 32")))

    def k(o):
        if cuda.threadIdx.x < 16:
            o[cuda.threadIdx.x] = 1
            bar()
        else:
            bar()
            o[cuda.threadIdx.x] = o[cuda.threadIdx.x - 16]

    o = np.zeros(32, "u4")
    for order in simt.ORDERS:
        o[:] = 0
        simt.jit(k)[1, 32](o, order=order)
        assert (o == 1).all()
    assert arrive is not bar


# -------------------------------------------------------------------------------------------------- Python emulations
@pytest.fixture
def own_emulations():
    before = list(REGISTRY)
    yield
    REGISTRY[:] = before


def test_python_emulation_takes_and_returns_operands_in_text_order(own_emulations):
    seen = {}

    @simt.emulate(r"mix\.b32", scope="warp")
    def mix(pair, address, literal, x, name):
        seen.update(pair=pair.copy(), address=address.copy(), literal=literal, x=x.copy(), name=name)
        return pair[:, ::-1], x + np.float32(1)

    low, high, x = execute(
        "mix.b32 {$1, $0}, $2, {$5, $4}, [$3+12], 0x11, $6, %special;", "=r,=r,=f,l,r,r,f", L // np.uint64(2), A, B, Y
    )
    np.testing.assert_array_equal(seen["pair"], np.stack([B, A], 1))
    np.testing.assert_array_equal(seen["address"], L // np.uint64(2) + np.uint64(12))
    assert (seen["literal"], seen["name"]) == (17, "%special")
    np.testing.assert_array_equal(seen["x"], Y)
    np.testing.assert_array_equal(high, A)
    np.testing.assert_array_equal(low, B)
    np.testing.assert_array_equal(x, Y + np.float32(1))


def test_python_emulation_of_one_thread_knows_where_it_is(own_emulations):
    places = []

    @simt.emulate(r"where\.b32")
    def where(x):
        places.append((*simt.current(), int(x)))
        return x * 2

    statement = from_constraints("where.b32 $0, $1;", "=r,r")

    def k(o):
        o[cuda.grid(1)] = statement(uint32(cuda.grid(1)))

    o = [np.zeros(4, "u4") for _ in range(2)]
    simt.run([simt.Launch(k, 2, 2, (x,)) for x in o])
    assert [x.tolist() for x in o] == [[0, 2, 4, 6]] * 2
    assert sorted(places) == [(r, (b, 0, 0), (t, 0, 0), 2 * b + t) for r in (0, 1) for b in (0, 1) for t in (0, 1)]


def test_python_emulation_reads_memory(own_emulations):
    @simt.emulate(r"peek\.b32", scope="warp")
    def peek(address):
        return np.array([simt.read_memory(a, "u4", 2).sum() for a in address], "u4")

    data = np.arange(40, dtype="u4")
    (got,) = execute("peek.b32 $0, [$1];", "=r,l", data.ctypes.data + 4 * LANE.astype("u8"))
    np.testing.assert_array_equal(got, 2 * LANE + 1)


def test_last_declared_emulation_wins(own_emulations):
    simt.emulate_ir(r"sub\.rn\.f32", "  %r = fadd float %a0, %a1\n  ret float %r")
    (got,) = execute("sub.rn.f32 $0, $1, $2;", "=f,f,f", Y, POSITIVE)
    np.testing.assert_array_equal(got, Y + POSITIVE)


# ------------------------------------------------------------------------------------------------------- completeness
#: Statements tested here or in the files named, beside the tables above.
ELSEWHERE = [
    "trap;",  # test_simt_faults.py
    "bar.sync 0;",
    "bar.arrive 2, 96;",  # test_simt_kernels.py
    "nanosleep.u32 $0;",
    "fence.acq_rel.sys;",
    "atom.global.cas.b32 $0, [$1], $2, $3;",
    "cp.async.ca.shared.global [$0], [$1], 4;",
    "cp.async.commit_group;",
    "cp.async.wait_group 0;",
    *(f"ldmatrix.sync.aligned.m8n8.x{n}{t}.shared.b16 {{$0}}, [$1];" for n in (1, 2, 4) for t in ("", ".trans")),
    *(
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{t}.{t}.f32 {{$0}}, {{$1}}, {{$2}}, {{$3}};"
        for k, t in ((8, "bf16"), (16, "bf16"), (8, "tf32"))
    ),
    "rsqrt.approx.f64 $0, $1;",
    "{ .reg .u32 r0; add.cc.u32 r0; }",
    "{ .reg .u32 r0; sub.cc.u32 r0; }",
    "{ .reg .u32 r0; mov.b64 {blo,bhi}, $3; mul.lo.u32 r0; }",
    "{ .reg .u32 r0; mov.b64 {clo,chi}, $4; mad.lo.cc.u32 r0; }",
    "{ mad.lo.cc.u32 $0, $2, $3, $4; madc.hi.u32 $1, $2, $3, 0; }",
    "{ setp.equ.f64 p, $1, $2; selp.f64 $0, $3, $4, p; }",
]  # fmt: skip


def test_every_emulation_has_a_test():
    texts = [c[0] for c in (*REGISTER_CASES, *APPROXIMATE_CASES, *LOADS, *STORES)] + ELSEWHERE
    covered = set()
    for text in texts:
        found = find(Site(text.split("{}")[0] if "{}" in text else text, "", "void", ()))
        assert found, f"no emulation of {text}"
        covered.add(found[0].pattern.pattern)
    missing = [e.pattern.pattern for e in REGISTRY if e.pattern.pattern not in covered]
    assert not missing
