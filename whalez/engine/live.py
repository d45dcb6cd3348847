"""What the loop remembers of a request that is being served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whalez.hub.requests import Report, Submit
from whalez.planning.plan import GangPlan


@dataclass(slots=True)
class Live:
    """One request between its submission and its end. Times are monotonic nanoseconds of this process."""

    client: bytes
    submit: Submit
    prompt: np.ndarray  #: i32 [T]
    whale: bool  #: the lane that was chosen
    why: str
    submitted_ns: int
    submit_launch: int  #: launch that was composed next when the request came in
    generated: list[int] = field(default_factory=list)
    dropped: tuple[str, str] | None = None  #: kind and reason; what cannot be stopped any more is computed for nobody
    first_token_launch: int = 0
    posted_ns: int = 0
    first_launch_ns: int = 0
    first_token_ns: int = 0
    prefill_ns: int = 0
    seq: int | None = None
    plan: GangPlan | None = None  #: set when the superstep was entered
    entry_launch: int | None = None
    slips: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache before the next decode row."""
        return len(self.prompt) + len(self.generated) - 1

    def report(self, rank: int) -> Report:
        plan = self.plan
        return Report(
            lane="local" if plan is None else "whale",
            why=self.why,
            poster=rank,
            seq=self.seq,
            gang=() if plan is None else plan.gang,
            segments=() if plan is None else tuple(plan.segment(member) for member in plan.gang),
            entry_launch=self.entry_launch,
            slips=self.slips,
            submit_launch=self.submit_launch,
            first_token_launch=self.first_token_launch,
            ttft_s=(self.first_token_ns - self.submitted_ns) / 1e9,
            queue_s=(self.first_launch_ns - self.submitted_ns) / 1e9,
            rendezvous_s=(self.first_launch_ns - self.posted_ns) / 1e9 if plan is not None else 0.0,
            prefill_s=self.prefill_ns / 1e9,
            phases=self.phases,
        )
