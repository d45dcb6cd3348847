"""The HTTP face over fake ranks: what is refused and how, what an answer looks like, who gets cancelled."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_link import FakeLink, answer, status

from whalez.hub.requests import Failed, Response, Submit, TokenOut
from whalez.serve.app import Front
from whalez.serve.links import Ranks
from whalez.serve.tokenizer import ByteTokenizer


def front_of(*links: FakeLink, **options: Any) -> Front:
    return Front(Ranks(links or (FakeLink(),)), ByteTokenizer(), "m", **options)


def talk(front: Front, conversation: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run the conversation with a front that has heard of its ranks."""

    async def run() -> Any:
        await front.ranks.refresh()
        transport = httpx.ASGITransport(front.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            try:
                return await asyncio.wait_for(conversation(client), 10)
            finally:
                await front.ranks.close()

    return asyncio.run(run())


def post(front: Front, body: Any, raw: bytes | None = None) -> httpx.Response:
    content = json.dumps(body).encode() if raw is None else raw
    return talk(front, lambda client: client.post("/v1/completions", content=content))


def refused(response: httpx.Response, code: int = 400) -> dict[str, Any]:
    assert response.status_code == code, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


# ---- what is refused ------------------------------------------------------------------------------------------
BAD = {
    "no prompt": ({}, "prompt"),
    "null prompt": ({"prompt": None}, "prompt"),
    "empty text": ({"prompt": ""}, "prompt"),
    "empty ids": ({"prompt": []}, "prompt"),
    "list of an empty text": ({"prompt": [""]}, "prompt"),
    "number as prompt": ({"prompt": 3}, "prompt"),
    "mixed prompt": ({"prompt": [1, "a"]}, "prompt"),
    "floats as ids": ({"prompt": [1.5]}, "prompt"),
    "booleans as ids": ({"prompt": [True]}, "prompt"),
    "two prompts": ({"prompt": ["a", "b"]}, "prompt"),
    "two lists": ({"prompt": [[1], [2]]}, "prompt"),
    "nested too deep": ({"prompt": [[[1]]]}, "prompt"),
    "id above the vocabulary": ({"prompt": [1, 300]}, "prompt"),
    "id below zero": ({"prompt": [-1, 5]}, "prompt"),
    "id beyond any integer type": ({"prompt": [2**70]}, "prompt"),
    "longer than the context": ({"prompt": "x" * 101}, "prompt"),
    "no room for max_tokens": ({"prompt": "x" * 90, "max_tokens": 11}, "max_tokens"),
    "max_tokens zero": ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"prompt": "x", "max_tokens": -5}, "max_tokens"),
    "max_tokens text": ({"prompt": "x", "max_tokens": "16"}, "max_tokens"),
    "max_tokens fraction": ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    "max_tokens boolean": ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    "temperature text": ({"prompt": "x", "temperature": "hot"}, "temperature"),
    "temperature negative": ({"prompt": "x", "temperature": -0.1}, "temperature"),
    "top_p zero": ({"prompt": "x", "top_p": 0}, "top_p"),
    "seed text": ({"prompt": "x", "seed": "a"}, "seed"),
    "seed too large": ({"prompt": "x", "seed": 2**63}, "seed"),
    "stop number": ({"prompt": "x", "stop": 3}, "stop"),
    "stop empty": ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    "five stops": ({"prompt": "x", "stop": list("abcde")}, "stop"),
    "stream text": ({"prompt": "x", "stream": "yes"}, "stream"),
    "echo": ({"prompt": "x", "echo": True}, "echo"),
    "n": ({"prompt": "x", "n": 2}, "n"),
    "best_of": ({"prompt": "x", "best_of": 3}, "best_of"),
    "logprobs": ({"prompt": "x", "logprobs": 1}, "logprobs"),
    "logit_bias": ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
    "lane": ({"prompt": "x", "lane": "fast"}, "lane"),
    "model number": ({"prompt": "x", "model": 3}, "model"),
}


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD.keys())
def test_bad_field_is_400_and_named(body: dict, param: str) -> None:
    link = FakeLink()
    error = refused(post(front_of(link), body))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]
    assert link.submitted == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "x"} y',
        b"[]",
        b"3",
        b'{"prompt": "\xff"}',
        b"[" * 99_999,
        b'{"prompt": ' + b"[" * 99_999,
    ],
)
def test_not_an_object_is_400(raw: bytes) -> None:
    refused(post(front_of(), None, raw))


def test_body_too_large_is_413_announced_or_not() -> None:
    front = front_of(max_body_bytes=100)
    refused(post(front, {"prompt": "x" * 200}), 413)

    async def parts():
        yield b'{"prompt": "'
        yield b"x" * 200

    refused(talk(front, lambda client: client.post("/v1/completions", content=parts())), 413)


def test_unknown_path_and_method_keep_the_error_shape() -> None:
    refused(talk(front_of(), lambda client: client.get("/v1/nothing")), 404)
    refused(talk(front_of(), lambda client: client.get("/v1/completions")), 405)


