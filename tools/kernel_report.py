"""What every kernel takes of every chip: docs/kernels.md for people, docs/kernels.json for programs. No GPU needed.

    python tools/kernel_report.py                    write both
    python tools/kernel_report.py --check            compare with the committed ones; exit 1 and say what differs
    python tools/kernel_report.py --show NAME        the machine code of one kernel (--arch), --ptx for its PTX

Writing and checking both refuse a kernel that spills registers or keeps an array on the stack, that claims tensor cores
and has none in its code, whose largest launch no chip of the image can run, or whose shared memory may lie where an
access of 16 bytes loses the context. The numbers are a function of the source and of the versions of the compilers:
what the table says of an unchanged kernel changes only with those.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "whalez"
sys.path.insert(0, str(ROOT))

from whalez.ops.device import compile as compiler  # noqa: E402
from whalez.ops.device.kernel import KERNELS, Kernel  # noqa: E402

Found = TypeVar("Found", bound=Any)  # sorts

MARKDOWN, RECORDS = ROOT / "docs" / "kernels.md", ROOT / "docs" / "kernels.json"


class Chip(NamedTuple):
    """The smallest multiprocessor that takes an image."""

    shared_bytes: int  # of a multiprocessor
    block_shared_bytes: int  # of one block
    threads: int
    blocks: int


REGISTERS = 65536
REGISTERS_STEP = 256  # registers are given to warps by so many
CHIPS = {
    "sm_80": Chip(167_936, 166_912, 2048, 32),  # A100
    "sm_90": Chip(233_472, 232_448, 2048, 32),  # H100, H200
    "sm_90a": Chip(233_472, 232_448, 2048, 32),
    "sm_100": Chip(233_472, 232_448, 2048, 32),  # B200
}
SMALL = Chip(102_400, 101_376, 1536, 16)  # 8.6 and 8.9 run the image for sm_80 with less


class Row(NamedTuple):
    """One kernel in one image."""

    kernel: str
    arch: str
    threads: int  # of the largest block
    registers: int
    static_bytes: int  # shared memory
    dynamic_bytes: int  # the most a launch asks for
    stack_bytes: int
    spill_bytes: int
    tensor_core: int  # instructions
    blocks: int  # of the largest size that are resident on one multiprocessor


_DEFINES = re.compile(r"^from whalez\.ops\.device\.kernel import .*\bkernel\b", re.MULTILINE)


def modules() -> list[str]:
    """Every module of whalez that defines kernels: it imports the decorator."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if "testing" not in path.parts]
    named = [path for path in paths if _DEFINES.search(path.read_text(encoding="utf-8"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in named]


def load() -> dict[str, Kernel]:
    for name in modules():
        importlib.import_module(name)
    return KERNELS


def resident_blocks(chip: Chip, threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks a multiprocessor holds at once; 0 if not even one."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // REGISTERS_STEP) * REGISTERS_STEP
    if shared_bytes > chip.block_shared_bytes:
        return 0
    by_shared = chip.shared_bytes // (shared_bytes + compiler.SHARED_RESERVED_BYTES)
    return min(chip.blocks, chip.threads // (warps * 32), REGISTERS // per_warp // warps, by_shared)


def rows_of(name: str) -> list[Row]:
    """A kernel in all its images; what a worker does."""
    kernel, rows = KERNELS[name], []
    threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
    for arch in compiler.architectures_of(kernel):
        # Not from the cache: what keeps an image there may have compiled others before it.
        cubin = compiler.assemble(compiler.compile_ptx(kernel, arch), arch, name)
        usage = compiler.resource_usage(cubin)
        blocks = resident_blocks(CHIPS[arch], threads, usage.registers, usage.shared_bytes + kernel.shared_bytes)
        tensor_core = compiler.tensor_core_instructions(cubin)
        usages = (usage.registers, usage.shared_bytes, kernel.shared_bytes, usage.stack_bytes, usage.spill_bytes)
        rows.append(Row(name, arch, threads, *usages, tensor_core, blocks))
    return rows


def alignment_faults_of(name: str) -> list[str]:
    """Shared memory of a kernel that may lie wrong; what a worker does. The same in all images, so of the oldest."""
    arch = compiler.architectures_of(KERNELS[name])[0]
    found = compiler.under_aligned(compiler.compile_ptx(KERNELS[name], arch))
    return [f"{name} has shared memory that is not aligned to 16 bytes: {line.strip()}" for line in found]


def each_kernel(work: Callable[[str], list[Found]], jobs: int, names: Iterable[str]) -> list[Found]:
    """What `work` finds of these kernels, sorted; each in a fresh process, but with one job in this one.

    Compilers number their names, and the registers of a kernel may depend on what was compiled before it.
    """
    if jobs == 1:
        return sorted(each for name in names for each in work(name))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules())
    with context.Pool(jobs, initializer=load, maxtasksperchild=1) as pool:
        return sorted(each for found in pool.imap_unordered(work, names, chunksize=1) for each in found)


def measure(jobs: int) -> list[Row]:
    return each_kernel(rows_of, jobs, KERNELS)


def alignment_faults(rows: list[Row], jobs: int) -> list[str]:
    """Of all kernels that have shared memory."""
    return each_kernel(alignment_faults_of, jobs, {row.kernel for row in rows if row.static_bytes or row.dynamic_bytes})


def faults(rows: list[Row]) -> Iterator[str]:
    """What no kernel may have, one sentence each."""
    for row in rows:
        where = f"{row.kernel} on {row.arch}"
        if row.spill_bytes:
            yield f"{where} spills {row.spill_bytes} bytes of registers"
        if row.stack_bytes:
            yield f"{where} has a stack frame of {row.stack_bytes} bytes"
        if KERNELS[row.kernel].tensor_cores and not row.tensor_core:
            yield f"{where} claims tensor cores and has no instruction for them"
        if not row.blocks:
            yield (
                f"{where} cannot be launched: {row.threads} threads of {row.registers} registers, "
                f"{row.static_bytes} + {row.dynamic_bytes} bytes of shared memory"
            )


def records(rows: list[Row]) -> str:
    lines = ",\n".join("  " + json.dumps(row._asdict()) for row in rows)
    return f'{{"compilers": {json.dumps(compiler.compiler_versions())},\n "kernels": [\n{lines}\n]}}\n'


_HEAD = """\
# Kernels

Made by `python tools/kernel_report.py` (docs/cuda.md says how a kernel becomes machine code); CI compares.
One line per kernel, and one more for an image in which it differs.

| column | meaning |
|---|---|
| threads | of the largest block it is launched with |
| registers | of each thread |
| static, dynamic | bytes of shared memory of a block; dynamic is the most a launch asks for |
| stack, spill | bytes of each thread that did not stay in registers: always 0 |
| tensor | tensor-core instructions in the code |
| blocks | of that size on one multiprocessor at a time |
"""


def markdown(rows: list[Row]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in compiler.compiler_versions().items())
    out = [_HEAD, f"Compilers: {versions}.\n"]
    out += ["| kernel | image | threads | registers | static | dynamic | stack | spill | tensor | blocks |"]
    out += ["|---|---|" + "--:|" * 8]
    small = []
    for name in sorted({row.kernel for row in rows}):
        mine = [row for row in rows if row.kernel == name]
        mine.sort(key=lambda row: int(re.sub(r"\D", "", row.arch)))
        groups: dict[tuple[int, ...], list[str]] = {}
        for row in mine:
            groups.setdefault(row[2:], []).append(row.arch.removeprefix("sm_"))
            shared = row.static_bytes + row.dynamic_bytes
            if row.arch == "sm_80" and not resident_blocks(SMALL, row.threads, row.registers, shared):
                small.append(f"`{name}`")
        for facts, archs in groups.items():
            images = "all" if len(archs) == len(mine) else ", ".join(archs)
            out.append(f"| {name} | {images} | {' | '.join(str(fact) if fact else '' for fact in facts)} |")
    out += ["", f"{len({row.kernel for row in rows})} kernels, {len(rows)} images."]
    if small:
        out += [f"More shared memory than a block has on 8.6 and 8.9: {', '.join(small)}."]
    return "\n".join(out) + "\n"


def differences(path: Path, made: str) -> list[str]:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    lines = difflib.unified_diff(
        old.splitlines(), made.splitlines(), f"{name} (committed)", f"{name} (now)", "", "", 0, ""
    )
    return list(lines)


def _toolchain_of(path: Path) -> dict[str, str]:
    return dict(json.loads(path.read_text(encoding="utf-8"))["compilers"]) if path.exists() else {}


def show(name: str, arch: str, ptx: bool) -> str:
    kernel = KERNELS[name]
    return compiler.compile_ptx(kernel, arch) if ptx else compiler.disassembly(compiler.compile_cubin(kernel, arch))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed report, write nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", metavar="NAME", help="print the machine code of one kernel")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--ptx", action="store_true", help="with --show: its PTX")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    load()
    if given.show:
        if given.show not in KERNELS:
            parser.error(f"no kernel {given.show}; there are: {', '.join(sorted(KERNELS))}")
        print(show(given.show, given.arch, given.ptx))
        return 0
    rows = measure(given.jobs)
    made = {MARKDOWN: markdown(rows), RECORDS: records(rows)}
    complaints = [*faults(rows), *alignment_faults(rows, given.jobs)]
    if given.check:
        if (was := _toolchain_of(RECORDS)) != (now := compiler.compiler_versions()):
            complaints.append(f"the report was made with {was}, this environment has {now} (constraints.txt)")
        for path, text in made.items():
            if changed := differences(path, text):
                print("\n".join(changed))
                complaints.append(
                    f"{path.name} is not what the sources give: python tools/kernel_report.py, and commit it"
                )
    elif not complaints:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
    for complaint in complaints:
        print(f"kernel report: {complaint}", file=sys.stderr)
    print(f"{len(KERNELS)} kernels, {len(rows)} images, {time.monotonic() - started:.0f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
