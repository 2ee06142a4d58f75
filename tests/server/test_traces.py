"""Recorded requests: rows without text, keys that are equal where the text is, and no cost while nobody fetches."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import RequestOutputKind

from hotspan.cli.trace import collect, write_rows
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.core.recorded import RecordedServer, recorded_servers
from hotspan.core.trace import read
from hotspan.engine.traces import Traces, block_keys, section_keys
from hotspan.server.recording import Recording, with_servers

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
TEXT = list(range(1300))


class Server:
    """vLLM's client around one recorder, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.traces = Traces(lambda: self.now)

    def asked(
        self,
        tokens: list[int],
        *,
        salt: str = "",
        media: Any = None,
        kind: RequestOutputKind = DELTA,
        session: str | None = None,
        ends: str | None = "stop",
    ) -> None:
        """A request of three tokens in two outputs, the first after a second."""

        async def generate() -> AsyncGenerator[Any, None]:
            asked = SimpleNamespace(prompt_token_ids=tokens, cache_salt=salt, lora_request=None, mm_features=media)
            self.traces.admitted(asked)  # type: ignore[arg-type]
            counts = (1, 2) if kind is DELTA else (3,)
            for n, count in enumerate(counts):
                self.now += 1
                reason = ends if n == len(counts) - 1 else None
                each = SimpleNamespace(token_ids=[0] * count, finish_reason=reason)
                told = SimpleNamespace(first_token_latency=0.25) if kind is FINAL else None
                yield SimpleNamespace(outputs=[each], num_cached_tokens=512, metrics=told)

        async def drain() -> None:
            async for _ in self.traces.followed(generate(), kind, session):
                pass

        asyncio.run(drain())


def test_a_row_has_times_lengths_and_keys() -> None:
    """In Mooncake's format, whether outputs are deltas or come once, with what the server found and took."""
    server = Server()
    assert server.traces.fetch("a") == {"rows": [], "running": 0, "dropped": 0}
    server.now += 5
    server.asked(TEXT)
    server.asked(TEXT, kind=FINAL)
    found = server.traces.fetch("a")
    assert found is not None
    first, second = found["rows"]
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (5000, 1300, 3)
    assert (first["ttft_ms"], first["cached_length"], second["output_length"]) == (1000.0, 512, 3)
    assert (second["ttft_ms"], second["duration_ms"]) == (250.0, 1000.0), "a whole answer's first token came before"
    assert first["hash_ids"] == second["hash_ids"] and len(first["hash_ids"]) == 3
    assert server.traces.fetch("a") == {"rows": [], "running": 0, "dropped": 0}


def test_a_row_has_its_session_and_how_it_ended(tmp_path: Path) -> None:
    """Requests of a session share a key that no other recording has, and await each other when they are replayed."""
    server = Server()
    server.traces.fetch("a")
    server.asked(TEXT, session="tenant|mine")
    server.asked(TEXT, session="tenant|other", ends="length")
    server.now += 7
    server.asked(TEXT, session="tenant|mine", ends=None)
    server.asked(TEXT)
    found = server.traces.fetch("a", is_last=True)
    assert found is not None
    rows = found["rows"]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "abort", "stop"]
    assert rows[0]["session"] == rows[2]["session"] != rows[1]["session"] and "session" not in rows[3]
    assert [row["duration_ms"] for row in rows] == [2000.0] * 4
    assert "mine" not in json.dumps(rows)
    server.traces.fetch("b")
    server.asked(TEXT, session="tenant|mine")
    again = server.traces.fetch("b")
    assert again is not None and again["rows"][0]["session"] != rows[0]["session"]
    write_rows(tmp_path / "trace.jsonl", rows)
    trace = read(tmp_path / "trace.jsonl")
    assert [each.after for each in trace.requests] == [(), (), (0,), ()] and trace.requests[2].think_s == 9.0
    assert [each.finish_reason for each in trace.requests] == ["stop", "length", "abort", "stop"]


