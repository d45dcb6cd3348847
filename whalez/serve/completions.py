"""The words of `POST /v1/completions`: what a body may say, what it means, and the shapes of the answers.

Rule: data in, data out; no socket, no clock, no link.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, SupportsIndex

import msgspec

from whalez.errors import RequestError
from whalez.hub.request_limits import check_counts, unknown_token
from whalez.hub.requests import Report, Status, Submit
from whalez.serve.tokenizer import Tokenizer

MAX_TOKENS_DEFAULT = 16
STOPS_MAX = 4  #: as OpenAI: up to four stop strings


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True):
    """The fields we read. Unknown ones are ignored; null means the default, as OpenAI has it."""

    prompt: msgspec.Raw = msgspec.Raw()  #: text, ids, or a list of one of these; parsed by `_prompt_tokens`
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    lane: str | None = None  #: ours: "auto" | "whale" | "local"
    # Known to OpenAI and not to us; accepted only with the value that changes nothing.
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


#: field -> values that ask for nothing; any other is refused by name rather than silently ignored
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}

_body = msgspec.json.Decoder(Body)
_ids = msgspec.json.Decoder(list[int])
_anything = msgspec.json.Decoder()


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One validated request."""

    submit: Submit
    prompt_count: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def parse_body(raw: bytes) -> Body:
    """Raises RequestError for what is not JSON or has a field of the wrong type; `param` names the field."""
    try:
        return _body.decode(raw)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".") or None
        raise RequestError(f"{field or 'body'}: {what}", param=field) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def validate(body: Body, tokenizer: Tokenizer, limits: Status, request_id: str, random_seed: int) -> Ask:
    """What the body asks of a rank. Raises RequestError naming the field.

    random_seed: used when the client gives none, so that two sampled answers differ.
    """
    for field, neutral in _NEUTRAL.items():
        if getattr(body, field) not in neutral:
            raise RequestError(f"{field}: not supported", param=field)
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    check_sampling(temperature, top_p)
    seed = random_seed if body.seed is None else body.seed
    if not -(2**63) <= seed < 2**63:
        raise RequestError(f"seed: expected a 64-bit integer, got {seed}", param="seed")
    lane = "auto" if body.lane is None else body.lane
    if lane not in ("auto", "whale", "local"):
        raise RequestError(f'lane: expected "auto", "whale" or "local", got {lane[:40]!r}', param="lane")
    tokens = _prompt_tokens(body.prompt, tokenizer)
    check_tokens(tokens, max_tokens, limits.max_ctx, limits.vocab_size)
    return Ask(
        submit=Submit(
            request_id=request_id,
            tokens=pack_tokens(tokens),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed & (2**63 - 1),
            stop_tokens=limits.eos_tokens,
            lane=lane,
        ),
        prompt_count=len(tokens),
        stops=_stops(body.stop),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _prompt_tokens(raw: msgspec.Raw, tokenizer: Tokenizer) -> list[int]:
    if bytes(raw) in (b"", b"null"):
        raise RequestError("prompt: missing", param="prompt")
    try:
        return _ids.decode(raw)  # by far the longest ones; no Python object but the ids is made
    except msgspec.ValidationError:
        pass
    try:
        prompt = _anything.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:  # the outer decoder only looked for the end of the value
        raise RequestError(f"prompt: not valid JSON: {error}", param="prompt") from None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    elif isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        raise RequestError(f"prompt: one prompt per request, got {len(prompt)}", param="prompt")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return prompt
    raise RequestError("prompt: expected text, a list of token ids, or a list of one of these", param="prompt")


def check_sampling(temperature: float, top_p: float) -> None:
    """Equal for every way in. Raises RequestError."""
    if not 0 <= temperature <= 2:
        raise RequestError(f"temperature: expected 0 to 2, got {temperature}", param="temperature")
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p: expected above 0 and at most 1, got {top_p}", param="top_p")


def token_ids(prompt: Iterable[object]) -> list[int]:
    """A caller's ids as ints; numpy's are welcome, a bool is none. Raises RequestError naming the position."""
    tokens = []
    for at, item in enumerate(prompt):
        if isinstance(item, bool) or not isinstance(item, SupportsIndex):
            raise RequestError(f"prompt: expected token ids, got {item!r} at position {at}", param="prompt")
        tokens.append(item.__index__())
    return tokens


def check_tokens(tokens: list[int], max_tokens: int, max_ctx: int, vocab_size: int) -> None:
    """Limits of the model and the fleet, equal for every way in. Raises RequestError."""
    check_counts(len(tokens), max_tokens, max_ctx)
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise unknown_token(token, tokens.index(token), vocab_size)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > STOPS_MAX:
        raise RequestError(f"stop: at most {STOPS_MAX} strings, got {len(stops)}", param="stop")
    if not all(stops):
        raise RequestError("stop: an empty string", param="stop")
    return stops


def pack_tokens(tokens: list[int]) -> bytes:
    """int32 little endian, as `Submit.tokens` wants them. The ids are checked already."""
    packed = array("i", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


# ---- answers --------------------------------------------------------------------------------------------------
def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt_count: int, completion_count: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": completion_count,
        "total_tokens": prompt_count + completion_count,
    }


def completion(
    request_id: str, created: int, model: str, text: str, finish_reason: str | None, **more: Any
) -> dict[str, Any]:
    """A whole answer, or one piece of a streamed one; `more` are further top-level fields."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        **more,
    }


def lane_report(tokens: list[int], report: Report | None) -> dict[str, Any]:
    """The `whalez` field: the ids behind the text, and how they were made (absent when a stop string cut it short)."""
    return {"tokens": tokens, **(msgspec.to_builtins(report) if report is not None else {})}
