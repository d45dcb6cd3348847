"""The checked layer over the driver: bad machines, names of errors, and that the fake is a likeness."""

from __future__ import annotations

import ctypes
import inspect
import time
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from whalez.errors import CapabilityMissing, FabricError
from whalez.fabric.cuda.driver import ADVICE, CALLS, STICKY, Device, Driver, DriverError, Teardown, run_all
from whalez.testing.fake_driver import FakeDriver, FakeGpu, FakeMachine, fake_processes, real


@pytest.mark.parametrize("call", CALLS)
def test_the_fake_has_the_signature_of_the_driver(call: str) -> None:
    first = (getattr(real, call).__doc__ or "").strip().splitlines()[0]
    inside, depth, names = first.split("(", 1)[1].rsplit(")", 1)[0], 0, [""]
    for letter in inside:  # commas inside of brackets belong to a type
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    expected = [part.split(":")[0].split()[-1].lstrip("*") for part in names if part.strip()]
    fake = list(inspect.signature(getattr(FakeDriver, f"_{call}")).parameters)[1:]
    assert len(fake) == len(expected), (first, fake)
    assert fake == expected or call in {"cuLaunchKernel", "cuMemcpyAsync"}, (first, fake)


def refused(error: type[FabricError] = CapabilityMissing, **options: Any) -> str:
    """What opening device 0 says, within a second and with nothing left."""
    fake = FakeDriver(**options)
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        Device(Driver(fake), 0)
    assert time.monotonic() - begun < 1
    assert fake.leaks() == {}
    return str(caught.value)


def test_no_driver() -> None:
    try:
        Driver().cuInit(0)
    except CapabilityMissing as error:
        message = str(error)
    except DriverError as error:
        pytest.skip(f"this machine has a driver: {error.words}")
    else:
        pytest.skip("this machine has a driver")
    assert "cuInit: no NVIDIA driver" in message
    assert "libcuda" in message


def test_no_cuda_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(CapabilityMissing, match=r"whalez\[cuda\]"):
        Driver()


def test_an_old_driver_says_its_version_and_the_one_needed() -> None:
    message = refused(version=12_080)
    assert "cuDriverGetVersion -> 12080" in message
    assert "CUDA 12.8" in message and "13.0" in message


def test_a_driver_that_lacks_a_function() -> None:
    fake = FakeDriver()

    def missing(*_: object) -> None:
        raise RuntimeError('Function "cuLibraryEnumerateKernels" not found')

    fake.cuLibraryEnumerateKernels = missing  # type: ignore[attr-defined]
    with pytest.raises(CapabilityMissing, match="cuLibraryEnumerateKernels: the NVIDIA driver is too old"):
        Driver(fake).cuLibraryEnumerateKernels(1, 1)


def test_no_device_says_the_call_the_code_and_what_to_do() -> None:
    message = refused(DriverError, machine=FakeMachine(gpus=[]))
    assert "cuInit -> 100 CUDA_ERROR_NO_DEVICE" in message
    assert "nvidia-smi" in message


def test_a_device_number_that_is_not_there() -> None:
    with pytest.raises(CapabilityMissing, match="cuDeviceGetCount -> 1"):
        Device(Driver(FakeDriver()), 1)


def test_a_device_that_is_too_old() -> None:
    message = refused(machine=FakeMachine(gpus=[FakeGpu(capability=(7, 5), name="Tesla T4")]))
    assert "7.5 (Tesla T4)" in message and "8.0" in message


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDriverGetVersion"])
def test_any_failing_call_of_the_start_is_named(call: str) -> None:
    message = refused(DriverError, refuse=lambda name, _: 401 * (name == call))
    assert f"device 0: {call} -> 401 CUDA_ERROR_ILLEGAL_STATE: the fabric manager" in message


def test_advice_is_of_codes_and_calls_that_exist() -> None:
    for call, code in ADVICE:
        assert call == "*" or call in CALLS
        real.CUresult(code)


def test_codes_that_end_the_process_are_those_that_the_driver_says_so_of() -> None:
    """A code that is missing is taken for a call that failed, and the work goes on in a process that is lost."""
    said = {int(code): " ".join((code.__doc__ or "").split()) for code in real.CUresult}
    final = {code for code, words in said.items() if "the process must be terminated and relaunched" in words}
    if not final:
        pytest.skip("these bindings do not document their codes")
    assert 226 in final
    # Said otherwise, or not: uncorrectable errors of memory and of a link, a context that was destroyed, an assertion.
    assert final | {214, 220, 709, 710} == STICKY
    assert all(DriverError("cuStreamQuery", code, "").advice for code in STICKY)


def test_advice_of_the_call_goes_before_that_of_the_code() -> None:
    assert "IMEX" not in DriverError("cuMemAlloc", 801, "").advice
    assert "not necessarily on this one" in DriverError("cuMemImportFromShareableHandle", 801, "").advice
    assert "not necessarily on this one" in DriverError("cuMemImportFromShareableHandle", 600, "").advice
    assert "no IMEX channel" in DriverError("cuMemCreate", 800, "").advice
    assert "this device only" in DriverError("cuStreamWriteValue64", 1, "").advice
    assert "cuMemCreate (expandable" in DriverError("cuIpcGetMemHandle", 1, "").advice
    assert "another machine" in DriverError("cuIpcOpenMemHandle", 400, "").advice
    assert "fabric manager" in DriverError("cuMemMap", 401, "").advice
    assert DriverError("cuMemMap", 12345, "").advice == ""


def test_a_code_that_the_bindings_do_not_know() -> None:
    fake = FakeDriver()
    fake.cuInit = lambda flags: (real.CUresult(5_000),)  # type: ignore[attr-defined]
    with pytest.raises(DriverError, match=r"cuInit -> -1 unknown code: 5000"):
        Driver(fake).cuInit(0)


def test_only_listed_calls_go_through() -> None:
    with pytest.raises(AttributeError):
        Driver(FakeDriver()).cuMemAllocPitch  # noqa: B018


def test_the_context_is_given_back_once() -> None:
    fake = FakeDriver()
    device = Device(Driver(fake), 0)
    assert fake.leaks() == {"contexts": 1}
    device.close()
    device.close()
    assert fake.leaks() == {}


def test_what_was_uploaded_has_arrived() -> None:
    """A kernel of a stream of ours, or a peer, may look at it next."""
    fake = FakeDriver()
    with fake_processes(fake), Device(Driver(fake), 0) as device:
        device.bind()
        memory = device.driver.cuMemAlloc(1 << 16)
        device.upload(int(memory), b"tables")
        assert ctypes.string_at(int(memory), 6) == b"tables"
        device.driver.cuMemFree(memory)


def test_a_teardown_goes_on_where_it_failed() -> None:
    done: list[str] = []
    state = {"broken": True}

    def unmap() -> None:
        if state["broken"]:
            raise DriverError("cuMemUnmap", 999, "CUDA_ERROR_UNKNOWN")
        done.append("unmap")

    first, second = Teardown(), Teardown()
    first.push(done.append, "free")
    first.push(unmap)
    second.push(done.append, "other")
    with pytest.raises(DriverError, match="cuMemUnmap"):
        run_all([first, second])
    assert done == ["other"]  # what lies under a failed step waits for it, the rest does not
    state["broken"] = False
    run_all([first, second])
    assert done == ["other", "unmap", "free"]
    assert not first
