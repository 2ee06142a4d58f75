"""Names: everything that changes a chunk's bytes changes its key, and nothing else does."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.namespace import NO_ADAPTER, NO_TENANT, ChunkKeyer, namespace_digest, tenant_digest

NAMES = st.text(max_size=8)
VALUES = st.one_of(st.text(max_size=8), st.binary(max_size=8), st.integers(-(2**70), 2**70))
FIELDS = st.dictionaries(NAMES, VALUES, max_size=5)
DIGESTS = st.binary(min_size=32, max_size=32)


@given(FIELDS, FIELDS)
def test_different_fields_have_different_digests(one: dict, other: dict) -> None:
    """The digest tells any two sets of fields apart, and only those."""
    assert (namespace_digest(one) == namespace_digest(other)) == (one == other)


@given(FIELDS.filter(bool), st.data())
def test_every_small_change_changes_the_digest(fields: dict, data: st.DataObject) -> None:
    """Dropping a field, renaming it, or moving a byte between name and value changes the digest."""
    name = data.draw(st.sampled_from(sorted(fields)))
    value = fields[name]
    rest = {key: fields[key] for key in fields if key != name}
    changed = [rest, rest | {name + "x": value}]
    if isinstance(value, str) and name:
        changed.append(rest | {name[:-1]: name[-1] + value})
    if isinstance(value, int):
        changed += [rest | {name: str(value)}, rest | {name: str(value).encode()}, rest | {name: value + 1}]
    digest = namespace_digest(fields)
    assert all(namespace_digest(other) != digest for other in changed if other != fields)


@given(FIELDS, st.randoms())
def test_order_does_not_matter(fields: dict, random: object) -> None:
    """The digest is that of the set of fields, in whatever order they were given."""
    items = list(fields.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert namespace_digest(dict(items)) == namespace_digest(fields)


@pytest.mark.parametrize("value", [True, 1.5, None, ["a"]])
def test_other_types_are_refused(value: object) -> None:
    """A value that could be spelled two ways raises TypeError and names the field."""
    with pytest.raises(TypeError, match="'model'"):
        namespace_digest({"model": value})  # type: ignore[dict-item]


def test_the_digest_is_the_documented_one() -> None:
    """The byte string under the hash is the tagged, length-prefixed one, so that other programs can compute it."""
    spelled = b"hotspan-namespace-1"
    for part in (b"chunk_tokens", b"i256", b"model", b"sqwen"):
        spelled += len(part).to_bytes(8, "little") + part
    assert namespace_digest({"model": "qwen", "chunk_tokens": 256}) == hashlib.sha256(spelled).digest()


@given(DIGESTS, DIGESTS, DIGESTS, st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.data())
def test_a_key_depends_on_all_it_is_made_of(
    namespace: bytes, adapter: bytes, tenant: bytes, engine_hash: bytes, group: int, data: st.DataObject
) -> None:
    """Another namespace, adapter, tenant, group or engine hash is another key; the same ones are the same key."""

    def other(digest: bytes) -> bytes:
        return data.draw(DIGESTS.filter(lambda drawn: drawn != digest))

    key = ChunkKeyer(namespace, adapter, tenant).key(engine_hash, group)
    assert key == ChunkKeyer(namespace, adapter, tenant).key(engine_hash, group)
    others = {
        ChunkKeyer(other(namespace), adapter, tenant).key(engine_hash, group),
        ChunkKeyer(namespace, other(adapter), tenant).key(engine_hash, group),
        ChunkKeyer(namespace, adapter, other(tenant)).key(engine_hash, group),
        ChunkKeyer(namespace, adapter, tenant).key(engine_hash, group ^ 1),
        ChunkKeyer(namespace, adapter, tenant).key(other(engine_hash), group),
    }
    assert key not in others


@given(st.permutations([bytes([n]) * 32 for n in range(3)]))
def test_what_a_key_is_made_of_can_not_change_places(digests: list[bytes]) -> None:
    """The same three digests in other places are another key."""
    ordered = ChunkKeyer(*sorted(digests)).key(b"hash", 0)
    assert (ChunkKeyer(*digests).key(b"hash", 0) == ordered) == (digests == sorted(digests))


def test_tenants_have_different_digests() -> None:
    """Without a keyring, too, two tenants' names are two digests of 32 bytes, neither of them that of nobody."""
    digests = {tenant_digest(name) for name in ("", "a", "b", "default")} | {NO_TENANT}
    assert len(digests) == 5 and {len(digest) for digest in digests} == {32}


def test_one_keyer_makes_many_keys() -> None:
    """Keys do not depend on which keys the keyer made before."""
    keyer = ChunkKeyer(bytes(32))
    first = keyer.key(b"a" * 32, 0)
    keyer.key(b"b" * 32, 1)
    assert keyer.key(b"a" * 32, 0) == first


def test_the_key_is_the_documented_one() -> None:
    """A known answer, computed here from the formula in words: a change of it loses every stored chunk."""
    namespace, engine_hash = bytes(range(32)), bytes(range(32, 64))
    spelled = b"hotspan-chunk-2" + namespace + NO_TENANT + NO_ADAPTER + b"\x03\x00\x00\x00" + engine_hash
    key = ChunkKeyer(namespace).key(engine_hash, 3)
    assert key == hashlib.sha256(spelled).digest()
    assert key.hex() == "e00fe4d8875cdc94a7cbc37a8adb4de58164ed44763ad48098df5828bb376679"
    tenant, adapter = bytes([1]) * 32, bytes([2]) * 32
    spelled = b"hotspan-chunk-2" + namespace + tenant + adapter + b"\x03\x00\x00\x00" + engine_hash
    assert ChunkKeyer(namespace, adapter, tenant).key(engine_hash, 3) == hashlib.sha256(spelled).digest()


@pytest.mark.parametrize("sizes", [(31, 32, 32), (33, 32, 32), (32, 0, 32), (32, 64, 32), (32, 32, 31), (32, 0, 64)])
def test_short_digests_are_refused(sizes: tuple[int, int, int]) -> None:
    """A namespace, adapter or tenant that is not 32 bytes raises ValueError: lengths must not be able to shift."""
    with pytest.raises(ValueError):
        ChunkKeyer(*map(bytes, sizes))


@given(DIGESTS, DIGESTS, DIGESTS, st.binary(max_size=16), st.integers(0, 3))
def test_window_keys_are_of_tokens_and_owner_alone(
    namespace: bytes, tenant: bytes, adapter: bytes, tokens: bytes, group: int
) -> None:
    """Another namespace, tenant, adapter, group or token gives another key; no chunk has the key of a window."""
    keyer = ChunkKeyer(namespace, adapter, tenant)
    key = keyer.window_key(tokens, group)
    assert key == ChunkKeyer(namespace, adapter, tenant).window_key(tokens, group)
    flipped = [bytes([parts[0] ^ 1, *parts[1:]]) for parts in (namespace, adapter, tenant)]
    others = [
        ChunkKeyer(flipped[0], adapter, tenant),
        ChunkKeyer(namespace, flipped[1], tenant),
        ChunkKeyer(namespace, adapter, flipped[2]),
    ]
    assert all(other.window_key(tokens, group) != key and other.owner != keyer.owner for other in others)
    assert keyer.window_key(tokens, group + 1) != key != keyer.window_key(tokens + b"x", group)
    assert keyer.key(hashlib.sha256(tokens).digest(), group) != key
