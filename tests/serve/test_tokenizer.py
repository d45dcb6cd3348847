"""Byte tokens: the pieces of a stream joined are the whole text, and no piece ends inside a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalez.errors import RequestError
from whalez.serve.tokenizer import ByteTokenizer, StopFilter, load_tokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert all(0 <= token < 256 for token in tokens)
    assert TOKENIZER.decode(tokens) == text.encode("utf-8", "replace").decode()


@given(st.lists(st.integers(0, 600)))
def test_pieces_join_to_the_whole(tokens: list[int]) -> None:
    decoder = TOKENIZER.decoder()
    pieces = [decoder.push(token) for token in tokens]
    assert "".join(pieces) + decoder.finish() == TOKENIZER.decode(tokens)


def test_a_character_comes_out_whole() -> None:
    decoder = TOKENIZER.decoder()
    assert [decoder.push(byte) for byte in "é€🐋".encode()] == ["", "é", "", "", "€", "", "", "", "🐋"]


def test_a_cut_character_and_a_token_beyond_bytes_are_replaced() -> None:
    assert TOKENIZER.decode([0xE2, 0x82]) == "�"
    assert TOKENIZER.decode([65, 0xE2, 300, 66]) == "A��B"


def test_lone_surrogate_does_not_raise() -> None:
    assert TOKENIZER.encode("\ud800") == [ord("?")]


def test_a_vocabulary_we_cannot_read_refuses_text(tmp_path) -> None:
    assert load_tokenizer(tmp_path).encode("a") == [97]
    (tmp_path / "tiktoken.model").write_bytes(b"")
    with pytest.raises(RequestError, match=r"tiktoken\.model"):
        load_tokenizer(tmp_path).encode("a")


@given(
    st.lists(st.text(alphabet="ab", max_size=3)),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_filter_equals_cutting_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    """Nothing of a stop string gets out, and what comes before it does. A whole text is cut at the first match to
    complete, so the dumb version looks at every prefix in turn."""
    text, expected = "", None
    for piece in pieces:
        text += piece
        cuts = [text.find(stop) for stop in stops if stop in text]
        if cuts:
            expected = text[: min(cuts)]
            break
    stream, out = StopFilter(tuple(stops)), ""
    for piece in pieces:
        out += stream.push(piece)
        assert text.startswith(out) or expected is None
        if stream.stopped:
            break
    out += stream.finish()
    assert stream.stopped == (expected is not None)
    assert out == (text if expected is None else expected)


def test_stop_filter_holds_back_no_more_than_it_must() -> None:
    stream = StopFilter(("stop",))
    assert [stream.push(piece) for piece in ("a s", "t", "art", " st")] == ["a ", "", "start", " "]
    assert stream.finish() == "st"
