"""The dashboard's page: no data, no asset from elsewhere, and a policy that allows nothing but its own script."""

import base64
import hashlib
import re

from hotspan.http.dashboard import DASHBOARD, dashboard
from hotspan.router.routes import CACHE, REPLICAS
from tests.docs.test_pages import unknown_metrics
from tests.router.rig import replicas, routed, say_ok
from tests.server.test_admin_routes import FakeEngine, ask

TEXT = dashboard().content.decode()


def test_policy_allows_the_pages_own_script_and_style_alone() -> None:
    """Both by their digests; requests go to the same origin only, and no other site can frame the page."""
    policy = dict(part.split(" ", 1) for part in dashboard().headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", TEXT, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)


def test_page_loads_nothing_from_elsewhere() -> None:
    """No address but SVG's name, and no attribute that the policy would block."""
    assert set(re.findall(r"https?://[^\s\"'`<]+", TEXT)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\s(src|style|on\w+)=\"", TEXT) and "innerHTML" not in TEXT


def test_metrics_of_the_page_exist() -> None:
    """Each metric that the page reads is one that the code has."""
    assert len(re.findall(r"hotspan_(?:cache|cost|router)_\w+", TEXT)) > 40
    assert not unknown_metrics(re.sub(r'"(hotspan_\w+)" \+', "", TEXT))


def test_anybody_gets_the_page_and_only_the_administrator_its_data() -> None:
    """A browser can open the page without a token; what it shows needs one."""
    engine = FakeEngine({"replica": "r", "tiers": {}, "texts": [], "hit_tokens": {}, "is_encrypted": False})
    reply = ask(engine, "GET", DASHBOARD, key=None)
    assert reply.status == 200 and reply.body == dashboard().content and not engine.asked
    assert reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"] == dashboard().headers["content-security-policy"]
    assert [ask(engine, "GET", "/hotspan/cache", key=key).status for key in (None, "key-a")] == [401, 403]
    assert ask(engine, "GET", "/hotspan/cache").status == 200


async def test_the_router_has_the_page_and_keeps_its_data() -> None:
    """The router answers itself, without a token; its metrics and replicas need the token."""
    async with replicas(say_ok) as (fake,), routed([fake], admin_token="t") as at:
        async with at.client.get(at.url + DASHBOARD) as answer:
            assert answer.status == 200 and await answer.read() == dashboard().content
            assert answer.headers["content-security-policy"] == dashboard().headers["content-security-policy"]
        for path in ("/metrics", REPLICAS, CACHE):
            async with at.client.get(at.url + path) as answer:
                assert answer.status == 401
            assert not fake.asked
            async with at.client.get(at.url + path, headers={"authorization": "Bearer t"}) as answer:
                assert answer.status == 200
