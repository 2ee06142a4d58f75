import asyncio
import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai_server import Behaviour, OpenAIServer, Served

from conftest import StartServer
from hotspan.bench import client, runner
from hotspan.bench.config import BenchConfig
from hotspan.bench.export import summary_of
from hotspan.bench.records import BenchResult, RequestRecord, RoundName
from hotspan.bench.runner import run_rounds
from hotspan.bench.summary import quantiles
from hotspan.bench.workloads.base import Prompt
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.bench.workloads.rag_qa_quality import RagQaQualityOptions
from hotspan.core.errors import ConfigError
from tests.bench.simulated import in_simulated_time


def small(server: OpenAIServer, *, in_flight: int = 2, **more: object) -> BenchConfig:
    options = LongDocQaOptions(
        document_length=64, num_documents=3, num_inflight_requests=in_flight, max_output_length=3, shuffle_policy="tile"
    )
    return BenchConfig(options=options, engine_url=server.url, **more)  # type: ignore[arg-type]


def test_rounds_are_played_in_order(serve: StartServer) -> None:
    """Pre-warm-up, then each document once and alone with one token, then every question."""
    server = serve(first_token_s=0.01)
    result = run_rounds(small(server))
    assert [(r.name, r.summary.requests) for r in result.rounds] == [
        (RoundName.PRE_WARM_UP, 2),
        (RoundName.WARM_UP, 3),
        (RoundName.QUERY, 6),
    ]
    warm_up = result.round(RoundName.WARM_UP)
    assert warm_up is not None
    for before, after in zip(warm_up.records, warm_up.records[1:], strict=False):
        assert before.finish_time <= after.submit_time
    assert [r.request_id for r in result.query.records] == [f"doc{d}_q{q}" for q in range(2) for d in range(3)]


