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
from hotspan.server.findings import Finding, Severity
from hotspan.server.machine import machine
from hotspan.server.numa import Numa, disk_node, placement, shared_policy

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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--server", "unix:/x"), "unknown option --server"),
        (("--chat-template", "/nosuch.jinja"), "--chat-template /nosuch.jinja: there is no such file"),
        (("--port", "99999", "--foo", "1"), "2 things are wrong"),
        (("--disk", "/etc/hostname", "--disk-gib", "1"), "/etc/hostname is no directory"),
    ],
)
def test_what_config_check_refuses_is_bad(model: Path, words: tuple[str, ...], expected: str) -> None:
    """A server that would not start has no sound posture: exit status 1, and what is wrong."""
    pytest.importorskip("vllm")
    found = findings(str(model), *words)["configuration"]
    assert found["severity"] == "bad" and expected in found["remedy"], found
    assert run(str(model), *words).exit_code == 1


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


GPU_HOST = Facts({"CUDA_VISIBLE_DEVICES": "0,1"}, locked_bytes=-1, shared_huge_pages="advise", numa=Numa(2))


@pytest.mark.parametrize(
    ("what", "wrong", "right", "remedy"),
    [
        ("locked memory", {"locked_bytes": 8 << 20}, {"locked_bytes": -1}, "memlock"),
        ("huge pages of /dev/shm", {"shared_huge_pages": "never"}, {"shared_huge_pages": "advise"}, "huge=advise"),
        ("NUMA", {"numa": Numa(2, "default")}, {"numa": Numa(2, "interleave:0-1")}, "numactl --interleave=all"),
        ("NUMA", {"numa": Numa(2, "default")}, {"numa": Numa(1, "default")}, "numactl --interleave=all"),
        ("NUMA", {"numa": Numa(2, "default")}, {"numa": Numa(2, "default", "interleave")}, "mpol=interleave"),
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


# -- NUMA ------------------------------------------------------------------------------------------------------------

FAR, NEAR = "0000:81:00.0", "0000:17:00.0"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A /sys with two nodes, a GPU on each, an audio device beside one, and a drive on node 1."""
    own = min(os.sched_getaffinity(0))
    for node, cpus in enumerate((f"{own}", f"{own + 100}-{own + 131}")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cpus + "\n")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "dev/block").mkdir(parents=True)
    devices = {
        NEAR: ("0x030200", 0),
        FAR: ("0x030000", 1),
        "0000:81:00.1": ("0x040300", 1),
        "0000:c1:00.0": ("0x01", 1),
    }
    for address, (kind, node) in devices.items():
        device = tmp_path / "devices/pci" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(kind + "\n")
        (device / "numa_node").write_text(f"{node}\n")
        (tmp_path / "bus/pci/devices" / address).symlink_to(device)
    drive = tmp_path / "devices/pci/0000:c1:00.0/nvme/nvme0/nvme0n1"
    drive.mkdir(parents=True)
    where = (tmp_path / "kv").parent.stat().st_dev
    (tmp_path / f"dev/block/{os.major(where)}:{os.minor(where)}").symlink_to(drive)
    return tmp_path


def test_what_is_on_which_node_is_read(system: Path) -> None:
    """GPUs by their PCI address and no other devices, those that are visible; the node of the directory's drive."""
    assert Numa.probe({}, "default", "", system).gpus == {NEAR: 0, FAR: 1}
    assert Numa.probe({"CUDA_VISIBLE_DEVICES": "1"}, "default", "", system).gpus == {FAR: 1}
    assert Numa.probe({"CUDA_VISIBLE_DEVICES": "GPU-5a,GPU-7b"}, "default", "", system).gpus == {NEAR: 0, FAR: 1}
    assert Numa.probe({"CUDA_VISIBLE_DEVICES": ""}, "default", "", system).gpus == {}
    assert disk_node(system / "kv/not/there/yet", system) == 1
    (system / "devices/pci/0000:c1:00.0/numa_node").write_text("-1\n")
    assert disk_node(system / "kv", system) is None
    assert disk_node(system / "kv", system / "nowhere") is None


@pytest.mark.parametrize(
    ("policy", "shared", "nodes"),
    [
        ("bind:1", "", {1}),
        ("interleave:0-1", "", {0, 1}),
        ("default", "interleave:0", {0, 1}),
        ("bind:0", "bind:1", {1}),
        ("bind:0", "default", {0}),
        ("prefer:1", "", {1}),
        ("weighted", "", set()),
        ("", "", set()),
    ],
)
def test_where_the_ram_tier_lies(policy: str, shared: str, nodes: set[int]) -> None:
    """The mount of /dev/shm decides, then the process's policy; by default the CPUs that it may use, if of one node."""
    assert Numa(2, policy, shared).ram == nodes
    assert (
        Numa(2, "default", cpus=frozenset({1})).ram == {1} and Numa(2, "default", cpus=frozenset({0, 1})).ram == set()
    )
    assert shared_policy("shm /dev/shm tmpfs rw,mpol=interleave:0-1,size=8g 0 0\n") == "interleave:0-1"
    assert shared_policy("shm /dev/shm tmpfs rw,size=8g 0 0\n") == shared_policy("") == ""


def test_gpus_that_are_far_are_named(system: Path) -> None:
    """A GPU on another node than the RAM tier, or than the disk, is named with both nodes; near ones are not."""

    def found(policy: str, disk: int | None, shared: str = "", visible: str = "0,1") -> dict[str, Finding]:
        numa = Numa.probe({"CUDA_VISIBLE_DEVICES": visible}, policy, shared, system)
        return {each.what: each for each in placement(numa, disk)}

    ram = found("bind:0", None)["NUMA"]
    assert ram.severity is Severity.WARNING and FAR in ram.state and NEAR not in ram.state
    assert "node 0" in ram.state and "node 1" in ram.state and "--membind" in ram.remedy
    disk = found("interleave:0-1", 1)
    assert disk["NUMA"].severity is Severity.OK
    assert disk["NUMA of the disk"].severity is Severity.WARNING
    assert NEAR in disk["NUMA of the disk"].state and FAR not in disk["NUMA of the disk"].state
    near = found("bind:1", 1, visible="1")
    assert [each.severity for each in near.values()] == [Severity.OK, Severity.OK]
    apart = found("bind:1", 0, visible="1")["NUMA of the disk"]
    assert apart.severity is Severity.WARNING and "RAM tier on node 1" in apart.state and FAR in apart.state
    assert FAR in found("default", None)["NUMA"].state, "its CPUs are of node 0"
    assert "NUMA of the disk" not in found("bind:0", None)
