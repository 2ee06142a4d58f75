"""`hotspan simulate`: tables, files and errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.simulate.routers import POLICIES


def run(*arguments: str) -> tuple[int, str]:
    """Its exit status and what it says."""
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output


def test_it_shows_and_writes_everything(tmp_path: Path) -> None:
    """Every strategy is in the table and the file, with the machine, the settings and each seed's figures."""
    output = tmp_path / "routing.json"
    status, text = run("--requests", "120", "--seeds", "2", "--output", str(output))
    assert status == 0, text
    data = json.loads(output.read_text())
    assert data["kind"] == "routing" and data["machine"]["CPU"]
    assert data["settings"]["replicas"] == 8 and data["settings"]["costs"]["prefill_tokens_per_s"] == 8000
    assert data["traces"]["synthetic"]["published"]["requests"] == 3993
    assert len(data["results"]) == 2 * len(POLICIES)
    for result in data["results"]:
        assert [each["seed"] for each in result["runs"]] == [1, 2]
        assert result["ttft_s"]["p99"] >= result["ttft_s"]["p50"] > 0 and 0 <= result["hit_rate"] < 1
        assert result["policy"] in text and result["trace"] in text


def test_tiers_and_eviction_are_compared(tmp_path: Path) -> None:
    """Each size and eviction that is named has rows of its own, and the page a plot of them, without a network."""
    output, page = tmp_path / "routing.json", tmp_path / "routing.html"
    sizes = [
        "--gpu-tokens",
        "50000",
        "--gpu-tokens",
        "100000",
        "--ram-gib",
        "20",
        "--eviction",
        "arc",
        "--eviction",
        "lru",
    ]
    what = ["--trace", "synthetic", "--strategy", "auto", "--strategy", "prefix-tree", "--requests", "150"]
    status, text = run(*what, *sizes, "--output", str(output), "--report", str(page))
    assert status == 0, text
    results = json.loads(output.read_text())["results"]
    combinations = {(each["policy"], each["sizes"]["gpu_tokens"], each["sizes"]["eviction"]) for each in results}
    assert len(combinations) == len(results) == 8
    html = page.read_text()
    for title in ("Time to first token", "Found against waited", "The busiest replica", "Hit rate by size"):
        assert title in html
    assert 'src="http' not in html and "prefix-tree" in html
    assert '"showlegend":true' in html.replace(" ", "") and '"showlegend":false' not in html.replace(" ", "")
    assert '"range":[0,1.01]' in html.replace(" ", "")  # shares of requests, from none to all
    assert "synthetic, auto." not in html  # its plots of one size compare both strategies


def test_a_trace_is_written_and_replayed(tmp_path: Path) -> None:
    """A drawn trace that was written gives the figures of the drawn one."""
    trace, drawn, again = tmp_path / "trace.jsonl", tmp_path / "drawn.json", tmp_path / "again.json"
    what = ["--requests", "200", "--strategy", "kvaware"]
    assert run("--trace", "conversation", *what, "--write-trace", str(trace))[0] == 0
    assert run("--trace", "conversation", *what, "--output", str(drawn))[0] == 0
    assert run("--trace", str(trace), *what, "--output", str(again))[0] == 0
    results = [json.loads(path.read_text())["results"][0] for path in (drawn, again)]
    assert results[0]["hit_rate"] == results[1]["hit_rate"] and results[0]["ttft_s"] == results[1]["ttft_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere.jsonl"], "give one of conversation, synthetic, toolagent, documents, or a file"),
        (["--strategy", "fastest"], "there is no strategy 'fastest'; there are auto, session"),
        (["--eviction", "fifo"], "there is no eviction 'fifo'; there are learned, arc, lru"),
        (["--replicas", "0"], "--replicas is '0': give a whole number from 1 to 4096"),
        (["--gpu-tokens", "50000", "--gpu-tokens", "none"], "--gpu-tokens is"),
        (["--trace", "documents", "--blend"], "--blend keeps windows in RAM: give --ram-gib"),
        (["--gpu-tokens", "511"], "a GPU's pool of 511 tokens holds no block of 512"),
    ],
)
def test_what_can_not_be_is_said(arguments: list[str], message: str) -> None:
    """A wrong name ends with status 2 and a sentence that says what there is."""
    status, text = run("--requests", "10", *arguments)
    assert status == 2 and message in " ".join(text.split())


def test_numbers_of_replicas_are_compared(tmp_path: Path) -> None:
    """A second replica is a row of its own, and a point in the plots over sizes."""
    output, page = tmp_path / "routing.json", tmp_path / "routing.html"
    words = ("--requests", "60", "--trace", "synthetic", "--strategy", "auto", "--replicas", "1", "--replicas", "2")
    status, text = run(*words, "--output", str(output), "--report", str(page))
    assert status == 0, text
    one, two = json.loads(output.read_text())["results"]
    assert (one["sizes"]["replicas"], two["sizes"]["replicas"]) == (1, 2)
    assert one["ttft_s"]["mean"] > two["ttft_s"]["mean"]
    assert "Hit rate by size" in page.read_text() and page.read_text().count("synthetic, auto.") == 3


def test_plots_over_size_have_a_curve_for_all_that_is_no_size(tmp_path: Path) -> None:
    """Two disks and two numbers of replicas are two points on each of two curves; the table names the RAM once."""
    page = tmp_path / "routing.html"
    words = ("--requests", "60", "--trace", "synthetic", "--strategy", "auto", "--ram-gib", "20")
    sizes = ("--replicas", "1", "--replicas", "2", "--disk-gib", "40", "--disk-gib", "80")
    status, text = run(*words, *sizes, "--report", str(page))
    assert status == 0, text
    html = page.read_text().replace(" ", "")
    for name in ("auto,1replica", "auto,2replicas"):
        assert html.count(f'"name":"{name}"') == 2  # of hit rate, and of time to first token
    assert html.count('"x":[40.0,80.0]') == 4
    assert html.count("synthetic,auto.") == 3  # with one strategy all other plots compare the sizes
    assert text.count("RAM 20 GiB") == 1 and text.count("disk 40 GiB") == 2


def test_windows_are_shown_beside_prefixes(tmp_path: Path) -> None:
    """With --blend the table and the file have what was taken from windows; without it, and of traces that name no
    documents, nothing is.
    """
    output = tmp_path / "routing.json"
    shares = {}
    for trace, blend in (("documents", ["--blend"]), ("documents", []), ("synthetic", ["--blend"])):
        what = ["--trace", trace, "--strategy", "auto", "--requests", "300", "--ram-gib", "50", "--replicas", "2"]
        status, text = run(*what, *blend, "--output", str(output))
        assert status == 0, text
        data = json.loads(output.read_text())
        shares[trace, bool(blend)] = data["results"][0]["window_rate"]
        assert (" windows " in " ".join(text.split())) == (trace == "documents" and bool(blend))
        assert (data["settings"]["blend"] is not None) == bool(blend)
        assert "published" not in data["traces"].get("documents", {})
    assert shares["documents", True] > 0.2 and not shares["documents", False] and not shares["synthetic", True]