def test_keys_are_equal_where_everything_before_is() -> None:
    """Not behind a change, not with another salt or image, and not in another recording."""
    keys = block_keys(TEXT, "salt", (), b"s" * 32)
    changed = block_keys([*TEXT[:600], 0, *TEXT[601:]], "salt", (), b"s" * 32)
    assert changed[0] == keys[0] and not {*changed[1:]} & {*keys}
    assert not {*block_keys(TEXT, "other", (), b"s" * 32)} & {*keys}
    assert not {*block_keys(TEXT, "salt", (), b"t" * 32)} & {*keys}
    pictured = block_keys(TEXT, "salt", [(600, "cat")], b"s" * 32)
    assert pictured[0] == keys[0] and not {*pictured[1:]} & {*keys}
    assert block_keys(TEXT, "salt", [(600, "dog")], b"s" * 32)[1] != pictured[1]


def test_sections_are_named_by_their_own_text(tmp_path: Path) -> None:
    """Wherever they stand; not with another salt, nor in another recording. Short ones and prompts with media have
    none; without separators no row has any. What is written is read.
    """
    first, second, cut = list(range(300)), list(range(1000, 1200)), [9999, 9998]
    server = Server()
    server.traces.fetch("a")
    server.asked([*first, *cut, *second])
    server.traces.separators = [cut]
    for text in ([*first, *cut, *second], [7, 8, *cut, *second, *cut, *first]):
        server.asked(text)
    picture = SimpleNamespace(mm_position=SimpleNamespace(offset=0), identifier="cat")
    server.asked(first, media=[picture])
    server.asked(first, salt="other")
    found = server.traces.fetch("a")
    assert found is not None
    bare, row, other, pictured, salted = found["rows"]
    assert "sections" not in bare and "sections" not in pictured
    one, two = (key for *_, key in row["sections"])
    assert row["sections"] == [[0, 300, one], [302, 200, two]]
    assert other["sections"] == [[4, 200, two], [206, 300, one]]
    assert one != two and salted["sections"][0][2] not in (one, two)
    assert section_keys(first, "", [cut], b"s" * 32) != section_keys(first, "", [cut], b"t" * 32)
    write_rows(tmp_path / "own.jsonl", found["rows"])
    assert [each.start for each in read(tmp_path / "own.jsonl").requests[2].sections] == [4, 206]


def test_replicas_have_the_same_keys_in_one_recording() -> None:
    """And others in the next one: the keys are hashed with its name."""
    servers = [Server(), Server()]
    found = []
    for name in ("first", "second"):
        for server in servers:
            server.now += 31
            server.traces.fetch(name)
            server.asked(TEXT)
            fetched = server.traces.fetch(name)
            assert fetched is not None
            found.append(fetched["rows"][0]["hash_ids"])
    assert found[0] == found[1] and found[2] == found[3] and not {*found[0]} & {*found[2]}


def test_nothing_is_kept_while_nobody_fetches() -> None:
    """Without a recording outputs are passed on as they are; one that nobody fetches ends, and another may begin."""
    server = Server()
    outputs = object()
    assert server.traces.followed(outputs, DELTA) is outputs  # type: ignore[arg-type]
    assert server.traces.fetch("a") is not None and server.traces.fetch("b") is None
    server.now += 31
    assert server.traces.followed(outputs, DELTA) is outputs  # type: ignore[arg-type]
    assert server.traces.fetch("b") is not None


