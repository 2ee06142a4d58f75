"""The parts of benchmarks/multi_round_chat.py that need no engine."""

import json
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import multi_round_chat as benchmark
from benchmarks.multi_round_chat import L2, MODES, ChatSizes, Setting, order_of, plan_l2, started, verdicts
from hotspan.bench import counters
from hotspan.bench.compare import NamedRun
from hotspan.bench.records import BenchResult, RoundName
from hotspan.bench.summary import summarize
from hotspan.core.addresses import free_port
from hotspan.core.errors import ConfigError, EngineError
from hotspan.demo.model import DemoModel
from hotspan.demo.plan import BLOCK_TOKENS, GIB
from tests.bench.fabricated import fabricated_result

FAKE = Path(__file__).parents[1] / "demo" / "fake_hotspan.py"
KV_BYTES = 10_240
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server")


def test_ram_holds_a_fraction_of_the_sessions_and_l2_all() -> None:
    """The engine's pool holds fewer sessions than RAM, RAM fewer than half, L2 all of them with all their turns."""
    sizes = ChatSizes()
    pool, ram = sizes.pool_blocks * BLOCK_TOKENS, float(sizes.ram_gib(KV_BYTES)) * GIB / KV_BYTES
    everything = sizes.sessions * sizes.request_tokens
    assert sizes.request_tokens <= pool <= ram < everything / 2
    assert float(sizes.l2_gib(KV_BYTES)) * GIB / KV_BYTES >= everything
    last = sizes.shared_prompt_tokens + sizes.history_tokens + 3 * (sizes.input_tokens + sizes.output_tokens)
    assert last < sizes.request_tokens < 1.2 * last, "three turns in each session"
    assert sizes.options.num_requests == 3 * sizes.sessions


def test_sizes_with_nothing_to_measure_are_refused() -> None:
    """A RAM that holds most sessions, or less than the engine's own pool, is an error."""
    for wrong in ({"ram_sessions": 13.0}, {"pool_sessions": 8.0}, {"pool_sessions": 0.5}):
        with pytest.raises(ConfigError, match="nothing to measure"):
            ChatSizes(**wrong)  # type: ignore[arg-type]


def test_the_two_modes_differ_in_the_l2_alone(tmp_path: Path) -> None:
    """Both servers get the same options, and one of them what it must know of the L2 besides."""
    model = DemoModel(tmp_path, "demo", 1, KV_BYTES, 1, 1, 1)
    setting = Setting(sizes=ChatSizes(), model=model, l2="daemon", shared_memory_name="m", work=tmp_path, threads=2)
    told = ("--l2", "redis://127.0.0.1:5")
    ram, l2 = setting.arguments(1), setting.arguments(1, told)
    assert l2 == (*ram, *told)
    assert "--ram-gib" in ram


def test_modes_begin_in_turn() -> None:
    """Every other repetition begins with the other mode, and each has both."""
    assert [order_of(n) for n in (1, 2, 3)] == [("ram", "l2"), ("l2", "ram"), ("ram", "l2")]


def chat(ttft: tuple[float, float], itl_s: float, tokens_per_s: float, *, failed: int = 0) -> BenchResult:
    """A result whose query round has those TTFTs (p50, p90), that p50 between tokens and that throughput."""
    result = fabricated_result(1.0, {})
    query = result.query
    ttfts = [ttft[0]] * 6 + [ttft[1]] * 5
    records = [
        replace(
            query.records[i],
            submit_time=0.0,
            first_token_time=ttfts[i],
            finish_time=ttfts[i] + 1.0,
            inter_token_s=(itl_s,) * 3,
            successful=i >= failed,
        )
        for i in range(11)
    ]
    tokens = sum(r.num_output_tokens for r in records if r.successful)
    played = replace(query, records=tuple(records), summary=summarize(records, tokens / tokens_per_s, 1.0, None))
    return replace(result, rounds=(*result.rounds[:2], played))


def judged(*pairs: tuple[BenchResult, BenchResult]) -> list[tuple[float | None, bool]]:
    ram, l2 = (NamedRun(mode, mode, tuple(pair[i] for pair in pairs)) for i, mode in enumerate(MODES))
    return [(v.found.median if v.found else None, v.is_met) for v in verdicts(ram, l2)]


def test_each_goal_is_met_at_its_bound_and_not_beyond() -> None:
    """TTFT P50 at most 1.02 of RAM alone; P90 and ITL P50 1.3 and throughput 1.27 times as good; all answered."""
    ram = chat((1.0, 2.6), 0.13, 100.0)
    at = judged((ram, chat((1.02, 2.0), 0.1, 127.0)))
    assert at == [(pytest.approx(found), True) for found in (1.02, 1.3, 1.3, 1.27, 1.0)]
    beyond = judged((ram, chat((1.03, 2.01), 0.101, 126.0, failed=1)))
    assert [met for _, met in beyond] == [False] * 5


def test_goals_are_judged_by_the_median_of_the_repetitions_ratios() -> None:
    """Ratios are taken within a repetition, so that a machine ten times as slow for one of them changes none."""
    good = (chat((1.0, 2.6), 0.13, 100.0), chat((0.5, 1.0), 0.05, 200.0))
    slow = (chat((10.0, 26.0), 1.3, 10.0), chat((5.0, 10.0), 0.5, 20.0))
    bad = (chat((1.0, 2.6), 0.13, 100.0), chat((2.0, 9.0), 0.5, 50.0))
    assert judged(good, slow, bad) == [(pytest.approx(found), True) for found in (0.5, 2.6, 2.6, 2.0, 1.0)]
    assert [met for _, met in judged(bad, slow, bad)] == [False, False, False, False, True]


