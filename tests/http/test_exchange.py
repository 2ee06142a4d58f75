"""One request and its response, as an ASGI server has them."""

import asyncio
import re
from typing import Any

import pytest

from hotspan.http.bodies import Pace
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import ClientGone, Exchange, Message


def exchange(*messages: Message, headers: dict[str, str] | None = None) -> tuple[Exchange, list[Message]]:
    """One of a server that gives these messages, and what it was sent."""
    left, sent = [*messages], list[Message]()

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": given}
    return Exchange(scope, receive, send), sent


async def test_what_a_message_leaves_out_is_as_asgi_has_it() -> None:
    """A body without `more_body` ends there, and one without `body` is empty; a client that is gone has no more."""
    request = {"type": "http.request"}
    asked, _ = exchange(request | {"body": b"a", "more_body": True}, request, {"type": "http.disconnect"})
    assert [await asked.part(), await asked.part()] == [(b"a", True), (b"", False)]
    assert not asked.gone.is_set()
    with pytest.raises(ClientGone):
        await asked.part()
    assert asked.gone.is_set()


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\x7f"])
async def test_a_request_id_that_can_not_be_logged_is_replaced(given: str) -> None:
    """A word of 1 to 128 characters is the client's; any other header gives way to the next, or to one made up."""
    for headers, expected in (
        ({"x-request-id": "mine"}, "mine"),
        ({"x-request-id": "x" * 128}, "x" * 128),
        ({"x-request-id": given, "x-amzn-sagemaker-inference-id": "theirs"}, "theirs"),
        ({"x-request-id": given}, "[0-9a-f]{32}"),
        ({}, "[0-9a-f]{32}"),
    ):
        assert re.fullmatch(expected, exchange(headers=headers)[0].request_id)


async def test_a_response_is_begun_once_its_head_is_sent() -> None:
    """With its status and the request's id; an error after that sends nothing more."""
    asked, sent = exchange(headers={"x-request-id": "mine"})
    began = []
    asked.on_begin = lambda: began.append((asked.is_begun, asked.status, [*sent]))
    await asked.begin(201, [(b"content-type", b"text/plain")])
    assert began == [(True, 201, [])] and not asked.is_over
    assert sent[0]["headers"] == [(b"content-type", b"text/plain"), (b"x-request-id", b"mine")]
    async with asked.answered():
        raise ZeroDivisionError
    assert len(sent) == 1
    await asked.write(b"end", is_last=True)
    assert asked.is_over and sent[1] == {"type": "http.response.body", "body": b"end", "more_body": False}


async def test_a_body_has_its_time_from_the_beginning() -> None:
    """Nobody is late before a first byte was due, however often the loop looks; who is late gets 408."""
    async with Pace(HttpLimits(stall_s=600.0)) as pace:
        for _ in range(9):
            await asyncio.sleep(0)
        pace.came(1)
        await asyncio.sleep(0)
    with pytest.raises(HttpError, match="the body came too slowly") as late:
        async with Pace(HttpLimits(stall_s=0.0)):
            await asyncio.Event().wait()
    assert late.value.status == 408
