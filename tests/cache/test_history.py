"""The last requests of each tenant: how far two texts agree, and how much is kept."""

from hypothesis import given
from hypothesis import strategies as st

from hotspan.cache.history import MAX_BYTES, NAME_BYTES, History, Past
from hotspan.core.terms import Terms


def names(text: str) -> bytes:
    """Of a text whose chunks are single letters: each name covers all before it."""
    return b"".join(hash(text[:end]).to_bytes(NAME_BYTES, signed=True) for end in range(1, len(text) + 1))


def past(text: str, *, tenant: int = 0, request_id: str = "") -> Past:
    return Past(
        request_id=request_id or text,
        began_s=0.0,
        prompt_tokens=len(text),
        prompt_chunks=len(text),
        salt=None,
        owner=b"",
        namespace=b"",
        form=0,
        head=0,
        names=names(text),
        terms=Terms(tenant=tenant),
        bare_terms=Terms(tenant=tenant),
        tags_from=0,
    )


@given(st.lists(st.text("ab", max_size=12), max_size=12), st.text("ab", max_size=12))
def test_the_nearest_agrees_longest(earlier: list[str], asked: str) -> None:
    """Of all earlier texts the one with the longest common beginning is found, and the latest of several."""

    def common(text: str) -> int:
        return next(
            (n for n, (a, b) in enumerate(zip(text, asked, strict=False)) if a != b), min(len(text), len(asked))
        )

    history = History(len(earlier) + 1)
    for number, text in enumerate(earlier):
        history.add(past(text, request_id=f"{number}"))
    found = history.nearest(0, names(asked))
    assert found.chunks == max(map(common, earlier), default=0)
    if found.chunks:
        assert found.past is not None
        assert int(found.past.request_id) == max(n for n, text in enumerate(earlier) if common(text) == found.chunks)


def test_what_is_kept_is_bounded() -> None:
    """So many requests of a tenant, and so many bytes of all: the tenants that asked longest ago lose theirs first."""
    history = History(3)
    for number in range(10):
        history.add(past("x" * number, request_id=f"{number}"))
    assert [each.request_id for each in history.last(0)] == ["9", "8", "7"]
    for tenant in range(1, 1000):
        history.add(past("y" * 3000, tenant=tenant))
        assert history.size <= MAX_BYTES
    assert not list(history.last(0)) and len(history) > 100
    for each in list(history.last()):
        history.extend(each, bytes(NAME_BYTES * 9000))
        assert history.size <= MAX_BYTES
    assert history.size == sum(each.size for each in history.last())


def test_tenants_are_apart() -> None:
    """Nobody's text is compared with another tenant's."""
    history = History(3)
    history.add(past("ab", tenant=1))
    assert history.nearest(2, names("ab")).past is None
    assert history.nearest(1, names("ab")).chunks == 2
