"""From the NVVM IR text that numba-cuda hands to NVVM, to IR that runs on the machine.

Text, line by line, because llvmlite can parse IR but not build on what it parsed. What changes:
- triple, layout and NVVM's annotations go; llvm.nvvm.* become calls of simt.nvvm.* (nvvm.py)
- shared arrays become offsets from a base of the block, so that several blocks can be live
- inline PTX becomes calls, one function per distinct statement (emulation.py)
- a load or store through a pointer that is no local variable is preceded by a check of its alignment
- atomics and volatile accesses yield after they are done, so that threads that spin let others go on
- fadd, fsub and fmul may be contracted, as NVVM does by default
- float to integer saturates, as cvt does, where LLVM leaves the result open
- line information stays, so that a program counter has a source line
"""

from __future__ import annotations

import re

import llvmlite.binding as ll
from numba.cuda.cudadrv import nvvm as numba_nvvm

from whalez.testing.simt.emulation import Site, definition, split_top

_ASM = re.compile(
    r"call (?P<ret>.+?) asm\s+(?:sideeffect\s+)?(?:alignstack\s+)?"
    r'"(?P<text>[^"]*)",\s*"(?P<cons>[^"]*)"\s*\((?P<args>.*)\)(?P<tail>[^)]*)$'
)
_VALUE = re.compile(r"\s+(%.*|@.*|-?[\d.][\w.+-]*|undef|poison|true|false|null|zeroinitializer)$")
_SHARED = re.compile(r'^@"?([\w.$]+)"? = (external )?addrspace\(3\) global (\[.*\]|\S+?)( undef)?, align (\d+)')
_ARITHMETIC = re.compile(r"= f(add|sub|mul) (?!.*\b(fast|contract)\b)")
_TO_INTEGER = re.compile(r"= fpto(?P<sign>[su])i (?P<t>float|double) (?P<v>\S+) to (?P<i>i32|i64)(?=$| |,)")
_YIELDS = re.compile(r"\b(atomicrmw|cmpxchg|load volatile|load atomic|store volatile|store atomic)\b")
_DROPPED = ("target ", "!nvvm", "@llvm.used", '@"llvm.used"', "source_filename")

_NAME = r'%"[^"]*"|%[\w.$-]+'
_TYPE = r"i16|i32|i64|i128|half|bfloat|float|double|<\d+ x \w+>|[^ ,{}\[\]]+\*"
_LOAD = re.compile(rf"^\s+\S+ = load (?:volatile |atomic )?(?P<t>{_TYPE}), (?P=t)\* (?P<p>{_NAME})(?P<rest>.*)$")
_STORE = re.compile(rf"^\s+store (?:volatile |atomic )?(?P<t>{_TYPE}) .+, (?P=t)\* (?P<p>{_NAME})(?P<rest>.*)$")
_RMW = re.compile(
    rf"^\s+\S+ = (?:atomicrmw (?:volatile )?\w+|cmpxchg(?: volatile)?) (?P<t>{_TYPE})\* (?P<p>{_NAME}),(?P<rest>.*)$"
)
_ZEROED = re.compile(rf"^\s+store \[(?P<n>\d+) x (?P<t>i8|{_TYPE})\] zeroinitializer, \[.*\]\* (?P<p>{_NAME})$")
_ALLOCA = re.compile(rf"^\s+(?P<r>{_NAME}) = alloca ")
_GEP = re.compile(rf"^\s+(?P<r>{_NAME}) = getelementptr (?:inbounds )?(?P<t>.+?), (?P=t)\* (?P<b>{_NAME}), (?P<i>.*)$")
_CAST = re.compile(rf"^\s+(?P<r>{_NAME}) = bitcast \S.* (?P<b>{_NAME}) to ")
_BYTES = {"i16": 2, "i32": 4, "i64": 8, "i128": 16, "half": 2, "bfloat": 2, "float": 4, "double": 8}


