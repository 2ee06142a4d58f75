"""What has a tenant's label in RAM is found by an index: a search costs what it finds, not what others have."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotspan
from hotspan.cache.entry import Entry, Reader
from hotspan.cache.labels import Labels
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import MAX_LABELS, WINDOW, Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import chain
from tests.operations import operations

from .rig import Rig

TAG, NAMESPACE = 7, bytes(32)
A, B = 1, 2


def store(rig: Rig, chunks: Sequence[Chunk], tenant: int, labels: frozenset[int]) -> None:
    rig.cache.begin_store(chunks, Reader(terms=Terms(tenant=tenant, labels=labels)))
    rig.cache.end_store(chunks)


@pytest.mark.parametrize("tag", [TAG, 1000])
def test_a_search_by_label_costs_what_it_finds(tag: int) -> None:
    """One hundred times as many chunks of another tenant with the same tag, or of the tenant with another tag, add
    nothing, whether the tag has three chunks or nobody has it.
    """

    def cost(others: int) -> int:
        with Rig(2 * others + 8) as rig:
            store(rig, chain("wanted", 3), A, frozenset({TAG}))
            for n in range(others):
                store(rig, chain(f"another tenant's {n}", 1), B, frozenset({tag}))
                store(rig, chain(f"another tag {n}", 1), A, frozenset({TAG + 1 + n % 50}))
            found: list[Any] = []
            scope = Scope(tenant=A, labels=frozenset({tag}), namespace=NAMESPACE)
            steps = operations(lambda: found.extend(rig.cache.labelled(scope)))
            assert found == (chain("wanted", 3) if tag == TAG else [])
            return steps

    assert cost(1000) == cost(10)


def test_an_invalidation_by_label_looks_at_what_has_it() -> None:
    """Many scopes of pairs of tags cost one pass over what has them at most."""
    with Rig(600) as rig:
        for n in range(500):
            store(rig, chain(f"text {n}", 1), A, frozenset(range(1, 41)))
        pairs = [Scope(tenant=A, labels=frozenset({a, b, 1000})) for a in range(1, 41) for b in range(a)]
        assert operations(lambda: rig.cache.ram.matched(ScopeSet(pairs), NAMESPACE)) < 200 * len(pairs)


def test_what_leaves_ram_leaves_the_index() -> None:
    """Evicted, invalidated, or with other labels since: the index has what is here, as `check` says."""
    with Rig(4, disk=16) as rig:
        for n in range(12):
            store(rig, chain(f"text {n}", 1), A, frozenset({TAG, n + 100}))
            rig.cache.check()
        [first] = list(rig.cache.ram.entries.values())[:1]
        rig.cache.join([first.chunk], Reader(terms=Terms(tenant=A, labels=frozenset({999}))))
        rig.cache.check()
        assert rig.cache.labelled(Scope(tenant=A, labels=frozenset({999}))) == [first.chunk]
        many = frozenset(range(2000, 2000 + MAX_LABELS))
        rig.cache.join([first.chunk], Reader(terms=Terms(tenant=A, labels=many)))
        assert first.terms.is_wild and first.chunk in rig.cache.labelled(Scope(tenant=A, labels=frozenset({5})))
        rig.cache.invalidate([Scope(tenant=A, labels=frozenset({TAG}))], lambda done: None)
        assert not rig.cache.ram.entries and not len(rig.cache.ram._labels._keys)
        rig.cache.check()


LABELS = st.frozensets(st.sampled_from([1, 2, 3, WINDOW]), max_size=4)
TENANTS = st.sampled_from([A, B])
KEYS = [ChunkKey(bytes([n]) * 32) for n in range(8)]
TERMS = st.builds(Terms, tenant=TENANTS, labels=LABELS, is_wild=st.booleans())
SCOPES = st.builds(
    Scope,
    tenant=st.one_of(st.none(), TENANTS),
    labels=st.frozensets(st.sampled_from([1, 2, 3]), max_size=2),
    keys=st.one_of(st.none(), st.frozensets(st.sampled_from(KEYS), max_size=3)),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(terms=st.lists(TERMS, max_size=8), others=st.lists(TERMS, max_size=8), scopes=st.lists(SCOPES, max_size=4))
def test_no_chunk_is_missed(terms: list[Terms], others: list[Terms], scopes: list[Scope]) -> None:
    """What any of several scopes takes is among the candidates, also after chunks have other terms."""
    labels, here = Labels(), dict(zip(KEYS, terms, strict=False))
    for key, each in here.items():
        labels.add(key, each)
    for key, each in zip(list(here), others, strict=False):
        labels.discard(key, here[key])
        labels.add(key, each)
        here[key] = each
    labels.check(here.items())
    found, wanted = labels.candidates(ScopeSet(scopes), 100), ScopeSet(scopes)
    taken = {key for key, each in here.items() if wanted.takes(key, NAMESPACE, each)}
    assert found is None or taken <= found
    is_open = any(scope.tenant is None or (scope.keys is None and not scope.labels) for scope in scopes)
    assert (found is None) == is_open


def test_entries_know_their_terms() -> None:
    """Whoever changes an entry's terms tells the index: no other module assigns them."""
    assert "terms" in Entry.__struct_fields__
    source = Path(hotspan.__file__).parent / "cache"
    assigned = [
        path.name
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        and any(isinstance(each, ast.Attribute) and each.attr == "terms" for each in node.targets)
    ]
    assert assigned == ["ram.py"]