def test_right_answers_are_counted_from_a_cache_and_computed_anew(serve: StartServer) -> None:
    """Each question is asked twice, the second time with a salt of its own; both rounds have their share of right ones.

    The server answers questions for places wrong the first time.
    """
    seen: list[str] = []
    right: dict[str, str] = {}

    def answers(body: dict[str, Any]) -> tuple[str, ...] | None:
        question = body["messages"][-1]["content"].rsplit(" # # ", 1)[1]
        seen.append(question)
        return ("no", "thing") if seen.count(question) == 1 and question.startswith("Where") else (right[question],)

    server = serve(answers=answers)
    options = RagQaQualityOptions(document_length=40, num_cases=1, num_documents=3, num_questions=6)
    config = BenchConfig(options=options, engine_url=server.url, no_warmup=True)

    async def count_tokens(text: str) -> int | None:
        return None

    made = {each.name: each for each in asyncio.run(options.rounds(config.scale, config.seed, count_tokens))}
    right.update({p.content.rsplit(" # # ", 1)[1]: p.answers[0] for p in made[RoundName.QUERY].prompts})
    result = run_rounds(config)
    wheres = sum(prompt.content.rsplit(" # # ", 1)[1].startswith("Where") for prompt in made[RoundName.QUERY].prompts)
    cached, anew = (result.round(name) for name in (RoundName.QUERY, RoundName.ANEW))
    assert cached is not None and anew is not None and 0 < wheres < 6
    assert (cached.summary.scored, cached.summary.right) == (6, 6 - wheres)
    assert (anew.summary.scored, anew.summary.right, anew.summary.quality) == (6, 6, 1.0)
    salts = [body.get("cache_salt") for body in server.served.bodies]
    assert salts[:6] == [None] * 6 and None not in salts[6:] and len(set(salts[6:])) == 6
    assert summary_of(result)["results"]["quality"] == (6 - wheres) / 6
    assert BenchResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_requests_are_what_an_openai_server_expects(serve: StartServer) -> None:
    """Streaming chat completions at temperature 0 with usage; the key as a bearer token; ignore_eos only if asked."""
    server = serve()
    run_rounds(small(server, no_warmup=True, api_key="secret"))
    for body in server.served.bodies:
        (message,) = body.pop("messages")
        assert list(message) == ["role", "content"] and message["role"] == "user"
        assert message["content"].startswith("Document ")
        assert body == {
            "model": "small",
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    assert {h["Authorization"] for h in server.served.headers} == {"Bearer secret"}
    server = serve()
    run_rounds(small(server, no_warmup=True, ignore_eos=True))
    assert all(body["ignore_eos"] is True for body in server.served.bodies)


def test_the_use_of_the_caches_is_sampled(serve: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of the query round add up to its counters, come in order of time, and survive the file."""
    monkeypatch.setattr(runner, "_SAMPLE_S", 0.01)
    server = serve(first_token_s=0.1, between_tokens_s=0.01)
    result = run_rounds(small(server))
    timeline, cache = result.query.timeline, result.query.summary.cache
    assert cache is not None and len(timeline) > 1
    for tier, tokens in cache.hit_tokens.items():
        assert sum(each.use.hit_tokens[tier] for each in timeline) == tokens
    assert [each.at_s for each in timeline] == sorted(each.at_s for each in timeline)
    assert BenchResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert not any(each.timeline for each in result.rounds if each.name is not RoundName.QUERY)
    assert not run_rounds(small(server, engine_pid=os.getpid())).query.timeline


def test_no_request_waits_for_the_garbage_collector(serve: StartServer) -> None:
    """While requests are sent, what existed before is out of the collector's reach; afterwards it is as it was."""
    frozen: list[int] = []

    class Watch(runner.Progress):
        def request_finished(self, name: RoundName, record: RequestRecord) -> None:
            frozen.append(gc.get_freeze_count())

    run_rounds(small(serve()), Watch())
    assert frozen and min(frozen) > 10_000 and gc.get_freeze_count() == 0


def test_no_more_in_flight_than_asked(serve: StartServer) -> None:
    """The query round keeps exactly the asked number of requests in flight while it has that many."""
    server = serve(first_token_s=0.05, holds=lambda served, body: served.max_running < 4)
    run_rounds(small(server, in_flight=4, no_warmup=True))
    assert server.served.max_running == 4


async def answered(monkeypatch: pytest.MonkeyPatch, socket: Path, **behaviour: Any) -> RequestRecord:
    """One answer of a server that is in the same simulated time."""
    runner = web.AppRunner(OpenAIServer(Behaviour(**behaviour)).app())
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    monkeypatch.setattr(client.aiohttp, "TCPConnector", lambda **_: aiohttp.UnixConnector(str(socket)))
    async with client.OpenAIClient("http://server", "", 60, asyncio.get_running_loop().time) as asking:
        record = await asking.chat(Prompt("one", "What?", 3), 0, "small", ignore_eos=False)
    await runner.cleanup()
    return record


@in_simulated_time
async def test_times_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TTFT is the wait for the first text, not for the empty opening delta; ITL the waits between texts."""
    record = await answered(monkeypatch, tmp_path / "socket", first_token_s=0.6, between_tokens_s=0.3)
    assert record.ttft == pytest.approx(0.6) and record.inter_token_s == pytest.approx((0.3, 0.3))
    assert record.request_latency == pytest.approx(1.2) and record.decode_speed == pytest.approx(10 / 3)


@in_simulated_time
async def test_reasoning_is_an_answers_first_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reasoning delta counts as the first token and belongs to the answer."""
    told = {"reasoning_first": True, "first_token_s": 0.1, "between_tokens_s": 0.2}
    record = await answered(monkeypatch, tmp_path / "socket", **told)
    assert record.ttft == pytest.approx(0.1) and record.answer == "An answer."


def test_a_rounds_figures_are_its_records(serve: StartServer) -> None:
    """Quantiles are over the records, and a round lasts from its first request to its last answer."""
    query = run_rounds(small(serve(first_token_s=0.01, between_tokens_s=0.01), no_warmup=True)).query
    summary, records = query.summary, query.records
    assert summary.ttft_s == quantiles(record.ttft for record in records)
    assert summary.inter_token_s == quantiles(gap for record in records for gap in record.inter_token_s)
    assert summary.request_latency_s == quantiles(record.request_latency for record in records)
    lasted_s = max(record.finish_time for record in records) - min(record.submit_time for record in records)
    assert summary.elapsed_s >= lasted_s > 0


def test_tokens_are_those_of_the_servers_usage(serve: StartServer) -> None:
    """Input, output and cached tokens are the usage's, not counted from the text."""
    summary = run_rounds(small(serve(), no_warmup=True)).query.summary
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (600, 18, 360)
    assert summary.cached_rate == 0.6


def test_hit_rates_are_deltas_of_the_round(serve: StartServer) -> None:
    """Each tier's hit rate is what its counter grew by during the round over the round's prompt tokens."""
    result = run_rounds(small(serve()))
    for round in result.rounds:
        assert round.summary.hit_rates == {"gpu": 0.1, "ram": 0.4, "disk": 0.25}
        assert round.summary.cache is not None
        assert round.summary.cache.lookup_tokens == 90 * round.summary.requests


def test_a_server_without_metrics_is_measured_too(serve: StartServer) -> None:
    """No /metrics means no hit rates by tier, and nothing else changes."""
    summary = run_rounds(small(serve(has_metrics=False), no_warmup=True)).query.summary
    assert summary.cache is None and summary.hit_rates == {}
    assert summary.failed == 0


def failed(result: BenchResult) -> list[RequestRecord]:
    return [r for r in result.query.records if not r.successful]


def test_a_refused_request_is_recorded_with_its_error(serve: StartServer) -> None:
    """A request that the server refuses is a failure with status and body, no answer, and the others go on."""
    server = serve(fails=lambda content: 503 if "Document 1:" in content else 0)
    result = run_rounds(small(server, no_warmup=True))
    assert [r.request_id for r in failed(result)] == ["doc1_q0", "doc1_q1"]
    assert all("HTTP 503" in r.error and "no luck" in r.error for r in failed(result))
    assert all(r.answer == "" and r.answer_sha256 == "" for r in failed(result))
    assert result.query.summary.failed == 2
    assert result.query.summary.prompt_tokens == 400


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [({"breaks_off": True}, "out of memory"), ({"cuts": True}, "finish_reason"), ({"answer": ()}, "no tokens")],
)
def test_half_an_answer_is_a_failure(serve: StartServer, behaviour: dict[str, object], error: str) -> None:
    """A stream that breaks off, ends early or has no tokens fails with its reason and leaves no half answer."""
    result = run_rounds(small(serve(**behaviour), no_warmup=True))
    assert len(failed(result)) == 6
    assert all(error in r.error and r.answer == "" for r in failed(result))


def test_tokens_without_text_are_an_answer(serve: StartServer) -> None:
    """An answer whose tokens show nothing succeeds; its first token is the event that ended it."""
    record = run_rounds(small(serve(no_text=True), no_warmup=True)).query.records[0]
    assert record.successful and record.answer == "" and record.num_output_tokens == 3
    assert record.ttft == record.request_latency


def test_answers_are_kept_with_their_digest(serve: StartServer) -> None:
    """Two runs of one workload have equal digests for equal answers, and other digests for other answers."""
    one, same, other = (
        run_rounds(small(serve(answer=answer), no_warmup=True)) for answer in (("a", "b"), ("ab",), ("a", "c"))
    )
    digests = [[r.answer_sha256 for r in result.query.records] for result in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert one.query.records[0].answer == "ab"


def test_a_result_survives_json(serve: StartServer, tmp_path: Path) -> None:
    """A saved result loads as an equal one."""
    result = run_rounds(small(serve(), slo_ttft_ms=1.0), command="hotspan bench engine")
    path = tmp_path / "deep" / "result.json"
    result.save(path)
    assert BenchResult.load(path) == result
    path.write_text('{"schema": 99}')
    with pytest.raises(ConfigError, match="schema"):
        BenchResult.load(path)


def test_a_result_of_an_earlier_version_is_read(serve: StartServer, tmp_path: Path) -> None:
    """A saved result without the figures that came later loads with those figures unknown."""
    path = tmp_path / "result.json"
    result = run_rounds(small(serve()))
    result.save(path)
    saved = json.loads(path.read_text())
    for played in saved["rounds"]:
        del played["loop"]
        for name in ("tpot_s", "late_s", "ttft_from_due_s", "unsent", "within_slo"):
            del played["summary"][name]
        for record in played["records"]:
            del record["due_time"], record["tpot"]
    path.write_text(json.dumps(saved))
    loaded = BenchResult.load(path)
    assert loaded.query.records == result.query.records
    assert loaded.query.summary == replace(result.query.summary, tpot_s=None)
    del saved["rounds"][0]["summary"]["ttft_s"]
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="can't be read"):
        BenchResult.load(path)


class CountedCpu:
    """CPU-seconds of a server: half a second per answer, in the background; each reading sees half a second more."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.used_s = self.now = 0.0

    def seconds(self) -> float:
        self.now += 100.0  # what is waited for after the last answer
        self.used_s = min(self.used_s + 0.5, 0.5 * len(self._served.bodies))
        return self.used_s


def test_background_work_belongs_to_the_round_that_caused_it(
    serve: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time used after the last answer of a round is in that round's figure, and in no round's elapsed time."""
    server = serve()
    cpu = CountedCpu(server.served)
    monkeypatch.setattr(runner, "ProcessTreeCpu", lambda pid: cpu)
    monkeypatch.setattr(runner, "_run_clock", lambda: lambda: cpu.now)
    result = run_rounds(small(server, engine_pid=os.getpid()))
    assert [r.summary.requests for r in result.rounds] == [2, 3, 6]
    assert [r.summary.cpu_s for r in result.rounds] == pytest.approx([1.0, 1.5, 3.0])
    assert [r.summary.elapsed_s for r in result.rounds] == [0.0, 0.0, 0.0]


def test_a_pid_of_nobody_is_refused(serve: StartServer) -> None:
    """A server's pid that no process has is a clear error; that of one gives each round CPU-seconds."""
    with pytest.raises(ConfigError, match="--engine-pid"):
        run_rounds(small(serve(), engine_pid=2**22 + 1))
    seconds = [r.summary.cpu_s for r in run_rounds(small(serve(), engine_pid=os.getpid())).rounds]
    assert all(s is not None and s >= 0 for s in seconds)


def test_the_check_round_asks_the_same_one_at_a_time(serve: StartServer) -> None:
    """The check round sends the query round's requests in their order, each after the answer to the one before it."""
    server = serve(first_token_s=0.02)
    result = run_rounds(small(server, in_flight=3, rounds=(RoundName.QUERY, RoundName.CHECK)))
    check = result.round(RoundName.CHECK)
    assert check is not None
    assert [r.request_id for r in check.records] == [r.request_id for r in result.query.records]
    assert server.served.contents[:6] == server.served.contents[6:]
    assert all(a.finish_time <= b.submit_time for a, b in zip(check.records, check.records[1:], strict=False))


def test_an_absent_server_is_a_clear_error() -> None:
    """A server that isn't there is a ConfigError about --engine-url, not a run of failures."""
    options = LongDocQaOptions(num_documents=1)
    with pytest.raises(ConfigError, match="--engine-url"):
        run_rounds(BenchConfig(options=options, engine_url="http://127.0.0.1:9"))
