"""What a tenant with a right key tries against another tenant: its texts, its cache, its sessions, its adapters."""

import httpx
import pytest

from hotspan.bench.prose import prose

from .conftest import HTTP, KEYS, House

pytestmark = pytest.mark.engine

WORDS = 700


def test_another_tenants_text_is_computed_like_any_other(house: House) -> None:
    """The engine schedules as many tokens for a text that only another tenant has asked as for one that nobody has.

    So the time to first token can tell nothing; `make timing` measures that it does not.
    """
    asked, fresh = prose(9100, WORDS), prose(9101, WORDS)
    assert house.ask("acme", asked).cached == 0
    assert house.ask("acme", asked).cached > 256
    assert house.ask("globex", asked).cached == house.ask("globex", fresh).cached == 0
    for salt in ("", "acme", "default", "0"):
        salted = {"cache_salt": salt} if salt else {}
        assert house.ask("globex", prose(9102, 200) + asked, **salted).cached == 0


def expected(house: House, who: str, text: str, **more: object) -> int:
    """Cached tokens that the router expects for a tenant's completion."""
    asked = {"model": house.server.model, "prompt": text, "max_tokens": 1, **more}
    headers = {"authorization": f"Bearer {KEYS[who]}"}
    answer = HTTP.post(f"http://127.0.0.1:{house.router_port}/v1/completions", headers=headers, json=asked)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-hotspan-cached-tokens"])


@pytest.mark.parametrize("named", [{}, {"session_id": "of-a-chat"}, {"cache_salt": "of-a-team"}], ids=str)
def test_the_router_tells_no_tenant_what_others_sent(house: House, named: dict[str, object]) -> None:
    """`x-hotspan-cached-tokens` of a router with keys is for another's text what it is for one that nobody sent.

    It tells a tenant of its own texts, also of one that another tenant has sent, too.
    """
    words = " ".join(map(str, named.values()))
    sent, fresh = words + prose(9150, WORDS), words + prose(9151, WORDS)
    assert expected(house, "acme", sent, **named) == 0
    assert expected(house, "acme", sent, **named) > 256
    assert expected(house, "globex", fresh, **named) == expected(house, "globex", sent, **named) == 0
    assert expected(house, "globex", sent, **named) > 256 < expected(house, "acme", sent, **named)


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": {"hotspan": {"tenant": "acme"}}},
        {"kv_transfer_params": {"tenant": "acme"}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [0]}},
        {"kv_transfer_params": ["tags"]},
        {"cache_salt": 7},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"priority": "highest"},
    ],
    ids=str,
)
def test_no_body_names_a_tenant(house: House, body: dict[str, object]) -> None:
    """Whose a request is comes from its key; a body that tries to say it is refused, or says nothing."""
    text = prose(9110, WORDS)
    house.ask("acme", text)
    asked = {"model": house.server.model, "prompt": text, "max_tokens": 1, **body}
    answer = house.call("POST", "/v1/completions", KEYS["globex"], asked)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        assert not answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "scope", [{"tenant": "acme"}, {"tenant": "acme", "tags": ["a"]}, {"tenant": "nobody"}], ids=str
)
def test_no_tenant_forgets_for_another(house: House, scope: dict[str, object]) -> None:
    """An invalidation that names another tenant is refused and takes nothing."""
    text = prose(9120, WORDS)
    house.ask("acme", text, kv_transfer_params={"tags": ["a"]})
    answer = house.call("POST", "/hotspan/cache/invalidate", KEYS["globex"], scope)
    assert answer.status_code == 403, answer.text
    assert house.ask("acme", text).cached > 256


@pytest.mark.parametrize("named", [{"tags": ["shared-name"]}, {"session": "shared-name"}], ids=str)
def test_equal_names_of_two_tenants_are_two_names(house: House, named: dict[str, object]) -> None:
    """A tag or a session of one tenant is not the other's of the same name."""
    text = prose(9130, WORDS)
    for who in KEYS:
        house.ask(who, text, kv_transfer_params=named)
    answer = house.call("POST", "/hotspan/cache/invalidate", KEYS["globex"], named)
    assert answer.status_code == 200, answer.text
    assert house.ask("globex", text).cached == 0
    assert house.ask("acme", text).cached > 256


def test_a_text_is_forgotten_for_its_own_tenant_only(house: House) -> None:
    """Naming a text forgets one's own copy of it."""
    text = prose(9140, WORDS)
    for who in KEYS:
        house.ask(who, text)
    answer = house.call("POST", "/hotspan/cache/invalidate", KEYS["globex"], {"prompt": text})
    assert answer.status_code == 200, answer.text
    assert house.ask("globex", text).cached == 0
    assert house.ask("acme", text).cached > 256


def test_a_stored_response_is_its_tenants(house: House) -> None:
    """An id of another tenant's response is unknown, whether it is read, cancelled, continued, or used again."""
    body = {"model": house.server.model, "input": "hello", "max_output_tokens": 4, "store": True}
    made = house.call("POST", "/v1/responses", KEYS["acme"], body)
    assert made.status_code == 200, made.text
    name = made.json()["id"]
    own, stolen = f"/v1/responses/{name}", body | {"previous_response_id": name}
    statuses = {
        who: [
            house.call("GET", own, KEYS[who]).status_code,
            house.call("POST", "/v1/responses", KEYS[who], stolen).status_code,
            house.call("POST", f"{own}/cancel", KEYS[who]).status_code,
        ]
        for who in ("acme", "globex")
    }
    assert statuses == {"acme": [200, 200, 400], "globex": [404, 404, 404]}
    house.call("POST", "/v1/responses", KEYS["globex"], body | {"input": "other", "request_id": name})
    assert house.call("GET", own, KEYS["acme"]).json()["output"] == made.json()["output"]


def test_a_session_is_its_tenants(house: House) -> None:
    """Another tenant can't close a session, and does not learn whether there is one."""
    opened = house.call("POST", "/invocations", KEYS["acme"], {"requestType": "NEW_SESSION"})
    assert opened.status_code == 200, opened.text
    name = opened.headers["x-amzn-sagemaker-session-id"].partition(";")[0]
    closing = {"authorization": f"Bearer {KEYS['globex']}", "x-amzn-sagemaker-session-id": name}
    foreign, unknown = (
        _post(house, closing | {"x-amzn-sagemaker-session-id": which}) for which in (name, "0" * len(name))
    )
    assert foreign == unknown
    own = _post(house, closing | {"authorization": f"Bearer {KEYS['acme']}"})
    assert own[0] == 200, own


def _post(house: House, headers: dict[str, str]) -> tuple[int, str]:
    """Status and error of a request to close a session, without the id."""
    answer = httpx.post(house.server.url + "/invocations", headers=headers, json={"requestType": "CLOSE"}, timeout=60)
    return answer.status_code, answer.text.replace(headers["x-amzn-sagemaker-session-id"], "ID")