# ---- answers --------------------------------------------------------------------------------------------------
def test_whole_answer() -> None:
    link = FakeLink(answer("hé!".encode(), finish_reason="stop"), status(eos_tokens=(2,)))
    body = {"prompt": "ab", "max_tokens": 9, "temperature": 0, "seed": 5, "top_p": 0.5, "user": "u", "lane": "whale"}
    response = post(front_of(link), body)
    assert response.status_code == 200
    got = response.json()
    assert got["choices"] == [{"index": 0, "text": "hé!", "logprobs": None, "finish_reason": "stop"}]
    assert got["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert got["object"] == "text_completion"
    assert got["model"] == "m"
    assert got["created"] > 1_000_000_000
    assert got["whalez"]["lane"] == "local"
    assert got["whalez"]["tokens"] == list("hé!".encode())
    (sent,) = link.submitted
    assert got["id"] == sent.request_id
    assert sent.tokens == b"a\0\0\0b\0\0\0"
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.seed) == (9, 0, 0.5, 5)
    assert (sent.lane, sent.stop_tokens) == ("whale", (2,))
    assert link.cancelled == []


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_every_form_of_prompt(prompt: Any) -> None:
    link = FakeLink()
    assert post(front_of(link), {"prompt": prompt, "n": 1, "stop": None, "logit_bias": {}}).status_code == 200
    assert link.submitted[0].tokens == b"a\0\0\0b\0\0\0"
    assert link.submitted[0].max_tokens == 16


def test_the_largest_prompt_fits_exactly() -> None:
    assert post(front_of(), {"prompt": "x" * 84, "max_tokens": 16}).status_code == 200


def test_two_unseeded_requests_get_different_seeds() -> None:
    link = FakeLink()
    front = front_of(link)
    for _ in range(2):
        post(front, {"prompt": "x"})
    first, second = link.submitted
    assert first.seed != second.seed


def test_stream() -> None:
    link = FakeLink(answer("né".encode()))
    body = {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, counts, done = events(post(front_of(link), body))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "né"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert chunks[-1]["whalez"]["lane"] == "local"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_the_text_and_cancels(stream: bool) -> None:
    link = FakeLink(answer(b"one END two"))
    response = post(front_of(link), {"prompt": "x", "stop": ["END", "zzz"], "stream": stream})
    if stream:
        *chunks, done = events(response)
        assert done == "[DONE]"
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        last = chunks[-1]
    else:
        last = response.json()
        text = last["choices"][0]["text"]
        assert last["usage"]["completion_tokens"] == len("one END")
    assert text == "one "
    assert last["choices"][0]["finish_reason"] == "stop"
    assert link.cancelled == [link.submitted[0].request_id]


# ---- failures -------------------------------------------------------------------------------------------------
def fails(kind: str, after: int = 0) -> Callable:
    def respond(submit):
        name = submit.request_id
        tokens = [TokenOut(request_id=name, index=i, token=97) for i in range(after)]
        return [*tokens, Failed(request_id=name, kind=kind, reason="because", param="prompt")]

    return respond


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "code"), [("invalid", 400), ("unavailable", 503), ("internal", 500)])
def test_a_rank_s_refusal_has_its_status_even_when_streaming(kind: str, code: int, stream: bool) -> None:
    link = FakeLink(fails(kind))
    response = post(front_of(link), {"prompt": "x", "stream": stream})
    assert "because" in refused(response, code)["message"]
    assert ("retry-after" in response.headers) == (code == 503)
    assert link.cancelled == []  # the rank ended it itself


def test_failure_in_the_middle_of_a_stream_ends_it_without_done() -> None:
    got = events(post(front_of(FakeLink(fails("internal", after=2))), {"prompt": "x", "stream": True}))
    assert [event["choices"][0]["text"] for event in got[:-1]] == ["a", "a"]
    assert got[-1]["error"]["type"] == "internal_error"
    assert "rank 0: because" in got[-1]["error"]["message"]


