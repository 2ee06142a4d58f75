"""The guard of the engine: which salt and which directives a request gets, whatever its client said."""

import asyncio
import copy
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from hotspan.core.directives import Directives, parse_directives
from hotspan.core.fair import FairOrder
from hotspan.engine import guard
from hotspan.engine.guard import RequestGuard
from hotspan.http.exchange import ON_READ
from hotspan.server.principal import Principal, asking, current_tenant
from hotspan.server.run import use_fair_queueing
from kit.waiting import until_async

GUARD = RequestGuard(current_tenant)


def request(params: object = None, salt: str | None = None, **extra: Any) -> EngineCoreRequest:
    given = extra if params is None else extra | {"kv_transfer_params": params}
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args=given or None),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def handed(asked: EngineCoreRequest) -> Directives:
    assert asked.sampling_params is not None and asked.sampling_params.extra_args is not None
    params = asked.sampling_params.extra_args["kv_transfer_params"]
    assert list(params) == ["hotspan"]
    return Directives.from_json(params["hotspan"])


def test_directives_are_the_principals() -> None:
    """What the client asked for goes down with the tenant of its key; what else it sent is kept as it was."""
    asked = request({"ttl": "1h", "tags": ["a"]}, logits="x")
    with asking(Principal("acme")):
        GUARD.admit(asked)
    assert handed(asked) == Directives(tenant="acme", ttl_s=3600, tags=("a",))
    assert asked.sampling_params and asked.sampling_params.extra_args
    assert asked.sampling_params.extra_args["logits"] == "x"


def test_requests_without_directives_have_a_tenant() -> None:
    """A request that says nothing, and one of the server itself, is somebody's."""
    asked = request()
    GUARD.admit(asked)
    assert handed(asked) == Directives(tenant="default") and asked.cache_salt == GUARD.salt("default", None)


@pytest.mark.parametrize(
    "params",
    [{"hotspan": {"tenant": "globex"}}, {"tenant": "globex"}, {"do_remote_prefill": True}, "text", [1], {"ttl": 0}, 7],
)
def test_wrong_directives_are_the_clients_error(params: object) -> None:
    """Nothing but the whitelist passes, and it is an error that routes answer with 400."""
    with pytest.raises(VLLMValidationError):
        GUARD.admit(request(params))


def test_shared_parameters_are_not_touched() -> None:
    """Choices of one request share their parameters: each gets its directives, and the client's stay what they were."""
    first = request({"tags": ["a"]})
    second = copy.copy(first)
    shared, before = first.sampling_params, copy.deepcopy(first.sampling_params)
    with asking(Principal("acme")):
        GUARD.admit(first)
        GUARD.admit(second)
    assert handed(first) == handed(second) and first.cache_salt == second.cache_salt
    assert shared == before


def test_pooling_requests_are_salted() -> None:
    """Embeddings carry no directives, and are kept apart all the same."""
    asked = request()
    asked.sampling_params, asked.pooling_params = None, PoolingParams()
    with asking(Principal("acme")):
        GUARD.admit(asked)
    assert asked.cache_salt == GUARD.salt("acme", None)


def test_without_tiers_and_without_isolation() -> None:
    """--no-cache salts and checks but hands nothing down; --share-across-tenants leaves the client's salt alone."""
    plain = RequestGuard(current_tenant, is_cached=False)
    asked = request({"ttl": 60})
    plain.admit(asked)
    assert asked.sampling_params and not asked.sampling_params.extra_args and asked.cache_salt
    with pytest.raises(VLLMValidationError):
        plain.admit(request({"ttl": "x"}))
    shared = RequestGuard(current_tenant, is_isolated=False)
    for salt in (None, "mine"):
        asked = request(salt=salt)
        with asking(Principal("acme")):
            shared.admit(asked)
        assert asked.cache_salt == salt and handed(asked).tenant == "acme"


@given(st.lists(st.tuples(st.text(max_size=8), st.none() | st.text(max_size=8)), min_size=2, max_size=2, unique=True))
def test_salts_differ(pairs: list[tuple[str, str | None]]) -> None:
    """Two tenants, or two salts of one tenant, never share a salt; no salt of a client's is one of ours."""
    (first, one), (second, two) = pairs
    alike = (first, one or "") == (second, two or "")
    assert (GUARD.salt(first, one) == GUARD.salt(second, two)) == alike
    assert GUARD.salt(first, GUARD.salt(second, two)) != GUARD.salt(second, two)


def guarded() -> tuple[Any, list[Any]]:
    """A client behind the guard, and what its engine was given."""
    seen: list[Any] = []

    async def add(asked: EngineCoreRequest) -> None:
        seen.append(asked)

    async def generate(prompt: object, sampling_params: SamplingParams, request_id: str) -> Any:
        asked = request()
        asked.sampling_params = sampling_params
        await client.engine_core.add_request_async(asked)
        yield request_id

    renderer = SimpleNamespace(_process_multimodal=add, _executor=None)
    observability = SimpleNamespace(otlp_traces_endpoint=None)
    client: Any = SimpleNamespace(
        engine_core=SimpleNamespace(add_request_async=add),
        generate=generate,
        renderer=renderer,
        vllm_config=SimpleNamespace(observability_config=observability),
    )
    GUARD.protect(client)
    return client, seen


