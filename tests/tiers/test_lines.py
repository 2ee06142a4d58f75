"""Lines of leaves: first and last are the oldest and a young one, whatever came in whatever order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.types import Chunk, ChunkKey
from hotspan.tiers.leaves import Line
from hotspan.tiers.retention import LeafRetention
from tests.operations import operations

steps = st.lists(
    st.tuples(st.sampled_from(["put", "discard", "oldest", "youngest", "back"]), st.integers(0, 9), st.integers(1, 40)),
    max_size=80,
)


@settings(deadline=None)
@given(steps=steps)
def test_the_first_is_the_oldest(steps: list[tuple[str, int, int]]) -> None:
    """A line has what was put into it and not taken out, of which the first was used least recently."""
    line, held, aside = Line(), dict[ChunkKey, int](), list[tuple[int, ChunkKey]]()
    for what, number, used in steps:
        key = ChunkKey(bytes([number]))
        if what == "put" and key not in held and key not in {each for _, each in aside}:
            line.put(key, used)
            held[key] = used
        elif what == "discard":
            line.discard(key)
            held.pop(key, None)
        elif what in ("oldest", "youngest") and held:
            leaf = line.first() if what == "oldest" else line.last()
            assert leaf is not None and held.pop(leaf[1]) == leaf[0]
            line.pop(leaf)
            aside.append(leaf)
        elif what == "back" and aside:
            leaf = aside.pop()
            line.push(leaf)
            held[leaf[1]] = leaf[0]
        first, last = line.first(), line.last()
        assert len(line) == len(held) and {key: used for used, key in line.entries()} == held
        assert (first[0] if first else None) == min(held.values(), default=None)
        assert last is None if not held else last is not None and held[last[1]] == last[0]
        assert line.is_empty == (not held and not aside)


def test_a_use_of_a_long_text_costs_few_steps_a_chunk() -> None:
    """Of a large tier, where few chunks are of the sample, a text of 2,000 chunks that is used again and again."""
    policy, text = LeafRetention(1 << 24), [Chunk(ChunkKey((n << 20).to_bytes(32)), None) for n in range(2000)]
    keys = [chunk.key for chunk in text]
    for above, key in zip([None, *keys], keys, strict=False):
        policy.add(key, above)
    policy.touch(reversed(keys))
    again = operations(lambda: policy.touch(reversed(keys)))
    print(f"steps for a chunk of a text that is used again: {again / len(keys):.1f}")
    assert again < 12 * len(keys)
    policy.check()