def bytes_of(t: str) -> int:
    if t.endswith("*"):
        return 8
    vector = re.fullmatch(r"<(\d+) x (\w+)>", t)
    if vector:
        return int(vector[1]) * (1 if vector[2] == "i8" else _BYTES.get(vector[2], 1))
    return _BYTES[t]


def _saturating(m: re.Match[str]) -> str:
    bits = {"float": 32, "double": 64}[m["t"]]
    return f"= call {m['i']} @llvm.fpto{m['sign']}i.sat.{m['i']}.f{bits}({m['t']} {m['v']})"


def _odd_multiple(offset: int, align: int) -> int:
    """The first odd multiple of `align` at or behind `offset`."""
    return offset + (align - offset) % (2 * align)


class _Function:
    """What is known of the names of the function that is being rewritten."""

    def __init__(self) -> None:
        self.local: set[str] = set()  #: pointers into local variables: checking them would keep them out of registers
        self.roots: dict[str, tuple[str, str]] = {}  #: element pointer -> (base pointer, element type)

    def learn(self, line: str) -> None:
        if "alloca" in line and (m := _ALLOCA.match(line)):
            self.local.add(m["r"])
        elif "getelementptr" in line and (m := _GEP.match(line)):
            if m["b"] in self.local:
                self.local.add(m["r"])
            elif "," not in m["i"].split(" , !dbg")[0].split(", !dbg")[0]:
                self.roots[m["r"]] = (m["b"], m["t"])
        elif "bitcast" in line and (m := _CAST.match(line)) and m["b"] in self.local:
            self.local.add(m["r"])

    def check(self, line: str) -> str | None:
        """The check to put before this line. The base of an element has the alignment of the element, and is the same
        value in the next turn of a loop, so the optimiser can drop the check there."""
        m = (
            _LOAD.match(line)
            if " load " in line
            else _STORE.match(line)
            if line.startswith("  store ")
            else _RMW.match(line)
        )
        if not m or m["p"] in self.local:
            return None
        explicit = re.search(r", align (\d+)", m["rest"])
        bytes_count = int(explicit[1]) if explicit else bytes_of(m["t"])
        if bytes_count <= 1 or bytes_count & (bytes_count - 1):
            return None
        pointer = m["p"]
        while pointer in self.roots and self.roots[pointer][1] == m["t"]:
            pointer = self.roots[pointer][0]
        debug = re.search(r", (!dbg !\d+)", m["rest"])
        return f"  call void @simt_check({m['t']}* {pointer}, i64 {bytes_count - 1})" + (
            f", {debug[1]}" if debug else ""
        )


