"""Every interleaving of small fleets keeps every property; and a broken protocol is found, by the right name.

Takes about 20 s: it is a search over a million states.
"""

from __future__ import annotations

import pytest

from whalez.testing import mutations as broken
from whalez.testing.explore import PROPERTIES, Explorer, Whale, World, _pair, worlds


@pytest.mark.parametrize("world", worlds(), ids=lambda world: world.name)
def test_every_interleaving_keeps_the_properties(world: World, record_property: pytest.FixtureRequest) -> None:
    result = Explorer(world).run()
    print(f"{result.states_count} states, {result.moves_count} moves")
    assert result.broken is None, "\n  ".join([result.what, *result.trace])
    assert result.is_complete
    # A search that meets nothing proves nothing: each whale is begun, at several launches, on time and late.
    assert result.begun_count > 2 * len(world.whales)
