"""Isolation: exact blocks keep their names, all others get names that no other request can have."""

import hashlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.engine.blend.isolation import isolated, private_name

NONCES = st.binary(min_size=16, max_size=16)
BLOCK = 4


def chained(request: SimpleNamespace) -> list[bytes]:
    """The engine's hasher in small: the names of the complete blocks without one."""
    names, last = [], request.block_hashes[-1] if request.block_hashes else b""
    for at in range(len(request.block_hashes), len(request.tokens) // BLOCK):
        last = hashlib.sha256(bytes(request.tokens[at * BLOCK : (at + 1) * BLOCK]) + last).digest()
        names.append(last)
    return names


def named(tokens: int) -> SimpleNamespace:
    request = SimpleNamespace(tokens=[7] * tokens, block_hashes=[])
    request.block_hashes += chained(request)
    return request


@given(st.integers(0, 40), st.integers(0, 45), NONCES)
def test_only_exact_blocks_keep_their_names(tokens: int, first: int, nonce: bytes) -> None:
    """The block with the first approximate token and all behind it are private; those before are the engine's."""
    exact = named(tokens).block_hashes
    names = isolated(exact, first, BLOCK, nonce)
    assert len(names) == len(exact)
    assert [one == other for one, other in zip(names, exact, strict=True)] == [
        (at + 1) * BLOCK <= first for at in range(len(exact))
    ]


@given(st.integers(1, 30), st.integers(0, 20), st.integers(0, 119), NONCES, NONCES)
def test_blocks_that_come_later_are_private_too(
    blocks: int, answer: int, first: int, nonce: bytes, other: bytes
) -> None:
    """No block from the first approximate one on is ever named as the engine would, and two requests of the same text
    share none of these names. The first approximate block has a name already (`Blending` sees to that)."""
    first %= blocks * BLOCK
    found = []
    for secret in (nonce, other):
        request = named(blocks * BLOCK)
        request.block_hashes[:] = isolated(request.block_hashes, first, BLOCK, secret)
        request.tokens += [7] * answer
        request.block_hashes += chained(request)
        found.append(request.block_hashes)
    exact = named(blocks * BLOCK + answer).block_hashes
    for at, (one, two) in enumerate(zip(*found, strict=True)):
        if (at + 1) * BLOCK <= first:
            assert one == two == exact[at]
        else:
            assert one != exact[at] and (one != two or nonce == other)


def test_without_isolation_the_names_are_the_exact_ones() -> None:
    """The negative control: the engine itself names approximate blocks by their exact tokens."""
    request = named(8)
    request.tokens += [7] * 8
    assert request.block_hashes + chained(request) == named(16).block_hashes


@pytest.mark.parametrize("nonce", [b"", bytes(15), bytes(17)])
def test_a_nonce_that_can_be_guessed_is_refused(nonce: bytes) -> None:
    """Fewer bytes than the size are no secret."""
    with pytest.raises(ValueError, match="16 random bytes"):
        private_name(nonce, 0)
