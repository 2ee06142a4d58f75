import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hotspan.bench.records import RoundName
from hotspan.core.errors import ConfigError, EngineError
from hotspan.demo import run as demo_run
from hotspan.demo.plan import BLOCK_TOKENS, MODE_NAMES, DemoSizes, choose_modes, plan_modes
from hotspan.demo.run import DemoRequest, run_demo
from hotspan.demo.server import ServerProcess, free_port, serve_command

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
    assert restart.rounds == (RoundName.PRE_WARM_UP, RoundName.QUERY)
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
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo starts the stand-in instead of the engine."""
    monkeypatch.setattr(demo_run, "serve_command", fake_serve)


def test_the_demo_runs_all_modes_and_shows_them(fake: None, tmp_path: Path) -> None:
    """Five servers are started with equal threads and stopped in order; table, report and JSON name every mode."""
    console = Console(record=True, width=160)
    request = DemoRequest(output=tmp_path, sizes=SMALL, threads=1, model_size="tiny")
    runs = run_demo(request, console)
    assert tuple(run.name for run in runs) == MODE_NAMES
    logs = [(tmp_path / f"server-{name}.log").read_text() for name in MODE_NAMES]
    assert all("stopped in order" in log for log in logs)
    assert len({line for log in logs for line in log.splitlines() if line.startswith("threads")}) == 1
    assert [len(run.result.rounds) for run in runs] == [3, 3, 3, 2, 3]
    saved = json.loads((tmp_path / "demo.json").read_text())
    assert [mode["name"] for mode in saved["modes"]] == list(MODE_NAMES)
    assert saved["modes"][1]["same_answers"]["bound"] == {"same": 6, "compared": 6}
    shown = console.export_text()
    assert all(run.title in shown for run in runs) and "6 of 6" in shown
    assert all(run.title in (tmp_path / "report.html").read_text() for run in runs)
    assert not list(tmp_path.glob("kv-*")), "the disk mode's directory is gone"
    assert all(run.result.query.summary.cpu_s is not None for run in runs)


def test_a_server_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    """A server that ends while it starts is an EngineError with its status and the end of its log."""
    port = free_port()
    command = fake_serve(tmp_path, ("--port", str(port), "--dies"))
    with (
        ServerProcess(command, {}, port, tmp_path / "server.log") as server,
        pytest.raises(EngineError, match=r"status 1[^$]*the slab does not fit"),
    ):
        server.wait_until_ready(30, lambda waited, line: None)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Stopping waits for the given time and then kills the process it started."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    log = tmp_path / "server.log"
    with ServerProcess([sys.executable, "-c", stubborn], {}, 1, log, stop_timeout_s=0.3) as server:
        while "up" not in log.read_text():
            server.check_alive()
        server.stop()
        with pytest.raises(EngineError, match="status -9"):
            server.check_alive()


def test_the_real_command_line_is_hotspan_serve() -> None:
    """The server is this Python's `hotspan serve MODEL` with the arguments after it."""
    command = serve_command(Path("m"), ("--port", "1"))
    assert command == (sys.executable, "-m", "hotspan", "serve", "m", "--port", "1")
