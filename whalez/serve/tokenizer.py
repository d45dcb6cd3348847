"""Text to token ids and back, whatever the checkpoint ships.

Rule: nothing here knows HTTP or a rank; a tokenizer is three methods, so that one read from a checkpoint can stand in
for the byte-level one.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from whalez.errors import RequestError

#: Files that mean "this checkpoint has a vocabulary of its own"; bytes would then be the wrong ids.
VOCABULARY_FILES = ("tiktoken.model", "tokenizer.model", "tokenizer.json", "vocab.json")


class Decoder(Protocol):
    """Turns a stream of tokens into pieces of text; the pieces joined are the text of all the tokens."""

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain, never half a character."""

    def finish(self) -> str:
        """The end of the stream: what was held back."""


class Tokenizer(Protocol):
    """What the front needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def decoder(self) -> Decoder: ...


class ByteDecoder:
    """Incremental UTF-8 over byte tokens.

    A token above 255 is no byte: it shows as U+FFFD and ends a character that was begun, because the character's
    remaining bytes cannot follow any more.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if 0 <= token < 256:
            return self._utf8.decode(bytes((token,)))
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest + "�"

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteTokenizer:
    """Ids 0-255 are the bytes of UTF-8 text; for checkpoints that ship no vocabulary."""

    def encode(self, text: str) -> list[int]:
        # JSON can carry lone surrogates; they have no UTF-8 form.
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Iterable[int]) -> str:
        decoder = self.decoder()
        return "".join(map(decoder.push, tokens)) + decoder.finish()

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()


class IdsOnlyTokenizer:
    """Stands in where a checkpoint has a vocabulary we cannot read: ids pass, text is refused instead of mangled."""

    def __init__(self, why: str) -> None:
        self._why = why

    def encode(self, text: str) -> list[int]:
        raise RequestError(f"prompt: text is not possible, {self._why}; send token ids", param="prompt")

    def decode(self, tokens: Iterable[int]) -> str:
        return ""

    def decoder(self) -> IdsOnlyTokenizer:
        return self

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def load_tokenizer(model_dir: str | Path | None) -> Tokenizer:
    """The tokenizer of a checkpoint folder; byte-level when the folder ships no vocabulary."""
    if model_dir is not None:
        for name in VOCABULARY_FILES:
            if (Path(model_dir) / name).exists():
                return IdsOnlyTokenizer(f"this version cannot read {name} of the checkpoint")
    return ByteTokenizer()


class StopFilter:
    """Cuts a stream of text at the first of some stop strings, without ever letting a part of one out.

    `push` returns the text that no stop string can claim any more; once `stopped` is true nothing follows.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        assert not self.stopped
        self._held += text
        cuts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            return self._release(min(cuts))
        return self._release(len(self._held) - self._claimed())

    def finish(self) -> str:
        """No more text comes: a begun stop string is ordinary text after all."""
        return "" if self.stopped else self._release(len(self._held))

    def _claimed(self) -> int:
        """Length of the longest tail that a stop string could begin with."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _release(self, size: int) -> str:
        out, self._held = self._held[:size], self._held[size:]
        return out
