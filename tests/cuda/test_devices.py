"""Every op through the driver's path, over a driver that records: the same checks as in the harness, and only entries.

This is what a GPU runs, down to the last call before libcuda: kernels loaded, arguments packed by CudaStream, arrays in
memory of the device. The fake driver then runs each launched kernel in the CPU harness.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from whalez.fabric.cuda.doorbell import Peers
from whalez.fabric.cuda.kernels import (
    REPORT_BYTES,
    doorbell_ring_kernel,
    doorbell_wait_kernel,
    doorbell_write_kernel,
)
from whalez.ops.device.kernel import KERNELS


def of(module: str, name: str) -> Any:
    """A check of another test module."""
    return getattr(importlib.import_module(module), name)


def check_kda(dim: int) -> None:
    make = of("test_kernels_kda", "make")
    of("test_kernels_kda", "check_prefill")(devices.Stream(), make(3, dim=dim))
    of("test_kernels_kda", "check_decode")(devices.Stream(), dim)


def check_kda_inputs() -> None:
    of("test_kernels_kda", "check_gate")(devices.Stream())
    of("test_kernels_kda", "check_beta")(devices.Stream())


def check_lse() -> None:
    for dtype in of("test_kernels_lse", "DTYPES"):
        of("test_kernels_lse", "Sides").drawn(3, 3, 20, dtype, 4).check(devices.Stream())
    of("test_kernels_lse", "check_finalise")(3, 3, 20, 4)


def check_conv() -> None:
    case = of("test_kernels_conv", "Case")
    case(66, 8).short_conv(devices.Stream(), in_place=True, tail="in place")
    case(5, 8).conv_tail(devices.Stream())
    of("test_kernels_conv", "check_decode")(3, 8)


def check_latent() -> None:
    of("test_kernels_latent", "check_pages")(5, start=2, page=4)
    of("test_kernels_latent", "check_decode")(3)
    of("test_kernels_latent", "check_norm")(2, 64, 16)


def check_norm() -> None:
    of("test_kernels_norm", "check_rms_norm")(3, 64, 0)
    of("test_kernels_norm", "check_gated_rms_norm")(3, 3, 20, 4)
    of("test_kernels_norm", "check_l2_norm")(3, 3, 20, 4)
    of("test_kernels_norm", "check_swiglu")(3, 24, 8)


def check_mla() -> None:
    attend = of("test_kernels_mla", "Attend")
    for dims in (of("test_kernels_mla", "SMALL"), of("test_kernels_mla", "FULL")):
        attend.draw(dims, 5, 17, 1, 12).check(devices.Stream())
    of("test_kernels_mla", "Decode")((9,), 2, 16, 2).check(devices.Stream())


def check_doorbells() -> None:
    """A ring, a wait that it ends, and a word written: through tables of addresses and a report."""
    lines, report = devices.zeros((2, 16), np.uint64), devices.zeros(REPORT_BYTES // 8, np.uint64)
    table = devices.array(devices.at(lines) + 128 * np.arange(2, dtype=np.uint64))
    masks = Peers.of([1]).masks
    stream, line = devices.Stream(), devices.at(lines)
    stream.launch(doorbell_ring_kernel, 1, 1, 0, devices.at(table), 2, *masks, 7)
    stream.launch(
        doorbell_wait_kernel, 1, 1, 0, line, 2, *masks, 7, 10**9, devices.at(table), devices.at(report), 0
    )  # fmt: skip
    stream.launch(doorbell_write_kernel, 1, 1, 0, line, 9)
    stream.wait_value((line + 128, 7), (line, 9))
    stream.write_value(line + 8, 5)
    stream.copy(line + 16, line + 8, 8)
    stream.zero(line + 8, 8)
    devices.run_queues([stream])
    assert lines[:, :3].tolist() == [[9, 0, 5], [7, 0, 0]]
    assert not report.any()


def check_pairs() -> None:
    of("test_fabric_kernels", "check_pairs")("memop")


CHECKS: dict[str, Callable[[], None]] = {
    "kda 32": lambda: check_kda(32),
    "kda 128": lambda: check_kda(128),
    "kda inputs": check_kda_inputs,
    "lse": check_lse,
    "conv": check_conv,
    "latent": check_latent,
    "norm": check_norm,
    "mla": check_mla,
    "doorbells": check_doorbells,
    "doorbells of a world": check_pairs,
}


@pytest.fixture(scope="module")
def fake() -> Iterator[devices.FakeGpu]:
    with ExitStack() as stack:
        made = devices.FakeGpu(stack)
        yield made
        made.close()
        assert made.fake.leaks() == {}


@pytest.fixture(scope="module")
def checked() -> set[str]:
    """The ops of CHECKS that `fake` has seen."""
    return set()


# 128 launches the same entries as 32, with kernels that take the harness twice as long.
@pytest.mark.parametrize("op", [pytest.param(op, marks=[pytest.mark.slow] * (op == "kda 128")) for op in CHECKS])
def test_an_op_launches_prepacked_kernels_and_does_nothing_else(
    fake: devices.FakeGpu, checked: set[str], op: str
) -> None:
    """Nothing compiles, loads, allocates, frees or waits between the first entry of an op and its last one."""
    fake.queueing.clear()
    with devices.used(fake):
        CHECKS[op]()
        fake.reset()
    checked.add(op)
    assert len(fake.queueing) >= 2
    assert set(fake.queueing) <= devices.SUPERSTEP
    assert fake.queueing.count("cuLaunchKernel") >= 2


def test_a_copy_between_two_places_of_the_host_is_seen_to_wait(
    fake: devices.FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a wait for another stream it would keep the host from handing that one anything."""
    monkeypatch.setattr("whalez.testing.fake_driver.FOREVER_S", 0.05)
    with devices.used(fake):
        word, places = devices.zeros(1, np.uint64), devices.zeros(2, np.uint64)
        stream, at = devices.Stream(), places.ctypes.data
        stream.copy(at, at + 8, 8)
        devices.run_queues([stream])
        stream.wait_value((devices.at(word), 1))
        stream.copy(at, at + 8, 8)
        with pytest.raises(AssertionError, match="cuMemcpyAsync between two places of the host would wait for ever"):
            devices.run_queues([stream])
        word[0] = 1
        fake.device.upload(devices.at(word), word.tobytes())
        fake.reset()


