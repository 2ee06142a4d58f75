"""`hotspan plan` and the probe behind it, on the machine that runs this."""

import json
import os
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from hotspan.cli.plan import plan
from hotspan.core.types import GIB
from hotspan.plan.host import Answerer, Daemon, Host, usual_directories
from hotspan.plan.tiers import choose_tiers

from . import models

NOBODY = Daemon(Answerer.NOBODY, "127.0.0.1:9200", None)


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command("plan")(plan)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


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
    for word in ("57,344 bytes a token", "14.0 MiB a chunk", "memory left", "reserve", "RAM", "7 texts of 10,240"):
        assert word in done.output
    assert not (tmp_path / "kv").exists()


def test_without_auto_nothing_is_chosen_but_little_ram(model: Path) -> None:
    """As with a plain `hotspan serve`: no disk is looked at, and the table says how to get one."""
    done = invoke(str(model), "--max-num-seqs", "2")
    assert done.exit_code == 0, done.output
    assert "nobody asked for it" in done.output and "hotspan-kv-" not in done.output
    assert "2 texts of the model's full length" in done.output or "a quarter of the memory left" in done.output


def test_a_cpu_engine_has_its_weights_in_the_table(model: Path) -> None:
    """With --cpu the weights' size and the pool are named."""
    done = invoke(str(model), "--cpu", "--disk", "/dev/shm/no-such", "--prefill-rate", "1000", "--ram-rate", "10")
    assert done.exit_code == 0, done.output
    for word in ("weights", "3.0 GiB", "engine's pool", "lies in memory"):
        assert word in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["/no/such/model"], "is not on this machine"), (["MODEL", "--tp", "3"], "can't be split"), ([], "model")],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, model: Path) -> None:
    """Exit status 2 and what to do, without a traceback."""
    done = invoke(*[str(model) if argument == "MODEL" else argument for argument in arguments])
    assert done.exit_code == 2
    assert said in done.output and "Traceback" not in done.output


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
