"""`python -m proofs`: exit status, JSON, and how a failing case is shown."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hotspan.tiers.log import GenerationLog
from hotspan.tiers.table import DiskTable
from proofs.__main__ import main

app = typer.Typer()
app.command()(main)

RUN = CliRunner()


def test_a_proof_is_written_down(tmp_path: Path) -> None:
    """What passed ends with status 0, and its JSON says claim, figures, settings, machine and command."""
    path = tmp_path / "power.json"
    done = RUN.invoke(app, ["power", "--images", "100", "--output", str(path)])
    assert done.exit_code == 0 and "passed" in done.stdout
    data = json.loads(path.read_text())
    assert (data["kind"], data["name"], data["passed"]) == ("proof", "power", True)
    assert data["figures"]["images"] == data["settings"]["images"] == 100
    assert data["machine"]["CPU"] and data["command"].startswith("python -m proofs") and data["claim"]


def test_a_failure_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not pass ends with status 1, and shows the seed and case."""
    monkeypatch.setattr(GenerationLog, "append", lambda self, entry: None)
    monkeypatch.setattr(DiskTable, "flush", lambda self: None)
    done = RUN.invoke(app, ["power", "--images", "400", "--seed", "1"])
    assert done.exit_code == 1 and "python -m proofs power --seed 1 --only" in done.stdout


@pytest.mark.parametrize("wrong", [["nothing"], ["power", "--hours", "1"]])
def test_what_does_not_fit_is_refused(wrong: list[str]) -> None:
    """An unknown proof, or an option of another one, ends with status 2."""
    assert RUN.invoke(app, [*wrong]).exit_code == 2