@pytest.mark.slow  # all checks have to have run
def test_no_kernel_is_left_out(fake: devices.FakeGpu, checked: set[str]) -> None:
    """A new kernel needs a check here, so that it is launched once the way a device launches it."""
    with devices.used(fake):
        for op in CHECKS.keys() - checked:
            CHECKS[op]()
        fake.reset()
    devices.all_kernels()
    ours = {name for name, kernel in KERNELS.items() if kernel.function.__module__.startswith("whalez.")}
    assert ours - fake.launched == set()


def test_a_write_beside_an_array_is_found(fake: devices.FakeGpu) -> None:
    with devices.used(fake):
        array = devices.zeros(4, np.float32)
        stream = devices.Stream()
        stream.zero(devices.at(array), 4)
        devices.run_queues([stream])
        stream.zero(devices.at(array) + 12, 8)
        with pytest.raises(AssertionError, match="byte 16 of an array of 16 bytes"):
            devices.run_queues([stream])
        fake.reset()


def test_arrays_and_spaces_are_given_back(fake: devices.FakeGpu, tmp_path: Any) -> None:
    with devices.used(fake):
        before = fake.fake.leaks()
        space = devices.sparse(tmp_path / "far", 2, 2**31 + 64)
        space[1, :3] = 7
        devices.at(devices.empty(5))
        assert fake.fake.leaks() != before
        fake.reset()
        assert fake.fake.leaks() == before


def test_an_array_lies_in_device_memory_between_two_copies(fake: devices.FakeGpu) -> None:
    with devices.used(fake):
        array, beside = devices.zeros((4, 2), np.uint64), devices.zeros(1, np.uint64)
        stream, begun = devices.Stream(), len(fake.fake.calls)
        place = devices.at(array)
        assert place != array.ctypes.data
        assert devices.at(array[1:]) == place + 16
        stream.write_value(place + 16, 7)
        array[0] = 3
        devices.run_queues([stream])
        assert array.tolist() == [[3, 3], [7, 0], [0, 0], [0, 0]]
        names = fake.fake.names(begun)
        assert [names.count(each) for each in ("cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH")] == [1, 1, 1]
        with pytest.raises(LookupError, match="no array of this device"):
            devices.at(np.zeros(3))
        assert beside[0] == 0
        fake.reset()


def test_streams_that_take_no_more_do_not_keep_others_from_what_they_wait_for(fake: devices.FakeGpu) -> None:
    with devices.used(fake):
        words = devices.zeros(3, np.uint64)
        streams, place = [devices.Stream(rank) for rank in range(2)], devices.at(words)
        streams[0].wait_value((place, 1))
        for stream in streams:
            for _ in range(2000):
                stream.zero(place + 16, 8)
        streams[1].write_value(place, 1)
        devices.run_queues(streams)
        assert words.tolist() == [1, 0, 0]
        fake.reset()


def test_a_stand_in_waits_for_what_lies_before_it_and_for_nothing_else(fake: devices.FakeGpu) -> None:
    """Two streams that wait for each other in turn, with host code between."""
    with devices.used(fake):
        word, x = devices.zeros(2, np.uint64), devices.zeros(2, np.uint64)
        streams, seen = [devices.Stream(rank) for rank in range(2)], []

        def add() -> None:
            seen.append(x.tolist())
            x[1] += 5

        streams[0].wait_value((devices.at(word), 1))
        streams[0].write_value(devices.at(x), 4)
        devices.stand_in(streams[0], "an addition", add, reads=[x], writes=[x])
        streams[0].write_value(devices.at(word) + 8, 1)
        streams[1].write_value(devices.at(word), 1)
        streams[1].wait_value((devices.at(word) + 8, 1))
        streams[1].copy(devices.at(x), devices.at(x) + 8, 8)
        devices.run_queues(streams)
        assert seen == [[4, 0]]
        assert x.tolist() == [5, 5]
        fake.reset()


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("test_kernels_*.py")), ids=lambda path: path.name)
def test_kernel_tests_hand_over_no_address_of_the_host(path: Path) -> None:
    """It would work, in page-locked memory, and test something else than what runs. Copies by the driver take them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if ".ctypes.data" in line and "cuMemcpy" not in line]


@pytest.mark.slow  # another pytest
def test_without_a_gpu_its_variants_are_skipped_with_a_reason() -> None:
    """`-m gpu` selects the same tests; on a machine without a driver each says what is missing."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "tests/cuda/test_kernels_norm.py"],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if "no GPU to run on" not in done.stdout:
        pytest.skip("this machine has a GPU")
    assert "SKIPPED" in done.stdout
    assert "no NVIDIA driver" in done.stdout
    assert " passed" not in done.stdout
