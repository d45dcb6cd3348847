"""The free-running loop of one rank: `turn` is one launch, and reads like the design.

Rule 1: the loop looks into its inbox once per launch boundary and never waits for it.
Rule 2: an idle rank may sleep only when nothing is armed and nothing committed; a peer's launch bell, anything put into
its inbox, or a heartbeat tick wakes it, and it then launches like everybody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from whalez.clock import now_ns
from whalez.config import FleetConfig
from whalez.engine.launch import LaunchResult, LaunchRunner
from whalez.engine.live import Live
from whalez.engine.records import Capture, TraceFile
from whalez.engine.sampler import check_sampling, sample
from whalez.engine.scheduler import Chunk, LaunchPlan, Phase, Scheduler
from whalez.errors import LocalProtocolError, RequestError, Unavailable
from whalez.fabric.doorbell import Bells
from whalez.fabric.layout import BELL_LAUNCH
from whalez.hub.admin import CancelWhale, DrainFleet
from whalez.hub.interface import Hub
from whalez.hub.request_limits import check_counts, unknown_token
from whalez.hub.requests import CancelRequest, Done, Failed, Response, Submit, TokenOut
from whalez.model.cache import StateCache
from whalez.model.exchange import Batch, PrefillSpan
from whalez.parallel.context import GangSpan, GangViews, LocalSpan, WindowMap
from whalez.planning import PlanPolicy, PlanRefused, plan_whale, predict_lanes
from whalez.rendezvous.effects import (
    Compose,
    Disarm,
    DrainBegun,
    Effect,
    LaunchKind,
    PostEnded,
    Reserve,
    Send,
    WhaleBegun,
    WhaleOver,
)
from whalez.rendezvous.events import (
    CannotReserve,
    DrainedHere,
    DrainWanted,
    LaunchComposing,
    PostWanted,
    Received,
    Reserved,
    WithdrawWanted,
)
from whalez.rendezvous.lives import WhaleLives
from whalez.rendezvous.member import Member
from whalez.rendezvous.messages import Bye, Died, DrainAll, Gather, Message

TICK_S = 0.25  # an idle rank launches at least this often
BYE_S = 2.0  # how long a leaving rank waits for the others' last word


class Loop:
    """One rank's engine. What is not said to be any thread's, or read only, belongs to one thread."""

    def __init__(
        self,
        *,
        rank: int,
        fleet: FleetConfig,
        policy: PlanPolicy,
        rows_max: int,
        cores: int | None,
        member: Member,
        hub: Hub,
        bells: Bells,
        runner: LaunchRunner,
        cache: StateCache,
        views: GangViews,
        windows: WindowMap,
        reply: Callable[[bytes, Response], None],
        trace: TraceFile | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.rank = rank
        self.fleet = fleet
        self.policy = policy
        self.rows_max = rows_max  #: rows of one request in one launch
        self.cores = cores  #: ranks that can compute at the same time; None = all
        self.member = member
        self.hub = hub
        self.bells = bells
        self.runner = runner
        self.cache = cache
        self.views = views
        self.windows = windows
        self.reply = reply
        self.trace = trace
        self.capture = capture
        self.scheduler = Scheduler(
            slots=fleet.slots,
            pages=fleet.cache_pages,
            page_tokens=fleet.page_tokens,
            chunk_tokens=fleet.chunk_tokens,
            armed_rows=fleet.armed_rows,
        )
        self.launch = 0  #: index of the launch composed next
        self.state = "serving"
        self.whales = WhaleLives()
        self.sleeps_total = 0
        self.slips_total = 0
        self._peers = np.array([r for r in range(fleet.world) if r != rank], np.int64)
        self._live: dict[str, Live] = {}
        self._submitted: deque[tuple[bytes, Submit | CancelRequest, int, int]] = deque()  # filled by the link's thread
        self._drain_wanted: deque[float] = deque()  # grace seconds; filled by signal handlers
        self._orders: deque[CancelWhale | DrainFleet] = deque()  # filled by the admin socket's thread
        self._drain_deadline_ns: int | None = None
        self._drained = False
        self._over: tuple[str, str] | None = None  #: kind and reason of every answer once no launch will follow
        self._longest_s = 0.0
        self._whale: Gather | None = None  # of the superstep being entered or under way

    # ---- called from other threads and from signal handlers ----------------------------------------------------
    def submit(self, client: bytes, request: Submit | CancelRequest) -> None:
        """Put a client's request into the inbox and ring."""
        self._submitted.append((client, request, now_ns(), self.launch))
        if self._over is not None:  # looked at after the append: whoever ended the loop before has emptied the inbox
            self._refuse_submitted(*self._over)
        self.bells.wake()

    def drain(self, grace_s: float) -> None:
        """Take no new requests, let those that run finish within `grace_s`, then leave with the whole fleet."""
        self._drain_wanted.append(grace_s)
        self.bells.wake()

    def order(self, wish: CancelWhale | DrainFleet) -> None:
        """Put an operator's wish into the inbox and ring."""
        self._orders.append(wish)
        self.bells.wake()

    def prompts(self) -> dict[str, bytes]:
        """Token ids of the requests being served, int32 little endian, by request id."""
        return {live.request_id: live.submit.tokens for live in tuple(self._live.values())}

    def serves(self, request_id: str) -> bool:
        """Whether the loop has taken this request and not ended it. Any thread."""
        return request_id in self._live

    @property
    def submitted_count(self) -> int:
        """Requests in the inbox that the loop has not looked at."""
        return len(self._submitted)

    # ---- one launch -------------------------------------------------------------------------------------------
    def turn(self) -> bool:
        """One boundary and one launch. Returns False after the world's last launch."""
        self._look_into_inbox()
        if self._may_sleep():
            self.sleeps_total += 1
            self.bells.sleep(self.launch, TICK_S)
            self._look_into_inbox()
        compose = self._perform(LaunchComposing(self.launch, self.runner.experts.words))
        assert compose is not None and compose.launch == self.launch
        plan = self.scheduler.compose(compose.kind)
        self.bells.write_word(self.launch, compose.word)
        self.bells.set_launch_count(self.launch + 1)
        self.hub.report_launch(self.launch + 1)
        self.bells.ring(BELL_LAUNCH, self._peers, self.launch + 1)
        self._run(compose, plan)
        self.launch += 1
        return compose.kind is not LaunchKind.STOP

    def run(self) -> None:
        """Launch until Stop, then say Bye and hear the others' (at most 2 s)."""
        while self.turn():
            pass
        self.state = "stopping"
        self._end_all("unavailable", "the fleet is stopping")
        bye = Bye(rank=self.rank)
        self.hub.send(bye)
        self._receive(bye)  # the hub brings the others' only
        deadline = now_ns() + int(BYE_S * 1e9)
        while not self.member.everyone_said_bye and now_ns() < deadline:
            self.bells.take_wakes()
            for message in self.hub.drain():
                self._receive(message)
            self.bells.sleep(self.launch, 0.05)

    def _may_sleep(self) -> bool:
        return not self.scheduler.has_work and not self._submitted and self.member.may_sleep

    # ---- the boundary -----------------------------------------------------------------------------------------
    def _look_into_inbox(self) -> None:
        self.bells.take_wakes()
        for message in self.hub.drain():
            self._receive(message)
        while self._submitted:
            client, request, at_ns, at_launch = self._submitted.popleft()
            if isinstance(request, Submit):
                self._accept(client, request, at_ns, at_launch)
            else:
                self._cancel(client, request.request_id)
        while self._orders:
            self._obey(self._orders.popleft())
        while self._drain_wanted:
            self._begin_drain(self._drain_wanted.popleft(), alone=True)
        self._check_drained()
        for entry in self.scheduler.admit():
            live = self._live[entry.request_id]
            self.cache.open_slot(entry.slot, entry.pages)
            if live.whale:
                live.posted_ns = now_ns()
                tokens = live.submit.tokens
                self._perform(
                    PostWanted(
                        request_id=entry.request_id,
                        tokens=tokens,
                        prompt_hash=hashlib.sha256(tokens).hexdigest(),
                        max_tokens=entry.max_tokens,
                    )
                )

    def _receive(self, message: Message) -> None:
        if not isinstance(message, Died):  # the hub stores a death and raises it from drain
            self._perform(Received(message))

    def _perform(self, event: Any) -> Compose | None:
        """Step the member and do what it wants, in order."""
        compose = None
        effects: deque[Effect] = deque(self._step(event))
        while effects:
            effect = effects.popleft()
            match effect:
                case Send(message=message):
                    self.hub.send(message)
                case Reserve():
                    effects.extend(self._step(self._reserve(effect)))
                case WhaleBegun(gather=gather, slipped=slipped):
                    self._whale = gather
                    self.slips_total += slipped
                    self._begin_whale(gather, slipped)
                case WhaleOver():
                    self._whale = None
                case PostEnded(request_id=request_id, reason=reason):
                    self._post_ended(request_id, reason)
                case DrainBegun(grace_s=grace_s):
                    self._begin_drain(grace_s, alone=False)
                case Disarm():
                    pass  # a helper's scratch is the launch's own; nothing is held between gather and superstep
                case Compose():
                    compose = effect
                case _:
                    raise LocalProtocolError(f"no driver for {type(effect).__name__}")
        return compose

    def _step(self, event: Any) -> list[Effect]:
        now = now_ns()
        effects = self.member.step(event, now)
        self.whales.member_saw(self.rank, event, effects, now, self.launch)
        return effects

    def _reserve(self, effect: Reserve) -> Reserved | CannotReserve:
        _, length = effect.plan.segment(self.rank)
        if effect.plan.supersteps != 1:
            return CannotReserve(effect.seq, f"{effect.plan.supersteps} supersteps, this engine runs whales of one")
        if not effect.is_owner and self.state != "serving":
            return CannotReserve(effect.seq, f"rank {self.rank} is {self.state}")
        if length > self.rows_max:
            return CannotReserve(effect.seq, f"segment of {length} rows, rank {self.rank} has room for {self.rows_max}")
        return Reserved(effect.seq)

    # ---- requests ---------------------------------------------------------------------------------------------
    def _accept(self, client: bytes, submit: Submit, at_ns: int, at_launch: int) -> None:
        try:
            if self.state != "serving":
                raise Unavailable(f"rank {self.rank} is {self.state}")
            prompt = self._checked_prompt(submit)
            check_sampling(submit.temperature, submit.top_p, submit.seed)
            whale, why = self._choose_lane(submit.lane, len(prompt))
            if submit.request_id in self._live:
                raise RequestError(f"request_id: {submit.request_id!r} is being served", "request_id")
        except RequestError as error:
            self._refuse(client, submit, "invalid", str(error), error.param)
        except Unavailable as error:
            self._refuse(client, submit, "unavailable", str(error))
        else:
            self._live[submit.request_id] = Live(client, submit, prompt, whale, why, at_ns, at_launch)
            self.scheduler.add(submit.request_id, len(prompt), submit.max_tokens, whale=whale)

    def _checked_prompt(self, submit: Submit) -> np.ndarray:
        if len(submit.tokens) % 4:
            raise RequestError("tokens: expected 4 bytes per token", "prompt")
        prompt = np.frombuffer(submit.tokens, "<i4").astype(np.int32)
        vocab = self.runner.config.vocab_size
        check_counts(len(prompt), submit.max_tokens, self.fleet.max_ctx)
        bad = (prompt < 0) | (prompt >= vocab)
        if bad.any():
            at = int(np.argmax(bad))
            raise unknown_token(int(prompt[at]), at, vocab)
        total = len(prompt) + submit.max_tokens
        if self.scheduler.pages_for(total) > self.scheduler.pages_total:
            raise RequestError(f"prompt: expected at most {self.scheduler.pages_total} cache pages", "prompt")
        return prompt

    def _choose_lane(self, lane: str, length: int) -> tuple[bool, str]:
        if lane not in ("auto", "whale", "local"):
            raise RequestError(f"lane: expected auto, whale or local, got {lane[:40]!r}", "lane")
        if lane == "local":
            return False, "asked for"
        plan = plan_whale(length, self.rank, self.policy)
        if isinstance(plan, PlanRefused):
            if lane == "whale":
                raise RequestError(f"lane: no gang for {length} tokens: {plan.reason}", "lane")
            return False, plan.reason
        if lane == "whale":
            return True, "asked for"
        lanes = predict_lanes(length, plan, self.policy, self.fleet.chunk_tokens, self.cores)
        ratio = lanes.local_s / lanes.whale_s
        return lanes.whale_is_faster, f"predicted {ratio:.2f} x the local lane's speed"

    def _obey(self, wish: CancelWhale | DrainFleet) -> None:
        if isinstance(wish, DrainFleet):
            self.hub.send(DrainAll(grace_s=wish.grace_s))
        elif (live := self._live.get(wish.request_id)) is not None:
            self._drop(live, "cancelled", f"whale {wish.seq} was cancelled by an operator")

    def _cancel(self, client: bytes, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None and live.client == client:  # only its own, whatever name another one gave his
            self._drop(live, "cancelled", "cancelled by the client")

    def _drop(self, live: Live, kind: str, reason: str) -> None:
        """End a request early: now, or as soon as its post ends or its superstep is over."""
        if live.dropped is not None:
            return
        live.dropped = kind, reason
        if self.scheduler.entry(live.request_id).phase is Phase.POSTED:
            self._perform(WithdrawWanted(live.request_id))  # ends as PostEnded, or in a superstep of no use
        else:
            self._fail(live, kind, reason)

    def _post_ended(self, request_id: str, reason: str) -> None:
        live = self._live[request_id]
        self.scheduler.post_ended(request_id)
        live.why = f"no gang: {reason}"
        if live.dropped is not None:
            self._fail(live, *live.dropped)

    def _refuse(self, client: bytes, submit: Submit, kind: str, reason: str, param: str | None = None) -> None:
        self.reply(client, Failed(request_id=submit.request_id, kind=kind, reason=reason, param=param))

    def _fail(self, live: Live, kind: str, reason: str) -> None:
        if self.capture is not None:
            self.capture.drop(live.request_id)
        self.reply(live.client, Failed(request_id=live.request_id, kind=kind, reason=reason))
        self._forget(live)

    def _forget(self, live: Live) -> None:
        if live.request_id in self.scheduler:
            self.scheduler.remove(live.request_id)
        del self._live[live.request_id]

    def fail_all(self, kind: str, reason: str) -> None:
        """The fleet stops: end every request with an error (see `Failed.kind`) that says why."""
        self.state = "failed"
        self._end_all(kind, reason)

    def _end_all(self, kind: str, reason: str) -> None:
        """No launch follows: answer what is here, and from now on whatever comes."""
        self._over = kind, reason
        self._refuse_submitted(kind, reason)
        for live in self._live.values():
            self.reply(live.client, Failed(request_id=live.request_id, kind=kind, reason=reason))
        self._live.clear()

    def _refuse_submitted(self, kind: str, reason: str) -> None:
        """From the loop and, once it is over, from the link's thread."""
        with contextlib.suppress(IndexError):  # empty: the other thread may have taken the last one
            while True:
                client, request, *_ = self._submitted.popleft()
                if isinstance(request, Submit):
                    self._refuse(client, request, kind, reason)

    # ---- leaving ----------------------------------------------------------------------------------------------
    def _begin_drain(self, grace_s: float, *, alone: bool) -> None:
        if alone and self.state == "serving":
            self._perform(DrainWanted())
        self.state = "draining"
        deadline = now_ns() + int(grace_s * 1e9)
        self._drain_deadline_ns = min(deadline, self._drain_deadline_ns or deadline)

    def _check_drained(self) -> None:
        if self._drain_deadline_ns is None or self._drained:
            return
        if now_ns() >= self._drain_deadline_ns:
            for live in list(self._live.values()):
                self._drop(live, "unavailable", "the fleet is stopping")
        if not self._live:
            self._drained = True
            self._perform(DrainedHere())

    # ---- the launch -------------------------------------------------------------------------------------------
    def _begin_whale(self, gather: Gather, slipped: int) -> None:
        live = self._live.get(gather.request_id)
        if gather.plan.poster == self.rank and live is not None:
            live.seq, live.plan, live.entry_launch, live.slips = gather.seq, gather.plan, self.launch, slipped

    def _run(self, compose: Compose, plan: LaunchPlan) -> None:
        started_ns = now_ns()
        batch, wanted = self._batch(compose, plan)
        result = self.runner.run(self.launch, batch, wanted)
        took_ns = now_ns() - started_ns
        # A fleet whose launches are long is not stuck sooner than ten of them.
        self._longest_s = max(self._longest_s, took_ns / 1e9 - self.runner.waited_s())
        self.bells.stuck_s = max(self.fleet.stuck_s, 10 * self._longest_s)
        if batch.rows_count:
            self._publish(compose, plan, batch, result, started_ns, took_ns)

    def _batch(self, compose: Compose, plan: LaunchPlan) -> tuple[Batch, np.ndarray]:
        """The launch's rows, and which of them need logits: decodes, finished prompts, the owner's whale, in order."""
        lives = [self._live[request_id] for request_id in plan.decodes]
        batch = Batch(
            np.array([live.generated[-1] for live in lives], np.int32),
            np.array([self.scheduler.entry(live.request_id).slot for live in lives], np.int64),
            np.array([live.cached_tokens for live in lives], np.int64),
        )
        wanted = list(range(len(lives)))
        row = len(lives)
        for chunk in plan.chunks:
            live = self._live[chunk.request_id]
            span = live.prompt[chunk.start : chunk.start + chunk.length]
            slot = self.scheduler.entry(chunk.request_id).slot
            batch.spans.append(PrefillSpan(span, chunk.start, LocalSpan(self.cache, slot, chunk.start)))
            row += chunk.length
            if chunk.start + chunk.length == len(live.prompt):
                wanted.append(row - 1)
        if compose.kind is LaunchKind.SUPERSTEP:
            assert self._whale is not None and compose.seq == self._whale.seq
            segment, is_owner = self._segment(self._whale)
            batch.spans.append(segment)
            if is_owner:
                wanted.append(row + len(segment.tokens) - 1)
        return batch, np.array(wanted, np.int64)

    def _segment(self, gather: Gather) -> tuple[PrefillSpan, bool]:
        start, length = gather.plan.segment(self.rank)
        tokens = np.frombuffer(gather.tokens, "<i4", count=length, offset=4 * start).astype(np.int32)
        is_owner = gather.plan.poster == self.rank
        exchange = GangSpan(
            self.bells,
            self.views,
            self.windows,
            self.cache,
            gather.plan,
            seq=gather.seq,
            rank=self.rank,
            slot=self.scheduler.entry(gather.request_id).slot if is_owner else None,
            watch=self.runner.watch,
            on_slice=self.runner.experts.on_slice,
        )
        return PrefillSpan(tokens, start, exchange), is_owner

    # ---- the launch's result ----------------------------------------------------------------------------------
    def _publish(
        self, compose: Compose, plan: LaunchPlan, batch: Batch, result: LaunchResult, started_ns: int, took_ns: int
    ) -> None:
        logits = iter(result.logits)
        if self.capture is not None and result.hidden is not None:
            self._capture_rows(plan, batch, result)
        for request_id in plan.decodes:
            self._emit(self._live[request_id], next(logits))
        for chunk in plan.chunks:
            live = self._live[chunk.request_id]
            live.first_launch_ns = live.first_launch_ns or started_ns
            live.prefill_ns += took_ns
            if self.scheduler.prefilled(chunk):
                self._emit(live, next(logits))
        if compose.kind is LaunchKind.SUPERSTEP:
            assert self._whale is not None
            if self._whale.plan.poster == self.rank:
                live = self._live[self._whale.request_id]
                live.first_launch_ns, live.prefill_ns, live.phases = started_ns, took_ns, self.runner.phases()
                self.scheduler.whale_prefilled(live.request_id)
                self._emit(live, next(logits))
            elif self.capture is not None:
                self.capture.finish(self._whale.request_id)
        if self.trace is not None and batch.spans:
            self._trace(compose, plan.chunks, took_ns)

    def _emit(self, live: Live, logits: np.ndarray) -> None:
        """Sample the next token of a request and say so; end it if it is complete."""
        if live.dropped is not None:
            self._fail(live, *live.dropped)
            return
        submit = live.submit
        if self.capture is not None:
            self.capture.logits(live.request_id, logits)
        token = sample(logits, submit.temperature, submit.top_p, submit.seed, len(live.generated))
        if not live.first_token_ns:
            live.first_token_ns, live.first_token_launch = now_ns(), self.launch
        if token in submit.stop_tokens:
            self._finish(live, "stop")
            return
        self.reply(live.client, TokenOut(request_id=live.request_id, index=len(live.generated), token=token))
        live.generated.append(token)
        if len(live.generated) == submit.max_tokens:
            self._finish(live, "length")

    def _finish(self, live: Live, reason: str) -> None:
        if self.capture is not None:
            self.capture.finish(live.request_id)
        self.reply(
            live.client,
            Done(
                request_id=live.request_id,
                finish_reason=reason,
                tokens=tuple(live.generated),
                prompt_tokens=len(live.prompt),
                report=live.report(self.rank),
            ),
        )
        self._forget(live)

    # ---- debug ------------------------------------------------------------------------------------------------
    def _capture_rows(self, plan: LaunchPlan, batch: Batch, result: LaunchResult) -> None:
        assert self.capture is not None and result.hidden is not None
        ids = [*plan.decodes, *(chunk.request_id for chunk in plan.chunks)]
        if self._whale is not None and len(batch.spans) > len(plan.chunks):
            ids.append(self._whale.request_id)
        starts = [*batch.decode_lengths, *(span.start for span in batch.spans)]
        lengths = [*(1 for _ in plan.decodes), *(len(span.tokens) for span in batch.spans)]
        row = 0
        for request_id, start, length in zip(ids, starts, lengths, strict=True):
            part = slice(row, row + length)
            choices = [layer[part] for layer in result.choices]
            self.capture.rows(request_id, int(start), result.hidden[part], choices)
            row += length

    def _trace(self, compose: Compose, chunks: tuple[Chunk, ...], took_ns: int) -> None:
        assert self.trace is not None
        whale = self._whale if compose.kind is LaunchKind.SUPERSTEP else None
        self.trace.write(
            {
                "launch": self.launch,
                "kind": str(compose.kind),
                "request_id": chunks[0].request_id if whale is None else whale.request_id,
                "seq": None if whale is None else whale.seq,
                "start": chunks[0].start if whale is None else whale.plan.segment(self.rank)[0],
                "rows": sum(c.length for c in chunks) if whale is None else whale.plan.segment(self.rank)[1],
                "took_s": took_ns / 1e9,
                "wall_s": time.time(),
                "phases": self.runner.phases(),
                "layers_ns": self.runner.watch.ns.tolist(),
            }
        )
