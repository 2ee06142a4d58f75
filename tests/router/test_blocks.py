"""Blocks: a piece is claimed exactly while a medium has all blocks that it overlaps."""

import random
import tracemalloc
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotspan.router.blocks import Blocks
from hotspan.router.event_messages import Removed, Stored
from hotspan.router.text import Roots
from hotspan.router.types import Medium
from tests.operations import operations
from tests.router.engine import (
    BLOCK_TOKENS,
    NAMES,
    Claims,
    Text,
    blocks_of,
    hash_of,
    join,
    keys_of,
    removed,
    stored,
    whole_keys,
)

STEM: Text = tuple(7 * at % 200 + 1 for at in range(48))
TEXTS: list[Text] = [
    STEM,
    STEM + tuple(range(60, 140)),
    STEM[:36] + tuple(range(100, 190)),
    STEM + tuple(range(60, 96)) + tuple(range(20, 80)),
    tuple(range(1, 60)),
    (1,) * 64,  # blocks of 96 bytes: pieces end in every sixth
    (5,) * 8 + tuple(range(30, 90)),
    (47,) * 60,  # tokens of 45 bytes
]
media = st.sampled_from(list(Medium))
texts = st.integers(0, len(TEXTS) - 1)


def new_blocks(cap: int = 10_000) -> Blocks:
    """Of a replica that has nothing yet."""
    return Blocks(join, Roots().of_engine, cap)


class Replica(RuleBasedStateMachine):
    """Blocks against a model that looks at whole texts."""

    @initialize(cap=st.sampled_from([10_000, 10_000, 40, 7]))
    def begin(self, cap: int) -> None:
        self.cap = cap
        self.blocks = new_blocks(cap)
        self.held: dict[Medium, set[int]] = {medium: set() for medium in Medium}
        self.noted: dict[Medium, set[int]] = {medium: set() for medium in Medium}  # with no cap, what is known of that
        self.seen: set[int] = set()
        self.claims = Claims()

    def told(self, event: Stored) -> None:
        told = self.blocks.store(event)
        assert told is not None
        self.claims.add(0, *told)

    @rule(text=texts, medium=media, ends=st.tuples(st.integers(0, 40), st.integers(0, 40)), as_bytes=st.booleans())
    def store(self, text: int, medium: Medium, ends: tuple[int, int], as_bytes: bool) -> None:
        hashes = blocks_of(TEXTS[text])
        first, last = sorted(min(end, len(hashes)) for end in ends)
        event = stored(TEXTS[text], first, last, medium)
        if as_bytes:
            event.block_hashes = [b"\7" * 24 + name.to_bytes(8, "big") for name in hashes[first:last]]
        self.held[medium] |= set(hashes[first:last])
        for at in range(first, last):
            if hashes[at] not in self.seen and at and hashes[at - 1] not in self.seen:
                break
            self.seen.add(hashes[at])
            self.noted[medium].add(hashes[at])
        self.told(event)

    @rule(text=texts, medium=media, at=st.sets(st.integers(0, 40)))
    def store_by_hash(self, text: int, medium: Medium, at: set[int]) -> None:
        names = [name for index, name in enumerate(blocks_of(TEXTS[text])) if index in at and name in self.seen]
        self.held[medium] |= set(names)
        self.noted[medium] |= set(names)
        self.told(Stored(block_hashes=list(names), medium=NAMES[medium]))

    @rule(text=texts, medium=media, at=st.sets(st.integers(0, 40)))
    def remove(self, text: int, medium: Medium, at: set[int]) -> None:
        names = [name for index, name in enumerate(blocks_of(TEXTS[text])) if index in at]
        self.held[medium] -= set(names)
        self.noted[medium] -= set(names)
        told = self.blocks.remove(removed(names, medium))
        assert told is not None
        self.claims.remove(0, *told)

    @rule()
    def clear(self) -> None:
        self.blocks.clear()
        self.claims = Claims()
        self.seen.clear()
        for held in (*self.held.values(), *self.noted.values()):
            held.clear()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        again = Claims()
        for medium, keys in self.blocks.held():
            again.add(0, medium, keys)
        for medium in Medium:
            allowed = whole_keys(TEXTS, self.held[medium])
            assert self.claims.keys[medium] <= allowed
            assert again.keys[medium] == self.claims.keys[medium]
            if self.cap == 10_000:
                assert self.claims.keys[medium] == whole_keys(TEXTS, self.noted[medium])


