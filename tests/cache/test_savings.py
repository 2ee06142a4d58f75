"""Which texts saved the most."""

from hotspan.cache import savings as module
from hotspan.cache.savings import Saved, SavedText, Savings
from hotspan.core.terms import Scope, Terms, tag_labels, tenant_label
from hotspan.core.types import ChunkKey

NAMESPACE = bytes(32)


def text(number: int, *tags: str, tenant: str = "acme") -> SavedText:
    """A text whose first chunk has this number."""
    return SavedText(tags, ChunkKey(bytes([number]) * 32), Terms(tenant_label(tenant), labels=tag_labels(tags)))


def names(savings: Savings) -> list[object]:
    """The texts in their order, by their tags or the number of their first chunk."""
    return [each.tags or each.first[0] for each, _ in savings.top(9)]


def test_texts_are_counted_by_tags_or_first_chunk() -> None:
    """Prompts with the same tags are one text, whatever stands before; of another tenant they are another text."""
    savings = Savings()
    savings.note(text(1, "manual"), 512, 2.0)
    savings.note(text(2, "manual"), 256, 1.0)
    savings.note(text(2, "manual", tenant="globex"), 256, 2.5)
    savings.note(text(3), 1024, 0.5)
    savings.note(text(3), 1024, -0.1)
    assert [saved for _, saved in savings.top(9)] == [Saved(2, 768, 3.0), Saved(1, 256, 2.5), Saved(2, 2048, 0.5)]
    assert len(savings.top(1)) == 1


def test_without_seconds_tokens_decide() -> None:
    """A server without a cost model knows no seconds."""
    savings = Savings()
    for number in (1, 2, 3):
        savings.note(text(number), number * 256, 0.0)
    assert names(savings) == [3, 2, 1]


def test_the_one_that_saved_least_makes_room() -> None:
    """Those that saved much stay, however many come."""
    savings = Savings(capacity=3)
    for number, seconds in enumerate((5.0, 1.0, 3.0, 2.0, 4.0)):
        savings.note(text(number), 256, seconds)
    assert names(savings) == [0, 4, 2]


def test_what_is_invalidated_is_forgotten() -> None:
    """By tag, by tenant, and by chunks; what is another's stays."""
    savings = Savings()

    def note_all() -> None:
        for each in (text(1, "a"), text(2, "b"), text(3), text(4, tenant="globex")):
            savings.note(each, 256, 1.0)

    tenant = tenant_label("acme")
    for scope, left in (
        (Scope(tenant, labels=tag_labels(["a"])), [("b",), 3, 4]),
        (Scope(tenant), [4]),
        (Scope(tenant, keys=frozenset([text(3).first])), [4]),
        (Scope(), []),
    ):
        note_all()
        savings.invalidate([scope], NAMESPACE)
        assert sorted(names(savings), key=str) == sorted(left, key=str)
    note_all()
    savings.clear()
    assert not savings.top(9)


def test_tokens_are_counted_by_tenant() -> None:
    """Of all texts, those that made room and those that were invalidated included; the tenants are bounded."""
    savings = Savings(capacity=1)
    for number, tenant in ((1, "acme"), (2, "acme"), (3, "globex")):
        savings.note(text(number, tenant=tenant), 256 * number, 1.0)
    counted = {tenant_label("acme"): 768, tenant_label("globex"): 768}
    assert savings.tenant_tokens == counted
    savings.invalidate([Scope()], NAMESPACE)
    savings.clear()
    assert savings.tenant_tokens == counted
    for number in range(module._MAX_TENANTS + 5):
        savings.note(text(4, tenant=str(number)), 256, 1.0)
    assert len(savings.tenant_tokens) == module._MAX_TENANTS and savings.tenant_tokens.items() >= counted.items()
