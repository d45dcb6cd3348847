"""Which CPU meaning a statement of inline PTX has, and how generated IR reaches it.

An emulation is declared by a pattern for the opcode, so intrinsics of the project have no CPU branch: the harness meets
their text. Three kinds:

    @emulate(r"redux\\.sync\\.add\\.s32", scope="warp")    a Python function on numpy arrays (tens of us a call)
    def _(value, mask): ...
    emulate_ir(r"tanh\\.approx\\.f32", "  %r = call ...")  LLVM IR, inlined into the thread
    emulate_native(r"mma\\..*", "simt_mma_...", "warp")   a function of simt_rt.c (about a us)

The last declared that matches wins. All that the project uses are in ptx.py, each with a numpy test.
"""

from __future__ import annotations

import ctypes as C
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from whalez.testing.simt import machine
from whalez.testing.simt.errors import SimtError
from whalez.testing.simt.machine import OP_FAIL, OP_FUNCTION, OPS_FIRST, OPS_MAX, SLOTS, CFiber, address_of, rt

Scope = Literal["thread", "warp", "warpgroup"]
LANES = {"thread": 1, "warp": 32, "warpgroup": 128}
DTYPES: dict[str, Any] = {
    "r": np.uint32,
    "l": np.uint64,
    "h": np.uint16,
    "f": np.float32,
    "d": np.float64,
    "b": np.bool_,
}


# ------------------------------------------------------------------------------------------------------ statements
@dataclass(frozen=True)
class Reg:
    index: int


@dataclass(frozen=True)
class Mem:
    index: int
    offset: int


@dataclass(frozen=True)
class Vec:
    indices: tuple[int, ...]


Operand = Reg | Mem | Vec | int | str


def split_top(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    out, depth, part = [], 0, ""
    for ch in text:
        depth += ch in "([{<"
        depth -= ch in ")]}>"
        if ch == "," and depth == 0:
            out.append(part.strip())
            part = ""
        else:
            part += ch
    return [*out, part.strip()] if part.strip() else out


def _operand(token: str) -> Operand:
    registers = [int(x) for x in re.findall(r"\$(\d+)", token)]
    if token[0] == "{":
        return Vec(tuple(registers))
    if token[0] == "[" and registers:
        offset = re.fullmatch(r"\[\s*\$\d+\s*(?:([+-])\s*(\w+))?\s*\]", token)
        if not offset:
            raise SimtError(f"inline PTX: address {token} not understood")
        return Mem(registers[0], int(f"{offset[1]}{int(offset[2], 0)}") if offset[1] else 0)
    if registers:
        return Reg(registers[0])
    try:
        return int(token, 0)
    except ValueError:
        return token


def parse_ptx(text: str) -> tuple[str, tuple[Operand, ...] | None]:
    """`op a, {b, c}, [d], 16;` as opcode and operands; several statements as their text and None."""
    text = " ".join(text.replace("\\0A", " ").replace("\\09", " ").split()).rstrip("; ")
    if ";" in text:
        return text, None
    op, _, rest = text.partition(" ")
    return op, tuple(_operand(t) for t in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest))


@dataclass(frozen=True)
class Site:
    """One statement of inline PTX as it stands in the IR: equal sites share one function."""

    text: str
    constraints: str
    returns: str  #: IR type
    types: tuple[str, ...]  #: IR types of the inputs

    @property
    def op(self) -> str:
        return parse_ptx(self.text)[0]

    @property
    def operands(self) -> tuple[Operand, ...] | None:
        return parse_ptx(self.text)[1]

    @property
    def outs(self) -> list[str]:
        return [c for c in self.constraints.split(",") if c.startswith("=")]

    @property
    def ins(self) -> list[str]:
        return [c for c in self.constraints.split(",") if c and not c.startswith(("=", "~"))]

    @property
    def out_types(self) -> list[str]:
        if self.returns == "void":
            return []
        return split_top(self.returns[1:-1]) if self.returns.startswith("{") else [self.returns]

    @property
    def sources(self) -> list[int]:
        """Input registers as the text has them, which need not be the order of the arguments."""
        registers: list[int] = []
        if self.operands is None:
            return [len(self.outs) + i for i in range(len(self.types))]
        for o in self.operands:
            registers += o.indices if isinstance(o, Vec) else [o.index] if isinstance(o, Reg | Mem) else []
        return [k for k in registers if k >= len(self.outs)]

    def arg(self, register: int) -> str:
        """IR name of an input register `$n`."""
        return f"%a{self.sources.index(register)}"

    def type_of(self, register: int) -> str:
        n = len(self.outs)
        return self.types[register - n] if register >= n else self.out_types[register]


