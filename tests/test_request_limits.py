"""One function tells every way in what a request may ask for, and blames the field that is at fault."""

import pytest

from whalez.errors import RequestError
from whalez.hub.request_limits import check_counts, unknown_token
from whalez.serve.completions import token_ids


@pytest.mark.parametrize(
    ("prompt_count", "max_tokens", "param", "words"),
    [
        (1, 70000, "max_tokens", "expected at most 99 after a prompt of 1 tokens, got 70000"),
        (99, 2, "max_tokens", "expected at most 1 "),
        (100, 1, "prompt", "expected at most 99 tokens, got 100"),
        (0, 1, "prompt", "expected at least one token, got none"),
        (1, 0, "max_tokens", "expected at least 1, got 0"),
    ],
)
def test_the_field_at_fault_is_named(prompt_count: int, max_tokens: int, param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_counts(prompt_count, max_tokens, 100)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ") and words in str(caught.value)


@pytest.mark.parametrize(("prompt_count", "max_tokens"), [(1, 1), (99, 1), (1, 99)])
def test_what_fits_is_let_through(prompt_count: int, max_tokens: int) -> None:
    check_counts(prompt_count, max_tokens, 100)


def test_an_unknown_token_is_told_with_range_and_position() -> None:
    assert str(unknown_token(512, 3, 512)) == "prompt: expected token ids 0..511, got 512 at position 3"


@pytest.mark.parametrize("wrong", [True, 1.5, "1", None], ids=str)
def test_what_is_no_token_id_is_refused_by_position(wrong: object) -> None:
    with pytest.raises(RequestError, match=r"prompt: expected token ids, got .* at position 1") as caught:
        token_ids([3, wrong])
    assert caught.value.param == "prompt"
    assert token_ids([3, 4]) == [3, 4]
