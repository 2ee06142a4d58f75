"""What a replica knows of a log of invalidations."""

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.testing.chunks import key_of
from hotspan.tiers import view as views
from hotspan.tiers.view import LogView

NAMESPACE = bytes(32)


def test_it_grows_no_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of endless invalidations it knows the newer ones by name; what is as old as those it forgot can't be judged."""
    monkeypatch.setattr(views, "_MOST", 64)
    view = LogView()
    for generation in range(1, 1001):
        by_label, by_key = Scope(labels=frozenset({generation})), Scope(keys=frozenset({key_of(str(generation))}))
        view.add(generation, by_key if generation % 3 else by_label)
        assert view.taken_at(key_of(str(generation)), NAMESPACE, Terms(labels=frozenset({generation}))) == generation
        assert sum(map(len, [*view._by_key.values(), *view._by_label.values()])) == len(view._generations) <= 64
    assert 1000 - 64 <= view.floor < 1000
    for generation in range(1, 1001):
        taken_at = view.taken_at(key_of(str(generation)), NAMESPACE, Terms(labels=frozenset({generation})))
        assert taken_at == max(generation, view.floor)
    assert view.taken_at(key_of("other"), NAMESPACE, Terms()) == view.floor
