"""Stands in for `hotspan serve`: the real command line, a real socket, no engine.

Its answer is the length of the prompt; `--drifts` adds a mark to it. `--dies` makes it end while it starts; with
FAKE_LOADS it is never ready in front of a disk tier. Says on stdout what it got, its process id, and that it was
stopped in order.
"""

import asyncio
import json
import os
import signal
import sys

from aiohttp import web


async def ping(request: web.Request) -> web.Response:
    return web.Response(status=503 if "FAKE_LOADS" in os.environ and "--disk" in sys.argv else 200)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "demo", "root": ""}]})


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if not body.get("stream"):
        return web.json_response({"usage": {"prompt_tokens": len(body["messages"][0]["content"]) // 5}})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    text = f"{len(body['messages'][0]['content'])}" + "!" * ("--drifts" in sys.argv)
    for event in (
        {"choices": [{"delta": {"content": text}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": body["max_tokens"]}},
    ):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def main(arguments: list[str]) -> None:
    print("arguments", json.dumps(arguments), flush=True)
    print("threads", os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
    if "--dies" in arguments:
        sys.exit("the slab does not fit")
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            *(web.get("/ping", ping), web.get("/health", ping)),
            *(web.get("/v1/models", models), web.post("/v1/chat/completions", chat)),
        ],
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(arguments[arguments.index("--port") + 1])).start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print(f"pid {os.getpid()}", flush=True)
    await stopped.wait()
    print("stopped in order", flush=True)


asyncio.run(main(sys.argv[1:]))