def test_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows between two fetches are bounded by their keys."""
    monkeypatch.setattr("hotspan.engine.traces._MAX_KEYS", 5)
    server = Server()
    server.traces.fetch("a")
    for _ in range(3):
        server.asked(TEXT)
    found = server.traces.fetch("a")
    assert found is not None and len(found["rows"]) == 1 and found["dropped"] == 2


def test_a_client_that_goes_leaves_its_row() -> None:
    """A stream that is closed after its first output is a request with what was answered; one before it is none."""
    server = Server()
    server.traces.fetch("a")
    closed = []

    async def generate() -> AsyncGenerator[Any, None]:
        try:
            asked = SimpleNamespace(prompt_token_ids=TEXT, cache_salt="", lora_request=None, mm_features=None)
            server.traces.admitted(asked)  # type: ignore[arg-type]
            while True:
                yield SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=[0], finish_reason=None)], num_cached_tokens=None
                )
        finally:
            closed.append(True)

    async def leave() -> None:
        followed = server.traces.followed(generate(), DELTA)
        await anext(followed)
        assert server.traces.fetch("a") == {"rows": [], "running": 1, "dropped": 0}
        await followed.aclose()

    asyncio.run(leave())
    found = server.traces.fetch("a")
    assert closed and found is not None and found["running"] == 0 and found["rows"][0]["output_length"] == 1


def test_a_file_is_sorted_and_can_be_simulated(tmp_path: Path) -> None:
    """Rows come when requests end and are written by their beginnings; the file is a trace with what was recorded."""
    server = Server()
    times = iter((0.0, 0.0, 1.0, 2.0, 3.0))

    def post(path: str, body: dict[str, Any]) -> Any:
        assert path == "/hotspan/trace"
        assert "block_tokens" not in body, "the server has chunks of its own"
        found = server.traces.fetch(body["recording"], is_last=body["is_last"])
        return found | ({"servers": [{"model": "m", "ram": 1}]} if body["is_last"] and found is not None else {})

    def sleep(seconds: float) -> None:
        server.asked(TEXT)
        server.now -= 10  # the next one began earlier
        server.asked(TEXT[:600])

    rows, lost, silent, servers = collect([post], 2.0, clock=lambda: next(times), sleep=sleep)
    assert servers == [{"model": "m", "ram": 1}]
    assert len(rows) == 4 and (lost, silent) == (0, []) and rows == sorted(rows, key=lambda row: row["timestamp"])
    write_rows(tmp_path / "own.jsonl", rows, servers)
    trace = read(tmp_path / "own.jsonl")
    assert trace.servers == (RecordedServer("m"),)
    assert trace.requests[0].at_s == 0 and trace.facts().recorded_ttft_s == 1.0
    assert trace.facts().recorded_hit_rate == pytest.approx(4 * 512 / (2 * 1300 + 2 * 600))
    assert server.traces.fetch("another") is not None, "the last fetch has ended the recording"
    assert not any("token" in json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines())


def test_a_server_that_ends_leaves_what_it_has_told() -> None:
    """It is named, and not asked again; one that can't be asked at first is an error."""
    asked = []

    def ends(path: str, body: dict[str, Any]) -> Any:
        asked.append(body)
        if len(asked) > 1:
            raise ConfigError("http://x can't be asked")
        return {"rows": [{"timestamp": 1}], "running": 0, "dropped": 0}

    def lasts(path: str, body: dict[str, Any]) -> Any:
        return {"rows": [{"timestamp": 2}], "running": 0, "dropped": 0}

    times = iter(range(10))
    found = collect([ends, lasts], 3.5, clock=lambda: float(next(times)), sleep=lambda _: None)
    assert [row["timestamp"] for row in found.rows] == [1, 2, 2, 2, 2] and len(asked) == 2
    assert found.silent == ["http://x can't be asked"]
    with pytest.raises(ConfigError, match="http://x"):
        collect([ends], 3.5)


