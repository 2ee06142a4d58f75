import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import typer
from click.testing import Result
from openai_server import Served
from typer.testing import CliRunner

from conftest import StartServer
from hotspan.bench.records import BenchResult
from hotspan.bench.workloads import WORKLOADS
from hotspan.cli.bench import app
from hotspan.cli.output import command_line
from hotspan.config.options import options_of

COLUMNS = [
    *("request_id", "successful", "ttft", "request_latency", "num_input_tokens", "num_output_tokens"),
    *("decode_speed", "submit_time", "first_token_time", "finish_time", "error"),
]
OWN_COLUMNS = ["cached_tokens", "due_time", "tpot", "itl_p50", "itl_p90", "itl_p99"]
RESULT_KEYS = [
    *("total_requests", "successful_requests", "failed_requests", "elapsed_time", "mean_ttft_ms"),
    *("mean_decode_speed", "mean_request_latency_ms", "input_throughput", "output_throughput"),
    *("total_input_tokens", "total_output_tokens", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    *("p50_decode_speed", "p90_decode_speed", "p99_decode_speed"),
    *("p50_request_latency_ms", "p90_request_latency_ms", "p99_request_latency_ms"),
]


def invoke(*arguments: str) -> Result:
    root = typer.Typer()
    root.add_typer(app, name="bench")
    return CliRunner().invoke(root, ["bench", *arguments])


def engine(url: str, output: Path, *more: str) -> Result:
    common = ("--engine-url", url, "--workload", "long-doc-qa", "--output", str(output), "-q", "--no-interactive")
    small = ("--ldqa-document-length", "40", "--ldqa-max-output-length", "3", "--tokens-per-gb-kvcache", "80")
    return invoke("engine", *common, *small, "--kv-cache-volume", "1", *more)


def rows(directory: Path) -> list[dict[str, Any]]:
    with (directory / "bench_results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_have_the_columns_and_keys_that_users_know(serve: StartServer, tmp_path: Path) -> None:
    """The CSV begins with the known columns, the summary's results with the known keys, in their order; status 0."""
    done = engine(serve(between_tokens_s=0.01).url, tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "bench_results.csv").read_text().splitlines()[0].split(",") == COLUMNS + OWN_COLUMNS
    assert len(rows(tmp_path)) == 4
    for row in rows(tmp_path):
        assert (row["successful"], row["num_input_tokens"], row["num_output_tokens"]) == ("True", "100", "3")
        assert float(row["submit_time"]) <= float(row["first_token_time"]) <= float(row["finish_time"])
        assert float(row["ttft"]) == pytest.approx(float(row["first_token_time"]) - float(row["submit_time"]))
    summary = json.loads((tmp_path / "bench_summary.json").read_text())
    assert json.loads(done.stdout) == summary
    assert set(summary) == {"config", "results"}
    assert list(summary["results"])[: len(RESULT_KEYS)] == RESULT_KEYS
    assert summary["results"]["p99_decode_speed"] <= summary["results"]["p50_decode_speed"], "p99 is the slow tail"
    assert summary["config"]["ldqa_document_length"] == 40
    assert summary["config"]["model"] == "small"


def test_our_own_columns_and_keys_follow(serve: StartServer, tmp_path: Path) -> None:
    """ITL and TPOT by request and over all, cached tokens, the loop and how late it was, success rate and goodput."""
    server = serve(first_token_s=0.01, between_tokens_s=0.01)
    flags = ("--mrc-num-sessions", "2", "--mrc-num-requests", "4", "--mrc-qps", "20", "--mrc-output-length", "3")
    objective = ("--slo-ttft-ms", "600000", "--slo-itl-ms", "0.0001")
    done = engine(server.url, tmp_path, "--workload", "multi-round-chat", *flags, *objective, "--json")
    assert done.exit_code == 0, done.output
    for row in rows(tmp_path):
        assert row["cached_tokens"] == "60"
        assert 2 * float(row["tpot"]) == pytest.approx(float(row["request_latency"]) - float(row["ttft"]))
        assert float(row["itl_p50"]) <= float(row["itl_p90"]) <= float(row["itl_p99"])
        assert float(row["due_time"]) <= float(row["submit_time"]) + 1e-6
    results = json.loads((tmp_path / "bench_summary.json").read_text())["results"]
    itls, tpots = ([float(row[name]) for row in rows(tmp_path)] for name in ("itl_p50", "tpot"))
    assert results["mean_itl_ms"] == pytest.approx(1000 * fmean(itls))  # each is the mean of two
    assert results["p50_tpot_ms"] == pytest.approx(1000 * median(tpots))
    for name in ("itl_ms", "tpot_ms"):
        assert results[f"p50_{name}"] <= results[f"p90_{name}"] <= results[f"p99_{name}"]
    assert results["p50_ttft_from_due_ms"] >= results["p50_ttft_ms"]
    assert (results["loop"], results["unsent_requests"], results["success_rate"]) == ("closed", 0, 1.0)
    assert (results["total_cached_tokens"], results["cached_rate"]) == (240, 0.6)
    assert (results["requests_within_slo"], results["goodput"]) == (0, 0.0), "no answer has 0.1 us between tokens"
    assert "Closed loop" in done.output


def test_what_a_run_does_not_have_is_null(serve: StartServer, tmp_path: Path) -> None:
    """A schedule without times, and no objective, give empty cells and nulls rather than zeros."""
    engine(serve(answer=("one",)).url, tmp_path, "--json")
    assert all(row[name] == "" for row in rows(tmp_path) for name in ("due_time", "tpot", "itl_p50", "itl_p99"))
    results = json.loads((tmp_path / "bench_summary.json").read_text())["results"]
    nulls = ("p50_late_ms", "p50_ttft_from_due_ms", "p99_itl_ms", "p99_tpot_ms", "goodput", "requests_within_slo")
    assert all(results[name] is None for name in nulls)


def test_a_failed_request_is_status_1_and_in_the_csv(serve: StartServer, tmp_path: Path) -> None:
    """Any failed request makes the status 1; the CSV has its line with its error."""
    server = serve(fails=lambda content: 500 if "Document 1:" in content and "Question" in content else 0)
    done = engine(server.url, tmp_path)
    assert done.exit_code == 1, done.output
    bad = [row for row in rows(tmp_path) if row["successful"] == "False"]
    assert sorted(row["request_id"] for row in bad) == ["doc1_q0", "doc1_q1"]
    assert all("HTTP 500" in row["error"] and row["num_output_tokens"] == "0" for row in bad)
    assert "HTTP 500" in done.output


def test_quiet_shows_no_progress(serve: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-q is --quiet: no bar is made."""
    made: list[object] = []
    monkeypatch.setattr("hotspan.bench.terminal.TerminalProgress.__init__", lambda *given: made.append(given))
    done = engine(serve().url, tmp_path)
    assert done.exit_code == 0 and not made, done.output


def by_salt(served: Served, body: dict[str, Any]) -> int:
    """What a server finds that keeps texts by their salts: all but what a salt brings for the first time."""
    salts = [seen.get("cache_salt") for seen in served.bodies]
    return 0 if body.get("cache_salt") and salts.count(body["cache_salt"]) == 1 else 60


def test_the_check_compares_with_answers_computed_anew(serve: StartServer, tmp_path: Path) -> None:
    """--check N asks N questions again, each alone and then under a salt of its own; equal answers are status 0."""
    server = serve(cached=by_salt)
    done = engine(server.url, tmp_path, "--check", "2", "--json")
    assert done.exit_code == 0, done.output
    assert "answers: 2 of 2 are those that the engine computes without a cache (2 came from a cache)" in done.output
    asked = server.served.bodies[-6:]
    salts = [body.get("cache_salt") for body in asked]
    assert salts[:2] == [None, None] and salts[2] == salts[3] != salts[4] == salts[5] and None not in salts[2:]
    contents = [body["messages"][0]["content"] for body in asked]
    assert contents[0] == contents[2] == contents[3] != contents[1] == contents[4] == contents[5]
    loaded = BenchResult.load(tmp_path / "hotspan_bench.json")
    assert loaded.check is not None and loaded.check.is_passed and loaded.check.asked == 2
    assert engine(serve(cached=lambda served, body: None).url, tmp_path, "--check", "9").exit_code == 0


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"answers": lambda body: None if body.get("cache_salt") else ("Wrong",)}, "0 of 2 are those .*DIFFERENT: doc"),
        ({"cached": lambda served, body: 60}, "not checked, since the server .* doc"),
        ({"refuses": lambda body: 400 if body.get("cache_salt") else 0}, "failed: doc"),
    ],
)
def test_a_check_that_fails_is_status_1(
    serve: StartServer, tmp_path: Path, behaviour: dict[str, Any], expected: str
) -> None:
    """Answers that differ or that are not computed anew, and requests that fail, are named, with status 1."""
    done = engine(serve(**({"cached": by_salt} | behaviour)).url, tmp_path, "--check", "2", "--json")
    assert done.exit_code == 1 and re.search(expected, done.output), done.output
    check = BenchResult.load(tmp_path / "hotspan_bench.json").check
    assert check is not None and not check.is_passed


def test_only_the_files_that_were_asked_for_are_written(
    serve: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--no-csv writes no CSV; without --output there is a CSV alone, in the working directory."""
    monkeypatch.chdir(tmp_path)
    url, names = serve().url, ["bench_summary.json", "hotspan_bench.json"]
    assert engine(url, tmp_path / "all", "--no-csv").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == names
    small = ("--ldqa-document-length", "40", "--ldqa-num-documents", "1", "-q")
    assert invoke("engine", "--engine-url", url, "--workload", "long-doc-qa", *small).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "bench_results.csv"]


def test_export_resolves_and_does_not_run(serve: StartServer, tmp_path: Path) -> None:
    """--export-config writes the resolved settings and sends nothing; --config with it gives the same run."""
    server = serve()
    path = tmp_path / "bench.json"
    done = engine(server.url, tmp_path, "--export-config", str(path), "--seed", "5")
    assert done.exit_code == 0, done.output
    assert server.served.bodies == []
    assert json.loads(path.read_text())["model"] == "small"
    replay = invoke("engine", "--engine-url", server.url, "--config", str(path), "--output", str(tmp_path), "-q")
    assert replay.exit_code == 0, replay.output
    replayed = server.served.contents
    server.served.bodies.clear()
    engine(server.url, tmp_path, "--seed", "5")
    assert server.served.contents == replayed


def test_flags_override_the_file(serve: StartServer, tmp_path: Path) -> None:
    """A flag that is given goes before the file's value; one that isn't leaves it."""
    server = serve()
    path = tmp_path / "bench.json"
    path.write_text('{"workload": "long-doc-qa", "ldqa_num_documents": 2, "ldqa_query_per_document": 3, "model": "m"}')
    flags = ("--config", str(path), "--ldqa-query-per-document", "1", "--no-warmup", "-q", "--no-csv")
    done = invoke("engine", "--engine-url", server.url, *flags)
    assert done.exit_code == 0, done.output
    assert len(server.served.bodies) == 2
    assert {body["model"] for body in server.served.bodies} == {"m"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "long-doc-qa"), "--engine-url"),
        (("--engine-url", "http://localhost:1"), "--workload must be one of long-doc-qa, multi-round-chat"),
        (("--workload", "multi-round-chat", "--slo-itl-ms", "-1"), "--slo-itl-ms"),
        (
            ("--workload", "multi-round-chat", "--mrc-loop", "half"),
            "--mrc-loop is 'half': give closed (the default) or open",
        ),
        (("--engine-url", "localhost:1", "--workload", "long-doc-qa"), "http://"),
    ],
)
def test_missing_settings_are_named(arguments: tuple[str, ...], message: str) -> None:
    """What is missing or wrong is status 2 and one line that names it."""
    done = invoke("engine", *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_results_of_two_runs_make_one_report(serve: StartServer, tmp_path: Path) -> None:
    """`bench report` reads what `--output` wrote and compares the runs, answers included."""
    for name, answer in (("one", ("a",)), ("two", ("b",))):
        engine(serve(answer=answer).url, tmp_path / name, "--json")
    files = [str(tmp_path / name / "hotspan_bench.json") for name in ("one", "two")]
    done = invoke("report", str(tmp_path / "report.html"), *files)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text()
    assert "0 of 4" in page


def test_the_key_is_in_no_file(serve: StartServer, tmp_path: Path) -> None:
    """The API key reaches the server and no result file, nor the recorded command."""
    engine(serve().url, tmp_path, "--json", "--report", str(tmp_path / "r.html"), "--api-key", "sk-hidden")
    assert not any("sk-hidden" in path.read_text() for path in tmp_path.iterdir())
    assert "sk-hidden" not in command_line(["bench", "--api-key", "sk-hidden", "--api-key=sk-hidden"])


def test_repetitions_find_nothing_of_each_other(serve: StartServer, tmp_path: Path) -> None:
    """The second has a salt of its own for all its requests; both are written, with intervals in the summary."""
    server = serve()
    done = engine(server.url, tmp_path, "--repetitions", "2", "--json")
    assert done.exit_code == 0, done.output
    salts = [body.get("cache_salt") for body in server.served.bodies]
    half = len(salts) // 2
    assert set(salts[:half]) == {None} and len(set(salts[half:])) == 1 and None not in salts[half:]
    summary = json.loads((tmp_path / "bench_summary.json").read_text())
    assert summary["repetitions"]["count"] == 2 and "mean_ttft_ms" in summary["repetitions"]["intervals"]
    assert "mean of 2 repetitions" in done.output
    same = invoke("compare", str(tmp_path), str(tmp_path), "--fail-if", "total_input_tokens > 1x")
    assert same.exit_code == 0 and "none" in same.output, same.output


def test_a_condition_sets_the_exit_status(serve: StartServer, tmp_path: Path) -> None:
    """1 if it holds, with the figure; a condition that means nothing is refused before a request is sent."""
    server = serve()
    done = engine(server.url, tmp_path, "--fail-if", "successful_requests > 0")
    assert done.exit_code == 1 and "failed: successful_requests is 4, which is > 0" in done.output
    asked = len(server.served.bodies)
    assert engine(server.url, tmp_path, "--fail-if", "speed > 0").exit_code == 2
    assert len(server.served.bodies) == asked


def test_two_servers_take_turns(serve: StartServer, tmp_path: Path) -> None:
    """A, B, A, B on the same requests; the figures of both and their ratios are written and printed."""
    a, b = serve(), serve(answer=("Two", " words"))
    small = ("--ldqa-document-length", "40", "--ldqa-max-output-length", "3", "--ldqa-num-documents", "2")
    (tmp_path / "one.json").write_text(json.dumps({"engine_pid": 1 << 30}))  # of no process, and of one server
    words = ("--workload", "long-doc-qa", *small, "--repetitions", "2", "--output", str(tmp_path / "both.json"))
    words += ("--config", str(tmp_path / "one.json"))
    done = invoke("compare", a.url, b.url, *words, "--json", "--fail-if", "total_output_tokens < 0.9x")
    assert done.exit_code == 1, done.output
    assert "total_output_tokens is 0.6667x" in done.output and "repetition 2 of 2" in done.output
    assert a.served.contents == b.served.contents
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["ratios"]["total_output_tokens"]["mean"] == pytest.approx(2 / 3)
    assert json.loads(done.stdout) == both
    mixed = invoke("compare", a.url, str(tmp_path))
    assert mixed.exit_code == 2 and "two servers or two results" in mixed.output


def test_a_run_begins_with_what_the_server_is(serve: StartServer, tmp_path: Path) -> None:
    """That it answers, which caches it has, and whether they are cold."""
    small = ("--ldqa-document-length", "40", "--ldqa-num-documents", "1", "--output", str(tmp_path))
    server = serve()
    for state in ("cold", "warm"):
        done = invoke("engine", "--engine-url", server.url, "--workload", "long-doc-qa", *small)
        assert f"{server.url} answers" in done.output and f"; {state}: " in done.output, done.output
    assert "hotspan's tiers" in done.output


TOKEN = "the-token-of-who-runs-this"


def test_the_admin_token_is_for_the_metrics_alone(
    serve: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given in any way it gets the counters, and goes nowhere else; one that is missing is said, with what to do."""
    monkeypatch.delenv("HOTSPAN_ADMIN_TOKEN", raising=False)
    server = serve(admin_token=TOKEN)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    small = ["--ldqa-document-length", "40", "--ldqa-max-output-length", "3", "--workload", "long-doc-qa"]
    small += ["--tokens-per-gb-kvcache", "80", "--kv-cache-volume", "1"]

    def run(*more: str) -> str:
        done = invoke("engine", "--engine-url", server.url, "--output", str(tmp_path / "out"), *small, *more)
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    said = run()
    assert "/metrics is for the administrator: give its admin token with --token, --admin-token-file or" in said
    assert not any("Authorization" in each for each in server.served.metrics_headers)
    for more in (["--token", TOKEN], ["--admin-token-file", str(file)]):
        assert "hit rates are unknown" not in run(*more)
    monkeypatch.setenv("HOTSPAN_ADMIN_TOKEN", TOKEN)
    assert "hit rates are unknown" not in run()
    assert not any("Authorization" in each for each in server.served.headers)
    assert not any(TOKEN in path.read_text() for path in (tmp_path / "out").iterdir())


def test_lengths_that_can_not_fit_are_refused_before_anything_is_sent(serve: StartServer, tmp_path: Path) -> None:
    """Only those: the longest request that the model takes is sent; the line names model, lengths and flags."""
    refused = engine(serve(max_tokens=42).url, tmp_path)
    said = " ".join(refused.output.split())
    assert refused.exit_code == 2, said
    assert "small takes 42 tokens, prompt and answer, and a request of long-doc-qa has at least 43" in said
    assert "lower --ldqa-document-length or --ldqa-max-output-length" in said
    assert not list(tmp_path.iterdir())
    server = serve(max_tokens=43)
    assert engine(server.url, tmp_path).exit_code == 0 and server.served.bodies


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_each_workload_says_how_long_it_is_or_takes_its_texts_from_elsewhere(workload: str) -> None:
    """The flags that it names are its own, and what they set counts: text and answer."""
    options = WORKLOADS[workload]()
    if options.length is None:
        assert workload == "trace-replay"
        return
    if workload == "rag-qa-quality":
        assert replace(options, dataset="questions.json").length is None, "its documents are those of the file"
    own = {each.flag for each in options_of(type(options), f"{options.PREFIX}_")}
    assert options.length.flags and own >= set(options.length.flags)
    assert options.length.tokens > options.tokens_each
    longer = replace(options, **{name: getattr(options, name) + 500 for name in options.LENGTHS})
    assert longer.length is not None and longer.length.tokens >= options.length.tokens + 500


def test_a_run_without_an_answer_writes_and_compares_nothing(serve: StartServer, tmp_path: Path) -> None:
    """Status 1 and the reason, for one server, for two in turn and for files; what was written before stays alone."""
    bad, good = serve(fails=lambda content: 400).url, serve().url
    done = engine(bad, tmp_path / "none", "--json")
    assert done.exit_code == 1 and "nothing is written" in done.output and "HTTP 400" in done.output
    assert not (tmp_path / "none").exists()
    common = ("--workload", "long-doc-qa", "--ldqa-document-length", "40", "--tokens-per-gb-kvcache", "80")
    for pair in ((bad, good), (good, bad)):
        done = invoke("compare", *pair, *common, "--kv-cache-volume", "1", "--repetitions", "1", "--output", "x.json")
        assert done.exit_code == 1 and f"requests to {bad} failed, nothing is compared" in done.output
        assert "no luck" in done.output and "p99" not in done.output


def test_files_of_runs_without_an_answer_are_not_compared(serve: StartServer, tmp_path: Path) -> None:
    """As older versions wrote them."""
    assert engine(serve().url, tmp_path / "good").exit_code == 0
    (tmp_path / "bad").mkdir()
    told = json.loads((tmp_path / "good" / "hotspan_bench.json").read_text())
    for played in told["rounds"]:
        played["summary"]["failed"] = played["summary"]["requests"]
        for record in played["records"]:
            record |= {"successful": False, "error": "HTTP 400: too long"}
    (tmp_path / "bad" / "hotspan_bench.json").write_text(json.dumps(told))
    done = invoke("compare", str(tmp_path / "bad"), str(tmp_path / "good"), "--json")
    assert done.exit_code == 1 and "nothing is compared: HTTP 400: too long" in " ".join(done.output.split())
    assert not done.stdout.startswith("{")