def test_one_failure_in_one_run_is_no_success() -> None:
    """Success is of every request of every run and round, not of most."""
    good = (chat((1.0, 2.6), 0.13, 100.0), chat((0.5, 1.0), 0.05, 200.0))
    failing = chat((0.5, 1.0), 0.05, 200.0, failed=1)
    warm_up = replace(failing.query, name=RoundName.WARM_UP)
    before = replace(good[1], rounds=(good[1].rounds[0], warm_up, good[1].query))
    for pair in ((good[0], failing), (failing, good[1]), (good[0], before)):
        assert [met for _, met in judged(good, good, pair)] == [True, True, True, True, False]


def test_what_was_not_measured_is_not_met() -> None:
    """A figure that a run doesn't have is no success."""
    silent = chat((1.0, 2.0), 0.1, 100.0)
    records = tuple(replace(r, inter_token_s=()) for r in silent.query.records)
    query = replace(silent.query, records=records, summary=replace(silent.query.summary, inter_token_s=None))
    mute = replace(silent, rounds=(*silent.rounds[:2], query))
    assert judged((mute, mute))[2] == (None, False)


@needs_redis
def test_redis_is_started_empty_and_stopped(tmp_path: Path) -> None:
    """A Redis of the wanted size answers while the block runs, and nobody afterwards; it leaves no file."""
    l2 = plan_l2("redis", "0.010", "unused")
    with started(l2, tmp_path / "log"), socket.create_connection(("127.0.0.1", l2.port), timeout=60) as client:
        client.sendall(b"DBSIZE\r\nCONFIG GET maxmemory\r\n")
        answer = b""
        while b"maxmemory" not in answer or answer.count(b"\r\n") < 6:
            answer += client.recv(4096)
    assert answer.startswith(b":0\r\n") and b"10737419" in answer
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", l2.port), timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_an_l2_that_ends_is_said_with_its_last_words(tmp_path: Path) -> None:
    """A process that dies instead of answering is an error with the end of its log, not a run without an L2."""
    dies = L2((sys.executable, "-c", "raise SystemExit('no room')"), free_port(), ())
    with pytest.raises(EngineError, match="no room"), started(dies, tmp_path / "log"):
        pytest.fail("nobody answered")


def test_the_daemon_gets_the_flags_that_it_is_documented_with() -> None:
    """Host, port, shared memory and size; the server is told the same port and the same shared memory."""
    l2 = plan_l2("daemon", "2.5", "segment")
    given = dict(zip(l2.command[4::2], l2.command[5::2], strict=True))
    assert l2.command[1:4] == ("-m", "hotspan", "daemon")
    assert given == {
        "--host": "127.0.0.1",
        "--port": str(l2.port),
        "--shared-memory-name": "segment",
        "--size-gib": "2.5",
    }
    url = f"sagemaker-hyperpod://127.0.0.1:{l2.port}"
    assert l2.serve == ("--l2", url, "--l2-option", "shared_memory_name=segment")


@needs_redis
def test_a_whole_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two repetitions over stand-ins: servers in turn, the same turns for both, and the goals' figures in the file."""

    def serve(model: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
        return (sys.executable, str(FAKE), "serve", str(model), *arguments)

    monkeypatch.setattr(benchmark, "serve_command", serve)
    monkeypatch.setattr(counters, "_WINDOW_S", 0.02)
    output, work = tmp_path / "deep" / "chat.json", tmp_path / "work"
    sizes = "--sessions 12 --shared-prompt-tokens 30 --history-tokens 40 --requests 24 --qps 200"
    sizes += " --pool-sessions 3 --ram-sessions 5"
    rest = f"--output {output} --work {work} --l2 redis --model-size tiny --repetitions 2"
    assert benchmark.main([*rest.split(), *sizes.split()]) == 1, "stand-ins have no inter-token latency"
    found = json.loads(output.read_text())
    titles = [goal["title"].split(",")[0] for goal in found["goals"]]
    assert titles == ["TTFT P50", "TTFT P90", "ITL P50", "output throughput", "success"]
    assert found["goals"][-1]["is_met"] and not found["goals"][2]["is_met"]
    assert [list(repetition) for repetition in found["repetitions"]] == [["ram", "l2"]] * 2
    for repetition in found["repetitions"]:
        query = [rounds[RoundName.QUERY.value] for rounds in repetition.values()]
        assert {(q["requests"], q["loop"], q["unsent"]) for q in query} == {(24, "closed", 0)}
    assert "--l2 URL" in found["serve"]["l2"] and "--l2" not in found["serve"]["ram"]
    servers = {f"server-{mode}-{n}.log" for mode in MODES for n in (1, 2)}
    assert {path.name for path in work.glob("*.log")} == servers | {"l2-1.log", "l2-2.log"}
    assert all("stopped in order" in (work / name).read_text() for name in servers)
    shown = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("RAM")]
    assert shown[:4] == ["RAM only 1/2", "RAM + L2 1/2", "RAM + L2 2/2", "RAM only 2/2"]
