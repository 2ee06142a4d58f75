"""`hotspan ab` from its command line, against servers in this process: verdicts, exit statuses, files."""

import csv
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.ab import review, servers
from hotspan.ab.result import AbResult
from hotspan.cli.main import app
from hotspan.core.errors import ConfigError
from tests.bench.fabricated import fabricated_result

from .conftest import StartServer


def ab(*arguments: str) -> tuple[int, str]:
    """Its exit status and what it prints."""
    result = CliRunner().invoke(app, ["ab", "--quiet", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def number(body: dict[str, Any]) -> int:
    """Which question of the set is asked."""
    return int(body["messages"][0]["content"].split()[-1])


def questions(path: Path, count: int, **more: Any) -> str:
    lines = [json.dumps({"id": f"q{at}", "prompt": f"question {at}", **more}) for at in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


def says(drifts: int = 0) -> dict[str, Any]:
    """The behaviour of a server: two words about each question; of the first `drifts` of them another second word."""
    return {"answers": lambda body: (f"about {number(body)}", ", wrong" if number(body) < drifts else ", right")}


LIMITS = ("--max-drift", "20%", "--detect", "60%")
"""Wide, so that a few questions are enough."""


def test_identical_servers_pass(serve: StartServer, tmp_path: Path) -> None:
    """Status 0, the number of items that it takes before the run, the noise floor, and every file."""
    sides = ("--a", serve(**says()).url, "--b", serve(**says()).url + "/v1/")
    files = ("--output", str(tmp_path / "ab.json"), "--report", str(tmp_path / "ab.html"))
    asked = questions(tmp_path / "set.jsonl", 30, expected="right", match="contains")
    status, output = ab(*sides, "--set", asked, *LIMITS, *files, "--review", str(tmp_path / "r.jsonl"))
    assert status == 0, output
    assert "items to see 60.00% at 95%" in output and "30 asked" in output
    assert "noise floor: A differs from itself at 0 of 6 items" in output
    assert "pass: the drift is at most" in output
    assert output.count("\nA against itself ") == 2, "the tables fit into 100 columns"
    result = AbResult.load(tmp_path / "ab.json")
    assert result.agreements[2].different.count == 0 and result.compared == 30
    assert result.agreements[2].kl is not None and result.agreements[2].kl.value == 0
    assert result.scores is not None and result.scores.b.count == 30
    assert [each.name for each in result.figures][:2] == ["mean TTFT, first visit", "mean TTFT, second visit"]
    assert "Noise floor" in (tmp_path / "ab.html").read_text()
    assert (tmp_path / "r.jsonl").read_text() == ""


def test_a_drift_is_status_1_and_can_be_reviewed_blind(
    serve: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Different answers are in the review without their sides; the key file has these, and no seed tells them."""
    drawn = count()
    monkeypatch.setattr(review, "randbelow", lambda most: next(drawn) % most)
    sides = ("--a", serve(**says()).url, "--b", serve(**says(drifts=15)).url)
    files = (
        "--output",
        str(tmp_path / "ab.json"),
        "--review",
        str(tmp_path / "r.csv"),
        "--report",
        str(tmp_path / "r.html"),
    )
    asked = questions(tmp_path / "set.jsonl", 30, expected="right", match="contains")
    status, output = ab(*sides, "--set", asked, *LIMITS, *files)
    assert status == 1, output
    assert "drift: B's answers differ from A's at 50.00%" in output
    result = AbResult.load(tmp_path / "ab.json")
    assert len(result.differences) == 15 and all(each.is_kept and each.at == 1 for each in result.differences)
    assert result.scores is not None and result.scores.gain.high < 0
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    key = json.loads((tmp_path / "r.key.json").read_text())["answer_1"]
    assert len(rows) == len(key) == 15 and list(key.values()) == ["B", "A"] * 7 + ["B"]
    for row in rows:
        first_is_right = "right" in row["answer_1"]
        assert first_is_right is (key[row["id"]] == "A") and row["prompt"].startswith("question")
        assert "right" in row["answer_1"] + row["answer_2"] and row["better"] == ""
    assert "about 3, wrong" in (tmp_path / "r.html").read_text()


def test_too_few_items_are_status_2(serve: StartServer, tmp_path: Path) -> None:
    """What can't be told is neither a pass nor a drift."""
    server = serve(**says())
    status, output = ab("--a", server.url, "--b", server.url, "--set", questions(tmp_path / "s.jsonl", 5))
    assert status == 2 and "can't tell: the drift may be up to" in output


@pytest.mark.parametrize("sides", [("--a", "http://x", "--b", "http://y"), ("--same", "http://x")])
def test_more_items_than_the_file_has_are_refused(sides: tuple[str, ...], tmp_path: Path) -> None:
    """A smaller comparison than was asked for is not run in silence."""
    status, output = ab(*sides, "--set", questions(tmp_path / "s.jsonl", 5), "--items", "9")
    assert status == 2 and "has 5 items" in output


def test_log_probabilities_show_what_tokens_do_not(serve: StartServer, tmp_path: Path) -> None:
    """Equal tokens of other probabilities pass with a KL above 0."""
    other = serve(**says(), logprob=lambda body, at: -0.5)
    asked, output = questions(tmp_path / "s.jsonl", 30), tmp_path / "ab.json"
    status, said = ab("--a", serve(**says()).url, "--b", other.url, "--set", asked, *LIMITS, "--output", str(output))
    assert status == 0, said
    kl = AbResult.load(output).agreements[2].kl
    assert kl is not None and kl.value == pytest.approx(0.0673, abs=1e-3)
    assert AbResult.load(output).agreements[0].kl == type(kl)(0.0, 0.0, 0.0)


def test_a_failed_request_is_status_2_and_named(serve: StartServer, tmp_path: Path) -> None:
    """B refuses one question: no pass, and the line says which."""
    b = serve(**says(), refuses=lambda body: 500 * (number(body) == 7))
    asked = questions(tmp_path / "s.jsonl", 30)
    status, output = ab("--a", serve(**says()).url, "--b", b.url, "--set", asked, *LIMITS)
    assert status == 2 and "q7, B: HTTP 500" in output and "2 requests failed" in output


def test_requests_say_what_they_should(serve: StartServer, tmp_path: Path) -> None:
    """Both sides get the same bodies; --no-reuse gives each a salt of its own; the API key is in no file."""
    a, b = serve(**says()), serve(**says())
    more = ("--no-reuse", "--max-tokens", "2", "--top-logprobs", "0", "--b-model", "tuned", "--api-key", "sk-hidden")
    asked, output = questions(tmp_path / "s.jsonl", 3), tmp_path / "ab.json"
    ab("--a", a.url, "--b", b.url, "--set", asked, *more, "--output", str(output))
    bodies = a.served.bodies + b.served.bodies
    assert len({body.pop("cache_salt") for body in bodies}) == 12
    assert {body.pop("model") for body in b.served.bodies} == {"tuned"}
    assert {body.pop("model") for body in a.served.bodies} == {"small"}
    shapes = {json.dumps({**body, "messages": 0}, sort_keys=True) for body in bodies}
    (shape,) = map(json.loads, shapes)
    assert (shape["max_tokens"], shape["temperature"], shape["seed"], "logprobs" in shape) == (2, 0.0, 42, False)
    assert a.served.headers[0]["Authorization"] == "Bearer sk-hidden"
    assert "sk-hidden" not in output.read_text()


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "side A is not clear"),
        (("--a", "http://x", "--b", "http://y", "--b-serve", "m"), "side B is not clear"),
        (("--a", "x:80", "--b", "http://y"), "--a must start with http://"),
        (("--router", "http://x"), "--router and --canary belong together"),
        (("--router", "http://x", "--canary", "http://y", "--a", "http://z"), "leave --a and --b out"),
        (("--same", "http://x", "--b", "http://y"), "--same checks one server alone"),
        (("--same", "http://x", "--review", "r.csv"), "--review has no effect"),
        (("--same", "http://x", "--concurrency", "8"), "--concurrency has no effect"),
        (("--same", "http://x", "--detect", "9%"), "--detect has no effect"),
        (("--a", "http://x", "--b", "http://y", "--level", "3"), "--level has no effect"),
        (("--a", "http://x", "--b", "http://y", "--start", "together"), "--start has no effect"),
        (("--a", "http://x", "--b", "http://y", "--logs", "/tmp"), "--logs has no effect"),
        (("--router", "http://x", "--canary", "http://y", "--b-model", "m"), "--b-model has no effect"),
        (("--a", "http://x", "--b", "http://y", "--seed", "-1"), "--seed"),
        (("--a", "http://x", "--b", "http://y", "--output", "/dev/null/x.json"), "can't be written"),
        (("--a", "http://x", "--b", "http://y", "--report", "/"), "can't be written"),
        (("--a", "http://x", "--b", "http://y", "--max-drift", "3%"), "--detect 2.00% must be above"),
        (("--a", "http://x", "--b", "http://y", "--max-drift", "0"), "--max-drift must be above 0"),
        (("--a", "http://x", "--b", "http://y", "--review", "r.txt"), "must end in .jsonl or .csv"),
        (("--a-serve", "--disk /x", "--b", "http://y"), "begins with no model"),
        (("--a-serve", "m --port=80", "--b", "http://y"), "leave --port=80 out"),
        (("--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1", "--items", "3"), "can't be read"),
    ],
)
def test_what_can_not_work_is_said(arguments: tuple[str, ...], said: str) -> None:
    """Status 2 and one sentence."""
    status, output = ab(*arguments)
    assert status == 2 and said in output, output


def test_half_characters_and_passwords_reach_no_file(serve: StartServer, tmp_path: Path) -> None:
    """A server may cut a character in two; a half of one is no text; passwords in options are hidden."""
    whole, half = serve(answers=lambda body: ("\ud83d", "\ude00")), serve(answers=lambda body: ("\ud83d", "x"))
    url = whole.url.replace("//", "//me:sesame@")
    files = {kind: tmp_path / f"r.{kind}" for kind in ("json", "html", "jsonl")}
    options = zip(("--output", "--report", "--review"), map(str, files.values()), strict=True)
    asked = ("--set", questions(tmp_path / "set.jsonl", 30), *(word for two in options for word in two))
    status, output = ab("--a", url, "--b", half.url, *asked, *LIMITS)
    assert status == 1, output
    read = {kind: path.read_text() for kind, path in files.items()}
    assert "\N{GRINNING FACE}" in read["jsonl"] and "\N{REPLACEMENT CHARACTER}x" in read["html"]
    assert "sesame" not in "".join(read.values()) + output


@pytest.mark.parametrize("start, words", [("together", ""), ("in-turn", "A and B run one after the other")])
def test_servers_are_started_and_stopped(start: str, words: str, fake_servers: None, tmp_path: Path) -> None:
    """Two configurations run at once or in turn; a planted drift is found; both servers end in order."""
    sides = ("--a-serve", "model", "--b-serve", "model --drifts", "--start", start, "--logs", str(tmp_path))
    output = tmp_path / "ab.json"
    status, said = ab(*sides, "--items", "12", *LIMITS, "--output", str(output))
    assert status == 1 and words in said, said
    result = AbResult.load(output)
    assert result.is_interleaved is (start == "together") and bool(result.figures) is result.is_interleaved
    for name in ("server-a.log", "server-b.log"):
        assert "stopped in order" in (tmp_path / name).read_text()


def test_a_second_server_is_started_beside_the_first_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, free memory must hold it once more and a quarter; on GPUs servers run in turn."""
    monkeypatch.setattr(servers, "visible_gpus", lambda surroundings: 0)
    assert servers._fits(100, 126) and not servers._fits(100, 125)
    monkeypatch.setattr(servers, "visible_gpus", lambda surroundings: 1)
    assert not servers._fits(100, 10_000)


def test_the_benchmarks_report_has_a_section(serve: StartServer, tmp_path: Path) -> None:
    """`bench report --ab` shows a comparison, which --json prints, beside the runs; other files are refused."""
    server, output = serve(**says()), tmp_path / "ab.json"
    words = ("--a", server.url, "--b", server.url, "--set", questions(tmp_path / "s.jsonl", 3), "--output", str(output))
    done = CliRunner().invoke(app, ["ab", *words, "--json"])
    assert json.loads(done.stdout) == json.loads(output.read_text()), done.stderr
    run, page = tmp_path / "run.json", tmp_path / "page.html"
    fabricated_result(1.0, {}).save(run)
    done = CliRunner().invoke(app, ["bench", "report", str(page), str(run), "--ab", str(output)])
    assert done.exit_code == 0, done.output
    assert "A against itself" in page.read_text()
    with pytest.raises(ConfigError, match="can't be read as a result"):
        AbResult.load(run)
