"""`hotspan ab --same`: what repeats, and what does not."""

import json
from pathlib import Path
from typing import Any

from tests.bench.openai_server import Served

from .conftest import StartServer
from .test_cli import LIMITS, ab, number, questions, says


def test_a_server_that_repeats_itself_passes(serve: StartServer, tmp_path: Path) -> None:
    """Status 0; each condition is a row; no more requests are in flight than the condition says."""
    server, output = serve(**says()), tmp_path / "same.json"
    more = ("--level", "3", "--repeats", "2", "--output", str(output), "--report", str(tmp_path / "same.html"))
    status, said = ab("--same", server.url, "--set", questions(tmp_path / "s.jsonl", 20), *LIMITS[:2], *more)
    assert status == 0 and "pass: 0 of 20 items differ at worst" in said, said
    assert "needs 16 items, all answered alike, to pass; 20 asked" in said
    found = json.loads(output.read_text())["conditions"]
    assert [(each["title"], each["repeats"]) for each in found] == [("again, alone", 2), ("3 at a time", 2)]
    assert len(server.served.bodies) == 20 * 5 and server.served.max_running <= 3
    assert {body["seed"] for body in server.served.bodies} == {42}
    assert "3 at a time" in (tmp_path / "same.html").read_text()


def test_answers_that_depend_on_the_batch_are_found(serve: StartServer, tmp_path: Path) -> None:
    """A server whose answers change beside others: alone it repeats itself, at a higher concurrency it does not."""
    served: list[Served] = []

    def together(seen: Served, body: dict[str, Any]) -> bool:
        if not served:
            served.append(seen)
        return False

    def answers(body: dict[str, Any]) -> tuple[str, ...]:
        asked = sum(number(each) == number(body) for each in served[0].bodies)
        return ("x", "y" if asked <= 2 else "z")  # the first time, and the repetition alone

    server = serve(answers=answers, holds=together)
    more = ("--level", "4", "--repeats", "1", "--output", str(tmp_path / "same.json"))
    status, said = ab("--same", server.url, "--set", questions(tmp_path / "s.jsonl", 20), *LIMITS[:2], *more)
    assert status == 1 and "20 of 20 items differ at worst (4 at a time)" in said, said
    alone, four = json.loads((tmp_path / "same.json").read_text())["conditions"]
    assert alone["different"]["count"] == 0 and alone["at"] is None
    assert four["different"]["count"] == 20 and four["at"] == 1


def test_a_server_that_is_started_is_checked_over_a_restart(fake_servers: None, tmp_path: Path) -> None:
    """The conditions of a started server: repetitions, computed anew, and both again after a restart."""
    output = tmp_path / "same.json"
    more = ("--level", "2", "--repeats", "1", "--logs", str(tmp_path), "--output", str(output), "--items", "20")
    status, said = ab("--same-serve", "model", *LIMITS[:2], *more)
    assert status == 0, said
    assert [each["title"] for each in json.loads(output.read_text())["conditions"]] == [
        "again, alone",
        "2 at a time",
        "computed anew, alone",
        "after a restart, alone",
        "after a restart, computed anew",
    ]
    assert "stopped in order" in (tmp_path / "server-same.log").read_text()


def test_failures_are_no_pass(serve: StartServer, tmp_path: Path) -> None:
    """A request that fails makes it "can't tell"."""
    server = serve(**says(), refuses=lambda body: 503 * (number(body) == 2))
    status, said = ab("--same", server.url, "--set", questions(tmp_path / "s.jsonl", 20), *LIMITS[:2], "--repeats", "1")
    assert status == 2 and "q2, first, alone: HTTP 503" in said, said
