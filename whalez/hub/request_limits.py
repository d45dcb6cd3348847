"""What a request may ask for, in the same words for every way in: HTTP, the Python fleet and the rank's own loop.

Rule: ints in, nothing or a RequestError out.
"""

from __future__ import annotations

from whalez.errors import RequestError


def check_max_tokens(max_tokens: int) -> None:
    """Equal for every way in. Raises RequestError."""
    if max_tokens < 1:
        raise RequestError(f"max_tokens: expected at least 1, got {max_tokens}", "max_tokens")


def check_counts(prompt_count: int, max_tokens: int, max_ctx: int) -> None:
    """What a prompt of `prompt_count` tokens may ask for, equal for every way in. Raises RequestError."""
    check_max_tokens(max_tokens)
    if prompt_count < 1:
        raise RequestError("prompt: expected at least one token, got none", "prompt")
    if prompt_count >= max_ctx:
        raise RequestError(f"prompt: expected at most {max_ctx - 1} tokens, got {prompt_count}", "prompt")
    if prompt_count + max_tokens > max_ctx:
        raise RequestError(
            f"max_tokens: expected at most {max_ctx - prompt_count} after a prompt of {prompt_count} tokens, "
            f"got {max_tokens}",
            "max_tokens",
        )


def unknown_token(token: int, position: int, vocab_size: int) -> RequestError:
    """The refusal of an id outside the vocabulary."""
    return RequestError(f"prompt: expected token ids 0..{vocab_size - 1}, got {token} at position {position}", "prompt")
