"""Runs a plan on a Ray cluster: `python -m hotspan.router.ray.launch PLAN`, which is JSON.

A process of its own, since Ray reads what HAProxy needs from the environment when it is imported.
"""

import contextlib
import json
import logging
import signal
import sys
import threading
from typing import Any

from hotspan.core.errors import EngineError, HotspanError

NEEDED = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # A replica that died is noticed by a connection that was kept; nothing was answered, so another may.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # Ray runs its workers, and so engines and HAProxy, at the lowest priority but four.
    "RAY_worker_niceness": "0",
}
"""What all of Ray's processes must see. Bytes of answers then cross HAProxy and the replica's process, and no other."""

SESSION_HEADER = "RAY_SERVE_SESSION_ID_HEADER_KEY"


def main() -> int:
    """Exit status: 0 after a signal to stop, 2 if what was asked for can't work."""
    given = json.loads(sys.argv[1])
    try:
        run(given)
    except HotspanError as error:
        print(f"hotspan: {error}", file=sys.stderr)
        return 2
    return 0


def run(given: dict[str, Any]) -> None:
    """Deploy, say so, and take it back on a signal; a Ray that was started for it ends then, any other stays."""
    import ray
    from ray import serve

    from hotspan.router.ray.application import application
    from hotspan.router.ray.plan import Plan

    name, host, port = given["name"], given["host"], given["port"]
    ray.init(
        address=given["address"] or "local", ignore_reinit_error=True, log_to_driver=True, logging_level=logging.WARNING
    )
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    try:
        serve.run(application(Plan(**given["plan"])), name=name, route_prefix="/")
    except RuntimeError as error:  # Ray's, for whatever kept replicas from starting
        raise EngineError(
            "the replicas did not start: their log above says why, and `ray list actors` where"
        ) from error
    print(f"hotspan is ready on http://{host}:{port}: {given['plan']['replicas']} replicas on Ray, application {name}")
    sys.stdout.flush()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    with contextlib.suppress(Exception):  # whatever of Ray is already gone
        serve.delete(name)
        if given["address"] is None:
            serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
