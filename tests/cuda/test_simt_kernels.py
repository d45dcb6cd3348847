"""Whole kernels on the harness: what numba-cuda compiles from them does what numpy says, under every thread order."""

import math

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.types import float32, int32, int64, uint16, uint32, uint64

from helpers.ptx_asm import f32_array, from_constraints, ld_acquire_u32, st_release_u32
from whalez.testing import simt

rng = np.random.default_rng(0)


@cuda.jit(device=True)
def axpy(a, x, y):
    return a * x + y


@cuda.jit
def vadd(x, y, z, a):
    i = cuda.grid(1)
    if i < z.size:
        z[i] = axpy(a, x[i], y[i])


def matmul(A, B, C):
    sA = cuda.shared.array((16, 16), float32)
    sB = cuda.shared.array((16, 16), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    x, y = cuda.blockIdx.x * 16 + tx, cuda.blockIdx.y * 16 + ty
    acc = float32(0.0)
    for k in range(A.shape[1] // 16):
        sA[ty, tx] = A[y, k * 16 + tx]
        sB[ty, tx] = B[k * 16 + ty, x]
        cuda.syncthreads()
        for i in range(16):
            acc += sA[ty, i] * sB[i, tx]
        cuda.syncthreads()
    C[y, x] = acc


def matmul_race(A, B, C):  # the second barrier is missing
    sA = cuda.shared.array((16, 16), float32)
    sB = cuda.shared.array((16, 16), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    x, y = cuda.blockIdx.x * 16 + tx, cuda.blockIdx.y * 16 + ty
    acc = float32(0.0)
    for k in range(A.shape[1] // 16):
        sA[ty, tx] = A[y, k * 16 + tx]
        sB[ty, tx] = B[k * 16 + ty, x]
        cuda.syncthreads()
        for i in range(16):
            acc += sA[ty, i] * sB[i, tx]
    C[y, x] = acc


def block_sum(x, out):
    part = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    v = x[i] if i < x.size else float32(0)
    for o in (16, 8, 4, 2, 1):
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, o)
    if t % 32 == 0:
        part[t // 32] = v
    cuda.syncthreads()
    if t < 32:
        v = part[t] if t < cuda.blockDim.x // 32 else float32(0)
        for o in (16, 8, 4, 2, 1):
            v += cuda.shfl_xor_sync(0xFFFFFFFF, v, o)
        if t == 0:
            cuda.atomic.add(out, 0, v)


def histogram(x, h, highest):
    sh = cuda.shared.array(0, int32)  # dynamic shared memory
    t = cuda.threadIdx.x
    for b in range(t, h.size, cuda.blockDim.x):
        sh[b] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(sh, x[i], 1)
        cuda.atomic.max(highest, 0, float(x[i]))
    cuda.syncthreads()
    for b in range(t, h.size, cuda.blockDim.x):
        cuda.atomic.add(h, b, int64(sh[b]))


@cuda.jit(device=True)
def to_bf16(f):
    u = uint32(libdevice.float_as_int(f))
    return uint16((u + uint32(0x7FFF) + ((u >> uint32(16)) & uint32(1))) >> uint32(16))


def merge(o1, l1, o2, l2, out, lse):
    r, d = cuda.blockIdx.x, cuda.threadIdx.x
    a, b = l1[r], l2[r]
    m = max(a, b)
    ea, eb = math.exp(a - m), math.exp(b - m)
    s = ea + eb
    out[r, d] = to_bf16((o1[r, d] * ea + o2[r, d] * eb) / s)
    if d == 0:
        lse[r] = m + math.log(s)


def ring(rank, n, bufs, flags, out, steps):  # bufs, flags: raw addresses of peers
    t = cuda.threadIdx.x
    nxt = (rank + 1) % n
    for s in range(steps):
        peer = f32_array(uint64(bufs[nxt]), 2 * cuda.blockDim.x)
        mine = f32_array(uint64(bufs[rank]), 2 * cuda.blockDim.x)
        half = (s % 2) * cuda.blockDim.x
        peer[half + t] = out[t] + float32(1)
        cuda.syncthreads()
        if t == 0:
            st_release_u32(uint64(flags[nxt]), uint32(s + 1))
            while ld_acquire_u32(uint64(flags[rank])) < uint32(s + 1):
                pass
        cuda.syncthreads()
        out[t] = mine[half + t]


@simt.orders()
def test_vector_add_with_a_device_function(order):
    x, y = rng.random(1000, "f4"), rng.random(1000, "f4")
    z = np.zeros(1000, "f4")
    simt.jit(vadd)[(8,), (128,)](x, y, z, np.float32(2), order=order)
    np.testing.assert_allclose(z, 2 * x + y, rtol=1e-6)


@simt.orders()
def test_matmul_through_shared_memory(order):
    A, B = rng.random((64, 64), "f4"), rng.random((64, 64), "f4")
    C = np.zeros((64, 64), "f4")
    simt.jit(matmul)[(4, 4), (16, 16)](A, B, C, order=order)
    np.testing.assert_allclose(C, A @ B, rtol=1e-5)


@simt.orders()
def test_missing_barrier_is_caught_in_every_order(order):
    A, B = rng.random((64, 64), "f4"), rng.random((64, 64), "f4")
    C = np.zeros((64, 64), "f4")
    simt.jit(matmul_race)[(4, 4), (16, 16)](A, B, C, order=order)
    assert not np.allclose(C, A @ B, rtol=1e-4)


@simt.orders()
def test_block_sum(order):
    x = rng.random(1000, "f4")
    out = np.zeros(1, "f4")
    simt.jit(block_sum)[4, 256](x, out, order=order)
    np.testing.assert_allclose(out[0], x.sum(), rtol=1e-5)


@simt.orders()
def test_histogram_in_dynamic_shared_memory(order):
    x = rng.integers(0, 50, 5000).astype("i4")
    h, m = np.zeros(50, "i8"), np.zeros(1)
    simt.jit(histogram)[3, 64, 0, 50 * 4](x, h, m, order=order)
    assert (h == np.bincount(x, minlength=50)).all()
    assert m[0] == x.max()


def test_merge_of_two_partials_to_bf16():
    R, D = 7, 64
    o1, o2 = rng.standard_normal((2, R, D)).astype("f4")
    l1, l2 = (rng.standard_normal((2, R)) * 5).astype("f4")
    out, lse = np.zeros((R, D), "u2"), np.zeros(R, "f4")
    simt.jit(merge)[R, D](o1, l1, o2, l2, out, lse)
    want_lse = np.logaddexp(l1.astype(float), l2.astype(float))
    want = o1 * np.exp(l1 - want_lse)[:, None] + o2 * np.exp(l2 - want_lse)[:, None]
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    np.testing.assert_allclose((out.astype("u4") << 16).view("f4"), want, rtol=2**-8, atol=1e-6)


@simt.orders()
def test_ranks_that_spin_on_each_others_flags(order):
    n, T, steps = 4, 64, 5
    bufs = [np.full(2 * T, np.nan, "f4") for _ in range(n)]
    flags = [np.zeros(1, "u4") for _ in range(n)]
    outs = [np.full(T, float(r), "f4") for r in range(n)]
    pb = np.array([b.ctypes.data for b in bufs], "u8")
    pf = np.array([f.ctypes.data for f in flags], "u8")
    k = simt.jit(ring)
    launches = [simt.Launch(k, 1, T, (np.int32(r), np.int32(n), pb, pf, outs[r], np.int32(steps))) for r in range(n)]
    simt.run(launches, order=order)
    for r in range(n):
        assert (outs[r] == (r - steps) % n + steps).all()


def test_blocks_that_wait_for_each_other_need_to_be_resident():
    def k(flag, out):
        if cuda.threadIdx.x == 0:
            if cuda.blockIdx.x == 0:
                while cuda.atomic.cas(flag, 0, 1, 2) != 1:
                    pass
                out[0] = 5
            else:
                cuda.atomic.exch(flag, 0, 1)

    f, o = np.zeros(1, "i4"), np.zeros(1, "i4")
    simt.jit(k)[2, 32](f, o, resident=2)
    assert o[0] == 5
    assert f[0] == 2
    with pytest.raises(simt.SimtError, match="livelock"):
        simt.jit(k)[2, 32](np.zeros(1, "i4"), o, resident=1, spin_limit=1000)


def test_order_of_blocks_follows_the_thread_order():
    def k(counter, seen):
        seen[cuda.blockIdx.x] = cuda.atomic.add(counter, 0, 1)

    def order_of_blocks(order):
        seen = np.zeros(7, "i4")
        simt.jit(k)[7, 1](np.zeros(1, "i4"), seen, order=order)
        return seen.tolist()

    assert order_of_blocks("forward") == [0, 1, 2, 3, 4, 5, 6]
    assert order_of_blocks("reverse") == [6, 5, 4, 3, 2, 1, 0]
    drawn = {tuple(order_of_blocks(f"seed{i}")) for i in range(6)}
    assert len(drawn) > 3
    assert all(sorted(x) == list(range(7)) for x in drawn)
    assert any((np.diff(x) % 7 != 1).any() for x in drawn)  # not only turned round


def test_a_seed_gives_the_same_order_again():
    def k(counter, seen):
        seen[cuda.grid(1)] = cuda.atomic.add(counter, 0, 1)

    runs = []
    for order in ("seed5", "seed5", "seed6"):
        seen = np.zeros(256, "i4")
        simt.jit(k)[2, 128](np.zeros(1, "i4"), seen, order=order)
        runs.append(seen.tolist())
    assert runs[0] == runs[1] != runs[2]


def test_int32_wraps_where_a_gpu_wraps():
    """numba promotes int32 * int32 to int64, as its PTX does; a store as 32 bits wraps."""

    def k(a, b, o32, o64):
        i = cuda.threadIdx.x
        o64[i] = a[i] * b[i]
        p = int32(a[i] * b[i])
        o32[i] = p
        o64[i + 2] = int32(cuda.threadIdx.x + 40000) * int32(60000) + (p - p)

    a, b = np.array([50000, 3], "i4"), np.array([60000, 5], "i4")
    o32, o64 = np.zeros(2, "i4"), np.zeros(4, "i8")
    simt.jit(k)[1, 2](a, b, o32, o64)
    assert o32.tolist() == [50000 * 60000 - 2**32, 15]
    assert o64[:3].tolist() == [3000000000, 15, 40000 * 60000]


def test_float_to_integer_saturates_like_cvt():
    def k(x, o32, o64, u32):
        i = cuda.threadIdx.x
        o32[i] = int32(x[i])
        o64[i] = int64(x[i])
        u32[i] = uint32(x[i])

    top = 2**31 - 1
    for dtype in ("f4", "f8"):
        x = np.array([1.9, -1.9, 3e9, -3e9, 1e20, -1e20, np.nan, np.inf], dtype)
        o32, o64, u32 = np.zeros(8, "i4"), np.zeros(8, "i8"), np.zeros(8, "u4")
        simt.jit(k)[1, 8](x, o32, o64, u32)
        assert o32.tolist() == [1, -1, top, -top - 1, top, -top - 1, 0, top]
        assert o64.tolist() == [1, -1, 3 * 10**9, -3 * 10**9, 2**63 - 1, -(2**63), 0, 2**63 - 1]
        assert u32.tolist() == [1, 0, 3 * 10**9, 0, 2**32 - 1, 0, 0, 2**32 - 1]


@simt.orders()
def test_two_dimensional_block_votes_counts_and_shuffles(order):
    def k(f64, i64, bal, cnt):
        t = cuda.threadIdx.x + cuda.threadIdx.y * cuda.blockDim.x
        f64[t] = math.sqrt(float(t)) + math.sin(f64[t]) ** 2
        i64[t] = (i64[t] << 33) // 7 - t % 3
        bal[t] = cuda.ballot_sync(0xFFFFFFFF, t % 3 == 0)
        cnt[t] = cuda.syncthreads_count(int32(t % 5 == 0))
        v = cuda.shfl_sync(0xFFFFFFFF, f64[t], 31 - cuda.laneid)  # 64 bits
        cuda.syncwarp()
        f64[t] = v

    f, i = rng.random(64), rng.integers(0, 1 << 20, 64)
    f0, i0 = f.copy(), i.copy()
    bal, cnt = np.zeros(64, "i4"), np.zeros(64, "i4")
    simt.jit(k)[1, (8, 8)](f, i, bal, cnt, order=order)
    t = np.arange(64)
    e = np.sqrt(t) + np.sin(f0) ** 2
    np.testing.assert_allclose(f, np.concatenate([e[31::-1], e[63:31:-1]]), rtol=1e-12)
    assert (i == (i0 << 33) // 7 - t % 3).all()
    assert (cnt == 13).all()
    assert np.uint32(bal[0].astype("u4")) == sum(1 << j for j in range(32) if j % 3 == 0)


TAB = np.arange(16, dtype="f4") ** 2


def test_constants_locals_tuples_strides_and_1024_threads():
    def k(out, scal, flag, big):
        tab = cuda.const.array_like(TAB)
        loc = cuda.local.array(8, float32)
        t = cuda.threadIdx.x + 8 * cuda.threadIdx.y + 64 * cuda.threadIdx.z
        for i in range(8):
            loc[i] = tab[(t + i) % 16]
        s = float32(0)
        for i in range(8):
            s += loc[i]
        if flag:
            out[cuda.blockIdx.x, t] = s * scal[0] + float32(scal[1])
        if cuda.threadIdx.x == 0:
            big[0, -1] = 7

    out, big = simt.empty((3, 1024)), np.zeros((4, 10), "i8")[:, ::2]
    simt.jit(k)[3, (8, 8, 16)](out, (np.float32(2), np.int64(3)), True, big)
    t = np.arange(1024)
    assert (out == 2 * sum(TAB[(t + i) % 16] for i in range(8)) + 3).all()
    assert big[0, -1] == 7


def test_local_array_of_many_kilobytes_compiles_and_is_zeroed():
    def k(o, n):
        loc = cuda.local.array(8192, types.int64)
        before = loc[n]
        for i in range(n):
            loc[i] = i + before
        o[0] = loc[n - 1] + loc[8191]

    o = np.zeros(1)
    simt.jit(k)[1, 1](o, 8000)
    assert o[0] == 7999


def test_integer_intrinsics():
    def k(o, x):
        o[0] = cuda.popc(x[0])
        o[1] = cuda.clz(x[0])
        o[2] = cuda.ffs(x[0])
        o[3] = cuda.brev(x[0])
        o[4] = cuda.selp(x[0] > 3, 11, 12)
        cuda.threadfence()
        cuda.nanosleep(uint32(10))
        o[5] = cuda.fma(2.0, 3.0, 4.0)
        o[6] = cuda.lanemask_lt()
        o[7] = cuda.match_any_sync(0xFFFFFFFF, int32(cuda.laneid % 2))
        o[8] = cuda.activemask()

    o, x = np.zeros(9, "i8"), np.array([0b101000], "u4")
    simt.jit(k)[1, 32](o, x)
    assert o[:6].tolist() == [2, 26, 4, int(f"{0b101000:032b}"[::-1], 2), 11, 10]
    assert o[6] & 0xFFFFFFFF == 0x7FFFFFFF  # the last lane wrote last
    assert o[7] & 0xFFFFFFFF == 0xAAAAAAAA
    assert o[8] & 0xFFFFFFFF == 0xFFFFFFFF


bar_1_of_64 = from_constraints("bar.sync 1, 64;", "~{memory}")
bar_arrive = from_constraints("bar.arrive $0, 96;", "r,~{memory}")
bar_wait = from_constraints("bar.sync $0, 96;", "r,~{memory}")


@simt.orders()
def test_named_barriers_between_producers_and_a_consumer(order):
    def k(o):
        s = cuda.shared.array(96, int32)
        t = cuda.threadIdx.x
        if t < 64:
            s[t] = t * t
            bar_1_of_64()
            s[t] += s[63 - t] * 0
            bar_arrive(uint32(2))
        else:
            bar_wait(uint32(2))
            o[t - 64] = s[t - 64] + s[t - 32]

    o = np.zeros(32, "i4")
    simt.jit(k)[1, 96](o, order=order)
    t = np.arange(32)
    assert (o == t * t + (t + 32) ** 2).all()


@simt.orders()
def test_arriving_at_a_barrier_does_not_wait(order):
    """The consumer takes the two barriers in the other order; producers that waited would never reach the second."""

    def k(o):
        if cuda.threadIdx.x < 64:
            bar_arrive(uint32(2))
            bar_arrive(uint32(3))
        else:
            bar_wait(uint32(3))
            bar_wait(uint32(2))
            o[cuda.threadIdx.x - 64] = 1

    o = np.zeros(32, "i4")
    simt.jit(k)[1, 96](o, order=order)
    assert o.all()


def test_warpgroup_statement_with_tied_operands():
    """Four accumulators in and out, a block of statements matched as a whole, 128 threads together."""
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $10, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{$0,$1,$2,$3}, $8, $9, p, 1, 1, 0, 0; }"
    )
    wg = from_constraints(text, "=f,=f,=f,=f,0,1,2,3,l,l,r")
    seen = []

    @simt.emulate(r".*wgmma\.mma_async\.sync\.aligned\.m64n8k16.*", scope="warpgroup")
    def wgmma(c0, c1, c2, c3, da, db, scale):
        seen.append((c0.shape, int(da[5]), int(db[5]), int(scale[5])))
        return c0 + da, c1 + 1, c2 + c2.sum(), c3

    def k(o):
        t = cuda.threadIdx.x
        r = wg(o[t, 0], o[t, 1], o[t, 2], o[t, 3], uint64(11), uint64(22), uint32(1))
        for i in range(4):
            o[t, i] = r[i]

    o = np.arange(256 * 4, dtype="f4").reshape(256, 4)
    o0 = o.copy()
    try:
        simt.jit(k)[1, 256](o)
    finally:
        simt.emulation.REGISTRY.pop(0)
    assert seen == [((128,), 11, 22, 1)] * 2
    assert (o[:, 0] == o0[:, 0] + 11).all()
    assert (o[:, 1] == o0[:, 1] + 1).all()
    assert (o[:, 3] == o0[:, 3]).all()


def test_kernel_with_a_signature_is_compiled_once():
    def k(x, n):
        i = cuda.grid(1)
        if i < n:
            x[i] += float32(1)

    signature = (types.CPointer(float32), int64)
    a, b = simt.jit(k, signature), simt.jit(k, signature)
    assert a is b
    x = simt.zeros(40)
    a[2, 32](x, 40)
    first = a.compile(signature)
    a[2, 32](x.ctypes.data, 39)
    assert a.compile(signature) is first
    assert x.tolist() == [2.0] * 39 + [1.0]


def test_debug_information_and_fastmath_options_compile():
    def k(x):
        i = cuda.grid(1)
        x[i] = math.exp(x[i]) / (x[i] + float32(1))

    x = np.linspace(0, 1, 32, dtype="f4")
    for options in ({"fastmath": True}, {"lineinfo": False}):
        y = x.copy()
        simt.jit(k, **options)[1, 32](y)
        np.testing.assert_allclose(y, np.exp(x) / (x + 1), rtol=1e-5)
