"""What a GPU would not forgive is an error that names the thread and the line."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from types import SimpleNamespace

from numba import cuda
from numba.cuda import types
from numba.cuda.types import float32, uint32, uint64

from helpers.ptx_asm import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    from_constraints,
    ld_acquire_u64,
    ldmatrix_x4,
    shared_u32,
    st_release_u64,
)
from whalez.testing import simt

f32p = types.CPointer(float32)


def line_of(function, text):
    """`file.py:12` of the line of this function that contains `text`, as messages name it."""
    code = function.__code__
    with open(code.co_filename) as f:
        lines = f.read().splitlines()
    first = code.co_firstlineno
    at = next(i for i in range(first, len(lines)) if text in lines[i])
    return f"test_simt_faults.py:{at + 1}"


def fails(match, kernel, grid, block, *arguments, **how):
    with pytest.raises(simt.SimtError, match=match) as caught:
        simt.jit(kernel)[grid, block](*arguments, **how)
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- waits without end
def test_deadlock_says_who_waits_where():
    def k(x):
        if cuda.threadIdx.x < 40:
            x[cuda.threadIdx.x] = cuda.shfl_sync(0xFFFFFFFF, x[cuda.threadIdx.x], 0)
        cuda.syncthreads()

    said = fails("deadlock.*at shfl.sync mask 0xffffffff.*at barrier 0", k, 1, 64, np.zeros(64, "f4"))
    assert "[32..39 at shfl.sync" in said
    assert line_of(k, "shfl_sync") in said
    assert line_of(k, "syncthreads") in said


def test_spin_without_a_partner_is_a_livelock():
    def k(p):
        while ld_acquire_u64(p) == uint64(0):
            pass

    f = np.zeros(1, "u8")
    said = fails("livelock", k, 1, 1, np.uint64(f.ctypes.data), spin_limit=1000)
    assert line_of(k, "ld_acquire_u64") in said


def test_time_limit_stops_a_thread_that_never_yields():
    def k(x):
        while x[0] == 0:  # a plain load: hoisted, never yields
            pass
        x[1] = 1

    fails(r"time limit reached by thread \(0,0,0\)", k, 1, 1, np.zeros(2, "i4"), cpu_s=0.3)


def test_sleepers_are_woken_by_the_virtual_clock():
    now = from_constraints("mov.u64 $0, %globaltimer;", "=l")

    def k(o):
        t = now()
        cuda.nanosleep(uint32(5_000_000))
        o[cuda.threadIdx.x] = now() - t

    o = np.zeros(33, "u8")
    simt.jit(k)[1, 33](o, spin_limit=100)
    assert (o >= 5_000_000).all()
    assert (o < 5_100_000).all()


def test_bounded_spin_ends_by_the_clock():
    now = from_constraints("mov.u64 $0, %globaltimer;", "=l")

    def k(flag, o):
        deadline = now() + uint64(1_000_000)
        while ld_acquire_u64(flag) == uint64(0):
            if now() > deadline:
                o[0] = 7
                return
            cuda.nanosleep(uint32(1000))

    f, o = np.zeros(1, "u8"), np.zeros(1, "i4")
    simt.jit(k)[1, 1](np.uint64(f.ctypes.data), o)
    assert o[0] == 7


# ------------------------------------------------------------------------------------------------------------- memory
@cuda.jit(device=True)
def next_of(x, i):
    return x[i + 1]  # the last thread reads one past the end


def test_read_past_the_end_names_thread_and_line_also_of_a_device_function():
    def k(x, y):
        i = cuda.grid(1)
        y[i] = next_of(x, i)

    x, y = simt.array(np.arange(64, dtype="f4")), simt.empty(64, "f4")
    said = fails(r"invalid memory access .* thread \(31,0,0\) of block \(1,0,0\)", k, 2, 32, x, y)
    device_function, kernel = said.split(", inlined at ")
    assert device_function.endswith(line_of(next_of.py_func, "x[i + 1]"))
    assert line_of(k, "next_of(") in kernel
    assert (y[:63] == np.arange(1, 64)).all()

    def add(x, y):  # the machine can still be used
        y[cuda.grid(1)] = x[cuda.grid(1)] * 2

    simt.jit(add)[2, 32](x, y)
    assert (y == 2 * x).all()


def test_write_before_the_start_is_a_fault():
    def k(x):
        x[cuda.threadIdx.x - 1] = 0

    fails("invalid memory access", simt.jit(k, (f32p,)), 1, 1, simt.empty(1024))


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("what", ["load", "store"])
def test_misaligned_access_through_a_pointer(what, offset):
    def load(x, y):
        y[0] = x[1]

    def store(x, y):
        x[1] = y[0]

    k = {"load": load, "store": store}[what]
    x, y = np.zeros(8, "f4"), np.zeros(8, "f4")
    said = fails(
        "misaligned access: address 0x[0-9a-f]+ is not a multiple of 4 by thread",
        simt.jit(k, (f32p, f32p)), 1, 1, x.ctypes.data + offset, y.ctypes.data,
    )  # fmt: skip
    assert line_of(k, "x[1]") in said


@pytest.mark.parametrize(("dtype", "size"), [("i2", 2), ("f4", 4), ("i8", 8), ("f8", 8)])
def test_misaligned_array_element_of_every_size(dtype, size):
    def k(x):
        x[0] += x[1]

    raw = simt.zeros(64, "u1", align=16)
    simt.jit(k)[1, 1](raw[size : 3 * size].view(dtype))
    bad = raw[size // 2 : size // 2 + 2 * size].view(dtype)
    fails(f"misaligned access: .* multiple of {size} ", k, 1, 1, bad)


def test_misaligned_atomic():
    def k(x):
        cuda.atomic.add(x, 0, 1)

    raw = simt.zeros(64, "u1")
    fails("misaligned access", k, 1, 1, raw[2:6].view("i4"))


def test_bytes_and_local_arrays_need_no_alignment():
    def k(x, n):
        loc = cuda.local.array(9, types.uint8)
        for i in range(n):
            loc[i] = x[i + 1]
        x[0] = loc[n - 1]

    x = simt.array(np.arange(10), "u1")  # ends at a page, so its address is even
    x = x[1:]  # and this one is odd
    simt.jit(k)[1, 1](x, 8)
    assert x[0] == 9


def vector(text, constraints, loads):
    s = from_constraints(text, constraints)

    def k(p):
        if loads:
            s(p)
        else:
            s(p, float32(1), float32(2), float32(3), float32(4))

    return k


@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (vector("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,l,~{memory}", True), 16),
        (vector("ld.global.v2.b64 {$0,$1}, [$2];", "=l,=l,l,~{memory}", True), 16),
        (vector("ld.global.nc.v2.f32 {$0,$1}, [$2];", "=f,=f,l,~{memory}", True), 8),
        (vector("ld.acquire.sys.global.u64 $0, [$1];", "=l,l,~{memory}", True), 8),
        (vector("ld.volatile.global.u32 $0, [$1];", "=r,l,~{memory}", True), 4),
        (vector("st.global.v4.f32 [$0], {$1,$2,$3,$4};", "l,f,f,f,f,~{memory}", False), 16),
    ],
    ids=["ld-v4", "ld-v2-b64", "ld-v2", "ld-acquire", "ld-volatile", "st-v4"],
)
def test_misaligned_inline_access(kernel, size):
    x = simt.zeros(64, "u1", align=64)
    k = simt.jit(kernel, (uint64,))
    k[1, 1](x.ctypes.data + size)
    fails(f"misaligned access: .* multiple of {size} by thread", k, 1, 1, x.ctypes.data + size // 2)


def test_row_of_ldmatrix_must_be_aligned_and_in_shared_memory():
    def k(offset, use_global, out, p):
        s = cuda.shared.array(256, types.uint16, 16)
        address = uint32(shared_u32(s) + (cuda.threadIdx.x % 8) * 16 + offset)
        if use_global:
            address = uint32(p)
        r = ldmatrix_x4(address)
        out[cuda.threadIdx.x] = r[0]

    out = np.zeros(32, "u4")
    k_ = simt.jit(k, (types.int64, types.boolean, types.Array(uint32, 1, "C"), uint64))
    k_[1, 32](0, False, out, 0)
    fails("misaligned access: ldmatrix row address", k_, 1, 32, 8, False, out, 0)
    said = fails(r"outside the block's shared memory by thread \(\d+,0,0\)", k_, 1, 32, 512, False, out, 0)
    assert line_of(k, "ldmatrix_x4") in said
    fails("outside the block's shared memory", k_, 1, 32, 0, True, out, 4096)


def test_cp_async_must_be_aligned_inside_shared_and_readable():
    def k(p, offset):
        s = cuda.shared.array(16, uint32, 16)
        cp_async_16(uint32(shared_u32(s) + offset), uint64(p))
        cp_async_commit()
        cp_async_wait_0()

    x = simt.zeros(16, "u4", align=16)
    k_ = simt.jit(k, (uint64, types.int64))
    for order in simt.ORDERS:
        k_[1, 1](x.ctypes.data + 48, 48, order=order)
        fails("misaligned access: cp.async", k_, 1, 1, x.ctypes.data + 4, 0, order=order)
        fails("misaligned access: cp.async", k_, 1, 1, x.ctypes.data, 4, order=order)
        fails("outside the block's shared memory", k_, 1, 1, x.ctypes.data, 64, order=order)
        said = fails("invalid memory access", k_, 1, 1, x.ctypes.data + 64, 0, order=order)
        assert line_of(k, "cp_async_16") in said  # where it was issued, not where it was waited for


def dynamic_copy(alignment):
    def k(p):
        s = cuda.shared.array(0, uint32, alignment)
        cp_async_16(uint32(shared_u32(s)), uint64(p))
        cp_async_commit()
        cp_async_wait_0()

    return k


@pytest.mark.parametrize(("alignment", "is_right"), [(None, False), (8, False), (16, True), (128, True)])
def test_dynamic_shared_memory_is_aligned_as_declared_and_no_better(alignment, is_right):
    x = simt.zeros(4, "u4", align=16)
    k_ = simt.jit(dynamic_copy(alignment), (uint64,))
    if is_right:
        k_[1, 1, 0, 64](x.ctypes.data)
    else:
        with pytest.raises(simt.SimtError, match=r"misaligned access: cp\.async"):
            k_[1, 1, 0, 64](x.ctypes.data)


def test_shared_memory_ends_at_a_fault():
    def k(o, i):
        s = cuda.shared.array(32, float32)
        s[cuda.threadIdx.x] = 1
        p = shared_u32(s)
        o[0] = peek(uint64(p + i * 4))

    peek = from_constraints("ld.shared.f32 $0, [$1];", "=f,l,~{memory}")
    o = np.zeros(1, "f4")
    simt.jit(k)[1, 32](o, 31)
    fails("invalid memory access", k, 1, 32, o, 32)


def test_padding_behind_an_aligned_array_is_checked():
    def k(x, i):
        x[i] = 0

    x = simt.empty(3, "f4", align=16)
    assert x.ctypes.data % 16 == 0
    k_ = simt.jit(k, (f32p, types.int64))
    k_[1, 1](x, 2)
    fails("written 0 bytes past the end of an array", k_, 1, 1, x, 3)
    k_[1, 1](x, 1)  # told once
    fails("invalid memory access", k_, 1, 1, x, 4)


def test_uninitialised_shared_memory_is_nan():
    def k(o):
        s = cuda.shared.array(32, float32)
        o[cuda.threadIdx.x] = s[cuda.threadIdx.x]

    o = np.zeros(32, "f4")
    simt.jit(k)[1, 32](o)
    assert np.isnan(o).all()


def test_fresh_arrays_are_poisoned():
    assert np.isnan(simt.empty((3, 5))).all()
    assert (simt.empty(7, "i8") == -1).all()
    assert not simt.zeros(7, "i8").any()
    assert simt.array([[1, 2]], "i4").tolist() == [[1, 2]]


def test_local_arrays_too_big_for_the_stack():
    def k(o):
        loc = cuda.local.array(40000, types.float64)
        for i in range(40000):
            loc[i] = o[i % 2]
        o[0] = loc[int(o[1])]

    fails("stack overflow", k, 1, 1, np.zeros(2, "f4"))


# --------------------------------------------------------------------------------------------------------- statements
def test_unknown_ptx_is_named_with_its_kernel_and_line():
    brev = from_constraints("brev.b32 $0, $1;", "=r,r")

    def reverse_bits(o, do):
        if do:
            o[0] = brev(uint32(o[0]))

    simt.jit(reverse_bits)[1, 1](np.zeros(1, "u4"), False)  # only reaching it is an error
    said = fails(
        r"inline PTX without an emulation in reverse_bits: brev.b32 \$0, \$1;",
        reverse_bits,
        1,
        1,
        np.zeros(1, "u4"),
        True,
    )
    assert line_of(reverse_bits, "brev(") in said


def test_trap_is_an_error():
    trap = from_constraints("trap;", "")

    def k(o):
        if o[0] == 0:
            trap()

    said = fails(r"trap executed by thread \(0,0,0\)", k, 1, 1, np.zeros(1, "u4"))
    assert line_of(k, "trap()") in said
    simt.jit(k)[1, 1](np.ones(1, "u4"))


def test_failure_of_an_emulation_is_the_cause():
    @simt.emulate(r"broken\.b32")
    def broken(x):
        raise ZeroDivisionError

    s = from_constraints("broken.b32 $0, $1;", "=r,r")

    def k(o):
        o[0] = s(uint32(o[0]))

    try:
        with pytest.raises(simt.SimtError, match="emulation failed") as caught:
            simt.jit(k)[1, 1](np.zeros(1, "u4"))
    finally:
        simt.emulation.REGISTRY.pop(0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_barrier_of_one_warp_at_two_places():
    """bar.sync is .aligned: on a GPU the two halves of a warp would each wait for the other."""

    def k(o):
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()
            o[0] = 1
        else:
            o[1] = 2
            cuda.syncthreads()

    said = fails("a barrier is reached at two places by one warp: threads 15 and 16", k, 1, 32, np.zeros(2, "u4"))
    assert line_of(k, "o[1] = 2").split(":")[0] in said


def test_lane_outside_its_own_mask():
    def k(x):
        x[cuda.threadIdx.x] = cuda.shfl_sync(0x0000FFFF, x[cuda.threadIdx.x], 0)

    fails(r"shfl.sync: lane 16 executes a .sync op whose mask 0x0000ffff excludes it", k, 1, 32, np.zeros(32, "f4"))


def test_shuffle_from_a_lane_outside_the_mask():
    def k(x):
        if cuda.threadIdx.x < 16:
            x[cuda.threadIdx.x] = cuda.shfl_sync(0x0000FFFF, x[cuda.threadIdx.x], 20)

    fails("reads lane 20, which is not in mask 0x0000ffff", k, 1, 32, np.zeros(32, "f4"))


def test_barrier_number_beyond_15():
    bar = from_constraints("bar.sync 16;", "~{memory}")

    def k():
        bar()

    fails("no barrier 16", k, 1, 32)


# ----------------------------------------------------------------------------------------------------------- launches
def test_limits_of_a_gpu():
    def k(x):
        s = cuda.shared.array(13000, float32)
        s[cuda.threadIdx.x] = x[0]
        x[1] = s[0]

    def small(x):
        x[0] = 1

    x = np.zeros(2, "f4")
    fails("limits", k, 1, 32, x)
    fails("limits", small, 1, 1025, x)
    fails("limits", small, 0, 32, x)
    with pytest.raises(simt.SimtError, match="limits"):
        simt.jit(small)[1, 32, 0, 228 << 10](x)


def test_too_many_live_threads_are_an_error_and_leave_the_machine_usable():
    def k(x):
        cuda.syncthreads()
        x[cuda.grid(1)] = 1

    x = np.zeros(40 * 1024, "u1")
    fails("too many threads are live", k, 40, 1024, x, resident=40)
    simt.jit(k)[40, 1024](x, resident=4)
    assert x.all()


def test_launch_keeps_to_what_the_kernel_declares():
    def k(x):
        x[0] = 1

    kernel = SimpleNamespace(name="k", function=k, signature=(f32p,), block=(64, 1, 1), shared_bytes=1024)
    x = simt.zeros(1)
    simt.jit(kernel)[1, (8, 8), 0, 1024](x)
    fails("block .* larger than the kernel declares", kernel, 1, 65, x)
    with pytest.raises(simt.SimtError, match="1025 shared bytes are more than it declares"):
        simt.jit(kernel)[1, 64, 0, 1025](x)


def test_arguments_must_fit_the_signature():
    def k(x, n, m):
        x[0] = n + m

    k_ = simt.jit(k, (f32p, types.int32, types.float32))
    x = simt.zeros(1)
    k_[1, 1](x, -3, 1.5)
    assert x[0] == -1.5
    k_[1, 1](x, -(1 << 20), 0.0)
    assert x[0] == -(1 << 20)
    for bad, said in (((x, 1 << 31, 0.0), "argument 1"), ((x, 1.5, 0.0), "argument 1"), ((-1, 1, 0.0), "argument 0")):
        with pytest.raises(TypeError, match=said):
            k_[1, 1](*bad)
    with pytest.raises(TypeError, match="2 arguments for 3 parameters"):
        k_[1, 1](x, 1)


def test_store_is_not_lost_when_a_later_thread_fails():
    def k(x):
        st_release_u64(x, uint64(9))
        if cuda.threadIdx.x == 1:
            st_release_u64(uint64(8), uint64(9))

    x = np.zeros(1, "u8")
    fails(r"invalid memory access at address 0x8 by thread \(1,0,0\)", simt.jit(k, (uint64,)), 1, 2, x.ctypes.data)
    assert x[0] == 9
