"""Directives: what a client may ask of the cache, and what the operator's rules make of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.directives import (
    BLEND_MODES,
    MAX_TTL_S,
    BlendDirective,
    Directives,
    RetentionRule,
    governed,
    parse_directives,
    seconds,
    with_documents,
)
from hotspan.core.terms import adapter_label, tag_labels, tenant_label

NAMES = st.text(min_size=1, max_size=8)
DIRECTIVES = st.builds(
    Directives,
    tenant=NAMES,
    tags=st.lists(NAMES, max_size=4).map(tuple),
    tags_from=st.integers(0, 1 << 40),
    session=st.none() | NAMES,
    ttl_s=st.none() | st.integers(1, MAX_TTL_S),
    no_store=st.booleans(),
    renew=st.booleans(),
    blend=st.none()
    | st.booleans()
    | st.builds(
        BlendDirective,
        st.none() | st.sampled_from(BLEND_MODES),
        st.none() | st.floats(0, 1),
        st.none() | st.integers(1, 99),
    ),
)
RULES = st.builds(
    RetentionRule,
    tenant=st.sampled_from(["*", "a", "a*", "b"]),
    tag=st.none() | st.sampled_from(["*", "x", "x*", "doc"]),
    ttl_s=st.none() | st.integers(1, 100),
    no_store=st.booleans(),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(90, 90), (90.9, 90), ("90", 90), ("90s", 90), ("1.5h", 5400), ("15m", 900), (" 12 h ", 43200), ("7d", 604800)],
)
def test_times_to_live(value: object, expected: int) -> None:
    """A number is seconds; a text is a number with s, m, h or d."""
    assert seconds(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(0, 0.5, -1, MAX_TTL_S + 1, float("inf"), float("nan"), True, None, [60]),
        *("0", "0.5s", "", "h", "1w", "-1h", "1h30m", "1e3", "inf", "36501d", "9" * 400),
    ],
)
def test_other_times_are_refused(value: object) -> None:
    """Anything else raises ValueError that says what would do."""
    with pytest.raises(ValueError, match=r"15m, 12h or 7d"):
        seconds(value)


@given(DIRECTIVES)
def test_directives_survive_json(directives: Directives) -> None:
    """What `to_json` gave, through a JSON text, are the same directives."""
    assert Directives.from_json(json.loads(json.dumps(directives.to_json()))) == directives


@given(st.dictionaries(st.sampled_from(["ttl", "tags", "tags_from", "session", "no_store", "renew", "tag"]), JSON))
def test_any_parameters_parse_or_are_refused(params: dict) -> None:
    """Whatever a client sends either parses to directives of the default tenant, or raises ValueError."""
    try:
        directives = parse_directives(params)
    except ValueError as error:
        assert str(error)
    else:
        assert directives.tenant == "default"
        assert parse_directives({k: v for k, v in directives.to_json().items() if k != "tenant" and v is not None})


def test_all_parameters_arrive() -> None:
    """Every parameter that a client may give is where it belongs."""
    found = parse_directives(
        {"ttl": "1h", "tags": ["a", "b"], "tags_from": 7, "session": "s", "no_store": True, "renew": True}
    )
    assert found == Directives("default", ("a", "b"), 7, "s", 3600, True, True)
    assert parse_directives({}) == Directives()
    assert parse_directives({"ttl": None, "session": None}) == Directives()


def test_nobody_says_whose_he_is() -> None:
    """A client can't name its tenant."""
    with pytest.raises(ValueError, match="'tenant'"):
        parse_directives({"tenant": "somebody else"})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tag": ["a"]}, "did you mean tags"),
        ({"zzz": 1}, "it takes ttl, tags"),
        ({"tags": "a"}, "list of texts"),
        ({"tags": [1]}, "1 to 512 characters"),
        ({"tags": [""]}, "1 to 512 characters"),
        ({"tags": ["a" * 513]}, "1 to 512 characters"),
        ({"tags": ["a"] * 65}, "at most 64"),
        ({"session": ""}, "1 to 512 characters"),
        ({"session": 7}, "1 to 512 characters"),
        ({"tags_from": -1}, "number of tokens"),
        ({"tags_from": True}, "number of tokens"),
        ({"tags_from": 1.0}, "number of tokens"),
        ({"no_store": 1}, "true or false"),
        ({"renew": "yes"}, "true or false"),
        ({"ttl": "soon"}, "ttl is 'soon'"),
        ({"blend": "much"}, "first_k, deviation, query"),
        ({"blend": {"mode": "much"}}, "mode 'much'"),
        ({"blend": {"ratio": 0.3}}, "mode, recompute_ratio"),
        ({"blend": {"recompute_ratio": 3}}, "share from 0 to 1"),
        ({"blend": {"check_layer": 0}}, "check_layer of blend is 0: give a whole number from 1"),
        ({"blend": {"check_layer": 1.5}}, "check_layer of blend"),
    ],
)
def test_refusals_say_what_would_do(params: dict, message: str) -> None:
    """A parameter that can't be used is named, and the message says what can."""
    with pytest.raises(ValueError, match=message):
        parse_directives(params)


def test_a_version_of_a_document_is_the_document() -> None:
    """ "name@version" carries "name" too; a leading or missing @ is part of the name."""
    assert with_documents(["doc@3", "plain", "@odd"]) == {"doc@3", "doc", "plain", "@odd"}
    assert with_documents(["a@b@c"]) == {"a@b@c", "a@b"}


def test_terms_carry_all_wishes() -> None:
    """The terms are those of the tenant, the adapter, all tags and documents, the session and the time."""
    directives = Directives("t", ("doc@1",), session="s", ttl_s=60)
    terms = directives.terms("lora", 1000.9)
    assert (terms.tenant, terms.adapter) == (tenant_label("t"), adapter_label("lora"))
    assert terms.labels == tag_labels(["doc@1", "doc"], "s")
    assert terms.expires_s == 1060
    assert Directives().terms(None, 5.0).expires_s == 0 == Directives().terms(None, 5.0).adapter


@given(DIRECTIVES, st.lists(RULES, max_size=4), st.randoms())
def test_rules_only_shorten(directives: Directives, rules: list[RetentionRule], random: object) -> None:
    """Rules never lengthen a time to live nor lift no_store, their order does not matter, and nothing else changes."""
    found = governed(directives, rules)
    random.shuffle(rules)  # type: ignore[attr-defined]
    assert governed(directives, rules) == found == governed(found, rules)
    limits = [rule.ttl_s for rule in rules if rule.applies(directives) and rule.ttl_s is not None]
    limits += [] if directives.ttl_s is None else [directives.ttl_s]
    assert found.ttl_s == min(limits, default=None)
    assert found.no_store == (directives.no_store or any(rule.no_store for rule in rules if rule.applies(directives)))
    assert (found.tenant, found.tags, found.session) == (directives.tenant, directives.tags, directives.session)


def test_rules_apply_by_tenant_and_tag() -> None:
    """A rule with a tag is for requests that carry it, documents counted; patterns are those of a shell, and exact."""
    rule = RetentionRule("acme-*", "secret*", ttl_s=60)
    assert rule.applies(Directives("acme-1", ("secret-plan@2",)))
    assert RetentionRule(tag="doc").applies(Directives(tags=("doc@9",)))
    assert not rule.applies(Directives("acme-1"))
    assert not rule.applies(Directives("Acme-1", ("secret",)))
    assert not rule.applies(Directives("other", ("secret",)))
    assert RetentionRule().applies(Directives("anybody"))
