"""What both machines keep alike: records in seq order, and what a story says of an event.

Rule: nothing here knows a table; which state a record may go to is the machine's.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

STORY_COUNT_MAX = 64
_TOLD = ("rank", "seq", "request_id", "launch", "count", "reason", "outcome", "how", "grace_s")


class Numbered(Protocol):
    @property
    def seq(self) -> int: ...


R = TypeVar("R", bound=Numbered)


class Draft(Protocol[R]):
    """The state a step is about to leave behind."""

    records: tuple[R, ...]  #: ascending seq


def find(draft: Draft[R], seq: int) -> R | None:
    return next((record for record in draft.records if record.seq == seq), None)


def put(draft: Draft[R], record: R) -> R:
    """Add the record, or put it in the place of the one with its seq."""
    others = [other for other in draft.records if other.seq != record.seq]
    draft.records = tuple(sorted([*others, record], key=lambda one: one.seq))
    return record


def drop(draft: Draft[R], seq: int) -> None:
    draft.records = tuple(other for other in draft.records if other.seq != seq)


def describe(content: object) -> str:
    """Short: a story must not keep prompts alive."""
    parts = [f"{name}={getattr(content, name)}" for name in _TOLD if hasattr(content, name)]
    return f"{type(content).__name__}({', '.join(parts)})"
