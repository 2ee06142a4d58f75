"""A model's server without a model: it answers by its link as the real one does, and does what bodies ask for.

Its life is written to the file that FAKE_BOOK names. FAKE_BROKEN names models that can't be loaded, FAKE_SLOW_S is
how long one loads; one whose name is that of a file beside the book, with .held, loads for as long as that is there,
and with .stalled is ill.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hotspan.server.models.assignment import assigned
from hotspan.server.policy import Gate, access_table
from hotspan.server.principal import current_principal

NAME = sys.argv[-1]
PART = b"x" * 65536

METRICS = """\
# HELP fake_tokens_total Tokens.
# TYPE fake_tokens_total counter
fake_tokens_total{engine="0"} 5.0
# HELP fake_busy Requests.
# TYPE fake_busy gauge
fake_busy 1.0
"""


def note(event: str) -> None:
    with Path(os.environ["FAKE_BOOK"]).open("a") as book:
        book.write(f"{NAME} {event}\n")


async def answer(request: Request) -> Response:
    body = await request.body()
    asked = json.loads(body) if body else {}
    do = asked.get("do")
    if do == "die":
        os._exit(9)
    if do == "stream":
        made = events(asked["steps"], asked.get("pause_s", 0.02), asked.get("paced"))
        return StreamingResponse(made, media_type="text/event-stream")
    if do == "flood":
        return StreamingResponse(flood(asked["parts"]), media_type="application/octet-stream")
    if do == "fail":
        error = {"message": f"{NAME} refuses", "type": "BadRequestError", "param": "x", "code": 422}
        return JSONResponse({"error": error}, 422, headers={"retry-after": "7"})
    principal = current_principal()
    said: dict[str, Any] = {"served_by": NAME, "path": request.url.path, "query": request.url.query}
    said |= {"tenant": principal.tenant, "has_key": principal.has_key, "is_admin": principal.is_admin}
    return JSONResponse(said | {"headers": dict(request.headers), "body": asked, "method": request.method})


async def events(steps: int, pause_s: float, paced: str | None) -> Any:
    """paced: a file; after each event the next is made once there is a byte for it."""
    note("stream began")
    try:
        for step in range(steps):
            yield f"data: {step}\n\n"
            await asyncio.sleep(pause_s)
            while paced is not None and Path(paced).stat().st_size <= step:
                await asyncio.sleep(pause_s)
        yield "data: [DONE]\n\n"
        note("stream ended")
    except asyncio.CancelledError:
        note("stream aborted")
        raise


async def flood(parts: int) -> Any:
    for part in range(parts):
        yield PART
        note(f"part {part}")


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": NAME, "object": "model"}]})


async def receipt(request: Request) -> Response:
    asked = json.loads(await request.body())
    if asked.get("adapter") not in (None, NAME):
        return JSONResponse({"detail": "there is no such adapter"}, 404)
    note(f"invalidated {asked.get('tenant')}")
    removed = {"ram": 2}
    return JSONResponse(
        {"receipt": NAME, "replicas": [NAME], "requests_in_flight": 1, "is_durable": True, "removed": removed}
        | {"scope": {"tenant": asked.get("tenant")}}
    )


async def stats(request: Request) -> Response:
    return JSONResponse({"replicas": [{"replica": f"{NAME}-replica", "is_encrypted": False, "texts": [], "tiers": {}}]})


async def metrics(request: Request) -> Response:
    return PlainTextResponse(METRICS)


async def ping(request: Request) -> Response:
    if Path(os.environ["FAKE_BOOK"]).with_name(f"{NAME}.stalled").exists():
        return JSONResponse({"status": "Stalled"}, 503)
    return JSONResponse({"status": "Healthy"})


def main() -> None:
    assignment = assigned()
    note("started")
    time.sleep(float(os.environ.get("FAKE_SLOW_S", "0")))
    while Path(os.environ["FAKE_BOOK"]).with_name(f"{NAME}.held").exists():
        time.sleep(0.01)
    if NAME in os.environ.get("FAKE_BROKEN", "").split(","):
        Path(assignment.reason).write_text(f"{NAME} has no weights")
        sys.exit(2)
    app = Starlette(
        routes=[
            Route("/ping", ping),
            Route("/v1/models", models),
            Route("/metrics", metrics),
            Route("/hotspan/cache", stats),
            Route("/hotspan/cache/invalidate", receipt, methods=["POST"]),
            *(Route(path, answer, methods=["GET", "POST", "DELETE", "OPTIONS"]) for path in ANSWERED),
        ]
    )
    gate = Gate(app, access_table(has_keys=False, has_given_token=True), assignment.link.credentials)
    server = uvicorn.Server(uvicorn.Config(gate, log_level="error", lifespan="off"))
    listener = assignment.link.bind()
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it again at its end
    listener.listen()
    server.run(sockets=[listener])
    note("stopped")


ANSWERED = (
    *("/invocations", "/predictions/{model}", "/models/{model}/invoke", "/models/{model}/adapters", "/adapters"),
    *("/v1/chat/completions", "/v1/completions", "/version"),
)

if __name__ == "__main__":
    main()
