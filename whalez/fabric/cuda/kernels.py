"""The kernels of a doorbell: ring, and a wait for devices that refuse stream memory operations. One thread each.

Rule 1: a flag is stored with st.release.sys and looked at with ld.acquire.sys, nothing else; the host's rules for
        values (README.md of fabric) hold unchanged.
Rule 2: a wait is bounded. Before it gives up it writes what it waited for to memory that the host sees.
"""

from __future__ import annotations

from typing import Any, Final

from numba import cuda

from whalez.fabric.layout import LINE_BYTES
from whalez.ops.device.kernel import kernel
from whalez.ops.device.ptx import globaltimer, ld_acquire_sys_u64, nanosleep, st_release_sys_u64, st_volatile_u64
from whalez.ops.device.types import i64, u64, u64p

#: Peers travel as a bit set in four words.
WORLD_MAX: Final = 256

#: Words of a report; the state is written last.
REPORT_STATE: Final = 0
REPORT_PEER: Final = 1
REPORT_TAG: Final = 2  # the caller's: kind and layer
REPORT_EXPECTED: Final = 3
REPORT_SEEN: Final = 4
REPORT_WAITED_NS: Final = 5
REPORT_BYTES: Final = 128

#: States of a report. Anything but 0 ends every wait of this launch, so that the stream drains at once.
RUNNING: Final = 0
GAVE_UP: Final = 1  # written by the wait
STOPPED: Final = 2  # written by the host

_PAUSE_NS: Final = 200
_LOOKS_PER_CHECK: Final = 32  # the report is in host memory: looking at it costs more than looking at a flag


@cuda.jit(device=True)
def _is_member_thread(i_peer: Any, mask0: Any, mask1: Any, mask2: Any, mask3: Any) -> Any:
    word = i_peer >> 6
    mask = mask0
    if word == 1:
        mask = mask1
    elif word == 2:
        mask = mask2
    elif word == 3:
        mask = mask3
    return (mask >> u64(i_peer & 63)) & u64(1) != u64(0)


@kernel("doorbell_ring_kernel", u64p, i64, u64, u64, u64, u64, u64, block=1)
def doorbell_ring_kernel(g_lines: Any, world: Any, mask0: Any, mask1: Any, mask2: Any, mask3: Any, value: Any) -> None:
    """Store `value` to the lines of all peers in the mask: all flags of a beat in one launch.

    g_lines:  u64 [world]  where this rank's line lies in each peer's slab, mapped here
    Order:    what earlier kernels and copies of the stream wrote is visible to whoever sees the value
    """
    for i_peer in range(world):
        if _is_member_thread(i_peer, mask0, mask1, mask2, mask3):
            st_release_sys_u64(g_lines[i_peer], value)


@cuda.jit(device=True)
def _progress_thread(g_progress: Any, world: Any) -> Any:
    """Sum of the progress words of the world; they only rise, so an equal sum means that nobody moved."""
    total = u64(0)
    for i_peer in range(world):
        total += ld_acquire_sys_u64(g_progress[i_peer])
    return total


@kernel("doorbell_wait_kernel", u64, i64, u64, u64, u64, u64, u64, u64, u64p, u64, u64, block=1)
def doorbell_wait_kernel(
    lines: Any,
    world: Any,
    mask0: Any,
    mask1: Any,
    mask2: Any,
    mask3: Any,
    value: Any,
    budget_ns: Any,
    g_progress: Any,
    report: Any,
    tag: Any,
) -> None:
    """Spin until the lines of all peers in the mask have reached `value`, cyclically as the memory operation does.

    lines:       address of this rank's own lines of one kind, [world] of LINE_BYTES
    budget_ns:   how long nobody in the world may make progress before the wait gives up; found out at the end of a
                 budget only (a look at every rank's word costs microseconds), so it may take two of them
    g_progress:  u64 [world]  where each rank's progress word lies, mapped here
    report:      address of REPORT_BYTES in memory that the host sees, zero at the start of a launch
    Writes:      report, if it gives up; state last
    """
    if ld_acquire_sys_u64(report) != u64(RUNNING):
        return
    begun = globaltimer()
    restarted = begun
    progress = u64(0)
    looks = i64(0)
    for i_peer in range(world):
        if _is_member_thread(i_peer, mask0, mask1, mask2, mask3):
            line = lines + u64(i_peer * LINE_BYTES)
            seen = ld_acquire_sys_u64(line)
            while i64(seen - value) < 0:
                nanosleep(_PAUSE_NS)
                seen = ld_acquire_sys_u64(line)
                looks += 1
                if looks % _LOOKS_PER_CHECK == 0 and ld_acquire_sys_u64(report) != u64(RUNNING):
                    return
                now = globaltimer()
                if i64(seen - value) < 0 and now - restarted > budget_ns:
                    progress_now = _progress_thread(g_progress, world)
                    if progress_now == progress:
                        st_volatile_u64(report + u64(8 * REPORT_PEER), u64(i_peer))
                        st_volatile_u64(report + u64(8 * REPORT_TAG), tag)
                        st_volatile_u64(report + u64(8 * REPORT_EXPECTED), value)
                        st_volatile_u64(report + u64(8 * REPORT_SEEN), seen)
                        st_volatile_u64(report + u64(8 * REPORT_WAITED_NS), now - begun)
                        st_release_sys_u64(report, u64(GAVE_UP))
                        return
                    progress = progress_now
                    restarted = now


@kernel("doorbell_write_kernel", u64, u64, block=1)
def doorbell_write_kernel(address: Any, value: Any) -> None:
    """Store one word: `write_value` where stream memory operations are refused."""
    st_release_sys_u64(address, value)
