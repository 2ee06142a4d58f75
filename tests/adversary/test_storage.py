"""Who writes the disk or the shared directory while the server runs wants wrong answers, foreign files, its end."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hotspan.bench.prose import prose
from hotspan.l2.log import checked

from .conftest import KEYS, Asked, House

pytestmark = pytest.mark.engine

WORDS = 700


@pytest.fixture(scope="module")
def texts(house: House) -> list[tuple[str, Asked]]:
    """Texts that have left RAM and the engine for the disk and the L2, and the answers computed for them."""
    prompts = [prose(seed, WORDS) for seed in range(9400, 9409)]
    answers = [house.ask("acme", prompt) for prompt in prompts]
    for seed in range(9410, 9422):  # more than RAM and the engine hold
        house.ask("acme", prose(seed, WORDS))
    return list(zip(prompts, answers, strict=True))


def garbage(path: Path, seed: int) -> None:
    """Overwrite every page of a file in part, as somebody would who may write it."""
    noise = random.Random(seed)
    with path.open("r+b") as file:
        for offset in range(0, path.stat().st_size, 4096):
            file.seek(offset + noise.randrange(4096 - 64))
            file.write(noise.randbytes(64))


def zeros(path: Path, seed: int) -> None:
    """Empty it, its length kept."""
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def rotated(path: Path, seed: int) -> None:
    """Every frame in another frame's place."""
    content = path.read_bytes()
    middle = len(content) // 8192 * 4096
    path.write_bytes(content[middle:] + content[:middle])


ATTACKS = (garbage, rotated, zeros)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_written_disk_gives_no_wrong_answer(
    well: House, texts: list[tuple[str, Asked]], attack: Callable[[Path, int], None]
) -> None:
    """Every answer is the one that was computed: what does not verify is a miss."""
    attack(well.disk / "slab", 1)
    for path in sorted(well.shared.glob("objects/**/object")):
        attack(path, 2)
    for text, first in texts[ATTACKS.index(attack) :: len(ATTACKS)]:
        assert well.ask("acme", text).text == first.text


BROKEN_ENTRIES = (
    b"",
    b"\xff\xfe",
    b"{",
    b"null",
    b"[]",
    b"7",
    b'"scope"',
    b"{}",
    b'{"scope": null, "by": null}',
    b'{"scope": {"tenant": "seven"}, "by": 7}',
    b'{"scope": {"keys": "abc"}, "by": "x"}',
    b'{"scope": {"labels": {"a": 1}}, "by": "x"}',
    b'{"scope": {"namespace": 7}, "by": "x"}',
    b"[" * 100_000,
    json.dumps({"scope": {"tenant": 1 << 80}, "by": "x"}).encode(),
)


def test_broken_entries_of_the_log_stop_no_replica(well: House) -> None:
    """Whatever stands in the shared log, requests are answered, and later invalidations are read and take effect."""
    text = prose(9600, WORDS)
    assert well.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], {"tags": ["first"]}).status_code == 200
    epoch = max((well.shared / "log").iterdir(), key=lambda path: path.stat().st_mtime_ns)  # what was just written to
    newest = max(int(path.name, 16) for path in epoch.iterdir())
    in_form = [b"E" + checked(entry) for entry in BROKEN_ENTRIES]
    for number, entry in enumerate([*in_form, *BROKEN_ENTRIES], newest + 1):
        (epoch / f"{number:016x}").write_bytes(entry)
    first = well.ask("acme", text)
    assert well.ask("acme", text).text == first.text
    for _ in range(2):
        well.ask("acme", text)
        answer = well.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], {"prompt": text})
        assert answer.status_code == 200 and answer.json()["is_durable"], answer.text
        assert well.ask("acme", text).cached == 0


def test_links_in_the_shared_directory_lead_nowhere(well: House) -> None:
    """Links that somebody plants among the objects are neither read nor written, and what they lead to stays."""
    foreign = well.directory / "foreign"
    foreign.mkdir()
    (foreign / "object").write_text("precious")
    places = [path for path in (well.shared / "objects").glob("**") if path.is_dir()][:50]
    for place in places:
        for name in ("link", "object"):
            if not (place / name).exists():
                (place / name).symlink_to(foreign / "object" if name == "object" else foreign)
    for seed in range(9700, 9704):
        well.ask("globex", prose(seed, WORDS))
    assert (foreign / "object").read_text() == "precious"
    assert [path.name for path in foreign.iterdir()] == ["object"]
