"""The systemd unit: systemd takes it, it calls what there is, and it keeps what it says."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "hotspan.service"


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_it(tmp_path: Path) -> None:
    """systemd's own verification has nothing to say, unknown settings included."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/hotspan/bin/hotspan", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=180)
    said = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert not said, said
    assert done.returncode == 0, done.stderr
    copy.write_text(copy.read_text().replace("ProtectSystem", "ProtectSystems"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=180)
    assert "ProtectSystems" in done.stderr, "a setting that systemd does not know would not be noticed"


def test_it_looks_before_it_serves() -> None:
    """The posture is judged with the same words as the server gets, as a user that is not root."""
    found = settings()
    [serve], [doctor] = found["ExecStart"], found["ExecStartPre"]
    assert serve.replace(" serve ", " doctor ") == doctor
    assert found["User"] == ["hotspan"] and found["NoNewPrivileges"] == ["yes"] and found["UMask"] == ["0077"]


def test_memory_stays_in_memory() -> None:
    """No core dump and no swap, memory that may be locked, and files enough."""
    found = settings()
    assert found["LimitCORE"] == ["0"] and found["MemorySwapMax"] == ["0"]
    assert found["LimitMEMLOCK"] == ["infinity"] and int(found["LimitNOFILE"][0]) >= 8192


def test_it_has_time_to_stop() -> None:
    """Requests in flight and the cache's writes end before systemd kills."""
    from hotspan.config.settings import CacheSettings
    from hotspan.server.options import ServeOptions

    needed = ServeOptions("m", None).drain_s + CacheSettings(1).drain_s
    assert int(settings()["TimeoutStopSec"][0]) > needed and settings()["KillMode"] == ["mixed"]
