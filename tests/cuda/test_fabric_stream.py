"""The stream of a device over the recording fake: what entries ask of the driver, and what a superstep never asks."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba.cuda import types

from helpers.cuda_world import fake_kernels, image
from helpers.devices import SUPERSTEP
from whalez.errors import CapabilityMissing, FabricError
from whalez.fabric.cuda.depth import ENTRIES_MAX
from whalez.fabric.cuda.driver import Device, Driver, DriverError
from whalez.fabric.cuda.kernels import doorbell_ring_kernel, doorbell_write_kernel
from whalez.fabric.cuda.stream import BATCH_MAX, CudaStream, KernelSet, codes_of
from whalez.ops.device.kernel import Kernel
from whalez.testing.fake_driver import FakeDriver, FakeGpu, FakeMachine, fake_processes, read_word, write_word

ODD = Kernel(
    "odd_kernel",
    lambda *arguments: None,
    (types.int32, types.CPointer(types.float32), types.float32, types.uint16, types.int64, types.float64, types.uint64),
)


class Bench:
    """One device with some memory and a stream."""

    def __init__(self, stack: ExitStack, kernels: list[Kernel], **options: Any) -> None:
        self.ran: list[Any] = []
        known = fake_kernels() | {image(ODD): (codes_of(ODD), lambda *launch: self.ran.append(launch))}
        self.fake = FakeDriver(kernels=known, **options)
        stack.enter_context(fake_processes(self.fake))
        self.device = stack.enter_context(Device(Driver(self.fake), 0))
        self.device.bind()
        self.memory = int(self.device.driver.cuMemAlloc(1 << 16))
        stack.callback(lambda: self.device.driver.cuMemFree(self.memory))
        ctypes.memset(self.memory, 0, 1 << 16)
        self.kernels = stack.enter_context(KernelSet(self.device, kernels, image))
        self.stream = stack.enter_context(CudaStream(self.device, self.kernels, has_memops=self.fake.memops))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        made = Bench(stack, [ODD, doorbell_ring_kernel, doorbell_write_kernel])
        yield made
        stack.close()
        assert made.fake.leaks() == {}


def test_arguments_arrive_by_the_signature(bench: Bench) -> None:
    assert codes_of(ODD) == "iQfHqdQ"
    bench.stream.launch(ODD, (3, 2, 1), 64, 128, -5, bench.memory, 0.5, 65_535, -(2**40), 1e-300, 2**64 - 1)
    bench.stream.launch(ODD, 1, (8, 4, 2), 0, 1, 0, -1.0, 0, 0, 0.0, 0)
    first, second = bench.ran
    assert first == ((3, 2, 1), (64, 1, 1), 128, [-5, bench.memory, 0.5, 65_535, -(2**40), 1e-300, 2**64 - 1])
    assert second == ((1, 1, 1), (8, 4, 2), 0, [1, 0, -1.0, 0, 0, 0.0, 0])


def test_an_argument_out_of_range_or_missing_is_an_error_before_the_launch(bench: Bench) -> None:
    import struct

    begun = len(bench.fake.calls)
    for arguments in ((2**31, 0, 0.0, 0, 0, 0.0, 0), (0, -1, 0.0, 0, 0, 0.0, 0), (0, 0, 0.0)):
        with pytest.raises(struct.error):
            bench.stream.launch(ODD, 1, 1, 0, *arguments)
    assert "cuLaunchKernel" not in bench.fake.names(begun)


def test_a_kernel_that_was_not_loaded_is_not_compiled_now(bench: Bench) -> None:
    with pytest.raises(KeyError, match="other"):
        bench.stream.launch(Kernel("other", print, ()), 1, 1, 0)


def test_a_superstep_neither_compiles_nor_allocates_nor_synchronises(bench: Bench) -> None:
    stream, memory = bench.stream, bench.memory
    table = np.array([memory + 4096], np.uint64)
    ctypes.memmove(memory + 512, table.ctypes.data, 8)
    begun = len(bench.fake.calls)
    for layer in range(50):
        stream.zero(memory, 256)
        stream.copy(memory + 256, memory, 256)
        stream.launch(ODD, 1, 1, 0, layer, memory, 0.0, 0, 0, 0.0, 0)
        stream.launch(doorbell_ring_kernel, 1, 1, 0, memory + 512, 1, 1, 0, 0, 0, layer + 1)
        stream.wait_value((memory + 4096, layer + 1))
        stream.write_value(memory + 4224, layer)
    names = bench.fake.names(begun)
    assert len(names) == 602  # each entry binds the context and is one more call, and behind 256 of them is a mark
    assert set(names[::2]) == {"cuCtxSetCurrent"}
    assert set(names[1::2]) == SUPERSTEP - {"cuCtxSetCurrent", "cuEventQuery"}
    assert names.count("cuEventRecord") == 1
    assert stream.is_done()
    assert read_word(memory + 4096) == 50


ENTRY: dict[str, Callable[[Bench], object]] = {
    "launch": lambda bench: bench.stream.launch(ODD, 1, 1, 0, 1, 0, -1.0, 0, 0, 0.0, 0),
    "wait": lambda bench: bench.stream.wait_value((bench.memory, 0)),
    "waits": lambda bench: bench.stream.wait_value(*[(bench.memory + 8 * i, 0) for i in range(100)]),
    "largest batch": lambda bench: bench.stream.wait_value(*[(bench.memory + 8 * i, 0) for i in range(BATCH_MAX)]),
    "write": lambda bench: bench.stream.write_value(bench.memory + 8, 1),
    "copy": lambda bench: bench.stream.copy(bench.memory + 16, bench.memory + 8, 8),
    "zero": lambda bench: bench.stream.zero(bench.memory + 24, 8),
}


@pytest.mark.parametrize("entry", ENTRY)
def test_a_blocked_stream_is_never_given_so_much_that_the_host_waits(bench: Bench, entry: str) -> None:
    """The fake asserts that no call would block; and all that may stand there does, or the device would idle."""
    stood: list[int] = []

    def look(has_room: Callable[[], bool]) -> None:
        assert not has_room()
        stood.append(len(bench.fake._streams[bench.stream.handle].queue))
        write_word(bench.memory, 1 + len(stood))
        assert has_room()

    bench.stream.depth.when_full = look
    for beat in range(3):
        bench.stream.wait_value((bench.memory, 2 + beat))
        for _ in range(1500):
            ENTRY[entry](bench)
            if len(stood) > beat:
                break
    assert bench.stream.is_done()
    assert len(stood) == 3
    assert all(ENTRIES_MAX // 2 <= count <= ENTRIES_MAX for count in stood), stood


def test_a_stream_that_runs_is_not_waited_for(bench: Bench) -> None:
    def full(has_room: Callable[[], bool]) -> None:
        raise AssertionError("all of it has run")

    bench.stream.depth.when_full = full
    zero_often(bench)


def zero_often(bench: Bench) -> None:
    for _ in range(5000):
        bench.stream.zero(bench.memory + 8, 8)


def test_a_full_queue_that_nobody_watches_is_an_error_in_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalez.fabric.cuda.depth.FULL_S", 0.05)
    bench.stream.wait_value((bench.memory, 1))
    with pytest.raises(FabricError, match=r"the queue of a stream is full, and for 0\.05 s nothing"):
        zero_often(bench)
    write_word(bench.memory, 1)
    bench.stream.zero(bench.memory + 8, 8)  # and goes on when it runs
    assert bench.stream.is_done()


def test_what_waits_for_room_may_make_another_context_current() -> None:
    with ExitStack() as stack:
        bench = Bench(stack, [ODD], machine=FakeMachine(gpus=[FakeGpu(), FakeGpu()]))
        foreign = stack.enter_context(Device(Driver(bench.fake), 1))

        def look(has_room: Callable[[], bool]) -> None:
            write_word(bench.memory, 1)
            assert has_room()
            foreign.bind()

        bench.stream.depth.when_full = look
        bench.stream.wait_value((bench.memory, 1))
        while read_word(bench.memory) == 0:
            bench.stream.zero(bench.memory + 8, 8)
        assert bench.stream.is_done()


def test_a_kernel_that_failed_is_found_where_there_is_no_room(bench: Bench) -> None:
    bench.stream.wait_value((bench.memory, 1))
    bench.fake.refuse = lambda name, _: 719 * (name == "cuEventQuery")
    with pytest.raises(DriverError, match="cuEventQuery -> 719"):
        zero_often(bench)
    bench.fake.refuse = None
    write_word(bench.memory, 1)
    assert bench.stream.is_done()


def test_all_waits_of_a_beat_are_one_batch(bench: Bench) -> None:
    memory = bench.memory
    begun = len(bench.fake.calls)
    bench.stream.wait_value(*[(memory + 128 * i, 0) for i in range(15)])
    (call,) = [call for call in bench.fake.calls[begun:] if call.name == "cuStreamBatchMemOp"]
    assert call.arguments[1] == len(call.arguments[2]) == 15
    for i, operation in enumerate(call.arguments[2]):
        assert int(operation.waitValue.address) == memory + 128 * i
        assert (int(operation.waitValue.value64), operation.waitValue.flags) == (0, 0)  # GEQ
    bench.stream.wait_value(*[(memory + 8 * i, 0) for i in range(BATCH_MAX + 3)])
    counts = [call.arguments[1] for call in bench.fake.calls if call.name == "cuStreamBatchMemOp"]
    assert counts == [15, BATCH_MAX, 3]


def test_a_wait_blocks_what_comes_after_it_and_nothing_before(bench: Bench) -> None:
    stream, memory = bench.stream, bench.memory
    stream.write_value(memory + 8, 1)
    stream.wait_value((memory, 7), (memory + 128, 2**63))
    stream.write_value(memory + 16, 1)
    assert not stream.is_done()
    assert (read_word(memory + 8), read_word(memory + 16)) == (1, 0)
    other = CudaStream(bench.device, bench.kernels)
    other.write_value(memory, 7)
    assert not stream.is_done()
    other.write_value(memory + 128, 2**63)
    assert stream.is_done()
    assert read_word(memory + 16) == 1
    other.close()


@pytest.mark.parametrize(("value", "is_released"), [(2**63 - 1, True), (2**64 - 1, False)])
def test_2_63_minus_1_releases_a_wait_and_2_64_minus_1_does_not(bench: Bench, value: int, is_released: bool) -> None:
    """The comparison is (int64)(seen - value) >= 0: the largest number is -1."""
    with CudaStream(bench.device, bench.kernels) as other:
        bench.stream.wait_value((bench.memory, (2**40 + 1) * 2**20 + 5))
        other.write_value(bench.memory, value)
        assert bench.stream.is_done() is is_released
        other.write_value(bench.memory, 2**63 - 1)
        assert bench.stream.is_done()


def test_the_first_launch_of_a_kernel_does_not_wait_for_a_blocked_stream(bench: Bench) -> None:
    """It would if the kernel were loaded by it: cuKernelGetFunction gives a handle and loads nothing."""
    with CudaStream(bench.device, bench.kernels) as other:
        bench.stream.wait_value((bench.memory, 7))
        other.launch(doorbell_write_kernel, 1, 1, 0, bench.memory, 7)
        assert bench.stream.is_done()


def test_a_late_loading_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fake._loaded.clear()
    monkeypatch.setattr("whalez.testing.fake_driver.FOREVER_S", 0.05)
    bench.stream.wait_value((bench.memory, 7))
    with (
        CudaStream(bench.device, bench.kernels) as other,
        pytest.raises(
            AssertionError, match=r"cuLaunchKernel of a function that is not loaded would wait for ever.*wait"
        ),
    ):
        other.launch(doorbell_write_kernel, 1, 1, 0, bench.memory, 7)
    write_word(bench.memory, 7)
    assert bench.stream.is_done()
    bench.stream.launch(doorbell_write_kernel, 1, 1, 0, bench.memory, 8)  # nothing is blocked: it is loaded now
    assert bench.stream.is_done()
    assert read_word(bench.memory) == 8


def test_without_memory_operations_a_store_is_a_kernel_and_a_wait_is_refused() -> None:
    with ExitStack() as stack:
        bench = Bench(stack, [doorbell_write_kernel], memops=False)
        bench.stream.write_value(bench.memory, 2**63 + 5)
        assert read_word(bench.memory) == 2**63 + 5
        with pytest.raises(CapabilityMissing, match="refuses stream memory operations"):
            bench.stream.wait_value((bench.memory, 1))
        assert not {"cuStreamBatchMemOp", "cuStreamWriteValue64"} & set(bench.fake.names())


def test_a_stream_works_in_a_thread_that_never_saw_the_context(bench: Bench) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bench.stream.write_value(bench.memory, 3)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert errors == []
    assert read_word(bench.memory) == 3


def test_a_stream_works_in_threads_one_after_another() -> None:
    """The identity of a thread that has ended is given to the next one, which has no context."""
    with ExitStack() as stack:
        bench = Bench(stack, [ODD, doorbell_write_kernel])
        identities: set[int | None] = set()
        errors: list[BaseException] = []

        def run(value: int) -> None:
            identities.add(threading.get_ident())
            try:
                bench.stream.write_value(bench.memory, value)
            except BaseException as error:
                errors.append(error)

        for value in range(1, 9):
            thread = threading.Thread(target=run, args=(value,))
            thread.start()
            thread.join(10)
            assert errors == []
            assert read_word(bench.memory) == value
        assert len(identities) < 8, "no identity was given twice, so this test shows nothing"


ENTRIES: dict[str, Callable[[Bench], object]] = {
    "launch": lambda bench: bench.stream.launch(ODD, 1, 1, 0, 1, 0, -1.0, 0, 0, 0.0, 0),
    "wait_value": lambda bench: bench.stream.wait_value((bench.memory, 0)),
    "write_value": lambda bench: bench.stream.write_value(bench.memory, 1),
    "copy": lambda bench: bench.stream.copy(bench.memory + 8, bench.memory, 8),
    "zero": lambda bench: bench.stream.zero(bench.memory, 8),
    "is_done": lambda bench: bench.stream.is_done(),
    "close": lambda bench: bench.stream.close(),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_context_that_a_library_made_current_in_between_is_not_used(entry: str) -> None:
    with ExitStack() as stack:
        bench = Bench(stack, [ODD, doorbell_write_kernel], machine=FakeMachine(gpus=[FakeGpu(), FakeGpu()]))
        foreign = stack.enter_context(Device(Driver(bench.fake), 1))
        bench.stream.zero(bench.memory, 8)
        foreign.bind()
        ENTRIES[entry](bench)
        assert bench.fake._current.context == bench.device.context != foreign.context


def test_streams_are_not_ordered_against_the_default_stream(bench: Bench) -> None:
    assert bench.fake.machine.violations == []
    created = [call for call in bench.fake.calls if call.name == "cuStreamCreateWithPriority"]
    assert [call.arguments for call in created] == [(1, 0)]


def test_an_error_at_any_call_of_loading_is_named_and_leaves_nothing() -> None:
    fake = FakeDriver()
    with fake_processes(fake), Device(Driver(fake), 0) as device:
        begun = len(fake.calls)
        with KernelSet(device, [ODD, doorbell_write_kernel], image) as kernels, CudaStream(device, kernels):
            pass
        names = fake.names(begun)
        assert names.count("cuFuncLoad") == 2
        for (at, call), code in itertools.product(enumerate(names), (2, 700, 999)):
            fake.fail_at, fake.fail_code = len(fake.calls) + at, code
            with pytest.raises(DriverError) as caught:
                live(device)
            assert (caught.value.call, caught.value.code) == (call, code)
            assert fake.leaks() == {"contexts": 1}, (at, call)


def live(device: Device) -> None:
    kernels = KernelSet(device, [ODD, doorbell_write_kernel], image)
    try:
        stream = CudaStream(device, kernels)
        try:
            stream.close()
        except FabricError:
            stream.close()
            raise
        kernels.close()
    except FabricError:
        kernels.close()
        raise


def test_a_kernel_that_takes_more_shared_memory_than_there_is() -> None:
    fake = FakeDriver()
    with fake_processes(fake), Device(Driver(fake), 0) as device:
        big = Kernel("big_kernel", print, (), shared_bytes=232_449)
        with pytest.raises(CapabilityMissing, match=r"big_kernel takes 232449 bytes .* this device has 232448"):
            KernelSet(device, [big], image)
        KernelSet(device, [Kernel("fits_kernel", print, (), shared_bytes=232_448)], image).close()
        assert fake.names().count("cuKernelSetAttribute") == 1
        assert fake.leaks() == {"contexts": 1}


def test_a_launch_takes_the_shared_memory_that_its_kernel_declares_and_no_more() -> None:
    """What is beyond 48 KiB the driver is told of when the kernel is loaded, or it refuses every launch."""
    with ExitStack() as stack:
        big = Kernel("big_kernel", print, (), shared_bytes=90_112)
        bench = Bench(stack, [big, Kernel("plain_kernel", print, ())])
        for kernel, most in ((big, 90_112), (Kernel("plain_kernel", print, ()), 48 * 1024)):
            bench.stream.launch(kernel, 1, 1, most)
            with pytest.raises(DriverError, match="cuLaunchKernel -> 1 "):
                bench.stream.launch(kernel, 1, 1, most + 1)
        assert bench.stream.is_done()


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((1, 65_536, 1), 1),
        ((1, 1, 65_536), 1),
        (2**31, 1),
        (0, 1),
        ((1, 0, 1), 1),
        (1, 1025),
        (1, (32, 32, 2)),
        (1, (1, 1, 65)),
        (1, 0),
    ],
)
def test_a_launch_that_no_device_takes_is_refused_by_the_fake(bench: Bench, grid: Any, block: Any) -> None:
    with pytest.raises(DriverError, match="cuLaunchKernel -> 1 "):
        bench.stream.launch(doorbell_write_kernel, grid, block, 0, bench.memory, 1)
    bench.stream.launch(doorbell_write_kernel, (3, 65_535, 65_535), (16, 1, 64), 0, bench.memory, 1)


@pytest.mark.parametrize(("capability", "begins"), [((9, 0), b"\x7fELF"), ((12, 0), b"//")])
def test_images_are_made_for_the_device_that_is_there(
    capability: tuple[int, int], begins: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A cubin where there is one for the chip, PTX ending in a zero as the last resort, which is logged."""
    fake = FakeDriver(FakeMachine(gpus=[FakeGpu(capability=capability)]))
    with fake_processes(fake), Device(Driver(fake), 0) as device:
        KernelSet(device, [doorbell_write_kernel]).close()
        (loaded,) = [call.arguments[0] for call in fake.calls if call.name == "cuLibraryLoadData"]
        assert loaded.lstrip().startswith(begins)
        assert (loaded[-1] == 0) or begins != b"//"
        said = "doorbell_write_kernel: no image for compute capability 12.0, the driver compiles PTX 7.0 for compute_80"
        assert (said in caplog.text) is (begins == b"//")
        assert (b".version 7.0\n" in loaded) is (begins == b"//")