class Rewriter:
    """Rewrites the modules of one kernel and collects what they need.

    Attributes:
        sites:  statement of inline PTX -> name of the function that stands for it
        shared: name of a shared array -> (IR type, is dynamic, alignment)
    """

    def __init__(self, kernel: str, prefix: str = "simt_asm_") -> None:
        self.kernel, self.prefix = kernel, prefix
        self.sites: dict[Site, str] = {}
        self.shared: dict[str, tuple[str, bool, int]] = {}

    def module(self, text: str) -> str:
        text = numba_nvvm.llvm_replace(text)
        text = text.replace("emissionKind: DebugDirectivesOnly", "emissionKind: LineTablesOnly")
        for line in text.splitlines():
            if m := _SHARED.match(line):
                self.shared[m[1]] = (m[3], bool(m[2]), int(m[5]))
        shared = None
        if self.shared:
            shared = re.compile(r'@"?(' + "|".join(map(re.escape, self.shared)) + r')"?(?![\w.$])')
        out = [
            "declare void @simt_yield() convergent",
            "declare void @simt_check(ptr, i64)",
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
            *(
                f"declare {i} @llvm.fpto{sign}i.sat.{i}.{n}({t})"
                for sign in "su"
                for i in ("i32", "i64")
                for t, n in (("float", "f32"), ("double", "f64"))
            ),
        ]
        body: list[str] = []
        used: set[str] = set()
        names: _Function | None = None
        for line in text.splitlines():
            if line.startswith(_DROPPED) or _SHARED.match(line) or "llvm.dbg." in line.split("!", 1)[0]:
                continue
            if re.match(r"!\d+ = !\{.*\)\* @", line):  # says which function is a kernel
                continue
            line = line.replace("llvm.nvvm.", "simt.nvvm.")
            if line.startswith("define"):
                # each page of a large local array is touched in turn, so that it cannot reach past the stack's guard
                line = re.sub(r"^(define .*\))(?=[^)]*$)", r'\1 "probe-stack"="inline-asm"', line)
                names, body, used = _Function(), [line], set()
                continue
            if names is None:
                out.append(line)
                continue
            if line.startswith("}"):
                first = next(i for i, x in enumerate(body) if x.rstrip().endswith(":")) + 1
                out += body[:first] + [x for n in sorted(used) for x in self._shared_base(n)] + body[first:] + [line]
                names = None
                continue
            names.learn(line)
            if " zeroinitializer, [" in line and (m := _ZEROED.match(line)):
                # numba zeroes local arrays by one store of the whole, which takes LLVM minutes from a few KB on
                size = int(m["n"]) * (1 if m["t"] == "i8" else bytes_of(m["t"]))
                line = f"  call void @llvm.memset.p0.i64(ptr {m['p']}, i8 0, i64 {size}, i1 false)"
            if check := names.check(line):
                body.append(check)
            if shared and shared.search(line):
                used |= {m[1] for m in shared.finditer(line)}
                line = shared.sub(r'%"\1.simt"', line)
            if " asm " in line:
                line = _ASM.sub(self.call_site, line)
            line = _TO_INTEGER.sub(_saturating, line)
            body.append(_ARITHMETIC.sub(r"= f\1 contract ", line))
            if _YIELDS.search(line):
                debug = re.search(r", !dbg !\d+", line)
                body.append("  call void @simt_yield()" + (debug[0] if debug else ""))
        return "\n".join(out)

    @staticmethod
    def _shared_base(name: str) -> list[str]:
        return [
            f'  %"{name}.simt.b" = call ptr @simt_smem(ptr @simt_off_{name})',
            f'  %"{name}.simt" = addrspacecast ptr %"{name}.simt.b" to ptr addrspace(3)',
        ]

    def call_site(self, m: re.Match[str]) -> str:
        types = tuple(_VALUE.sub("", a) for a in split_top(m["args"]))
        site = Site(m["text"], m["cons"], m["ret"], types)
        name = self.sites.setdefault(site, f"{self.prefix}{len(self.sites)}")
        return f"call {m['ret']} @{name}({m['args']}){m['tail']}"

    def site_declarations(self) -> str:
        return "\n".join(f"declare {s.returns} @{n}({', '.join(s.types)})" for s, n in self.sites.items())

    def site_definitions(self) -> str:
        return "\n".join(definition(s, n, self.kernel) for s, n in self.sites.items())

    def shared_layout(self) -> tuple[str, int]:
        """IR constants with the offset of every shared array, and the static bytes before the dynamic ones.

        The dynamic ones lie at an odd multiple of the alignment they declare: a kernel that needs more faults here, and
        not only where a linker puts them there.
        """
        globals_text = "\n".join(f"@g{i} = global {t} undef" for i, (t, _, _) in enumerate(self.shared.values()))
        layout = ll.create_target_data("")
        sizes = [layout.get_abi_size(g.global_value_type) for g in ll.parse_assembly(globals_text).global_variables]
        offset, dynamic_align, at = 0, 1, {}
        for (name, (_, dynamic, align)), size in zip(self.shared.items(), sizes, strict=True):
            if dynamic:
                dynamic_align = max(dynamic_align, align)
            else:
                offset = (offset + align - 1) & -align
                at[name] = offset
                offset += size
        if any(dynamic for _, dynamic, _ in self.shared.values()):
            offset = _odd_multiple(offset, dynamic_align)
        lines = [f"@simt_off_{n} = constant i64 {at.get(n, offset)}" for n in self.shared]
        return "\n".join(lines), offset
