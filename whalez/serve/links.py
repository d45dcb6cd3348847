"""What the front and the launcher need of a request link, and which rank gets a request.

Rule: no sockets and no zmq here; `connect` is the one place that names the real link.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from whalez.errors import Unavailable, WhalezError
from whalez.hub.processes import open_pidfd
from whalez.hub.requests import Response, Status, Submit

#: Longest unix socket path Linux takes, without the closing zero byte.
SOCKET_PATH_MAX = 107
PROCESS_ENDED = "its process has ended"


class Link(Protocol):
    """One client end of a rank's request link."""

    def submit(self, submit: Submit) -> AsyncIterator[Response]: ...

    async def cancel(self, request_id: str) -> None: ...

    async def status(self, timeout_s: float) -> Status:
        """Raises TimeoutError when the rank's link thread does not answer in time."""

    async def close(self) -> None: ...


def link_address(run_dir: str | Path, rank: int) -> str:
    """Where the rank's loop listens for requests."""
    return f"ipc://{run_dir}/rank-{rank}.link"


def admin_address(run_dir: str | Path, rank: int) -> str:
    """Where the rank answers an operator's queries."""
    return f"ipc://{run_dir}/rank-{rank}.admin"


def connect(address: str) -> Link:
    """The real link; connecting needs no peer yet."""
    from whalez.hub.zmq_link import AsyncLinkClient  # only whalez.hub may import zmq, and tests need no link at all

    client: Link = AsyncLinkClient(address)
    return client


class RankView:
    """What the front knows of one rank; written only by `Ranks`."""

    def __init__(self, index: int, link: Link) -> None:
        self.index = index  #: position in --link; the rank number once a status came
        self.link = link
        self.status: Status | None = None  #: the last one that came
        self.answered_at = time.monotonic()  #: when the last status came, or when we began to ask
        self.in_flight = 0  #: requests of this front on this rank
        self.in_flight_then = 0  #: the same when `status` was taken; those are part of its running + waiting
        self.lost = asyncio.Event()  #: the process has ended, or its link thread has not answered for `silent_s`
        self.how_lost = ""  #: which of the two

    @property
    def name(self) -> str:
        return f"rank {self.status.rank if self.status else self.index}"

    @property
    def load(self) -> int:
        """Requests on the rank: ours as of now, everybody else's as of the last status."""
        if self.status is None:
            return self.in_flight
        return max(0, self.status.running + self.status.waiting - self.in_flight_then) + self.in_flight

    @property
    def trouble(self) -> str:
        """Empty when the rank takes requests, else what is wrong, with the rank's name."""
        if self.lost.is_set():
            return f"{self.name}: {self.how_lost}"
        if self.status is None:
            return f"{self.name}: starting"
        if not self.status.healthy:
            said = self.status.trouble or "unhealthy"
            return said if self.name in said else f"{self.name}: {said}"
        if self.status.state != "serving":
            return f"{self.name}: {self.status.state}"
        return ""


class Ranks:
    """All ranks behind one front: their last statuses, and the choice among them.

    `watch` asks every rank for its status each `poll_s`; a link thread answers even while its loop is stuck, so one
    that stays silent for `silent_s` is lost. The end of a process is seen at once, through a pidfd, for a link never
    leaves its machine. The requests on a lost rank are failed.

    Owns:      the links, and a pidfd per rank
    Closed by: `close`
    """

    def __init__(self, links: Sequence[Link], *, poll_s: float = 0.5, silent_s: float = 4.0) -> None:
        assert links, "a front needs a rank"
        self.views = [RankView(i, link) for i, link in enumerate(links)]
        self.poll_s = poll_s
        self.silent_s = silent_s
        self._turn = 0
        self._pidfds: dict[RankView, tuple[int, int]] = {}  # (pid, descriptor)

    async def refresh(self, timeout_s: float = 1.0) -> None:
        """Ask every rank at once; a rank that does not answer keeps its last status."""
        await asyncio.gather(*(self._ask(view, timeout_s) for view in self.views))

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self.poll_s)

    async def _ask(self, view: RankView, timeout_s: float) -> None:
        try:
            status = await view.link.status(timeout_s)
        except (TimeoutError, WhalezError):
            if not view.lost.is_set() and time.monotonic() - view.answered_at >= self.silent_s:
                self._lose(view, "does not answer any more")
            return
        view.status = status
        view.in_flight_then = view.in_flight
        view.answered_at = time.monotonic()
        view.lost.clear()
        self._watch_process(view, status.pid)

    def _lose(self, view: RankView, how: str) -> None:
        view.how_lost = how
        view.lost.set()

    def _watch_process(self, view: RankView, pid: int) -> None:
        if self._pidfds.get(view, (None, 0))[0] == pid:
            return
        self._forget_process(view)
        try:
            fd = open_pidfd(pid)
        except OSError:
            return  # not allowed here: its silence must do
        if fd is None:
            self._lose(view, PROCESS_ENDED)
            return
        self._pidfds[view] = pid, fd
        asyncio.get_running_loop().add_reader(fd, self._process_ended, view)

    def _process_ended(self, view: RankView) -> None:
        self._forget_process(view)
        self._lose(view, PROCESS_ENDED)

    def _forget_process(self, view: RankView) -> None:
        if view in self._pidfds:
            _, fd = self._pidfds.pop(view)
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def any_status(self) -> Status:
        """Vocabulary and limits are equal on all ranks. Raises Unavailable before the first answer."""
        for view in self.views:
            if view.status is not None:
                return view.status
        raise Unavailable(f"{self.views[0].name} is starting")

    def choose(self) -> RankView:
        """The least loaded rank that takes requests; equal ones in turn. Raises Unavailable with the reason."""
        count = len(self.views)
        order = [self.views[(self._turn + i) % count] for i in range(count)]
        able = [view for view in order if not view.trouble]
        if not able:
            raise Unavailable("; ".join(view.trouble for view in self.views))
        best = min(able, key=lambda view: view.load)
        self._turn = best.index + 1
        return best

    async def close(self) -> None:
        for view in self.views:
            self._forget_process(view)
        await asyncio.gather(*(view.link.close() for view in self.views))
