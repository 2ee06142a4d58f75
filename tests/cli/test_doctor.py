"""`hotspan doctor`: the posture of a command line, as a table and as JSON, and its exit status."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.server.facts import Facts, _mount_option
from hotspan.server.findings import Severity
from hotspan.server.machine import machine

PREFIXES = ("OPTION_", "SERVING_", "SAGEMAKER_", "HOTSPAN_", "LMCACHE_", "HF_MODEL_", "VLLM_", "AWS_")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "250")  # or the table breaks words


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def findings(*words: str) -> dict[str, dict[str, Any]]:
    """By subject; of a subject that is there twice, the worse."""
    rows = json.loads(run(*words, "--json").stdout)
    order = ("ok", "warning", "bad")
    return {row["what"]: row for row in sorted(rows, key=lambda row: order.index(row["severity"]))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_plain_server(model: Path) -> None:
    """What nobody else reaches is not bad: exit status 0, a table with every subject, and what the machine is."""
    done = run(str(model), "--ram-gib", "1")
    assert done.exit_code == 0, done.output
    for subject in (
        "exposure",
        "TLS",
        "admin token",
        "tenants",
        "L2",
        "media URLs",
        "secure mode",
        "engine",
        "huge pages",
    ):
        assert subject in done.output
    assert ", 0 bad" in done.output.splitlines()[-1]


def test_exit_status(model: Path) -> None:
    """Something bad is exit status 1, with what to do."""
    done = run(str(model), "--host", "0.0.0.0")
    assert done.exit_code == 1 and "--tenants" in done.output
    assert run(str(model), "--host", "0.0.0.0", "--insecure").exit_code == 0


def test_engine_options_are_judged(model: Path) -> None:
    """vLLM's options may follow as behind `hotspan serve`, and are judged."""
    found = findings(str(model), "--trust-remote-code", "--allowed-local-media-path", "/")
    assert found["custom code"]["severity"] == "warning" and found["local media"]["severity"] == "warning"
    assert findings(str(model), "--ssl-certfile", "/nowhere.pem")["start"]["severity"] == "bad"


def test_files_are_looked_at(model: Path, tmp_path: Path) -> None:
    """Permissions on the disk are those that count: of the token, the disk tier, the key store."""
    disk, store, token = tmp_path / "disk", tmp_path / "store", tmp_path / "token"
    for path in (disk, store):
        path.mkdir()
        path.chmod(0o755)
    token.write_text("x" * 32)
    token.chmod(0o644)
    words = ["--disk", str(disk), "--disk-gib", "1", "--kek", "env:KEK", "--key-store", str(store)]
    words = [str(model), *words, "--admin-token-file", str(token)]
    found = findings(*words)
    assert [found[what]["severity"] for what in ("disk", "key store", "admin token")] == ["bad"] * 3
    for path, mode in ((disk, 0o700), (store, 0o700), (token, 0o600)):
        path.chmod(mode)
    found = findings(*words)
    assert [found[what]["severity"] for what in ("disk", "key store", "admin token")] == ["ok"] * 3
    assert "O_DIRECT" in found


def test_secure_mode(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What secure mode would refuse at the start is bad, in the words of the start."""
    monkeypatch.setenv("SAGEMAKER_SECURE_MODE", "true")
    assert "start" not in findings(str(model))
    (model / "pytorch_model.bin").write_text("")
    found = findings(str(model))
    assert found["start"]["severity"] == "bad" and "pytorch_model.bin" in found["start"]["remedy"]


def test_a_wrong_configuration(tmp_path: Path) -> None:
    """A configuration that can't be read is bad, and the machine is looked at all the same."""
    found = findings("org/name", "--disk", str(tmp_path))
    assert found["configuration"]["severity"] == "bad" and "--disk-gib" in found["configuration"]["remedy"]
    assert "engine" in found and "exposure" not in found
    assert run("org/name", "--disk", str(tmp_path)).exit_code == 1


def test_a_ram_tier_that_finds_no_room(model: Path) -> None:
    """More RAM than /dev/shm has is bad, with how to enlarge it, on every platform that bounds it."""
    found = findings(str(model), "--ram-gib", "1000000")["/dev/shm"]
    assert found["severity"] == "bad" and "--shm-size" in found["remedy"] and "emptyDir" in found["remedy"]
    assert findings(str(model), "--ram-gib", "0.01")["/dev/shm"]["severity"] == "ok"


GPU_HOST = Facts({"CUDA_VISIBLE_DEVICES": "0,1"}, locked_bytes=-1, shared_huge_pages="advise", nodes=2)


@pytest.mark.parametrize(
    ("what", "wrong", "right", "remedy"),
    [
        ("locked memory", {"locked_bytes": 8 << 20}, {"locked_bytes": -1}, "memlock"),
        ("huge pages of /dev/shm", {"shared_huge_pages": "never"}, {"shared_huge_pages": "advise"}, "huge=advise"),
        ("NUMA", {"memory_policy": "default"}, {"memory_policy": "interleave:0-1"}, "numactl --interleave=all"),
        ("NUMA", {"memory_policy": "default"}, {"nodes": 1, "memory_policy": "default"}, "numactl --interleave=all"),
    ],
)
def test_what_a_host_with_gpus_lacks(what: str, wrong: dict[str, Any], right: dict[str, Any], remedy: str) -> None:
    """Limits of locked memory, small pages and a RAM tier on one node are warnings, each with what to do."""
    severities = []
    for given in (wrong, right):
        found = {each.what: each for each in machine(None, dataclasses.replace(GPU_HOST, **given))}[what]
        severities.append(found.severity)
        assert found.severity is Severity.OK or remedy in found.remedy
    assert severities == [Severity.WARNING, Severity.OK]


def test_mounts_are_read() -> None:
    """The last mount at a place counts; one without the option has the kernel's default."""
    mounts = "tmpfs /dev/shm tmpfs rw,size=8g 0 0\nshm /dev/shm tmpfs rw,huge=within_size,size=65536k 0 0\n"
    assert _mount_option(mounts, "/dev/shm", "huge") == "within_size"
    assert _mount_option(mounts.splitlines()[0], "/dev/shm", "huge") == "never"
    assert _mount_option(mounts, "/mnt", "huge") == ""
