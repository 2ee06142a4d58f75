import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hotspan.bench import counters
from hotspan.bench.records import TIMED_ROUNDS, RoundName
from hotspan.cli.main import app
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError, EngineError
from hotspan.demo import run as demo_run
from hotspan.demo.plan import BLOCK_TOKENS, MODE_NAMES, DemoRequest, DemoSizes, choose_modes, plan_modes
from hotspan.demo.results import DemoResult, compact_text
from hotspan.demo.run import run_demo
from hotspan.demo.server import ServerProcess, serve_command

FAKE = Path(__file__).parent / "fake_hotspan.py"
SMALL = DemoSizes(documents=3, document_tokens=200, in_flight=2, output_tokens=2)


def value_of(arguments: tuple[str, ...], flag: str) -> float:
    return float(arguments[arguments.index(flag) + 1])


def test_sizes_make_each_mode_mean_what_it_says() -> None:
    """The pool holds fewer than all documents, RAM all of them, the disk mode's RAM only the requests in flight."""
    sizes = DemoSizes()
    kv_bytes = 10_000
    none, ram, disk, restart, bound = plan_modes(sizes, kv_bytes, Path("kv"))
    assert tuple(mode.name for mode in (none, ram, disk, restart, bound)) == MODE_NAMES
    documents_gib = sizes.documents * sizes.document_tokens * kv_bytes / 2**30
    in_flight_gib = sizes.in_flight * sizes.request_tokens * kv_bytes / 2**30
    pool_tokens = none.pool_blocks * BLOCK_TOKENS
    assert sizes.request_tokens <= pool_tokens < 3 * sizes.request_tokens
    assert ram.pool_blocks == disk.pool_blocks == restart.pool_blocks == none.pool_blocks
    assert value_of(ram.arguments, "--ram-gib") > documents_gib
    assert in_flight_gib < value_of(disk.arguments, "--ram-gib") < documents_gib
    assert value_of(disk.arguments, "--disk-gib") > documents_gib
    assert restart.arguments == disk.arguments
    assert restart.rounds == (RoundName.PRE_WARM_UP, RoundName.QUERY, RoundName.CHECK)
    assert none.rounds == TIMED_ROUNDS and ram.rounds == disk.rounds == bound.rounds == tuple(RoundName)
    assert bound.pool_blocks * BLOCK_TOKENS >= sizes.documents * sizes.request_tokens
    assert bound.arguments == none.arguments == ("--no-cache",)


def test_modes_that_make_no_sense_are_refused() -> None:
    """Unknown modes, a restart without a disk, and sizes whose disk mode would be a RAM mode are errors."""
    modes = plan_modes(SMALL, 1000, Path("kv"))
    assert [mode.name for mode in choose_modes(modes, ("bound", "none"))] == ["none", "bound"]
    with pytest.raises(ConfigError, match="--mode must be one of"):
        choose_modes(modes, ("gpu",))
    with pytest.raises(ConfigError, match="--mode disk"):
        choose_modes(modes, ("restart",))
    with pytest.raises(ConfigError, match="--in-flight"):
        DemoSizes(documents=4, in_flight=4)


