"""The paired exchanges of a launch are one constant for every kind of load, idle included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.solo import no_decodes, solo
from whalez.config import fleet_config
from whalez.engine.sizing import plan_policy, slab_spec
from whalez.errors import FabricError, LocalProtocolError
from whalez.fabric.layout import BELL_COMBINE, BELL_DISPATCH, SlabLayout
from whalez.fabric.private import PrivateSlab
from whalez.model.checkpoint import load_weights
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Batch, PrefillSpan
from whalez.model.presets import make_checkpoint
from whalez.model.trace import Stopwatch
from whalez.model.weights import expert_bounds
from whalez.parallel.context import LocalSpan
from whalez.parallel.expert import PairedExperts
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


@pytest.fixture
def two(tmp_path: Path) -> tuple[PairedExperts, SlabLayout, list[PrivateSlab], Callable[[], None]]:
    """Rank 0 of a world of two whose peer is only memory; a call is one MoE layer with no rows of its own."""
    make_checkpoint(tmp_path, "kimi-linear", "tiny", 0)
    config, fleet = KimiLinearConfig.from_dir(tmp_path), fleet_config(tmp_path, 2, {"max_ctx": 256, "slots": 1})
    layout = SlabLayout.from_spec(slab_spec(config, fleet, plan_policy(config, fleet)))
    slabs = [PrivateSlab(rank, layout.nbytes) for rank in range(2)]
    bells: Any = SimpleNamespace(ring=lambda *_: None, wait=lambda *_, **__: None, read_words=lambda launch: (0, 0))
    experts = PairedExperts(
        bells,
        layout,
        slabs,
        rank=0,
        expert_bounds=expert_bounds(config.num_experts, 2),
        moe_layers=len(config.moe_layers),
        top_k=config.num_experts_per_token,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        watch=Stopwatch(config.num_hidden_layers),
    )
    weights = load_weights(tmp_path, config, 0, 2)
    layer = config.moe_layers[0]
    experts.begin(0)

    def moe() -> None:
        out = np.zeros((0, config.hidden_size), np.float32)
        experts.moe(layer, 0, weights.layers[layer].mlp, out, lambda: None)  # type: ignore[arg-type]

    return experts, layout, slabs, moe


@pytest.mark.parametrize("count", [1, 1 << 40, -(1 << 63)])
def test_a_count_of_a_peer_beyond_its_slab_names_it(two: Any, count: int) -> None:
    """One row too many is the one that matters: with few rows here it fits into the scratch of all."""
    experts, layout, slabs, moe = two
    told = layout.view(slabs[1], "dispatch_count")
    told[0] = len(experts.rows(1 << 30)) + count if count == 1 else count
    with pytest.raises(FabricError, match=r"rank 1: dispatch count outside its slab"):
        moe()


def test_as_many_rows_as_a_slab_holds_are_taken(two: Any) -> None:
    experts, layout, slabs, moe = two
    layout.view(slabs[1], "dispatch_count")[0] = len(experts.rows(1 << 30))
    moe()
    assert experts.words == (0, 0)


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (0, 1 << 40), (5, 3), (1 << 40, 1 << 40)])
def test_offsets_of_a_peer_outside_its_slab_name_it(two: Any, start: int, end: int) -> None:
    _, layout, slabs, moe = two
    layout.view(slabs[1], "combine_offsets")[:2] = start, end
    with pytest.raises(FabricError, match=r"rank 1: combine offsets outside its slab"):
        moe()