def test_a_stream_is_refused_before_it_begins() -> None:
    """Wrong directives fail the call that makes the stream, not the stream."""
    client, seen = guarded()
    wrong = SamplingParams(extra_args={"kv_transfer_params": {"tag": "x"}})
    with pytest.raises(VLLMValidationError, match="did you mean tags"):
        client.generate("prompt", wrong, "r")
    assert not seen


async def test_a_stream_keeps_the_tenant_it_was_begun_under() -> None:
    """Streams of two tenants that run side by side reach the engine as their own."""
    client, seen = guarded()

    async def run(name: str) -> None:
        with asking(Principal(name)):
            stream = client.generate("prompt", sampling_params=SamplingParams(), request_id=name)
            await asyncio.sleep(0)
            async for _ in stream:
                await asyncio.sleep(0)

    await asyncio.gather(*(run(f"t{n}") for n in range(4)))
    assert {handed(asked).tenant for asked in seen} == {f"t{n}" for n in range(4)}


def test_nothing_passes_the_guard_unseen() -> None:
    """What reaches the engine without `generate` is refused at the engine itself."""
    client, seen = guarded()
    with pytest.raises(VLLMValidationError):
        asyncio.run(client.engine_core.add_request_async(request({"hotspan": {"tenant": "globex"}})))
    assert not seen


def prompt(name: str, tokens: int, priority: int = 0) -> EngineCoreRequest:
    asked = request()
    asked.request_id, asked.prompt_token_ids, asked.priority = name, [1] * tokens, priority
    return asked


async def test_the_engine_has_a_prompt_once_it_is_admitted() -> None:
    """Whoever waits for the request's text to be read is told then, and not before."""
    client, seen = guarded()
    told = list[int]()
    token = ON_READ.set(lambda: told.append(len(seen)))
    try:
        answer = client.generate("prompt", SamplingParams(), "r")
        assert not told
        async for _ in answer:
            break
    finally:
        ON_READ.reset(token)
    assert told == [1]


async def test_prompts_of_tenants_are_begun_in_turns() -> None:
    """In vLLM's queue, one tenant's short prompt goes before the long ones that another has waiting; what clients give
    as priority does not count, and embeddings are served as they came."""
    fair, served = RequestGuard(current_tenant, order=FairOrder()), list[str]()
    queue: Any = create_request_queue(SchedulingPolicy.PRIORITY)

    async def add(asked: EngineCoreRequest) -> None:
        queue.add_request(Request.from_engine_core_request(asked, None))

    async def generate(asked: EngineCoreRequest, sampling_params: SamplingParams) -> Any:
        await client.engine_core.add_request_async(asked)
        while asked.request_id not in served:
            await asyncio.sleep(0)
        yield asked.request_id

    client: Any = SimpleNamespace(
        engine_core=SimpleNamespace(add_request_async=add),
        generate=generate,
        renderer=SimpleNamespace(_process_multimodal=add, _executor=None),
        vllm_config=SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None)),
    )
    fair.protect(client)

    async def ask(tenant: str, asked: EngineCoreRequest) -> None:
        with asking(Principal(tenant)):
            async for _ in client.generate(asked, sampling_params=asked.sampling_params):
                pass

    tasks = [asyncio.create_task(ask("noisy", prompt(f"n{n}", 1000, priority=-9))) for n in range(20)]
    await until_async(lambda: len(queue) == 20)
    served += [queue.pop_request().request_id for _ in range(3)]
    await until_async(lambda: sum(task.done() for task in tasks) == 3)
    tasks += [asyncio.create_task(ask("quiet", prompt(f"q{n}", 10))) for n in range(2)]
    await until_async(lambda: len(queue) == 19)
    while queue:
        served.append(queue.pop_request().request_id)
    await asyncio.gather(*tasks)
    assert served[:3] == ["n0", "n1", "n2"] and {"q0", "q1"} <= set(served[3:5]) and len(served) == 22
    embedding = request()
    embedding.sampling_params, embedding.pooling_params = None, PoolingParams()
    fair.admit(embedding)
    assert embedding.priority == 0


