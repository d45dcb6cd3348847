"""The lives of one whale as its machines saw them -> one life.

The sequencer tells who was asked and who answered, the members when they began and were done. What several tell is
dated by the first of them. Times of ranks on different machines are as good as those machines' clocks agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from whalez.admin.asking import Reply
from whalez.hub.admin import Whales
from whalez.rendezvous.lives import Life, Moment, What


@dataclass(slots=True)
class Story:
    """One seq. Times are seconds since 1970, None for what nobody saw (yet)."""

    seq: int
    request_id: str
    poster: int | None  #: None: a Stop
    gang: tuple[int, ...]
    tokens: int
    launch: int | None = None  #: L
    begun_launch: int | None = None
    slips: int = 0
    posted: float | None = None
    gathered: float | None = None
    ready: dict[int, float] = field(default_factory=dict)  #: by rank
    declined: dict[int, str] = field(default_factory=dict)  #: rank -> reason
    committed: float | None = None
    begun: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    cancelled: float | None = None
    why: str = ""  #: of the cancel

    @property
    def state(self) -> str:
        """The last thing that is known of it."""
        if self.poster is None:
            return "stop"
        if self.cancelled is not None:
            return "cancelled"
        if self.done and set(self.done) >= set(self.begun):
            return "done"
        if self.begun:
            return "running"
        if self.committed is not None:
            return "committed"
        return "ready" if set(self.ready) >= set(self.gang) else "gathering"


def stories(replies: Sequence[Reply]) -> list[Story]:
    """All whales that any rank remembers, ascending seq."""
    found: dict[int, Story] = {}
    for reply in replies:
        if isinstance(reply.answer, Whales):
            merge(found, (*reply.answer.sequenced, *reply.answer.seen), reply.answer.wall_s - reply.answer.at_ns / 1e9)
    return [found[seq] for seq in sorted(found)]


def merge(found: dict[int, Story], lives: Iterable[Life], epoch_s: float) -> None:
    """Put the lives one machine tells into `found`. `epoch_s`: seconds since 1970 at 0 of its monotonic clock."""
    for life in lives:
        story = found.get(life.seq)
        if story is None:
            story = found[life.seq] = Story(life.seq, life.request_id, life.poster, life.gang, life.tokens)
        story.launch = life.launch if story.launch is None else story.launch
        story.slips = max(story.slips, life.slips)
        for moment in life.moments:
            _put(story, moment, moment.at_ns / 1e9 + epoch_s)


def _put(story: Story, moment: Moment, at: float) -> None:
    def first(known: float | None) -> float:
        return at if known is None else min(known, at)

    match moment.what:
        case What.POSTED:
            story.posted = first(story.posted)
        case What.GATHERED:
            story.gathered = first(story.gathered)
        case What.READY:
            story.ready[moment.rank] = first(story.ready.get(moment.rank))
        case What.DECLINED:
            story.declined[moment.rank] = moment.detail
        case What.COMMITTED:
            story.committed = first(story.committed)
        case What.BEGUN:
            story.begun[moment.rank] = first(story.begun.get(moment.rank))
            story.begun_launch = moment.launch
        case What.DONE:
            story.done[moment.rank] = first(story.done.get(moment.rank))
        case What.CANCELLED:
            story.cancelled, story.why = first(story.cancelled), moment.detail


HEAD = (
    *("seq", "state", "request", "tokens", "poster", "gang", "posted", "gathered", "ready", "committed", "begun"),
    *("done", "slips", "why"),
)


def rows(told: Sequence[Story]) -> list[list[object]]:
    """The first time is a clock time, the later ones count from it."""
    return [_row(story) for story in told]


def _row(story: Story) -> list[object]:
    starts = [at for at in (story.posted, story.gathered, story.committed) if at is not None]
    begin = min(starts, default=0.0)

    def after(at: float | None) -> str:
        return "-" if at is None else f"+{(at - begin) * 1e3:.1f}ms"

    clock = time.strftime("%H:%M:%S", time.localtime(begin)) + f".{int(begin % 1 * 1e3):03d}"
    missing = [rank for rank in story.gang if rank not in story.ready and rank not in story.declined]
    ready = " ".join(f"{rank}{after(at)}" for rank, at in sorted(story.ready.items(), key=lambda item: item[1]))
    if missing and story.state == "gathering":
        ready = f"{ready} waits for {' '.join(map(str, missing))}".strip()
    why = [f"rank {rank} declined: {reason}" for rank, reason in story.declined.items()]
    if story.why:
        why.append(f"{after(story.cancelled)} {story.why}")
    return [
        story.seq,
        story.state,
        story.request_id or "-",
        story.tokens,
        "-" if story.poster is None else story.poster,
        ",".join(map(str, story.gang)) or "all",
        clock if story.posted is not None else "-",
        after(story.gathered),
        ready or "-",
        "-" if story.committed is None else f"{after(story.committed)} L={story.launch}",
        "-" if not story.begun else f"{after(min(story.begun.values()))} at {story.begun_launch}",
        "-" if not story.done else after(max(story.done.values())),
        story.slips,
        "; ".join(why) or "-",
    ]