def test_an_interrupt_ends_a_recording() -> None:
    """With what came until then, the last fetch included, and how many requests are missing."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    rows, lost, *_ = collect(
        [lambda path, body: {"rows": [{"timestamp": 1}], "running": 2, "dropped": 1}] * 2, 60, sleep=interrupted
    )
    assert (len(rows), lost) == (4, 6)


def test_blocks_of_another_size(tmp_path: Path) -> None:
    """The first fetch says how many tokens a key stands for; the file says it too, and can be simulated."""
    server = Server()
    server.traces.fetch("a", 128)
    server.asked(TEXT)
    found = server.traces.fetch("a")
    assert found is not None and len(found["rows"][0]["hash_ids"]) == 11
    write_rows(tmp_path / "own.jsonl", found["rows"])
    trace = read(tmp_path / "own.jsonl")
    assert trace.block_tokens == 128 and len(trace.requests[0].keys) == 10


def test_servers_with_other_chunks_are_not_mixed() -> None:
    """A file has blocks of one size: the line says which there are, and how to have one."""
    posts = [
        lambda path, body, tokens=tokens: {
            "rows": [{"timestamp": 1, "block_tokens": tokens}],
            "running": 0,
            "dropped": 0,
        }
        for tokens in (256, 128)
    ]
    with pytest.raises(ConfigError, match=r"chunks of \[128, 256\] tokens: give one size for all as --block-tokens"):
        collect(posts, 0.0)


@pytest.mark.parametrize(
    ("asked", "chunk_tokens", "tokens"), [(None, 256, 256), (None, None, 512), (None, 8, 16), (64, 256, 64)]
)
def test_blocks_are_chunks_unless_another_size_is_asked_for(
    asked: int | None, chunk_tokens: int | None, tokens: int
) -> None:
    """Within the bounds of a file; without tiers as in published traces."""
    assert Recording(recording="r" * 16, block_tokens=asked).tokens_of_blocks(chunk_tokens) == tokens


def test_the_last_answer_has_each_engine_core() -> None:
    """With its tiers and rates; without tiers as many as the server has cores, and always the rows."""
    last = {"rows": [1], "running": 0, "dropped": 0, "server": {"model": "m"}, "engines": 2}
    told = {
        "chunk_tokens": 256,
        "token_bytes": 100.0,
        "rates": {"prefill_tokens_per_s": 7.0},
        "tiers": {"ram": {"capacity_bytes": 5, "chunks": 1}},
    }
    found = with_servers(last, [told, told])
    server = {"model": "m", "chunk_tokens": 256, "token_bytes": 100.0, "tier_bytes": {"ram": 5}}
    assert found == {"rows": [1], "running": 0, "dropped": 0, "servers": [server | told["rates"]] * 2}
    read_back = recorded_servers(found, "x")
    assert read_back[0].tier_bytes == {"ram": 5.0} and read_back[0].prefill_tokens_per_s == 7.0
    assert with_servers(last, [])["servers"] == [{"model": "m"}] * 2


def test_the_replicas_of_a_router_are_recorded() -> None:
    """Rows of all that answer, also in the router's answer with an error; who did not is named; one may answer none."""

    def answer(replica: str, at: int) -> dict[str, Any]:
        return {"replica": replica, "status": 200, "body": {"rows": [{"timestamp": at}], "running": 1, "dropped": 0}}

    times = iter((0.0, 0.0, 1.0))
    complete = {"is_complete": True, "replicas": [answer("a", 2), answer("b", 1)]}
    partial = {"is_complete": False, "replicas": [answer("a", 3), {"replica": "b", "status": 503, "body": None}]}
    answers = iter((complete, partial))

    def post(path: str, body: dict[str, Any]) -> Any:
        if (found := next(answers)) is partial:
            raise RefusedError("502", found)
        return found

    rows, lost, silent, _ = collect([post], 1.0, clock=lambda: next(times), sleep=lambda seconds: None)
    assert [row["timestamp"] for row in rows] == [1, 2, 3] and (lost, silent) == (1, ["b"])

    def refused(path: str, body: dict[str, Any]) -> Any:
        raise RefusedError("409", {"replicas": [{"replica": "a", "status": 409, "body": None}]})

    with pytest.raises(RefusedError):
        collect([refused], 1.0)
