"""The record of one request."""

from types import SimpleNamespace

from hotspan.core.namespace import ChunkKeyer
from hotspan.engine.requests import ChunkGroup, RequestRecord
from tests.operations import operations

GROUPS = (ChunkGroup(0, 1, 16, is_chain=False), ChunkGroup(1, 2, 32, is_chain=True))


def record(hashes: int) -> RequestRecord:
    request = SimpleNamespace(block_hashes=[n.to_bytes(32) for n in range(hashes)], lora_request=None)
    return RequestRecord(request=request, keyer=ChunkKeyer(bytes(32)), groups=GROUPS)  # type: ignore[arg-type]


def test_a_request_that_waits_costs_the_same_however_long_its_text_is() -> None:
    """The chunks of a text are named once: to be asked for them again costs the same with 4 chunks as with 4,000."""

    def cost(hashes: int) -> int:
        asked = record(hashes)
        assert [len(chunks) for chunks in asked.by_group()] == [hashes // 2, hashes]
        return operations(asked.by_group)

    assert cost(4_000) == cost(4)


def test_a_text_that_grows_is_named_on() -> None:
    """Chunks that are completed later are named then, each standing on the one before it in a chain."""
    asked = record(4)
    asked.by_group()
    asked.request.block_hashes += [n.to_bytes(32) for n in range(4, 8)]
    chain, alone = asked.by_group()
    assert [chunk.parent for chunk in chain] == [None, *(chunk.key for chunk in chain[:-1])]
    assert all(chunk.parent is None for chunk in alone) and len(alone) == 8
    assert asked.keys == {chunk.key for chunk in [*chain, *alone]}