# -------------------------------------------------------------------------------------------------------- registry
Body = str | Callable[[Site, "re.Match[str]"], str]


@dataclass(frozen=True)
class Emulation:
    pattern: re.Pattern[str]
    kind: Literal["python", "native", "ir"]
    scope: Scope
    body: Any  #: function, C symbol, or IR (a function of the site and the match, if it depends on them)


REGISTRY: list[Emulation] = []
on_run: list[Callable[[], None]] = []  #: called before every run, to reset what emulations keep


def emulate(pattern: str, scope: Scope = "thread") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a Python function as the meaning of one statement.

    Args:
        pattern: regex for the whole opcode, or for the whole text where it is more than one statement
        scope:   who executes the statement together
    The function gets the sources in the order of the PTX text, one argument each: {..} as array (lanes, registers) of
    the constraint's type, registers and [addresses] as (lanes,), literals as they stand; scope "thread" has no lanes
    axis. It returns the destination, or a tuple of them, in the same shapes.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        REGISTRY.insert(0, Emulation(re.compile(pattern), "python", scope, function))
        return function

    return declare


def emulate_ir(pattern: str, body: Body) -> None:
    """Declare LLVM IR as the meaning of a statement of one thread.

    Inputs are %a0, %a1.. in the order of the text, for several statements in the order of $n; it ends in a ret.
    """
    REGISTRY.insert(0, Emulation(re.compile(pattern), "ir", "thread", body))


def emulate_native(pattern: str, symbol: str, scope: Scope) -> None:
    """Declare a function of simt_rt.c as the meaning.

    The slots of each lane hold the operands in the order of the text, destinations and literals included.
    """
    address_of(symbol)
    REGISTRY.insert(0, Emulation(re.compile(pattern), "native", scope, symbol))


def find(site: Site) -> tuple[Emulation, re.Match[str]] | None:
    op = site.op
    for emulation in REGISTRY:
        m = emulation.pattern.fullmatch(op)
        if m:
            return emulation, m
    return None


# ------------------------------------------------------------------------------------------- what emulations may ask
_current = [0]


