"""Whether a rank gets on, judged by its progress word and told from another thread than the loop's."""

from __future__ import annotations

import os
from collections.abc import Callable

from whalez.clock import now_ns
from whalez.engine.loop import Loop
from whalez.hub.requests import Status


class Health:
    """Answers status queries. `moved` is called by the loop whenever it gets on, `status` by the link's thread."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        incarnation: str,
        model: str,
        vocab_size: int,
        max_ctx: int,
        stall_s: float,
    ) -> None:
        self.rank, self.world, self.incarnation = rank, world, incarnation
        self.model, self.vocab_size, self.max_ctx = model, vocab_size, max_ctx
        self.eos_tokens: tuple[int, ...] = ()
        self.stall_s = stall_s
        self.dropped: Callable[[], dict[str, int]] = dict  #: what came to this rank's ports and was not let through
        self.loop: Loop | None = None  #: set once the world runs
        self.slabs = "slabs: host"
        self.failure = ""  #: why this rank is about to exit
        self.front: Callable[[], int | None] = lambda: None  #: how this rank's own front has exited, as Popen.poll
        self._moved_ns = now_ns()

    def moved(self) -> None:
        self._moved_ns = now_ns()

    def status(self) -> Status:
        loop = self.loop
        age_s = (now_ns() - self._moved_ns) / 1e9
        trouble = self.failure
        if not trouble and loop is not None and age_s > self.stall_s:
            trouble = f"rank {self.rank}: no progress for {age_s:.1f} s{self._awaited(loop)}"
        if not trouble and (code := self.front()) is not None:
            trouble = f"rank {self.rank}: its front has ended with {code}"
        state = "starting" if loop is None else loop.state
        return Status(
            query_id="",
            rank=self.rank,
            world=self.world,
            incarnation=self.incarnation,
            pid=os.getpid(),
            state="failed" if self.failure else state,
            launch=0 if loop is None else loop.launch,
            launch_age_s=age_s,
            healthy=loop is not None and not trouble,
            trouble=trouble or ("starting" if loop is None else ""),
            running=0 if loop is None else loop.scheduler.running_count,
            waiting=0 if loop is None else loop.scheduler.waiting_count + loop.submitted_count,
            cache_used=0 if loop is None else loop.scheduler.pages_used,
            cache_total=0 if loop is None else loop.scheduler.pages_total,
            max_ctx=self.max_ctx,
            vocab_size=self.vocab_size,
            model=self.model,
            eos_tokens=self.eos_tokens,
            dropped=self.dropped(),
            slabs=self.slabs,
        )

    def _awaited(self, loop: Loop) -> str:
        """Whom this rank waits for, and where: the sentence an operator needs when a fleet hangs."""
        wait = loop.bells.status(self.rank)
        if wait.peer is None:
            return f" in launch {loop.launch}"
        layer = "" if wait.layer < 0 else f", layer {wait.layer}"
        return f" in launch {loop.launch}, waiting for rank {wait.peer}'s {wait.kind} doorbell {wait.value:#x}{layer}"