def fake_serve(model: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
    return (sys.executable, str(FAKE), "serve", str(model), *arguments)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The demo starts the stand-in, which is quiet at once, instead of the engine; the servers' arguments so far."""
    servers: list[tuple[str, ...]] = []

    def serve(model: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
        servers.append(arguments)
        return fake_serve(model, arguments)

    monkeypatch.setattr(demo_run, "serve_command", serve)
    monkeypatch.setattr(counters, "_WINDOW_S", 0.02)
    return servers


def run_small(output: Path, console: Console, **more: Any) -> DemoResult:
    request = DemoRequest(
        output=output, sizes=SMALL, threads=1, model="made", model_size="tiny", dtype="bfloat16", **more
    )
    return run_demo(request, console)


def test_the_demo_runs_all_modes_and_shows_them(started: list[tuple[str, ...]], tmp_path: Path) -> None:
    """Five servers are started with equal threads and stopped in order; tables, report and JSON name every mode."""
    console = Console(record=True, width=80)
    runs = run_small(tmp_path, console).runs
    assert tuple(run.name for run in runs) == MODE_NAMES
    logs = [(tmp_path / f"server-{name}.log").read_text() for name in MODE_NAMES]
    assert all("stopped in order" in log for log in logs)
    assert len({line for log in logs for line in log.splitlines() if line.startswith("threads")}) == 1
    assert [len(run.results[0].rounds) for run in runs] == [3, 4, 4, 3, 4]
    saved = {mode["name"]: mode for mode in json.loads((tmp_path / "demo.json").read_text())["modes"]}
    assert list(saved) == list(MODE_NAMES)
    matches = [saved[name]["same_answers"] for name in MODE_NAMES]
    assert matches == [None, *[{"as": "bound", "same": 6, "compared": 6}] * 3, None]
    shown = console.export_text()
    assert all(run.title in shown for run in runs) and shown.count("6 of 6") == 3
    report = (tmp_path / "report.html").read_text()
    assert all(run.title in report for run in runs) and "near-ties" in report
    assert not list(tmp_path.glob("kv-*")), "the disk mode's directory is gone"
    assert all(result.query.summary.cpu_s is not None for run in runs for result in run.results)


def test_repetitions_are_interleaved_and_start_afresh(started: list[tuple[str, ...]], tmp_path: Path) -> None:
    """All modes are played before any is played again, each time over an empty disk; every run is in every file."""
    results = tmp_path / "deep" / "figures.json"
    console = Console(record=True, width=100)
    names = ("none", "disk", "bound")
    done = run_small(tmp_path, console, mode=names, repetitions=2, results=results)
    disks = [a[a.index("--disk") + 1] if "--disk" in a else "" for a in started]
    assert [bool(disk) for disk in disks] == [False, True, False] * 2
    assert disks[1] != disks[4]
    assert all(len(run.results) == 2 for run in done.runs)
    assert sorted(path.name for path in tmp_path.glob("server-*")) == sorted(
        f"server-{name}-{i}.log" for name in names for i in (1, 2)
    )
    assert "Medians of 2 repetitions" in console.export_text()
    disk = json.loads((tmp_path / "demo.json").read_text())["modes"][1]
    assert len(disk["results"]) == 2
    assert disk["same_answers"] == {"as": "bound", "same": 12, "compared": 12}
    ttft = [result.query.summary.ttft_s for result in done.runs[1].results]
    low, high = sorted(quantiles.mean for quantiles in ttft if quantiles)
    of_disk = disk["rounds"]["query"]["ttft_s"]["mean"]
    assert of_disk == {"median": pytest.approx((low + high) / 2), "min": low, "max": high}


def test_the_figures_alone_name_no_text_and_no_path(started: list[tuple[str, ...]], tmp_path: Path) -> None:
    """The compact file has machine, sizes, summaries, medians and ratios, and no request, answer, port or path."""
    results = tmp_path / "figures.json"
    run_small(tmp_path, Console(quiet=True), mode=("none", "ram", "disk", "bound"), results=results)
    text = results.read_text()
    assert not any(
        word in text for word in ('"records"', '"answer"', str(tmp_path), sys.executable, "--port", "doc0_q0")
    )
    found = json.loads(text)
    assert {"command", "sizes", "threads", "machine", "commit", "repetitions", "started_at"} <= set(found)
    none, ram, disk, bound = found["modes"]
    assert "--disk DIRECTORY" in disk["serve"] and none["serve"].startswith("hotspan serve MODEL")
    assert list(ram["repetitions"][0]) == [name.value for name in RoundName if name is not RoundName.ANEW]
    assert ram["repetitions"][0]["query"]["requests"] == 6
    for mode, ratio, to in ((none, "warm_up_cpu_ratio", "none"), (bound, "query_cpu_ratio", "bound")):
        assert mode[ratio]["to"] == to
        assert mode[ratio]["value"] in ({"median": 1, "min": 1, "max": 1}, None)
    assert ram["speed_up"]["over"] == "none"
    assert ram["speed_up"]["ttft"]["min"] == ram["speed_up"]["ttft"]["max"] > 0


def test_compact_json_is_json() -> None:
    """The compact form reads back as the same value to six digits, with one line for an object of plain values."""
    value = {"a": {"b": 1.23456789, "c": None, "d": 1e-9}, "e": [{"f": "x\n"}, []], "g": {}, "h": True, "i": [1, 2]}
    text = compact_text(value)
    assert json.loads(text) == value | {"a": {"b": 1.23457, "c": None, "d": 1e-9}}
    assert ' "a": {"b": 1.23457, "c": null, "d": 1e-09},' in text.splitlines()


def test_no_repetition_is_refused(tmp_path: Path) -> None:
    """A demo of no repetition is an error that names the flag."""
    with pytest.raises(ConfigError, match="--repetitions"):
        DemoRequest(output=tmp_path, sizes=SMALL, threads=1, repetitions=0)


def test_sizes_fit_the_machine_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hotspan demo` takes the defaults of `DemoSizes` and fits the documents to the machine; those given are kept."""
    asked: list[DemoRequest] = []

    def run(request: DemoRequest, console: object) -> SimpleNamespace:
        asked.append(request)
        return SimpleNamespace(runs=[])

    monkeypatch.setattr("hotspan.demo.run.run_demo", run)
    for flags in ([], ["--documents", "4"], ["--document-tokens", "4096"], ["--in-flight", "1"]):
        result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path), "--dtype", "float32", *flags])
        assert result.exit_code == 0, result.output
    assert [request.is_fitted for request in asked] == [True, False, False, True]
    assert [request.sizes for request in asked] == [
        DemoSizes(),
        DemoSizes(documents=4),
        DemoSizes(document_tokens=4096),
        DemoSizes(in_flight=1),
    ]


def test_a_server_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    """A server that ends while it starts is an EngineError with its status and the end of its log."""
    port = free_port()
    command = fake_serve(tmp_path, ("--port", str(port), "--dies"))
    with (
        Aftermath() as aftermath,
        ServerProcess(command, {}, port, tmp_path / "server.log", aftermath) as server,
        pytest.raises(EngineError, match=r"status 1[^$]*the slab does not fit"),
    ):
        server.wait_until_ready(120, lambda waited, line: None)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Stopping waits for the given time and then kills the process it started."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    log = tmp_path / "server.log"
    with (
        Aftermath() as aftermath,
        ServerProcess([sys.executable, "-c", stubborn], {}, 1, log, aftermath, stop_timeout_s=0.3) as server,
    ):
        while "up" not in log.read_text():
            server.check_alive()
        server.stop()
        with pytest.raises(EngineError, match="status -9"):
            server.check_alive()


def test_the_real_command_line_is_hotspan_serve() -> None:
    """The server is this Python's `hotspan serve MODEL` with the arguments after it."""
    command = serve_command(Path("m"), ("--port", "1"))
    assert command == (sys.executable, "-m", "hotspan", "serve", "m", "--port", "1")
