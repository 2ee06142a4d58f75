"""SageMaker's part between boto3's two clients and a container, over HTTP on this host. It has no key of hotspan's.

InvokeEndpoint                     POST /endpoints/NAME/invocations                  -> POST /invocations
InvokeEndpointWithResponseStream   POST /endpoints/NAME/invocations-response-stream  -> the same, as an event stream

CreateInferenceComponent           of an adapter, from its unpacked archive      -> POST /adapters
UpdateInferenceComponent           the same                                      -> POST /adapters/NAME/update
DeleteInferenceComponent                                                         -> DELETE /adapters/NAME
ListInferenceComponents                                                          -> GET /adapters
"""

import contextlib
import json
import secrets
import struct
import tarfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_PASSED = ("content-type", "accept")
_COMPONENT = "x-amzn-sagemaker-inference-component"
_STREAM_ACCEPT, _STREAM_TYPE = "x-amzn-sagemaker-accept", "x-amzn-sagemaker-content-type"
_PREFIX = "x-amzn-sagemaker-"
_ALIAS = f"{_PREFIX}adapter-alias"


class Platform:
    """What stands in front of the container at `url`. An inference component is the adapter of its name.

    artifacts: a directory of the container's, in which components' archives are unpacked.
    """

    def __init__(self, url: str, artifacts: Path) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=60)
        self._artifacts = artifacts

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self.manage, methods=["POST"]),
                Route("/endpoints/{name}/invocations", self.invoke, methods=["POST"]),
                Route("/endpoints/{name}/invocations-response-stream", self.stream, methods=["POST"]),
            ]
        )

    async def manage(self, request: Request) -> Response:
        """An operation of the control plane on an adapter's inference component."""
        asked = await request.json()
        name = asked.get("InferenceComponentName", "")
        operation, alias = request.headers["x-amz-target"].partition(".")[2], {_ALIAS: name}
        if operation == "CreateInferenceComponent":
            body = {"name": name, "src": self._unpacked(asked), "preload": True, "pin": False}
            reply = await self._http.post("/adapters", json=body, headers=alias)
        elif operation == "UpdateInferenceComponent":
            body = {"src": self._unpacked(asked)}
            reply = await self._http.post(f"/adapters/{name}/update", json=body, headers=alias)
        elif operation == "DeleteInferenceComponent":
            reply = await self._http.delete(f"/adapters/{name}", headers=alias)
        else:
            reply = await self._http.get("/adapters", params={"limit": 100})
        if reply.status_code != 200:
            said = {"__type": "ValidationException", "message": reply.json()["error"]["message"]}
            return JSONResponse(said, 400)
        if operation == "ListInferenceComponents":
            names = [adapter["name"] for adapter in reply.json()["adapters"]]
            return JSONResponse({"InferenceComponents": [{"InferenceComponentName": name} for name in names]})
        return JSONResponse({"InferenceComponentArn": f"arn:aws:sagemaker:eu-north-1:1:inference-component/{name}"})

    def _unpacked(self, asked: Mapping[str, Any]) -> str:
        """Where the archive of a component's adapter is unpacked, as the container is told."""
        place = self._artifacts / secrets.token_hex(8) / "model"
        with tarfile.open(urlsplit(asked["Specification"]["Container"]["ArtifactUrl"]).path) as archive:
            archive.extractall(place, filter="data")
        return str(place)

    async def invoke(self, request: Request) -> Response:
        reply = await self._http.post("/invocations", content=await request.body(), headers=_sent(request.headers))
        if reply.status_code >= 400:
            return _model_error(reply.status_code, reply.content)
        return Response(reply.content, headers=_returned(reply.headers))

    async def stream(self, request: Request) -> Response:
        headers = _sent(request.headers)
        if _STREAM_ACCEPT in request.headers:
            headers["accept"] = request.headers[_STREAM_ACCEPT]
        asked = self._http.build_request("POST", "/invocations", content=await request.body(), headers=headers)
        reply = await self._http.send(asked, stream=True)
        if reply.status_code >= 400:
            return _model_error(reply.status_code, await reply.aread())

        async def events() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(reply):
                async for part in reply.aiter_raw():
                    yield _event(part)

        returned = _returned(reply.headers) | {_STREAM_TYPE: reply.headers["content-type"]}
        return StreamingResponse(events(), headers=returned | {"content-type": "application/vnd.amazon.eventstream"})


def _sent(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: text for name, text in headers.items() if name in _PASSED or name.startswith(_PREFIX)}
    if _COMPONENT in kept:
        kept[f"{_PREFIX}adapter-identifier"] = kept.pop(_COMPONENT)
    return kept


def _returned(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in headers.items() if name == "content-type" or name.startswith(_PREFIX)}


def _model_error(status: int, content: bytes) -> Response:
    """How SageMaker hands on what a container refused."""
    body = {"OriginalStatusCode": status, "OriginalMessage": content.decode(), "Message": "the model refused"}
    return Response(json.dumps(body), 424, {"x-amzn-errortype": "ModelError", "content-type": "application/json"})


def _event(payload: bytes) -> bytes:
    """One PayloadPart in AWS's event stream encoding."""
    named = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    headers = b"".join(
        struct.pack("!B", len(name)) + name.encode() + struct.pack("!BH", 7, len(text)) + text.encode()
        for name, text in named.items()
    )
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack("!I", zlib.crc32(message))


@contextlib.contextmanager
def platform(url: str, artifacts: Path) -> Iterator[str]:
    """It, on a port of its own, for the block; its address."""
    config = uvicorn.Config(Platform(url, artifacts).app(), port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
