"""The router says of each replica whether what it holds is known or assumed, and why."""

import pytest

from hotspan.core.errors import ConfigError
from hotspan.router.settings import Replica

from .rig import replicas, routed, say_ok


async def test_without_events_it_is_said_so() -> None:
    """A replica without events is not exact, for a reason that the metrics name."""
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        assert await at.metric("replica_is_exact", replica=fake.url) == 0
        assert await at.metric("events_state", replica=fake.url, reason="no_events") == 1


async def test_events_need_a_model() -> None:
    """Events name tokens: without a tokenizer they are refused, and not silently useless."""
    async with replicas(say_ok) as (fake,):
        behind = (Replica(fake.url, events="tcp://127.0.0.1:5557"),)
        with pytest.raises(ConfigError, match="--model"):
            async with routed([fake], behind=behind):
                pass


async def test_adapters_have_texts_of_their_own() -> None:
    """The same prompt for another adapter, by header or by `model`, is not taken to be cached."""
    body = {"model": "m", "prompt": "a long text " * 500}
    law = {"x-amzn-sagemaker-adapter-identifier": "law"}
    async with replicas(say_ok) as (fake,), routed([fake], is_exposing=True) as at:
        seen = []
        for asked, headers in ((body, {}), (body, {}), (body | {"model": "n"}, {}), (body, law), (body, law)):
            async with at.post(asked, headers=headers) as answer:
                seen.append(int(answer.headers["x-hotspan-cached-tokens"]) > 0)
        assert seen == [False, True, False, False, True]
