"""Seeded mistakes: a kernel with one change in its source, and a stream that launches it in the place of the good one.

A test that no mutation turns red has not tested the line. Usage:

    mutant = mutate(merge_kernel, "gap = -abs(a - b)", "gap = abs(a - b)")
    mutant = mutate(scan_kernel, "cuda.syncthreads()", "pass", nth=1, inside="load_tile_block")
    mutant = mutate(merge_kernel, constants={"LN2": 1.0})
    assert_caught(check, stream, merge_kernel, old="b * to_natural", new="b")       # check(stream) is the test itself

What a mutant may not be caught by: a kernel that no longer compiles. Only a wrong result (AssertionError) or a fault of
the harness (an access outside an array, a deadlock) counts; every other exception passes through and fails the test.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
from numba import cuda

from helpers import devices

_serial = itertools.count(1)
_mutated: list[str] = []  # the source of every kernel that `mutate` was given

#: Sources of kernels -> tests that seed a mistake in them; filled by `seeds` as test modules are imported.
SEEDED: dict[str, list[Callable[..., None]]] = {}


def source_of(kernel: Any) -> str:
    """The function a kernel is made of: one for all its head widths."""
    return f"{kernel.function.__module__}.{kernel.function.__qualname__}"


def seeds(*kernels: Any) -> Callable[[Any], Any]:
    """Decorator, outermost: this test seeds mistakes in these kernels, each run of it in at least one of them.

    Every kernel of whalez must be named by such a test, of which some runs are quick (test_mutate.py).
    """
    sources = {source_of(kernel) for kernel in kernels}

    def mark(test: Any) -> Any:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            begun = len(_mutated)
            test(*arguments, **named)
            assert not devices.takes_mutants() or sources & set(_mutated[begun:]), f"seeded nothing in {sources}"

        for source in sources:
            SEEDED.setdefault(source, []).append(run)
        return run

    return mark


def is_quick(test: Any) -> bool:
    """Whether each kernel that this test seeds has a mistake outside of the long tier: the test is not slow, no case of
    its parameters is but changes, and of those at least one is not."""

    def is_slow(marks: Any) -> bool:
        return any(mark.name == "slow" for mark in marks)

    marks = getattr(test, "pytestmark", [])
    slow = {m.args[0]: [is_slow(getattr(case, "marks", ())) for case in m.args[1]] for m in marks if len(m.args) == 2}
    changes_slow = slow.pop("change", [False])
    return not is_slow(marks) and not any(map(any, slow.values())) and not all(changes_slow)


def mutate(
    kernel: Any,
    old: str = "",
    new: str = "",
    *,
    nth: int | None = None,
    inside: str | None = None,
    constants: dict[str, Any] | None = None,
) -> Any:
    """A copy of `kernel` with `old` replaced by `new` in its source, and with other values of module constants.

    Args:
        kernel:     Kernel; it and its module stay as they are
        old, new:   the text of one place, and what stands there instead
        nth:        which of several occurrences, from 0; None demands that there is exactly one
        inside:     name of the device function to change, however deep the kernel calls it; None is the kernel itself
        constants:  {name: value} of globals, seen by the kernel and every device function it calls
    Raises:   LookupError if the text, the function or the constant is not there: a mutation that changes nothing
              must not pass for one that was caught
    """
    _mutated.append(source_of(kernel))
    rewriter = _Rewriter(old, new, nth, inside, constants or {})
    function = rewriter.rebuild(kernel.function)
    rewriter.require_all_used()
    return dataclasses.replace(kernel, name=f"{kernel.name}_mutant{next(_serial)}", function=function)


def changes(*each: dict[str, Any], quick: int = 2) -> Any:
    """Parametrises `change` with each of these; all but the first `quick` are left to the long tier."""
    marks = [[]] * quick + [[pytest.mark.slow]] * len(each)
    return pytest.mark.parametrize("change", [pytest.param(c, marks=m) for c, m in zip(each, marks, strict=False)])


class MutantStream:
    """A stream that launches `mutant` wherever `kernel` is asked for, and passes everything else on."""

    def __init__(self, stream: Any, kernel: Any, mutant: Any) -> None:
        self._stream, self._kernel, self._mutant = stream, kernel, mutant
        self.launches_count = 0

    def launch(self, kernel: Any, *args: Any) -> None:
        if kernel is self._kernel:
            self.launches_count += 1
            kernel = self._mutant
        self._stream.launch(kernel, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def assert_caught(
    check: Callable[[Any], None], stream: Any, kernel: Any, *faults: type[Exception], **change: Any
) -> None:
    """`check(stream)` must pass with `kernel` and fail with the mutant made of it by `change` (see `mutate`).

    On a GPU only `check(stream)` is run: there a mutant may hang, or take the context with it.

    Args:
        check:   runs the op on the stream it gets, waits for it and compares
        faults:  exceptions of the harness that count as caught, beside AssertionError
    """
    check(stream)
    if not devices.takes_mutants():
        return
    swapped = MutantStream(stream, kernel, mutate(kernel, **change))
    with pytest.raises((AssertionError, *faults)):
        check(swapped)
    if not swapped.launches_count:
        raise LookupError(f"{kernel.name} was never launched, so its mutant was not tried")


class _Rewriter:
    def __init__(self, old: str, new: str, nth: int | None, inside: str | None, constants: dict[str, Any]) -> None:
        self._old, self._new, self._nth, self._inside, self._constants = old, new, nth, inside, constants
        self._text_used = not old
        self._constants_used: set[str] = set()
        self._done: dict[Any, Any] = {}

    def require_all_used(self) -> None:
        if not self._text_used:
            raise LookupError(f"the kernel calls no device function named {self._inside}")
        if unused := self._constants.keys() - self._constants_used:
            raise LookupError(f"the kernel uses no constant named {', '.join(sorted(unused))}")

    def rebuild(self, function: Any, is_kernel: bool = True) -> Any:
        """The function again, with everything it calls and reads changed as asked; itself if nothing of it is."""
        if function in self._done:
            return self._done[function]
        python = getattr(function, "py_func", function)
        names = inspect.getclosurevars(python)
        changed: dict[str, Any] = {}
        for name, value in {**names.globals, **names.nonlocals}.items():
            if name in self._constants:
                changed[name] = self._constants[name]
                self._constants_used.add(name)
            elif hasattr(value, "py_func") and (again := self.rebuild(value, False)) is not value:
                changed[name] = again
        here = bool(self._old) and (is_kernel if self._inside is None else python.__name__ == self._inside)
        result = function
        if here or changed or is_kernel:
            source = _source_of(python)
            if here:
                source = self._replace(source, python.__name__)
            result = _define(source, python, {**names.nonlocals, **changed})
            if not is_kernel:
                result = cuda.jit(device=True, **_options_of(function))(result)
        self._done[function] = result
        return result

    def _replace(self, source: str, where: str) -> str:
        found = source.count(self._old)
        nth = self._nth
        if nth is None and found != 1:
            raise LookupError(f"{where}: expected the text once, found it {found} times: {self._old!r}")
        nth = nth or 0
        if found <= nth:
            raise LookupError(f"{where}: expected more than {nth} times, found {found}: {self._old!r}")
        parts = source.split(self._old)
        self._text_used = True
        return self._old.join(parts[: nth + 1]) + self._new + self._old.join(parts[nth + 1 :])


def _source_of(python: Any) -> str:
    """The def statement alone: decorators would register the copy or compile it."""
    lines = textwrap.dedent(inspect.getsource(python)).splitlines(keepends=True)
    return "".join(lines[_def_of(lines).lineno - 1 :])


def _def_of(lines: list[str]) -> ast.FunctionDef:
    statement = ast.parse("".join(lines)).body[0]
    if not isinstance(statement, ast.FunctionDef):
        raise LookupError(f"expected a def, got {type(statement).__name__}")
    return statement


def _define(source: str, python: Any, names: dict[str, Any]) -> Any:
    filename = f"<mutant {next(_serial)} of {python.__name__}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {**python.__globals__, **names}
    exec(compile("from __future__ import annotations\n" + source, filename, "exec"), namespace)
    function = namespace[python.__name__]
    assert isinstance(function, types.FunctionType)
    function.__module__ = python.__module__
    return function


def _options_of(dispatcher: Any) -> dict[str, Any]:
    kept = ("fastmath", "inline", "forceinline", "opt", "debug", "lineinfo")
    return {name: value for name, value in dispatcher.targetoptions.items() if name in kept and value}
