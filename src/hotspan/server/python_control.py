"""The administration of the engine of an `LLM()`, as Python calls: `hotspan.control(llm).invalidate(tags=["a"])`.

They go to the engine's own socket, as those of `hotspan cache` do. An engine core in this very process runs only while
it is called, so its part is done here, between the question and the answer.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hotspan.config.control import engine_sockets
from hotspan.config.environment import environment
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.http.paths import EXPLAIN, LOOKUP, PIN, PREFETCH
from hotspan.http.unix import UnixConnection

_TURN_S = 0.001

Json = dict[str, Any]


class Control:
    """One engine's. Fields and answers are those of the routes of the same names (docs/http.md).

    llm: vLLM's `LLM`, whose `kv_transfer_config` names hotspan's connector. Calls are for the thread that uses it.

    Raises, also from each call: ConfigError if the engine has no socket or can't be asked; RefusedError with the
    server's body for what it refuses.
    """

    def __init__(self, llm: Any) -> None:
        self._socket = _socket_of(llm.llm_engine.vllm_config.instance_id)
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # one in this process
        self._turn: Callable[[], None] | None = None
        if core is not None:
            self._turn = core.scheduler.connector.administrator.run_waiting

    def stats(self) -> Json:
        """The content of each tier, and the texts that saved the most computing."""
        return self._ask("GET", "/hotspan/cache")

    def invalidate(self, **what: Any) -> Json:
        """Forget what matches all fields: tags, session, adapter, prompt, tokens, ...; the receipt."""
        return self._ask("POST", "/hotspan/cache/invalidate", what)

    def clear(self) -> Json:
        """Forget everything; the receipt."""
        return self._ask("POST", "/hotspan/cache/clear", {})

    def check(self) -> Json:
        """Read and verify everything on disk."""
        return self._ask("POST", "/hotspan/cache/check", {})

    def prefetch(self, **what: Any) -> Json:
        """Bring the text of a prompt, a session or tags into RAM before its request."""
        return self._ask("POST", PREFETCH, what)

    def lookup(self, **what: Any) -> Json:
        """How much of a prompt, tokens, a session or tags each tier has; nothing is changed."""
        return self._ask("POST", LOOKUP, what)

    def pin(self, tags: Sequence[str], gib: float, hold_s: float = 3600.0) -> Json:
        """Have what carries all of some tags evicted last, up to so many GiB, for so many seconds."""
        return self._ask("POST", PIN, {"tags": list(tags), "gib": gib, "hold_s": hold_s})

    def explain(self, request: str | None = None) -> list[Json]:
        """Why the tokens of a request were computed, by the id of its output; without one, of the last 20 requests."""
        asked = {} if request is None else {"request": request}
        replicas = self._ask("POST", EXPLAIN, asked)["replicas"]
        return [told for replica in replicas for told in replica["requests"]]

    def shred(self, tenant: str) -> Json:
        """Destroy a tenant's keys; the receipt."""
        return self._ask("POST", "/hotspan/keys/shred", {"tenant": tenant})

    def rotate(self, tenant: str) -> Json:
        """Give a tenant a new root key."""
        return self._ask("POST", "/hotspan/keys/rotate", {"tenant": tenant})

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        if self._turn is None:
            return _called(self._socket, method, path, body)
        with ThreadPoolExecutor(1, thread_name_prefix="hotspan-control-call") as threads:
            answer = threads.submit(_called, self._socket, method, path, body)
            while not answer.done():
                self._turn()
                wait([answer], _TURN_S)
            return answer.result()


def _socket_of(name: str) -> Path:
    engines = engine_sockets(environment())
    found = next((engine for engine in engines if engine.name == name and engine.owner == os.getpid()), None)
    if found is None:
        raise ConfigError(
            "this LLM's engine has no socket for administration: give LLM(..., **hotspan.engine_options(ram=...)), and "
            "let VLLM_PLUGINS, if it is set, contain hotspan"
        )
    return found.cores[min(found.cores)]


def _called(path: Path, method: str, route: str, body: Json | None) -> Json:
    connection = UnixConnection(path)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, route, data, {"content-type": "application/json"})
        response = connection.getresponse()
        said: Json = json.loads(response.read())
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"the engine can't be asked ({error}): does it run?") from error
    finally:
        connection.close()
    if response.status != 200:
        raise RefusedError(str(said.get("error", {}).get("message", said)), said)
    return said
