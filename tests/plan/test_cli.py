"""`hotspan plan` and the probe behind it, on the machine that runs this."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from hotspan.cli.flags import ENGINE_OPTIONS
from hotspan.cli.plan import plan
from hotspan.core.types import GIB
from hotspan.plan.host import Answerer, Daemon, Host, usual_directories
from hotspan.plan.machines import machine
from hotspan.plan.tiers import choose_tiers

from . import models
from .test_worth import PAGE

NOBODY = Daemon(Answerer.NOBODY, "127.0.0.1:9200", None)


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("plan", context_settings=ENGINE_OPTIONS)(plan)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def flat(done: Result) -> str:
    """The output, with each row of the tables of reasons on one line: "what: how much: why"."""
    lines: list[str] = []
    for line in done.output.splitlines():
        if not line.startswith("│"):
            lines.append(line)
            continue
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if not cells[0]:
            above = lines.pop().split(" | ")
            cells = [f"{whole} {part}".strip() for whole, part in zip(above, cells, strict=True)]
        lines.append(" | ".join(cells))
    return "\n".join(lines).replace(" | ", ": ")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory without a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(models.QWEN_7B))
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(3 * GIB)
    return directory


def test_the_table_says_what_would_be_chosen(model: Path, tmp_path: Path) -> None:
    """The tables have the KV's size, the memory, the disk that was asked about, and what becomes of the texts."""
    done = invoke(str(model), "--disk", str(tmp_path / "kv"), "--no-measure", "--users", "7", "--tokens", "10240")
    assert done.exit_code == 0, done.output
    for word in (
        "57,344 bytes per token",
        "7.0 MiB per chunk",
        "28 layers of full attention",
        "memory available",
        "reserve",
        "RAM",
        "7 texts of 10,240",
    ):
        assert word in flat(done)
    assert not (tmp_path / "kv").exists()


def test_without_auto_nothing_is_chosen_but_little_ram(model: Path) -> None:
    """As with a plain `hotspan serve`: no disk is looked at, and the table says how to get one."""
    done = invoke(str(model), "--max-num-seqs", "2")
    assert done.exit_code == 0, done.output
    assert "not requested: give --disk DIR" in flat(done) and "hotspan-kv-" not in flat(done)
    assert "2 texts of the model's full length" in flat(done) or "a quarter of the available memory" in flat(done)


