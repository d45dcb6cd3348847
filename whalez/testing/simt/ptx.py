"""CPU meanings of the inline-PTX statements the project uses (one entry per opcode)."""
import ctypes

import numpy as np
from whalez.testing.simt._core import NSLOT, current, emulate, on_launch, read_mem

_L = np.arange(32)
_G, _T = _L >> 2, _L & 3                       # groupID, threadID_in_group


def _bf16(x):                                  # uint16 bits -> float32
    return (x.astype(np.uint32) << 16).view(np.float32)


def _halves(regs):                             # (32, n) u32 -> (32, 2n) u16, low half first
    return np.ascontiguousarray(regs).view(np.uint16).reshape(32, -1)


# PTX ISA "Matrix fragments for mma.m16n8k16": element i of lane l -> (row, col)
_i = np.arange(8)
A_ROW = _G[:, None] + 8 * ((_i >> 1) & 1)
A_COL = 2 * _T[:, None] + (_i & 1) + 8 * (_i >> 2)
_i = np.arange(4)
B_ROW = 2 * _T[:, None] + (_i & 1) + 8 * (_i >> 1)
B_COL = np.repeat(_G[:, None], 4, 1)
C_ROW = _G[:, None] + 8 * (_i >> 1)
C_COL = 2 * _T[:, None] + (_i & 1)


@emulate(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", scope="warp")
def mma_m16n8k16_bf16(a, b, c):
    A, B, Cm = np.empty((16, 16), np.float32), np.empty((16, 8), np.float32), np.empty((16, 8), np.float32)
    A[A_ROW, A_COL] = _bf16(_halves(a))
    B[B_ROW, B_COL] = _bf16(_halves(b))
    Cm[C_ROW, C_COL] = c
    D = Cm + A @ B
    return D[C_ROW, C_COL]


# The same statement for hot use, compiled by numba for the CPU. Registered under
# a switch so the tests can compare the two.
def use_native_mma():
    from numba import carray

    @emulate(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", scope="warp", native=True)
    def mma_native(mask, slots, fiber):          # slots in PTX order: d0-3 a0-3 b0-1 c0-3
        s = carray(slots, (32, NSLOT))
        A = np.empty((16, 16), np.float32)
        B = np.empty((8, 16), np.float32)
        for l in range(32):
            g, t = l >> 2, l & 3
            for i in range(8):
                u = np.uint32((s[l, 4 + (i >> 1)] >> np.uint64(16 * (i & 1))) & np.uint64(0xFFFF))
                A[g + 8 * ((i >> 1) & 1), 2 * t + (i & 1) + 8 * (i >> 2)] = np.uint32(u << np.uint32(16)).view(np.float32)
            for i in range(4):
                u = np.uint32((s[l, 8 + (i >> 1)] >> np.uint64(16 * (i & 1))) & np.uint64(0xFFFF))
                B[g, 2 * t + (i & 1) + 8 * (i >> 1)] = np.uint32(u << np.uint32(16)).view(np.float32)
        for l in range(32):
            g, t = l >> 2, l & 3
            for i in range(4):
                r, c = g + 8 * (i >> 1), 2 * t + (i & 1)
                bits = np.uint32(s[l, 10 + i])
                acc = bits.view(np.float32)
                for k in range(16):
                    acc += A[r, k] * B[c, k]
                res = np.float32(acc)
                s[l, i] = np.uint64(res.view(np.uint32))
        return 0


def _ldmatrix(n, trans):
    def fn(addr):                              # lane 8*m + r supplies the address of row r of matrix m
        out = np.empty((32, n), np.uint32)
        for m in range(n):
            M = np.stack([read_mem(addr[8 * m + r], np.uint16, 8) for r in range(8)])
            if trans:
                M = M.T
            out[:, m] = np.ascontiguousarray(M).view(np.uint32).reshape(32)   # lane l: row l/4, pair l%4
        return out
    return fn


for _n in (1, 2, 4):
    for _tr in (False, True):
        emulate(rf"ldmatrix\.sync\.aligned\.m8n8\.x{_n}{'.trans' if _tr else ''}\.shared\.b16".replace(".trans", r"\.trans"),
                scope="warp")(_ldmatrix(_n, _tr))

# cp.async is *deferred* to wait_group/wait_all of the issuing thread, so a missing
# wait (or a missing barrier after it) shows up as stale data, as on the GPU.
_q = {}                                        # thread -> [open copies, [committed groups]]


def _state():
    return _q.setdefault(current(), [[], []])


on_launch.append(_q.clear)


@emulate(r"cp\.async\.c[ag]\.shared\.global")
def cp_async(dst, src, size):
    _state()[0].append((int(dst), int(src), size))


@emulate(r"cp\.async\.commit_group")
def cp_async_commit():
    st = _state()
    st[1].append(st[0])
    st[0] = []


@emulate(r"cp\.async\.(wait_group|wait_all)")
def cp_async_wait(n=None):
    st = _state()
    if n is None:
        cp_async_commit()
    while len(st[1]) > (n or 0):
        for d, s, k in st[1].pop(0):
            ctypes.memmove(d, s, k)
