"""Sleeping on a word of shared memory: futex(2) and the monotonic clock, callable from nogil njit code.

Rule 1: the only caller of syscall(2). Rule 2: no protocol; who marks and who looks is doorbell.py's.

The symbols `syscall`, `clock_gettime` and `__errno_location` are left undefined in the code and bound by name whenever
it is loaded, so compiled code survives numba's cache. The futexes are shared ones (no FUTEX_PRIVATE_FLAG): the kernel
finds the sleeper of another process by the page, not by the address.
"""

from __future__ import annotations

import errno
from typing import Any

import numba.extending
from llvmlite import ir
from numba import njit, types

from whalez.errors import FabricError

#: numba types an intrinsic as a call with its typing context; in njit code there is none.
intrinsic: Any = numba.extending.intrinsic

#: System call numbers by LLVM architecture.
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT = 0
FUTEX_WAKE = 1
CLOCK_MONOTONIC = 1

EAGAIN = errno.EAGAIN
EINTR = errno.EINTR
ETIMEDOUT = errno.ETIMEDOUT

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_NULL = ir.Constant(_I64, 0)


def _function(module: Any, name: str, type_: ir.FunctionType) -> Any:
    return module.globals[name] if name in module.globals else ir.Function(module, type_, name)


def _timespec(builder: Any) -> Any:
    # In the entry block, or a wait in a loop would eat the stack.
    with builder.goto_entry_block():
        return builder.alloca(_I64, 2)


def _word(builder: Any, pointer: Any, index: int) -> Any:
    return builder.gep(pointer, [ir.Constant(_I64, index)])


def emit_futex(builder: Any, operation: int, address: Any, value: Any, timeout_ns: Any) -> Any:
    """syscall(SYS_futex, address, operation, value, timeout, 0, 0) -> i64 result, or minus errno.

    `timeout_ns` is an i64, or None for no timeout. Raises FabricError for a processor with no known number.
    """
    module = builder.module
    arch = module.triple.split("-")[0]
    if arch not in SYS_FUTEX:
        raise FabricError(f"host fabric: no futex system call number known for {arch!r}; known: {sorted(SYS_FUTEX)}")
    timeout = _NULL
    if timeout_ns is not None:
        timespec = _timespec(builder)
        second = ir.Constant(_I64, 1_000_000_000)
        builder.store(builder.sdiv(timeout_ns, second), _word(builder, timespec, 0))
        builder.store(builder.srem(timeout_ns, second), _word(builder, timespec, 1))
        timeout = builder.ptrtoint(timespec, _I64)
    syscall = _function(module, "syscall", ir.FunctionType(_I64, [_I64], var_arg=True))
    constants = [ir.Constant(_I64, SYS_FUTEX[arch]), address, ir.Constant(_I64, operation)]
    result = builder.call(syscall, [*constants, value, timeout, _NULL, _NULL])
    # errno must be read before anything else can run in this thread.
    location = _function(module, "__errno_location", ir.FunctionType(_I32.as_pointer(), []))
    error = builder.sext(builder.load(builder.call(location, [])), _I64)
    failed = builder.icmp_signed("<", result, _NULL)
    return builder.select(failed, builder.neg(error), result)


@intrinsic
def _futex_wait(typingctx: Any, address: Any, expected: Any, timeout_ns: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_futex(builder, FUTEX_WAIT, args[0], args[1], args[2])

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def _futex_wake(typingctx: Any, address: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_futex(builder, FUTEX_WAKE, args[0], args[1], None)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def monotonic_ns(typingctx: Any) -> Any:
    """monotonic_ns() -> int64: the clock of `time.monotonic_ns`, from njit code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        timespec = _timespec(builder)
        type_ = ir.FunctionType(_I32, [_I32, _I64])
        clock = _function(builder.module, "clock_gettime", type_)
        builder.call(clock, [ir.Constant(_I32, CLOCK_MONOTONIC), builder.ptrtoint(timespec, _I64)])
        seconds = builder.load(_word(builder, timespec, 0))
        return builder.add(
            builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), builder.load(_word(builder, timespec, 1))
        )

    return types.int64(), generate


@njit(cache=True, nogil=True)
def futex_wait(address: Any, expected_u32: Any, timeout_ns: Any) -> Any:
    """Sleep while the u32 at `address` equals `expected_u32`, at most `timeout_ns` (relative; <= 0 returns at once).

    Returns: 0 woken (perhaps for nothing) | -EAGAIN the word differs | -ETIMEDOUT | -EINTR a signal came |
             -EFAULT, -EINVAL, -ENOSYS: our mistake, or a kernel that forbids it
    """
    if timeout_ns <= 0:
        return -ETIMEDOUT
    return _futex_wait(address, expected_u32, timeout_ns)


@njit(cache=True, nogil=True)
def futex_wake(address: Any, count: Any) -> Any:
    """Wake at most `count` sleepers on the u32 at `address`, in any process. Returns how many, or minus errno."""
    return _futex_wake(address, count)