TestReplica = Replica.TestCase
TestReplica.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_what_a_request_asks_for_is_what_events_bring() -> None:
    """The keys of a text that is stored whole are those of a request with that text."""
    for text in TEXTS:
        told = new_blocks().store(stored(text, 0, len(blocks_of(text))))
        whole = text[: len(text) // BLOCK_TOKENS * BLOCK_TOKENS]
        assert told is not None and told[1] == keys_of(whole) != []


def test_lower_tiers_name_blocks_by_hash_after_the_gpu_has_lost_them() -> None:
    """A store without tokens is understood for as long as there is room to remember the blocks."""
    blocks, hashes = new_blocks(), blocks_of(STEM)
    blocks.store(stored(STEM, 0, len(hashes)))
    blocks.remove(removed(hashes))
    told = blocks.store(Stored(block_hashes=list(hashes), medium="CPU"))
    assert told == (Medium.RAM, keys_of(STEM))


def test_the_cap_holds_and_the_oldest_unheld_go_first() -> None:
    """No more blocks are known than may be; those in a medium stay, and what was let go is not claimed again."""
    blocks, first, second = new_blocks(20), TEXTS[4], TEXTS[7]
    blocks.store(stored(first, 0, 14))
    blocks.store(stored(STEM, 0, 6))
    assert len(blocks) == 20
    assert blocks.store(stored(second, 0, 1)) == (Medium.GPU, []) and blocks.dropped == 1
    blocks.remove(removed(blocks_of(first)[::-1]))
    told = blocks.store(stored(second, 0, 14))
    assert told == (Medium.GPU, keys_of(second[:56]))
    assert len(blocks) == 20
    assert blocks.store(Stored(block_hashes=list(blocks_of(first)), medium="CPU")) == (Medium.RAM, [])
    blocks.check()


def test_room_costs_the_same_however_many_could_make_it() -> None:
    """A new block takes the place of one of 20,000 in as many operations as of one of 2,000."""

    def adding(cap: int) -> int:
        blocks, names = new_blocks(cap), iter(range(10**9))

        def add(count: int) -> None:
            for name in islice(names, count):
                blocks.store(Stored(block_hashes=[name], token_ids=[1] * BLOCK_TOKENS, block_size=BLOCK_TOKENS))
                blocks.remove(Removed(block_hashes=[name]))

        add(2 * cap)
        return operations(lambda: add(100))

    assert adding(20_000) == pytest.approx(adding(2_000), rel=0.1)


def test_a_salt_an_adapter_and_an_image_are_told_apart() -> None:
    """Salt and adapter change the keys; nothing is claimed from an image on."""
    hashes, roots = blocks_of(STEM), Roots()
    plain = new_blocks().store(stored(STEM, 0, 12))
    salted = new_blocks().store(stored(STEM, 0, 12, extra_keys=[["salt"]] + [None] * 11))
    tuned = new_blocks().store(stored(STEM, 0, 12, lora_name="sql", lora_id=1, extra_keys=[["sql"]] * 12))
    found = [told[1] for told in (plain, salted, tuned) if told is not None]
    assert len(found) == 3 and all(found)
    assert len({key for keys in found for key in keys}) == sum(map(len, found))
    assert roots.of_engine("", "salt") == roots.of_request("", "salt")
    seen = stored(STEM, 0, 12, extra_keys=[None] * 8 + [[["picture", 3]]] + [None] * 3)
    image = new_blocks().store(seen)
    assert image is not None and image[1] == keys_of(STEM[: 8 * BLOCK_TOKENS])
    assert new_blocks().store(stored(STEM, 0, 12, lora_id=1)) == (Medium.GPU, [])  # an adapter without a name
    assert new_blocks().store(stored(STEM, 0, 12, Medium.RAM, extra_keys=None)) == (Medium.RAM, [])  # salted or not?
    assert len(hashes) == 12


def test_other_groups_and_media_are_counted_and_left_alone() -> None:
    """Group 0 counts, or the first with full attention; the rest and unknown media change nothing."""
    blocks = new_blocks()
    assert blocks.store(stored(STEM, 0, 12, group_idx=1)) is None
    assert blocks.store(stored(STEM, 0, 12, kv_cache_spec_kind="sliding_window", group_idx=0)) is None
    assert blocks.ignored == 24
    told = blocks.store(stored(STEM, 0, 12, kv_cache_spec_kind="full_attention", group_idx=2))
    assert told == (Medium.GPU, keys_of(STEM))
    event = stored(STEM, 0, 12)
    event.medium = "TAPE"
    assert blocks.store(event) is None
    other = removed(blocks_of(STEM))
    assert blocks.remove(other) is None  # group 0 is not the one that counts
    other.group_idx = 2
    assert blocks.remove(other) == (Medium.GPU, keys_of(STEM))


def test_a_block_takes_a_quarter_of_a_kilobyte() -> None:
    """Of 16 tokens of 4 bytes, with its text and its place in the tables."""
    blocks = Blocks(lambda ids: b"".join(each.to_bytes(4, "big") for each in ids), Roots().of_engine)
    rng, count = random.Random(1), 20_000
    tracemalloc.start()
    for _ in range(count // 100):
        names = [rng.getrandbits(64) for _ in range(100)]
        tokens = [rng.getrandbits(30) for _ in range(1600)]
        blocks.store(Stored(block_hashes=list(names), token_ids=tokens, block_size=16, extra_keys=[None] * 100))
        del names, tokens
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(blocks) == count and taken / count < 400


def test_odd_events_claim_nothing() -> None:
    """Tokens that do not fit the blocks, unknown tokens, unknown parents: unknown blocks, no claims."""
    odd = [stored(STEM, 0, 12) for _ in range(4)]
    odd[0].token_ids = odd[0].token_ids[:-1]
    odd[1].token_ids = [9999] * 48
    odd[2].parent_block_hash = hash_of((1, 2, 3))
    odd[3].block_size = 0
    for event in odd:
        blocks = new_blocks()
        assert blocks.store(event) == (Medium.GPU, [])
        assert blocks.unknown == 12 and len(blocks) == 0
        blocks.check()
