"""Raw heads before a server and a store's front: what two programs could read differently is refused at the entry."""

import asyncio
import json
from typing import Any

import pytest

from .rig import KEYS, Store, store

KEY = b"Authorization: Bearer " + KEYS["acme"].encode()


async def raw(running: Store, target: bytes, *lines: bytes, method: bytes = b"POST", body: bytes = b"{}") -> Any:
    """The status, and the answer's JSON if it has some. With no `lines`, not even a Host is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        has_host = not lines or any(line.startswith(b"Host:") for line in lines)
        host = [] if has_host else [b"Host: store"]
        head = [method + b" " + target + b" HTTP/1.1", *host, *lines, b"Connection: close"]
        writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        async with asyncio.timeout(60):
            answer = await reader.read()
    finally:
        writer.close()
    said = answer.partition(b"\r\n\r\n")[2]
    return int(answer.split(b" ", 2)[1]), json.loads(said) if said.startswith(b"{") else None


@pytest.mark.parametrize("has_keys", [True, False])
async def test_heads(has_keys: bool) -> None:
    """Decisive headers come once and targets are paths; what goes to a model is what came, less what is of one hop."""
    size, text = b"Content-Length: 2", b"Content-Type: application/json"
    async with store("a", has_keys=has_keys, default="a") as running:
        for twice in (
            (KEY, KEY),
            (b"X-Api-Key: key-a", b"x-api-key: key-b"),
            (b"X-Hotspan-Principal: {}", b"X-Hotspan-Principal: {}"),
            (b"Host: a", b"Host: b"),
            (text, b"Content-Type: text/plain"),
            (b"X-Amzn-SageMaker-Session-Id: a", b"X-Amzn-SageMaker-Session-Id: b"),
            (b"X-Amzn-SageMaker-Adapter-Identifier: a", b"X-Amzn-SageMaker-Adapter-Identifier: b"),
            (b"Transfer-Encoding: chunked",),
        ):
            status, _ = await raw(running, b"/invocations", *(() if KEY in twice else (KEY,)), size, *twice)
            assert status == 400, twice
        assert (await raw(running, b"/ping", method=b"GET", body=b""))[0] == 400
        for target in (b"*", b"*x", b"*@127.0.0.1:1/x", b"*#/invocations"):
            for method in (b"GET", b"POST", b"OPTIONS"):
                status, said = await raw(running, target, KEY, size, method=method)
                assert status == 400 and said["error"]["code"] == "bad_request", target
        lines = (KEY, size, text, b"X-Name: gr\xc3\xbcn", b"Connection: X-Hop", b"X-Hop: 1", b"X-Hotspan-Principal: {}")
        status, said = await raw(running, b"http://somewhere/invocations?a=%2F", *lines)
        assert status == 200 and said["query"] == "a=%2F" and not said["is_admin"]
        assert said["headers"]["x-name"].encode("latin-1").decode() == "grün" and "x-hop" not in said["headers"]
        assert said["tenant"] == ("acme" if has_keys else "default")
        chunks = b"2\r\n{}\r\n0\r\nX-Late: 1\r\nX-Hotspan-Principal: {}\r\n\r\n"
        status, said = await raw(running, b"/invocations", KEY, text, b"Transfer-Encoding: chunked", body=chunks)
        assert status == 200 and "x-late" not in said["headers"]
        status, _ = await raw(running, b"/invocations", KEY, size, text, b"X-Name: gr\xfcn")
        assert status == 400
