"""Who runs in the next launch, and who owns which slot and page. Pure bookkeeping: no clock, socket, array or model.

A request waits until a slot and pages for its whole length (prompt + max_tokens) are free, so that nothing that was
admitted ever runs out of memory. Then it is either posted as a whale (it holds its slot until the superstep or until
the post ends) or prefilled here in chunks; then it decodes, one row per launch, until it is finished.

Requests are admitted in the order of arrival. Prompt rows of a launch go to short prompts first (at most half of them
while a long one is under way), so that a short prompt never waits for the whole of a long one. Where a launch has a
single row they take turns, so that no stream of short prompts starves a long one.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from whalez.errors import LocalProtocolError
from whalez.rendezvous.effects import LaunchKind


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"  #: for a slot and pages
    POSTED = "posted"  #: holds slot and pages; a gang is being gathered or committed
    PREFILL = "prefill"  #: in chunks on this rank
    DECODE = "decode"


@dataclass(slots=True)
class Entry:
    """One request's bookkeeping."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    whale: bool  #: wants to be posted
    phase: Phase = Phase.WAITING
    slot: int = -1
    pages: tuple[int, ...] = ()
    prefilled: int = 0  #: prompt tokens whose rows have run


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start..start+length of a request."""

    request_id: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What one launch of this rank carries besides a whale segment."""

    decodes: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = field(default=())


class Scheduler:
    """Slots, pages and the order of work of one rank."""

    def __init__(self, *, slots: int, pages: int, page_tokens: int, chunk_tokens: int, armed_rows: int) -> None:
        self.page_tokens = page_tokens
        self.chunk_tokens = chunk_tokens
        self.armed_rows = min(armed_rows, chunk_tokens)  # slabs have room for a chunk
        self.pages_total = pages
        self._free_slots = list(range(slots))  # heaps: the lowest number first, so that untouched memory stays so
        self._free_pages = list(range(pages))
        self._waiting: deque[Entry] = deque()
        self._entries: dict[str, Entry] = {}  # in order of arrival
        self._long_is_due = False  # a short prompt had the last single row although a long one was there

    # ---- what the loop reads ----------------------------------------------------------------------------------
    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entry(self, request_id: str) -> Entry:
        return self._entries[request_id]

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._entries) - len(self._waiting)

    @property
    def pages_used(self) -> int:
        return self.pages_total - len(self._free_pages)

    @property
    def has_work(self) -> bool:
        """Whether a launch now would carry rows."""
        return any(e.phase in (Phase.PREFILL, Phase.DECODE) for e in self._entries.values())

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    # ---- a request's life -------------------------------------------------------------------------------------
    def add(self, request_id: str, prompt_tokens: int, max_tokens: int, *, whale: bool) -> None:
        if request_id in self._entries:
            raise LocalProtocolError(f"request {request_id!r} is already here")
        entry = Entry(request_id, prompt_tokens, max_tokens, whale)
        self._entries[request_id] = entry
        self._waiting.append(entry)

    def admit(self) -> list[Entry]:
        """Give slots and pages to waiting requests, in order, as far as they go; the next phase is in the entry."""
        admitted = []
        while self._waiting:
            entry = self._waiting[0]
            need = self.pages_for(entry.prompt_tokens + entry.max_tokens)
            if not self._free_slots or need > len(self._free_pages):
                break
            self._waiting.popleft()
            entry.slot = heapq.heappop(self._free_slots)
            entry.pages = tuple(heapq.heappop(self._free_pages) for _ in range(need))
            entry.phase = Phase.POSTED if entry.whale else Phase.PREFILL
            admitted.append(entry)
        return admitted

    def post_ended(self, request_id: str) -> None:
        """No superstep will come: prefill here."""
        entry = self._in_phase(request_id, Phase.POSTED)
        entry.phase = Phase.PREFILL

    def whale_prefilled(self, request_id: str) -> None:
        """The superstep has run: the whole prompt is in this rank's cache."""
        entry = self._in_phase(request_id, Phase.POSTED)
        entry.prefilled, entry.phase = entry.prompt_tokens, Phase.DECODE

    def prefilled(self, chunk: Chunk) -> bool:
        """The chunk's rows have run. Returns whether the prompt is complete."""
        entry = self._in_phase(chunk.request_id, Phase.PREFILL)
        assert entry.prefilled == chunk.start, (entry, chunk)
        self._long_is_due = self._is_short(entry)
        entry.prefilled += chunk.length
        if entry.prefilled < entry.prompt_tokens:
            return False
        entry.phase = Phase.DECODE
        return True

    def remove(self, request_id: str) -> None:
        """The request is over, however it ended; its slot and pages are free again."""
        entry = self._entries.pop(request_id)
        if entry.phase is Phase.WAITING:
            self._waiting.remove(entry)
            return
        heapq.heappush(self._free_slots, entry.slot)
        for page in entry.pages:
            heapq.heappush(self._free_pages, page)

    def _in_phase(self, request_id: str, phase: Phase) -> Entry:
        entry = self._entries[request_id]
        if entry.phase is not phase:
            raise LocalProtocolError(f"request {request_id!r}: expected phase {phase.name}, is in {entry.phase.name}")
        return entry

    # ---- a launch ---------------------------------------------------------------------------------------------
    def compose(self, kind: LaunchKind) -> LaunchPlan:
        """What the next launch carries. Changes nothing: `prefilled` and `remove` tell what became of it."""
        if kind is LaunchKind.STOP:
            return LaunchPlan()
        decodes = tuple(e.request_id for e in self._entries.values() if e.phase is Phase.DECODE)
        budget = {LaunchKind.ORDINARY: self.chunk_tokens, LaunchKind.ARMED: self.armed_rows}.get(kind, 0)
        return LaunchPlan(decodes, self._chunks(budget))

    def _is_short(self, entry: Entry) -> bool:
        return entry.prompt_tokens - entry.prefilled <= self.armed_rows

    def _chunks(self, budget: int) -> tuple[Chunk, ...]:
        prefills = [e for e in self._entries.values() if e.phase is Phase.PREFILL]
        short = [e for e in prefills if self._is_short(e)]
        long = [e for e in prefills if e not in short]
        chunks = []
        left_short = budget - (budget // 2 or min(budget, self._long_is_due)) if long else budget
        for group in (short, long):
            left = left_short if group is short else budget
            for entry in group:
                length = min(entry.prompt_tokens - entry.prefilled, left)
                if length == 0:
                    break
                chunks.append(Chunk(entry.request_id, entry.prefilled, length))
                left -= length
                budget -= length
        return tuple(chunks)
