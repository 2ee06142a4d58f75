"""An owner withdraws texts that a warm-up is computing, or has yet to: none of them is in any cache afterwards."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hotspan.bench.prose import prose

from .conftest import KEYS, House

pytestmark = pytest.mark.engine

WORDS = 500
WARM = "/hotspan/cache/warm"


def begun(house: House, withdrawn: list[str], kept: str, **named: Any) -> str:
    """The path of a warm-up of texts, all but the last of which are named so."""
    texts: list[dict[str, Any]] = [{"prompt": text, **named} for text in withdrawn]
    answer = house.call("POST", WARM, KEYS["acme"], {"texts": [*texts, {"prompt": kept}]})
    assert answer.status_code == 202, answer.text
    return f"{WARM}/{answer.json()['id']}"


def shown(house: House, path: str) -> dict[str, Any]:
    """The warm-up as it is now."""
    answer = house.call("GET", path, KEYS["acme"])
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


SCOPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tag": ({"tags": ["manual"]}, {"tags": ["manual"]}),
    "session": ({"session": "of-a-reader"}, {"session": "of-a-reader"}),
    "its text": ({}, {}),
}
"""What texts are named, and the invalidation that takes them; an empty one is one for each text, by the text."""


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("warmed", [0, 2])
def test_a_warm_up_that_an_invalidation_overtakes(house: House, name: str, warmed: int) -> None:
    """After a durable receipt no text that it takes is a hit, however far the warm-up was; the others are warmed.

    Another tenant's requests hold the warm-up up, so that texts of it are withdrawn before, while and after they are
    computed.
    """
    named, scope = SCOPES[name]
    seed = 97000 + 100 * list(SCOPES).index(name) + 10 * warmed
    texts, kept = [prose(seed + n, WORDS) for n in range(5)], prose(seed + 9, WORDS)
    body = {"model": house.server.model, "prompt": "go on", "max_tokens": 32, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(house.call, "POST", "/v1/completions", KEYS["globex"], body) for _ in range(4)]
        path = begun(house, texts, kept, **named)
        while (state := shown(house, path))["warmed"] < warmed:
            assert state["state"] in ("waiting", "running"), state
        for each in [scope] if scope else [{"prompt": text} for text in texts]:
            receipt = house.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], each)
            assert receipt.status_code == 200 and receipt.json()["is_durable"], receipt.text
        while (state := shown(house, path))["state"] in ("waiting", "running"):
            time.sleep(0.01)
        assert {other.result().status_code for other in others} <= {200, 429}
    assert state["state"] == "done" and state["warmed"] + state["failed"] == 6, state
    assert [house.ask("acme", text).cached for text in texts] == [0] * 5
    assert house.ask("acme", kept).cached > 256
