"""The paired exchanges of a launch are one constant for every kind of load, idle included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.solo import no_decodes, solo
from whalez.errors import FabricError, LocalProtocolError
from whalez.fabric.layout import BELL_COMBINE, BELL_DISPATCH
from whalez.model.exchange import Batch, PrefillSpan
from whalez.model.presets import make_checkpoint
from whalez.parallel.context import LocalSpan
from whalez.parallel.pacing import PairedChain


def test_values_rise_by_one_over_steps_and_launches() -> None:
    chain = PairedChain(3)
    seen = []
    for launch in range(4):
        chain.begin(launch)
        seen += [chain.advance() for _ in range(6)]
        assert chain.complete() == 6
    assert seen == list(range(1, 25))


def test_a_model_without_experts_makes_one_empty_pair() -> None:
    assert PairedChain(0).steps_per_launch == 2


def test_a_launch_cut_short_or_too_long_is_refused() -> None:
    chain = PairedChain(1)
    chain.begin(0)
    chain.advance()
    with pytest.raises(LocalProtocolError, match="made 1 of 2"):
        chain.complete()
    with pytest.raises(LocalProtocolError, match="after step 1/2"):
        chain.begin(1)
    chain.advance()
    with pytest.raises(LocalProtocolError, match="only 2 paired steps"):
        chain.advance()
    with pytest.raises(LocalProtocolError, match="launch 2 begun"):
        chain.begin(2)


def test_the_count_is_one_constant_for_every_kind_of_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "tiny"
    make_checkpoint(model, "kimi-linear", "tiny", 0)
    with solo(model) as one:
        rung: list[tuple[int, int]] = []
        real = one.runner.experts.bells.ring

        def ring(kind: int, peers: np.ndarray, value: int) -> None:
            rung.append((kind, value))
            real(kind, peers, value)

        monkeypatch.setattr(one.runner.experts.bells, "ring", ring)
        one.cache.open_slot(0, (0, 1, 2))
        one.cache.open_slot(1, (3, 4))
        tokens = np.arange(100, dtype=np.int32)

        def launch(decodes: int, *spans: PrefillSpan) -> list[int]:
            batch = no_decodes()
            if decodes:
                batch = Batch(np.array([5], np.int32), np.zeros(1, np.int64), np.array([100], np.int64))
            batch.spans = list(spans)
            rung.clear()
            one.runner.run(one.launch, batch, np.zeros(0, np.int64))
            one.launch += 1
            return [kind for kind, _ in rung]

        idle = launch(0)
        prefill = launch(0, PrefillSpan(tokens, 0, LocalSpan(one.cache, 0, 0)))
        decode = launch(1)
        both = launch(1, PrefillSpan(tokens[:7], 0, LocalSpan(one.cache, 1, 0)))
        several = launch(0, *(PrefillSpan(tokens[:9], 7 + 9 * i, LocalSpan(one.cache, 1, 7 + 9 * i)) for i in range(3)))
        assert idle == prefill == decode == both == several
        assert idle == [BELL_DISPATCH, BELL_COMBINE] * len(one.config.moe_layers)


def test_offsets_of_a_peer_outside_its_slab_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "tiny"
    make_checkpoint(model, "kimi-linear", "tiny", 0)
    with solo(model) as one:

        def lying(*arguments: object) -> None:
            arguments[8][:] = (0, 1 << 40)  # type: ignore[index]

        monkeypatch.setattr("whalez.parallel.expert.owner_compute", lying)
        with pytest.raises(FabricError, match="offsets"):
            one.prefill(np.arange(70, dtype=np.int32), 70)