def current() -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Inside a Python emulation: rank, block and thread of the (first) executing thread."""
    f = CFiber.from_address(_current[0])
    return f.rank, tuple(f.ctaid), tuple(f.tid)


def read_memory(address: int, dtype: Any, count: int = 1) -> np.ndarray:
    return np.frombuffer((C.c_char * (np.dtype(dtype).itemsize * count)).from_address(int(address)), dtype, count)


# ----------------------------------------------------------------------------------- from the IR to the emulation
_ops: dict[tuple[Any, ...], int] = {}
_kept: list[Any] = []  #: ctypes callbacks live as long as the process
pending: list[BaseException] = []  #: raised inside a callback of the run that is over


def op_name(number: int) -> str:
    for key, n in _ops.items():
        if n == number:
            return key[0] if key[0].startswith("simt_") else parse_ptx(key[0])[0]
    return machine.OP_NAMES.get(number, f"op#{number}")


def _register(key: tuple[Any, ...], function: Any, scope: Scope, native: bool) -> int:
    number = _ops.get(key)
    if number is None:
        number = OPS_FIRST + len(_ops)
        assert number < OPS_MAX, "raise MAX_OP in simt_rt.c and OPS_MAX in machine.py"
        callback = function() if callable(function) else function
        _kept.append(callback)
        rt.simt_set_op(number, callback if native else C.cast(callback, C.c_void_p), LANES[scope], int(native))
        _ops[key] = number
    return number


def _callback(function: Callable[..., Any], scope: Scope, site: Site) -> Any:
    """ctypes trampoline: slots -> numpy operands -> function -> slots."""
    lanes, outs_count = LANES[scope], len(site.outs)
    dtypes = [np.dtype(DTYPES[c.lstrip("=&+")]) for c in site.outs]
    dtypes += [dtypes[int(c)] if c.isdigit() else np.dtype(DTYPES[c.lstrip("&")]) for c in site.ins]
    operands = site.operands
    if operands is None:
        operands = tuple(Reg(k) for k in range(len(dtypes)))

    def column(slots: np.ndarray, k: int) -> np.ndarray:
        d = dtypes[k]
        return slots[:, k].copy().view(np.uint8).reshape(lanes, 8)[:, : d.itemsize].copy().view(d)[:, 0]

    def call(mask: int, slots_pointer: Any, fiber: int) -> int:
        try:
            _current[0] = fiber
            slots = np.ctypeslib.as_array(slots_pointer, (lanes * SLOTS,)).reshape(lanes, SLOTS)
            arguments: list[Any] = []
            destinations: list[tuple[int, ...]] = []
            for o in operands:
                match o:
                    case Reg(k) if k < outs_count:
                        destinations.append((k,))
                    case Vec(ks) if ks[0] < outs_count:
                        destinations.append(ks)
                    case Reg(k):
                        arguments.append(column(slots, k))
                    case Mem(k, offset):
                        arguments.append(column(slots, k) + np.array(offset).astype(dtypes[k]))
                    case Vec(ks):
                        arguments.append(np.stack([column(slots, k) for k in ks], 1))
                    case _:
                        arguments.append(o)
            if scope == "thread":
                arguments = [a[0] if isinstance(a, np.ndarray) else a for a in arguments]
            results = function(*arguments)
            if destinations:
                results = results if isinstance(results, tuple) else (results,)
                for ks, value in zip(destinations, results, strict=True):
                    v = np.asarray(value).reshape(lanes, len(ks))
                    for j, k in enumerate(ks):
                        column_bytes = np.zeros((lanes, 8), np.uint8)
                        w = np.ascontiguousarray(v[:, j]).astype(dtypes[k])
                        column_bytes[:, : w.itemsize] = w.view(np.uint8).reshape(lanes, -1)
                        slots[:, k] = column_bytes.view(np.uint64)[:, 0]
            return 0
        except BaseException as e:  # an exception must not cross the C frames; run() raises it
            pending.append(e)
            return 1

    return OP_FUNCTION(call)


def trap_ir(
    returns: str,
    name: str,
    parameters: Sequence[str],
    stores: Sequence[tuple[int, str, str]],
    op: int,
    mask: str,
    results: Sequence[tuple[str, int]],
) -> str:
    """IR function that puts values into slots, lets the scheduler do `op`, and takes the results out of slots.

    Args:
        parameters: "type %name"
        stores:     (slot, IR type, IR value)
        results:    (IR type, slot)
    """
    b = [f"define internal {returns} @{name}({', '.join(parameters)}) alwaysinline {{", "  %s = call ptr @simt_slots()"]
    for i, (slot, t, value) in enumerate(stores):
        b += [f"  %p{i} = getelementptr i64, ptr %s, i64 {slot}"]
        if t != "i64":
            b += [f"  store i64 0, ptr %p{i}"]
        b += [f"  store {t} {value}, ptr %p{i}"]
    b.append(f"  notail call void @simt_trap(i32 {op}, i32 {mask})")
    if not results:
        return "\n".join([*b, "  ret void\n}"])
    whole = "undef"
    for i, (t, slot) in enumerate(results):
        b += [f"  %q{i} = getelementptr i64, ptr %s, i64 {slot}", f"  %r{i} = load {t}, ptr %q{i}"]
        if returns.startswith("{"):
            b.append(f"  %g{i} = insertvalue {returns} {whole}, {t} %r{i}, {i}")
            whole = f"%g{i}"
    return "\n".join([*b, f"  ret {returns} {whole if returns.startswith('{') else '%r0'}\n}}"])


_failures = [0]


def fail_ir(returns: str, name: str, types: Sequence[str], message: str) -> str:
    """IR function that ends the run with this message when it is reached."""
    _failures[0] += 1
    text = "".join(ch if ch.isprintable() and ch.isascii() and ch not in '"\\' else "?" for ch in message)
    constant = f"@simt_message_{_failures[0]}"
    return (
        f'{constant} = private constant [{len(text) + 1} x i8] c"{text}\\00"\n'
        f'define internal {returns} @"{name}"({", ".join(types)}) {{\n  %s = call ptr @simt_slots()\n'
        f"  store ptr {constant}, ptr %s\n  notail call void @simt_trap(i32 {OP_FAIL}, i32 0)\n  unreachable\n}}"
    )


def _native_ir(site: Site, name: str, op: int, parameters: list[str]) -> str:
    assert site.operands is not None, f"{site.text}: a native emulation takes one statement"
    stores: list[tuple[int, str, str]] = []
    results: dict[int, int] = {}
    extra: list[str] = []
    slot = 0
    for o in site.operands:
        for k in o.indices if isinstance(o, Vec) else [o.index] if isinstance(o, Reg | Mem) else [None]:
            if k is None:
                if not isinstance(o, int):
                    raise SimtError(f"inline PTX {site.text}: operand {o} not understood")
                stores.append((slot, "i64", str(o)))
            elif k < len(site.outs):
                results[k] = slot
            elif isinstance(o, Mem) and o.offset:
                t = site.type_of(k)
                extra.append(f"  %o{k} = add {t} {site.arg(k)}, {o.offset}")
                stores.append((slot, t, f"%o{k}"))
            else:
                stores.append((slot, site.type_of(k), site.arg(k)))
            slot += 1
    stores.append((slot, "i64", "-1"))  # NO_OPERAND
    assert slot < SLOTS, "raise NSLOT in simt_rt.c and SLOTS in machine.py"
    out = [(t, results[i]) for i, t in enumerate(site.out_types)]
    text = trap_ir(site.returns, name, parameters, stores, op, "-1", out)
    return text.replace("  %s = call", "\n".join([*extra, "  %s = call"]), 1) if extra else text


def definition(site: Site, name: str, kernel: str) -> str:
    """IR function `name` with the meaning of this statement; reaching one without a meaning ends the run."""
    found = find(site)
    if found is None:
        text = " ".join(site.text.split())
        return fail_ir(site.returns, name, site.types, f"inline PTX without an emulation in {kernel}: {text}")
    emulation, m = found
    outs_count, sources = len(site.outs), site.sources
    registers = [outs_count + i for i in range(len(site.types))]
    names = [site.arg(k) if k in sources else f"%unused{k}" for k in registers]
    parameters = [f"{t} {a}" for t, a in zip(site.types, names, strict=True)]
    if emulation.kind == "ir":
        again = [(i, k) for i, k in enumerate(sources) if sources.index(k) < i]  # a register that the text has twice
        copies = "".join(f"  %a{i} = bitcast {site.type_of(k)} {site.arg(k)} to {site.type_of(k)}\n" for i, k in again)
        body = emulation.body if isinstance(emulation.body, str) else emulation.body(site, m)
        return f"define internal {site.returns} @{name}({', '.join(parameters)}) alwaysinline {{\n{copies}{body}\n}}"
    if emulation.kind == "native":
        op = _register((emulation.body,), address_of(emulation.body), emulation.scope, True)
        return _native_ir(site, name, op, parameters)
    key = (site.text, site.constraints, emulation.body)
    op = _register(key, lambda: _callback(emulation.body, emulation.scope, site), emulation.scope, False)
    assert outs_count + len(site.types) <= SLOTS, "raise NSLOT in simt_rt.c and SLOTS in machine.py"
    stores = list(zip(registers, site.types, names, strict=True))
    return trap_ir(site.returns, name, parameters, stores, op, "-1", [(t, i) for i, t in enumerate(site.out_types)])