@pytest.mark.parametrize(
    ("tenants", "policy", "given", "expected"),
    [
        (2, "fcfs", {}, "priority"),
        (1, "fcfs", {}, "fcfs"),
        (0, "fcfs", {}, "fcfs"),
        (2, "fcfs", {"scheduling_policy": "fcfs"}, "fcfs"),
        (2, "priority", {"scheduling_policy": "priority"}, "priority"),
        (2, "priority", {}, "priority"),
    ],
)
def test_the_queue_is_fair_where_there_are_tenants(
    tenants: int, policy: str, given: dict[str, str], expected: str
) -> None:
    """With two or more, unless the operator chose how the engine's queue is served."""
    arguments = SimpleNamespace(scheduling_policy=policy)
    options = SimpleNamespace(tenants=SimpleNamespace(tenants=range(tenants)), engine_values=given)
    is_fair = use_fair_queueing(arguments, options)  # type: ignore[arg-type]
    assert arguments.scheduling_policy == expected and is_fair == (policy == "fcfs" and expected == "priority")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"kv_transfer_params": {"ttl": 60}}, None),
        ({"kv_transfer_params": {"tll": 60}}, 400),
        ({"kv_transfer_params": None, "use_beam_search": True}, None),
        ({"kv_transfer_params": {"ttl": 60}, "use_beam_search": True}, 400),
        ({"features": {"mm_hashes": {"image": ["u"]}}}, 400),
        ({}, None),
    ],
)
def test_handlers_refuse_before_any_work(body: dict[str, Any], status: int | None) -> None:
    """Handlers that see a whole request answer wrong directives with an error of status 400, and do nothing."""
    done: list[Any] = []

    async def create(asked: Any, raw: object) -> str:
        done.append(asked)
        return "answer"

    state = SimpleNamespace(openai_serving_completion=SimpleNamespace(create_completion=create))
    GUARD.protect_routes(SimpleNamespace(state=state))  # type: ignore[arg-type]
    answer = asyncio.run(state.openai_serving_completion.create_completion(SimpleNamespace(**body), None))
    assert (answer == "answer" and len(done) == 1) if status is None else (answer.error.code == status and not done)


def test_directives_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler found right is not parsed again on its way to the engine, and only a handler can have said so."""
    parsed: list[Any] = []
    monkeypatch.setattr(guard, "parse_directives", lambda params: parsed.append(params) or parse_directives(params))

    async def create(asked: Any, raw: object) -> None:
        forwarded = request(copy.deepcopy(asked.kv_transfer_params))
        with asking(Principal("acme")):
            GUARD.admit(forwarded)
        assert handed(forwarded) == Directives(tenant="acme", ttl_s=60)

    state = SimpleNamespace(openai_serving_completion=SimpleNamespace(create_completion=create))
    GUARD.protect_routes(SimpleNamespace(state=state))  # type: ignore[arg-type]
    asked = SimpleNamespace(kv_transfer_params={"ttl": 60})
    asyncio.run(state.openai_serving_completion.create_completion(asked, None))
    assert parsed == [{"ttl": 60}]


CONTROL = {"type": "ephemeral", "ttl": "1h"}


class Body:
    """What a route has of a request beside its parsed body; `Request` for the guard."""

    def __init__(self, body: Any) -> None:
        self._body = json.dumps(body).encode()

    async def body(self) -> bytes:
        return self._body


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_pinned_goes_down_with_the_request(monkeypatch: pytest.MonkeyPatch, *, is_stream: bool) -> None:
    """A breakpoint, or a retention, of a request reaches the engine, though a stream is read by another task than its
    route's; the next request of the same task has none of it.
    """
    monkeypatch.setattr(guard, "Request", Body)
    found: list[Directives] = []

    def admitted() -> None:
        forwarded = request()
        GUARD.admit(forwarded)
        found.append(handed(forwarded))

    async def stream() -> AsyncGenerator[str]:
        admitted()
        yield "part"

    async def create(asked: Any, raw: Any) -> Any:
        return stream() if is_stream else admitted()

    state = SimpleNamespace(openai_serving_chat=SimpleNamespace(create_chat_completion=create))
    GUARD.protect_routes(SimpleNamespace(state=state))  # type: ignore[arg-type]

    async def ask(body: dict[str, Any]) -> Any:
        route = state.openai_serving_chat.create_chat_completion(SimpleNamespace(**body), Body(body))
        answer = await asyncio.create_task(route)  # as vLLM's routes run their handlers
        parts = [part async for part in answer] if is_stream else []
        assert len(parts) == is_stream
        return answer

    async def run() -> None:
        messages = [{"role": "user", "content": "text", "cache_control": CONTROL}]
        await ask({"messages": messages})
        await ask({"messages": [], "prompt_cache_retention": "24h"})
        await ask({"messages": []})

    asyncio.run(run())
    assert [each.holds for each in found] == [((1.0, 3600.0),), ((1.0, 86400.0),), ()]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_retention": "1h"},
        {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]},
        {"system": [{"type": "text", "text": "a", "cache_control": CONTROL}] * 5},
    ],
)
def test_what_would_pin_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> None:
    """With a 400, before any work."""
    monkeypatch.setattr(guard, "Request", Body)
    done: list[Any] = []

    async def create(asked: Any, raw: Any) -> None:
        done.append(asked)

    state = SimpleNamespace(anthropic_serving_messages=SimpleNamespace(create_messages=create))
    GUARD.protect_routes(SimpleNamespace(state=state))  # type: ignore[arg-type]
    answer = asyncio.run(state.anthropic_serving_messages.create_messages(SimpleNamespace(**body), Body(body)))
    assert answer.error.code == 400 and not done
