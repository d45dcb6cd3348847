"""Counting the paired exchanges: which value a pairing doorbell carries at which step of which launch.

Every launch of every rank runs the same number of steps: one dispatch and one combine per MoE layer, or one empty pair
if the model has none. `PairedChain` is the only place that counts them.
"""

from __future__ import annotations

from whalez.errors import LocalProtocolError
from whalez.fabric.doorbell import pairing_value


class PairedChain:
    """The steps of one launch after another."""

    def __init__(self, moe_layers: int) -> None:
        self.steps_per_launch = 2 * max(moe_layers, 1)
        self.launch = -1
        self._step = self.steps_per_launch

    def begin(self, launch: int) -> None:
        """Raises: LocalProtocolError if the launch before is not complete or launches do not follow one another."""
        if self._step != self.steps_per_launch or (self.launch >= 0 and launch != self.launch + 1):
            raise LocalProtocolError(
                f"launch {launch} begun after step {self._step}/{self.steps_per_launch} of launch {self.launch}"
            )
        self.launch, self._step = launch, 0

    def advance(self) -> int:
        """The doorbell value of the next step."""
        if self._step >= self.steps_per_launch:
            raise LocalProtocolError(f"launch {self.launch} has only {self.steps_per_launch} paired steps")
        value = pairing_value(self.launch, self.steps_per_launch, self._step)
        self._step += 1
        return value

    def complete(self) -> int:
        """Steps made; every launch must have made all of them. Raises: LocalProtocolError."""
        if self._step != self.steps_per_launch:
            raise LocalProtocolError(f"launch {self.launch} made {self._step} of {self.steps_per_launch} paired steps")
        return self._step
