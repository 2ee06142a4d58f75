"""`bench storage`: honest ratios, and a clear word where there is nothing to compare with."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hotspan.bench.config import StorageBench
from hotspan.bench.storage import Figure, Fio, in_turns
from hotspan.cli.bench import storage

app = typer.Typer()
app.command()(storage)
SMALL = ["--size-gib", "0.02", "--chunk-mib", "1", "--threads", "2", "--repetitions", "2"]

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def test_a_ratio_is_that_of_the_medians() -> None:
    """One outlier on either side does not move the ratio; without a limit there is none."""
    assert Figure("x", "y", [1, 2, 90], [4, 4, 0.1]).ratio == 0.5
    assert Figure("x", "y", [1.0], []).ratio is None


def test_jobs_take_turns() -> None:
    """Every job runs once a round after a warm-up, and odd rounds run in the other order."""
    order: list[str] = []
    rates = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 1, 2)
    assert "".join(order) == "baabba"
    assert [len(rounds) for rounds in rates.values()] == [2, 2]


@needs_fio
def test_it_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    """All figures have a rate and a limit, the file holds every round with the machine, and the scratch is gone."""
    output = tmp_path / "storage.json"
    (tmp_path / "disk").mkdir()
    result = CliRunner().invoke(app, [*SMALL, "--directory", str(tmp_path / "disk"), "--output", str(output)])
    assert result.exit_code == 0, result.output
    data = json.loads(output.read_text())
    assert data["machine"]["CPU"] and data["settings"]["threads"] == 2
    for figure in data["figures"]:
        assert figure["median"] > 0 and figure["limit_median"] > 0 and figure["ratio"] > 0, figure["name"]
    assert {figure["goal"] for figure in data["figures"]} == {None, 0.85, 0.9, 0.8, 0.7, 1.0}
    assert list((tmp_path / "disk").iterdir()) == []


@needs_fio
@pytest.mark.parametrize("jobs", [1, 3])
def test_fio_stays_inside_the_file(tmp_path: Path, jobs: int) -> None:
    """fio neither grows the file that it shares with our frames nor fails, with one job or several."""
    path = tmp_path / "file"
    path.write_bytes(bytes(10 << 20))
    for direction in ("write", "read"):
        assert Fio(path, 10 << 20, 1 << 20, jobs).rate(direction) > 0
    assert path.stat().st_size == 10 << 20


def test_without_fio_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fio our own figures are shown without a ratio and exit 0; with --require-fio it is exit 2 at once."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    arguments = [*SMALL, "--directory", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "apt-get install fio" in result.output and "not measured" in result.output
    result = CliRunner().invoke(app, [*arguments, "--require-fio"])
    assert result.exit_code == 2 and "apt-get install fio" in result.output


def test_chunks_are_whole_pages() -> None:
    """An odd --chunk-mib is rounded up to pages."""
    assert StorageBench(chunk_mib=0.3).payload_bytes % 4096 == 0