def test_a_cpu_engine_has_its_weights_in_the_table(model: Path) -> None:
    """With --cpu the weights' size and the pool are named."""
    done = invoke(str(model), "--cpu", "--disk", "/dev/shm/no-such", "--prefill-rate", "1000", "--ram-rate", "10")
    assert done.exit_code == 0, done.output
    for word in ("weights", "3.0 GiB", "engine's pool", "is in memory"):
        assert word in flat(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/model"], "is not on this machine"),
        (["MODEL/config.json"], "is a file: give the directory"),
        (["MODEL", "--tp", "3"], "can't be split"),
        (["MODEL", "--machine", "p4"], "known are p4d"),
        ([], "model"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, model: Path) -> None:
    """Exit status 2 and what to do, without a traceback."""
    done = invoke(*[argument.replace("MODEL", str(model)) for argument in arguments])
    assert done.exit_code == 2
    assert said in flat(done) and "Traceback" not in flat(done)


def test_the_whole_host_is_probed(tmp_path: Path) -> None:
    """Memory, /dev/shm, the directories and the port of the daemon of this machine make a plan."""
    host = Host.probe({}, [tmp_path / "kv", Path("/dev/shm/kv")], is_measured=False)
    assert host.memory is not None and host.shared_memory is not None and host.daemon is not None
    assert [disk.directory.name for disk in host.disks] == ["kv", "kv"]
    assert choose_tiers(host, None).ram_bytes <= host.memory.bytes


def test_the_daemon_is_looked_for_at_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody answers on this host, NODE_IP says where the node's daemon is."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("hotspan.plan.host.find_daemon", lambda *of: asked.append(of) or NOBODY)
    Host.probe({"NODE_IP": "10.0.0.7"}, [])
    Host.probe({}, [])
    assert asked == [(), ("10.0.0.7",), ()]


def test_usual_directories_are_ones_own(tmp_path: Path) -> None:
    """TMPDIR and /tmp are looked at under the user's name; a directory that others made or may write to is not."""
    found = usual_directories({"TMPDIR": str(tmp_path)})
    own = tmp_path / f"hotspan-kv-{os.geteuid()}"
    assert own in found and all(path.name == own.name for path in found)
    own.mkdir(mode=0o700)
    assert own in usual_directories({"TMPDIR": str(tmp_path)})
    own.chmod(0o777)
    assert own not in usual_directories({"TMPDIR": str(tmp_path)})
    own.rmdir()
    own.symlink_to("/")
    assert own not in usual_directories({"TMPDIR": str(tmp_path)})
    assert not [path for path in usual_directories({"TMPDIR": "/no/such"}) if path.parent == Path("/no/such")]


def test_a_machine_serves_options_and_prices_make_a_verdict(model: Path, tmp_path: Path) -> None:
    """Options of serve size tiers and pool; the terminal, the JSON and the page have verdict, cost and price."""
    words = ("--machine", "p4de.24xlarge", "--ram-gib", "200", "--tensor-parallel-size", "2", "--max-model-len", "8192")
    more = ("--users", "1000", "--disk-rate", "8", "--requests-per-hour", "3600", "--extra-price", "500")
    out = ("--output", str(tmp_path / "plan.json"), "--report", str(tmp_path / "plan.html"))
    done = invoke(str(model), *words, *more, *out)
    assert done.exit_code == 0, done.output
    for word in ("This helps", "2026-11-09", "2 ranks", "Payback", "per million prompt tokens", "█"):
        assert word in flat(done)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["verdict"]["helps"] and found["cost"]["payback_days"] > 0
    ram = next(each for each in found["working_set"]["holdings"] if each["tier"] == "ram")
    assert ram["bytes"] == 200 * GIB and ram["pays_from"] > 0
    assert set(found["hit_rates_by_users"]) == {"10", "100", "1000", "10000", "100000"}
    assert "This helps" in (tmp_path / "plan.html").read_text()


def test_the_title_names_the_machine_and_the_json_has_the_rates(model: Path) -> None:
    """Each rate that was reckoned with is in the table with its source, and in the JSON as a number."""
    words = (str(model), "--machine", "p4de.24xlarge", "--disk-rate", "8")
    text = flat(invoke(*words))
    assert "Tiers of one engine on p4de.24xlarge" in text and "this machine" not in text
    assert "disk rate: 8 GB/s: as given" in text and "RAM rate: 25 GB/s: estimate" in text
    found = json.loads(invoke(*words, "--json").stdout)
    prefill = machine("p4de.24xlarge").prefill_tokens_per_s(3 * GIB, 1)
    assert found["rates"]["prefill_tokens_per_s"] == pytest.approx(prefill)
    assert found["rates"]["gb_s"] == {"ram": 25.0, "disk": 8.0}
    assert set(found["rates"]["latency_s"]) == {"disk", "l2"}


def test_before_buying_the_config_is_enough(model: Path) -> None:
    """With config.json alone the pool is that with the files; where it does not give the weights, the table says so."""
    whole = models.QWEN_7B | {"intermediate_size": 18944, "vocab_size": 152064}
    (model / "config.json").write_text(json.dumps(whole))
    words = (str(model), "--machine", "p4de.24xlarge")
    pool = machine("p4de.24xlarge").pool_bytes(2 * 7_615_616_512, 1) / GIB
    (model / "model.safetensors").unlink()
    text = flat(invoke(*words))
    assert "weights: 14.2 GiB: computed from config.json" in text and f"engine's pool: {pool:.1f} GiB" in text
    (model / "config.json").write_text(json.dumps(models.QWEN_7B))
    text = flat(invoke(*words))
    assert "weights: unknown" in text and "too large by the weights" in text
    assert "weights: unknown: the engine's pool and the RAM tier are too large" in flat(invoke(str(model), "--cpu"))
    given = flat(invoke(*words, "--kv-cache-memory-bytes", str(8 * GIB)))
    assert "engine's pool: 8.0 GiB" in given and "too large" not in given


def test_an_engine_pays_for_the_share_of_the_machine_that_it_has(model: Path) -> None:
    """RAM, drives, one-off price and hourly price are divided by the same number of engines, which is printed."""
    words = (str(model), "--machine", "g6.12xlarge", "--hourly-price", "4", "--disk-rate", "3", "--tokens", "2560")
    words = (*words, "--users", "200", "--requests-per-hour", "1000", "--extra-price", "100")

    def planned(*more: str) -> tuple[float, float, float, float]:
        found = json.loads(invoke(*words, *more, "--json").stdout)
        sizes = {each["tier"]: each["bytes"] for each in found["working_set"]["holdings"]}
        assert found["price"]["usd_per_hour"] == 4
        return sizes["ram"], sizes["disk"], found["cost"]["without"], found["cost"]["payback_days"]

    ram, disk, usd, days = planned("--workers", "1")
    others = (("--workers", "2"), ("--models", "2"), ("--data-parallel-size", "2"))
    for more, engines in (((), 4), (others[0], 2), (others[1], 4), (others[2], 2)):
        share = planned(*more)
        assert share[0] == pytest.approx(ram / engines, rel=1e-4) and share[1] == pytest.approx(
            disk / engines, rel=1e-4
        )
        assert share[2] == pytest.approx(usd / engines) and share[3] == pytest.approx(days)
    text = flat(invoke(*words))
    assert "1/4 of the machine's RAM, drives and price, for 4 engines (--workers): 1.00 USD per hour" in text
    assert "shared by 4 engines" in text
    assert "all of the machine's RAM, drives and price: 4.00 USD per hour" in flat(invoke(*words, "--workers", "1"))
    assert planned("--tp", "2")[0] == pytest.approx(ram / 2, rel=1e-4)


def test_a_machine_that_is_too_small_for_its_engines(model: Path) -> None:
    """More engines than GPUs are refused; RAM that was given to each, and that all do not find, is named."""
    words = (str(model), "--machine", "g6.12xlarge")
    done = invoke(*words, "--workers", "3", "--tp", "2")
    assert done.exit_code == 2 and "4 GPUs, and 3 x 2 are needed" in flat(done)
    assert "RAM of all engines: 400.0 GiB: the machine has 192.0 GiB" in flat(invoke(*words, "--ram-gib", "100"))
    assert "of all engines" not in flat(invoke(*words, "--ram-gib", "40"))


def test_nothing_known_is_no_promise(model: Path) -> None:
    """On this host, without rates and pool, the verdict is that tiers may help, and the JSON has null."""
    words = (str(model), "--users", "1", "--ram-gib", "4")
    text = flat(invoke(*words))
    assert "This may help: 100% of the prompt tokens are found in the tiers" in text
    assert "the time saved is unknown without --prefill-rate and --ram-rate." in text and "This helps" not in text
    assert json.loads(invoke(*words, "--json").stdout)["verdict"]["helps"] is None


def test_ram_has_the_rate_of_copies_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as the disk is; not where nothing is to be measured, nor for an engine on a GPU; a given rate counts."""
    monkeypatch.setattr("hotspan.cli.plan.copy_gb_s", lambda: 12.5)
    words = (str(model), "--ram-gib", "4", "--users", "1", "--prefill-rate", "1000")
    text = flat(invoke(*words, "--cpu"))
    assert "RAM rate: 12.5 GB/s: measured: copies in memory" in text and "without --ram-rate" not in text
    for more in ((), ("--cpu", "--no-measure")):
        assert "RAM rate" not in flat(invoke(*words, *more))
    assert "RAM rate: 3 GB/s: as given" in flat(invoke(*words, "--cpu", "--ram-rate", "3"))


def test_compression_is_said_not_to_be_counted(model: Path, tmp_path: Path) -> None:
    """With --disk-compress always the sizes are the same, and the table says that the disk holds more."""
    words = (str(model), "--machine", "p4de.24xlarge", "--disk", str(tmp_path / "kv"), "--disk-gib=100")
    text = flat(invoke(*words, "--disk-compress", "always"))
    assert "disk compression: not counted: this plan counts uncompressed chunks" in text
    assert "not counted" not in flat(invoke(*words))
    refused = invoke(*words[:-1], "--disk-compress", "always")
    assert refused.exit_code == 2 and "--disk is given without --disk-gib" in flat(refused)


def test_a_price_that_nobody_gave_is_asked_for(model: Path) -> None:
    """Without a price list for the machine no cost is made up."""
    done = invoke(str(model), "--machine", "g5.12xlarge", "--users", "10")
    assert done.exit_code == 0 and "give --hourly-price" in flat(done) and "per million" not in flat(done)


def test_what_a_cost_lacks_is_named(model: Path) -> None:
    """Where the disk is needed and nobody knows its rate, the plan names the option; with it, there is a cost."""
    words = (str(model), "--machine", "p4de.24xlarge", "--users", "5000")
    done = invoke(*words)
    assert "Prefill cost and savings: unknown: give --disk-rate\n" in flat(done) and "per million" not in flat(done)
    assert "Pays from: tokens of repeated text" in flat(done)
    assert "per million" in flat(invoke(*words, "--disk-rate", "8"))


class Metrics(BaseHTTPRequestHandler):
    """A server whose metrics page is `page`."""

    token = ""
    page = PAGE

    def do_GET(self) -> None:
        if self.token and self.headers.get("authorization") != f"Bearer {self.token}":
            self.send_response(401)
            self.end_headers()
            return
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.page.encode())

    def log_message(self, *_: object) -> None: ...


def test_a_running_servers_figures_are_used(model: Path) -> None:
    """Its sizes, rates and hit rates stand in the tables; an address where nobody answers is one sentence."""
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = invoke(str(model), "--from-metrics", url, "--tokens", "1024", "--users", "10")
        server.shutdown()
    assert done.exit_code == 0, done.output
    for word in ("measured by the server", "Measured hit rates: engine's pool 10.0%, RAM 25.0%", "256 ms"):
        assert word in flat(done)
    assert "no tier was requested" not in flat(done) and "memory available" not in flat(done)  # not this host's
    done = invoke(str(model), "--from-metrics", url)
    assert done.exit_code == 2 and "is the server up" in flat(done)


def test_measured_hit_rates_decide_unless_reuse_is_given(model: Path) -> None:
    """A server with 0.1 % of hits gets no praise for what its tiers could hold, and its cost is that of few hits."""

    class Cold(Metrics):
        page = PAGE.replace("} 250.0", "} 1.0").replace('tier="ram"} 500000.0', 'tier="ram"} 500000000.0')

    with HTTPServer(("127.0.0.1", 0), Cold) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        words = (str(model), "--from-metrics", url, "--users", "10", "--tokens", "1024", "--ram-rate", "25")
        words = (*words, "--hourly-price", "4")
        text = flat(invoke(*words))
        found = json.loads(invoke(*words, "--json").stdout)
        reused = flat(invoke(*words, "--reuse", "1"))
        server.shutdown()
    assert "This will not help you: only 0.1% of the prefill time is saved." in text
    assert "Measured hit rates: engine's pool 10.0%, RAM 0.1%\n" in text and "hits as the server measured" in text
    assert f"Tiers of one engine on the server at {url}" in text
    assert found["verdict"]["helps"] is False and found["working_set"]["is_measured"]
    assert found["cost"]["with_tiers"] == pytest.approx(found["cost"]["without"], rel=0.002)
    assert "This helps: 60% of the prompt tokens" in reused and "not used, since --reuse is given" in reused


def test_a_server_that_asks_for_its_token_is_read_with_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator's token of the environment is sent where one is asked for; a wrong one is one sentence."""

    class Guarded(Metrics):
        token = "0123456789abcdef0123456789abcdef"

    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        words = (str(model), "--from-metrics", url, "--tokens", "1024", "--users", "10")
        monkeypatch.setenv("HOTSPAN_ADMIN_TOKEN", Guarded.token)
        told = invoke(*words)
        monkeypatch.setenv("HOTSPAN_ADMIN_TOKEN", "another" * 5)
        refused = invoke(*words)
        server.shutdown()
    assert told.exit_code == 0 and "measured by the server" in told.output, told.output
    assert refused.exit_code == 2 and "token" in refused.output and "Traceback" not in refused.output