def test_a_silent_rank_fails_its_requests_and_health() -> None:
    link = FakeLink(lambda submit: [TokenOut(request_id=submit.request_id, index=0, token=97)])
    front = front_of(link)
    front.ranks.silent_s = 0.0

    async def conversation(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        while not link.submitted:
            await asyncio.sleep(0)
        link.current = None
        health = await client.get("/health")
        return await asking, health

    response, health = talk(front, conversation)
    assert "rank 0: does not answer" in refused(response, 503)["message"]
    assert health.status_code == 503
    assert "rank 0: does not answer" in health.json()["trouble"]
    assert front.ranks.views[0].in_flight == 0


def test_the_end_of_a_link_is_told_when_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalez.serve.app.LAST_WORDS_S", 0.05)
    front = front_of(FakeLink(lambda submit: [Failed(request_id=submit.request_id, kind="gone", reason="it is cut")]))
    answer = talk(front, lambda client: client.post("/v1/completions", json={"prompt": "x"}))
    assert refused(answer, 503)["message"] == "rank 0: it is cut"


@pytest.mark.parametrize("last_words", ["", "it broke", "gone"])
def test_the_end_of_a_process_is_seen_at_once_and_its_last_words_count(last_words: str) -> None:
    """The link stays mute otherwise, or ends; `silent_s` is far away."""
    with subprocess.Popen(["sleep", "100"]) as child:
        link = FakeLink(status=status(pid=child.pid))
        front = front_of(link)
        seen = asyncio.Event()

        async def submit(submit: Submit) -> AsyncIterator[Response]:
            link.submitted.append(submit)
            await seen.wait()
            if last_words:
                kind = "gone" if last_words == "gone" else "unavailable"
                yield Failed(request_id=submit.request_id, kind=kind, reason=last_words)
            await asyncio.Event().wait()

        link.submit = submit  # type: ignore[method-assign]

        async def conversation(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            while not link.submitted:
                await asyncio.sleep(0)
            link.current = None
            child.kill()
            while not front.ranks.views[0].trouble:
                await asyncio.sleep(0)
            seen.set()
            return await asking, await client.post("/v1/completions", json={"prompt": "x"})

        try:
            during, after = talk(front, conversation)
        finally:
            child.kill()
    assert (
        refused(during, 503)["message"]
        == f"rank 0: {last_words if last_words == 'it broke' else 'its process has ended'}"
    )
    assert refused(after, 503)["message"] == "rank 0: its process has ended"


def test_before_the_first_status_and_while_draining_503() -> None:
    link = FakeLink(status=None)
    assert "starting" in refused(post(front_of(link), {"prompt": "x"}), 503)["message"]
    front = front_of()
    front.draining = True
    response = post(front, {"prompt": "x"})
    refused(response, 503)
    assert int(response.headers["retry-after"]) > 0
    response = post(front_of(FakeLink(status=status(state="draining"))), {"prompt": "x"})
    assert "draining" in refused(response, 503)["message"]
    assert int(response.headers["retry-after"]) > 0


def test_health_names_rank_and_trouble() -> None:
    healthy = talk(front_of(), lambda client: client.get("/health"))
    assert healthy.status_code == 200
    assert healthy.json()["status"] == "ok"
    assert healthy.json()["ranks"][0]["launch"] == 7
    stuck = FakeLink(status=status(rank=1, healthy=False, trouble="stalled in window 12 of layer 3"))
    response = talk(front_of(FakeLink(), stuck), lambda client: client.get("/health"))
    assert response.status_code == 503
    assert response.json()["trouble"] == "rank 1: stalled in window 12 of layer 3"
    assert [row["healthy"] for row in response.json()["ranks"]] == [True, False]


def test_models() -> None:
    got = talk(front_of(), lambda client: client.get("/v1/models")).json()
    assert [model["id"] for model in got["data"]] == ["m"]


# ---- who gets a request ---------------------------------------------------------------------------------------
def test_least_loaded_rank_with_own_requests_counted_once() -> None:
    links = [FakeLink(status=status(rank=r, running=busy)) for r, busy in enumerate((2, 1, 1))]
    ranks = Ranks(links)
    asyncio.run(ranks.refresh())
    chosen = []
    for _ in range(5):
        view = ranks.choose()
        view.in_flight += 1
        chosen.append(view.status.rank)
    assert sorted(chosen[:2]) == [1, 2]
    assert sorted(chosen[2:]) == [0, 1, 2]
    for view, link in zip(ranks.views, links, strict=True):  # now the ranks report ours as well: nothing changes
        link.current = status(rank=view.index, running=view.load)
    loads = [view.load for view in ranks.views]
    asyncio.run(ranks.refresh())
    assert [view.load for view in ranks.views] == loads


def test_idle_ranks_take_turns_and_a_sick_one_gets_none() -> None:
    sick = FakeLink(status=status(rank=1, healthy=False))
    ranks = Ranks([FakeLink(), sick, FakeLink(status=status(rank=2))])
    asyncio.run(ranks.refresh())
    assert [ranks.choose().status.rank for _ in range(4)] == [0, 2, 0, 2]


# ---- a client that goes away ----------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_request(stream: bool) -> None:
    link = FakeLink(lambda submit: [TokenOut(request_id=submit.request_id, index=0, token=97)])
    front = front_of(link)
    app = front.app()
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
    }

    async def run() -> None:
        await front.ranks.refresh()
        inbox: asyncio.Queue[dict] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        serving = asyncio.create_task(app(scope, inbox.get, send))
        while not link.submitted or (stream and len(sent) < 2):
            await asyncio.sleep(0)
        assert link.cancelled == []
        inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(serving, 5)
        assert link.cancelled == [link.submitted[0].request_id]
        assert front.ranks.views[0].in_flight == 0

    asyncio.run(run())
