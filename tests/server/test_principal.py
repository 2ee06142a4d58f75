"""From a credential to a tenant, and from a request to whatever works for it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.settings import TenantShare
from hotspan.config.tenants import Tenant, Tenants
from hotspan.core.credentials import key_digest
from hotspan.core.errors import ConfigError
from hotspan.server import principal as module
from hotspan.server.principal import ANYBODY, Credentials, Principal, asking, current_principal, current_tenant

ADMIN_TOKEN = "admin-token-of-the-test"
ACME = Principal("acme", has_key=True)
ADMIN = Principal("default", has_key=True, is_admin=True)


def known(**keys: str) -> Tenants:
    return Tenants(tuple(Tenant(name, (key_digest(key),), TenantShare(name)) for name, key in keys.items()))


KEYED = Credentials(known(acme="key-a", globex="key-b"), ADMIN_TOKEN)
OPEN = Credentials(Tenants(), ADMIN_TOKEN)


@pytest.mark.parametrize(
    ("headers", "keyed", "open_"),
    [
        ({}, None, ANYBODY),
        ({"authorization": "Bearer key-a"}, ACME, ANYBODY),
        ({"authorization": "bearer  key-a "}, ACME, ANYBODY),
        ({"x-api-key": "key-a"}, ACME, ANYBODY),
        ({"authorization": "Bearer placeholder", "x-api-key": "key-a"}, ACME, ANYBODY),
        ({"authorization": "Bearer key-a", "x-api-key": "key-b"}, ACME, ANYBODY),
        ({"authorization": "Basic key-a"}, None, ANYBODY),
        ({"authorization": "key-a"}, None, ANYBODY),
        ({"authorization": "Bearer "}, None, ANYBODY),
        ({"authorization": "Bearer key-"}, None, ANYBODY),
        ({"authorization": f"Bearer {ADMIN_TOKEN}"}, ADMIN, ADMIN),
        ({"x-api-key": ADMIN_TOKEN}, ADMIN, ADMIN),
    ],
)
def test_who_shows_what(headers: dict[str, str], keyed: Principal | None, open_: Principal) -> None:
    """A key in either header is its tenant, no key is nobody; without keys on the server it is the default tenant."""
    assert KEYED.identify(headers) == keyed
    assert OPEN.identify(headers) == open_


@given(st.text())
def test_any_other_text_is_nobody(text: str) -> None:
    """No text but the keys is a key, and none makes the comparison fail."""
    if text.strip() not in ("key-a", "key-b", ADMIN_TOKEN):
        assert KEYED.identify({"authorization": f"Bearer {text}"}) is None


def test_every_digest_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key, the last one and a wrong one cost the same comparisons, each by compare_digest."""
    compared: list[int] = []
    real = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: compared.append(len(a)) or real(a, b))
    for shown in (ADMIN_TOKEN, "key-b", "wrong"):
        compared.clear()
        KEYED.identify({"x-api-key": shown})
        assert compared == [32, 32, 32]


def test_admin_token_is_no_clients() -> None:
    """A tenant's key as admin token would make that tenant the administrator: refused."""
    with pytest.raises(ConfigError, match="of its own"):
        Credentials(known(acme=ADMIN_TOKEN), ADMIN_TOKEN)


def test_no_secret_in_repr() -> None:
    """A log line of the credentials tells nothing."""
    assert repr(KEYED) == "Credentials(keys=3)"


async def test_follows_the_request_into_its_tasks() -> None:
    """Concurrent requests keep their tenants apart, in the tasks they start and after these outlive them."""

    async def later() -> str:
        await asyncio.sleep(0.01)
        return current_tenant()

    async def request(name: str) -> asyncio.Task[str]:
        with asking(Principal(name, has_key=True)):
            await asyncio.sleep(0)
            assert current_tenant() == name
            return asyncio.create_task(later())

    tasks = await asyncio.gather(*(request(f"t{n}") for n in range(8)))
    assert await asyncio.gather(*tasks) == [f"t{n}" for n in range(8)]
    assert current_principal() == ANYBODY
