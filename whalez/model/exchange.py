"""What the forward pass asks of the world around it; it never learns whether it is alone, in a gang, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from whalez.model.trace import Stopwatch
from whalez.model.weights import MoeWeights


@dataclass(slots=True)
class PreparedKda:
    """What `kda_prepare` left of one span, independent of the state; see ops/kda."""

    k: np.ndarray  #: f32 [T, H, K]  keys decayed to their chunk's end
    u: np.ndarray  #: f32 [T, H, V]
    w: np.ndarray  #: f32 [T, H, K]
    decay: np.ndarray  #: f32 [N, H, K]


class Context(Protocol):
    """The latent rows a span attends to: everything in front of it, then its own."""

    def read(self, start: int, count: int, out: np.ndarray) -> None:
        """Copy latent rows start..start+count of the request into out f32 [count, L]."""

    def close(self) -> None:
        """The span has read all it needs; peers may overwrite what they lent."""


class SpanExchange(Protocol):
    """The state in front of one prefill span, layer by layer, and where its own goes.

    `layer` counts layers of the model. Every method is called once per layer of its kind, in layer order.
    """

    def halo(self, layer: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Put the 3 projected rows in front of the span into out f32 [3, D]; rows f32 [min(T, 3), D] are its last."""

    def state(self, layer: int, prepared: PreparedKda) -> np.ndarray:
        """KDA state f32 [H, K, V] in front of the span; the caller scans it in place to the state behind the span."""

    def context(self, layer: int, latent: np.ndarray) -> Context:
        """Hand over the span's latent rows f32 [T, L]; get what it attends to."""


class ExpertExchange(Protocol):
    """The paired exchange of one launch: one dispatch and one combine per MoE layer, whatever the rows."""

    def rows(self, count: int) -> np.ndarray:
        """Where the layer's normed rows f32 [count, D] are to be written; they are published from there."""

    def choices(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the expert choices i32 [count, k] and weights f32 [count, k] are to be written."""

    def moe(self, layer: int, count: int, weights: MoeWeights, out: np.ndarray, meanwhile: Callable[[], None]) -> None:
        """Publish, compute what this rank owns, and add the routed experts' result to out f32 [count, D].

        `meanwhile` runs after publishing and before the first wait; it may add to `out` as well.
        """


@dataclass(slots=True)
class PrefillSpan:
    """Consecutive prompt tokens of one request in a launch."""

    tokens: np.ndarray  #: i32 [T]
    start: int  #: position of the first token in the request
    exchange: SpanExchange


@dataclass(slots=True)
class Batch:
    """One launch's rows: the decode rows first, then every prefill span's."""

    decode_tokens: np.ndarray  #: i32 [B]
    decode_slots: np.ndarray  #: i64 [B]
    decode_lengths: np.ndarray  #: i64 [B] tokens in the cache before this one
    spans: list[PrefillSpan] = field(default_factory=list)

    @property
    def rows_count(self) -> int:
        return len(self.decode_tokens) + sum(len(span.tokens) for span in self.spans)


@dataclass(slots=True)
class Hooks:
    """What a launch reports while it runs."""

    watch: Stopwatch
    progress: Callable[[int], None]  #: called after every attention block and every layer, with the layer's number
    choices: list[np.ndarray] | None = None  #: debug: filled with the expert choices of every MoE layer
