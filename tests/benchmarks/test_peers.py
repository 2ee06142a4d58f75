"""The comparison with other systems: what it does to their files and values, and what its table says."""

from pathlib import Path

import pytest
import redis

from benchmarks.peers.__main__ import ALONE, table
from benchmarks.peers.stores import LARGE, PAGE, Files, redis_server
from benchmarks.peers.systems import SYSTEMS, VLLM, Place, Sizes, in_files, in_redis
from hotspan.core.aftermath import Aftermath
from hotspan.demo.plan import DemoSizes
from kit.ports import free_port

SIZES = Sizes.of(DemoSizes(documents=4, document_tokens=8192, in_flight=1), 20480)
BYTES = bytes(range(256)) * (5 * PAGE)
"""Large, and not a whole number of pages."""


def check_flipped(after: bytes) -> None:
    """Each page of BYTES differs in one bit, of a byte that holds an exponent."""
    changed = [at for at, (old, new) in enumerate(zip(BYTES, after, strict=True)) if old != new]
    assert [at // PAGE for at in changed] == list(range(len(BYTES) // PAGE))
    assert all(at % 2 == 1 and (BYTES[at] ^ after[at]).bit_count() == 1 for at in changed)


def test_one_bit_of_every_page_of_files_is_flipped(tmp_path: Path) -> None:
    """Small files stay as they were; clearing removes all."""
    large, small = tmp_path / "data" / "large", tmp_path / "small"
    large.parent.mkdir()
    large.write_bytes(BYTES)
    small.write_bytes(b"small")
    store = Files(tmp_path)
    assert store.flip() == len(BYTES) // PAGE
    check_flipped(large.read_bytes())
    assert small.read_bytes() == b"small"
    store.clear()
    assert not list(tmp_path.iterdir())


def test_one_bit_of_every_page_of_values_is_flipped(tmp_path: Path) -> None:
    """Small values, streams and times to live stay as they were; clearing removes all, and the server runs on."""
    port = free_port()
    with Aftermath() as aftermath, redis_server(port, tmp_path / "log", aftermath) as store:
        client = redis.Redis("127.0.0.1", port)
        client.set("large", BYTES, ex=1000)
        client.set("small", b"small")
        client.xadd("log", {"body": b"0" * LARGE})
        log = client.xrange("log")
        assert store.flip() == len(BYTES) // PAGE
        check_flipped(client.get("large"))
        assert 0 < client.ttl("large") <= 1000
        assert client.get("small") == b"small" and client.xrange("log") == log
        store.clear()
        assert client.dbsize() == 0
        assert list(store.pids) == [client.info("server")["process_id"]]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_keeps_its_kv_in_its_store(name: str, tmp_path: Path) -> None:
    """What is damaged is what the system reads: it names the directory or the Redis server of its store, no other."""
    place = Place(
        tmp_path / "model", tmp_path, SIZES, {"beside": 1234, "beside page": 1235, "redis": 16379, "s3": 16380}
    )
    system = SYSTEMS[name]
    beside = system.beside(place)[0] if system.beside else ()
    words = " ".join((*system.arguments(place), *system.environment(place).values(), *beside))
    assert (str(place.store) in words) == (system.store is in_files)
    assert ("16379" in words) == (system.store is in_redis)


def test_the_table_has_a_row_for_each_system() -> None:
    """A system that does not start is said to, and a system without files has no figures of them."""
    query = {"cpu_over_bound": 1.1, "ttft_over_bound": 1.2, "ttft_none_over": 9.0}
    found = {"cached": 50, "cached_bound": 100, "wrong_answers": 1, "answers": 4}
    rows = table(
        {
            "a": {"title": "A", "query": query, "restart": found, "flipped": found, "killed": found},
            "b": {"title": "B", "query": query},
            "c": {"title": "C", "error": "not ready"},
        }
    ).splitlines()
    assert rows[2] == "| A | 1.1 | 1.2 | 9.0 | 50% | 50 (1 of 4 answers wrong) | 1 of 4 |"
    assert rows[3].startswith("| B | 1.1 | 1.2 | 9.0 |  |") and "does not start" in rows[4]
    assert len({row.count("|") for row in rows}) == 1


def test_the_engine_alone_is_what_others_are_compared_with() -> None:
    """It is started with vLLM's own server in both of its pools."""
    assert all(SYSTEMS[name].program == VLLM for name in ALONE)
    assert [SYSTEMS[name].whole_pool for name in ALONE] == [False, True]
