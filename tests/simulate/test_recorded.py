"""A recorded trace says what the server was, and is simulated with that."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.core.errors import ConfigError
from hotspan.core.recorded import RecordedServer, described
from hotspan.core.trace import Request, read
from hotspan.core.types import GIB
from hotspan.simulate.recorded import Recorded, _answers, _prompts, fitted

BLOCK, TOKEN_BYTES = 256, 20_000
SERVER: dict[str, Any] = {
    "model": "small",
    "block_tokens": 128,
    "chunk_tokens": BLOCK,
    "gpu_tokens": 2048,
    "token_bytes": TOKEN_BYTES,
    "step_tokens": 2048,
    "max_running": 64,
    "tier_bytes": {"ram": 2 * GIB},
}
LATENCY_S, TOKENS_PER_S, RAM_BYTES_PER_S = 0.01, 2000.0, 1e9


def write(path: Path, *, server: dict[str, Any] | None = SERVER, slower: float = 1.0, together: bool = False) -> Path:
    """Questions about twelve documents at a server that computes one prompt after the other, and finds documents.

    slower: by what recorded times are longer than those of such a server. together: two prompts come at a time, and
    both first tokens out of one step.
    """
    rng, at_s, free_s, seen, rows = random.Random(3), 0.0, 0.0, set[int](), []
    for number in range(80):
        document = rng.randrange(12)
        tokens = 4 * BLOCK + rng.randrange(20, 200)
        found = 4 * BLOCK if document in seen else 0
        seen.add(document)
        at_s += 0.0 if together and number % 2 else rng.expovariate(1.5)
        took_s = LATENCY_S + (tokens - found) / TOKENS_PER_S + found * TOKEN_BYTES / RAM_BYTES_PER_S
        free_s = max(at_s, free_s) + slower * took_s
        keys = [document * 100 + n for n in range(4)] + [10_000 + number]
        times = {"ttft_ms": (free_s - at_s) * 1000, "duration_ms": (free_s - at_s + 7 * 0.03) * 1000}
        row = {"timestamp": at_s * 1000, "input_length": tokens, "output_length": 8, "hash_ids": keys}
        rows.append(row | times | {"cached_length": found, "block_tokens": BLOCK})
    if together:
        for one, other in zip(rows[::2], rows[1::2], strict=True):
            one |= {"ttft_ms": other["ttft_ms"], "duration_ms": other["duration_ms"]}
    if server is not None:
        rows[0]["servers"] = [server]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", *words])
    return done.exit_code, done.output


def result(tmp_path: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The first row of the figures, the trace's, and what was said."""
    output = tmp_path / "found.json"
    status, said = run(*words, "--output", str(output))
    assert status == 0, said
    told = json.loads(output.read_text())
    (trace,) = told["traces"].values()
    return told["results"][0], trace["replayed"][0], " ".join(said.split())


def test_a_recorded_trace_needs_no_flag(tmp_path: Path) -> None:
    """Sizes, rates and blocks are the server's: hits within 3 points, mean time to first token within 30 %."""
    found, recorded, said = result(tmp_path, str(write(tmp_path / "own.jsonl")))
    assert found["sizes"]["ram_gib"] == 2.0 and found["sizes"]["gpu_tokens"] == 2048 and found["policy"] == "auto"
    assert abs(found["hit_rate"] - recorded["recorded_hit_rate"]) <= 0.03
    assert found["ttft_s"]["mean"] == pytest.approx(recorded["recorded_ttft_s"], rel=0.3)
    assert 0.03 <= found["tpot_s"] < 0.1, "slowed by prompts that are computed meanwhile"
    assert "recorded server" not in said


def test_a_flag_that_differs_is_said(tmp_path: Path) -> None:
    """With both values; one that is the same, and those that are no part of the server, are not."""
    trace = str(write(tmp_path / "own.jsonl"))
    found, _, said = result(tmp_path, trace, "--ram-gib", "0.05", "--gpu-tokens", "2048", "--seed", "3")
    assert "--ram-gib is 0.05; the recorded server has 2" in said and "--gpu-tokens is" not in said
    assert "--seed" not in said and "do not trust" not in said
    assert found["sizes"]["ram_gib"] == 0.05
    _, _, said = result(tmp_path, "--trace", trace, "--ram-gib", "2", "--ram-gib", "4")
    assert "--ram-gib is 2, 4; the recorded server has 2" in said


def test_a_simulation_that_is_off_says_so(tmp_path: Path) -> None:
    """Where the recorded hits are not what such a cache finds, nothing is to be concluded for other sizes."""
    path = write(tmp_path / "own.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"cached_length": 0}) + "\n" for row in rows))
    assert "and were 0.000: the simulation of the recorded server is off" in result(tmp_path, str(path))[2]
    recorded = Recorded({"ram_gib": (1.0,)})
    facts = read(write(tmp_path / "slow.jsonl")).facts()
    assert facts.recorded_hit_rate is not None and facts.recorded_ttft_s is not None
    exact = (facts.recorded_hit_rate, facts.recorded_ttft_s)
    assert recorded.doubts(*exact, facts) == []
    assert "mean TTFT is" in recorded.doubts(exact[0], 1.4 * exact[1], facts)[0]
    assert recorded.doubts(exact[0], 0.6 * exact[1], facts) and Recorded().doubts(0.0, 0.0, facts) == []


@pytest.mark.parametrize("together", [False, True])
def test_rates_are_those_of_the_requests(tmp_path: Path, together: bool) -> None:
    """Fitted through queues and through prompts of one step."""
    found = fitted(read(write(tmp_path / "own.jsonl", together=together)).requests, TOKEN_BYTES)
    assert found["prefill_tokens_per_s"] == pytest.approx(TOKENS_PER_S, rel=0.1)
    assert found["ram_gb_per_s"] * 1e9 == pytest.approx(RAM_BYTES_PER_S, rel=0.25)
    assert found["decode_step_s"] == pytest.approx(0.03)
    slower = fitted(read(write(tmp_path / "slow.jsonl", slower=3.0)).requests, TOKEN_BYTES)
    assert slower["prefill_tokens_per_s"] == pytest.approx(TOKENS_PER_S / 3, rel=0.1)


def test_a_rate_is_found_where_steps_take_most_of_the_time(tmp_path: Path) -> None:
    """An engine whose steps take the same time whatever they compute has a rate all the same: nothing else is known."""
    path = write(tmp_path / "own.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    alone = [
        row | {"timestamp": 10_000 * n, "ttft_ms": 50.0 - row["input_length"] / 1000} for n, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in alone))
    found = fitted(read(path).requests, TOKEN_BYTES)
    assert found["prefill_tokens_per_s"] > 0 and found["latency_s"] >= 0
    facts = read(path).facts()
    simulated, _, _ = result(tmp_path, str(path))
    assert simulated["ttft_s"]["mean"] == pytest.approx(facts.recorded_ttft_s, rel=0.3)


def test_few_requests_leave_the_rates_that_the_server_told(tmp_path: Path) -> None:
    """And traces without a server are simulated as before."""
    told = SERVER | {"prefill_tokens_per_s": 777.0, "tier_bytes_per_s": {"disk": 3e9}}
    trace = read(write(tmp_path / "own.jsonl", server=told), 2)
    options = Recorded.of(trace).options
    assert (options["prefill_tokens_per_s"], options["disk_gb_per_s"], options["disk_gib"]) == (777.0, 3.0, (0.0,))
    assert Recorded.of(trace).block_tokens == 128
    other = read(write(tmp_path / "other.jsonl", server=None))
    assert Recorded.of(other) == Recorded() and not other.servers
    _, _, said = result(tmp_path, str(tmp_path / "other.jsonl"), "--strategy", "auto", "--replicas", "1")
    assert "recorded server" not in said


@pytest.mark.parametrize(
    "servers",
    [
        {"model": "m"},
        [1],
        [{"model": 3}],
        [{"gpu_tokens": -1}],
        [{"gpu_tokens": 1.5}],
        [{"token_bytes": True}],
        [{"token_bytes": 1e30}],
        [{"tier_bytes": {"ram": "2"}}],
        [{"tier_bytes": 5}],
    ],
)
def test_what_no_recording_writes_is_refused(tmp_path: Path, servers: Any) -> None:
    """With the line; names that are not known are let pass."""
    path = tmp_path / "own.jsonl"
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(row | {"servers": servers}) + "\n")
    with pytest.raises(ConfigError, match="line 1: servers "):
        read(path)
    path.write_text(json.dumps(row | {"servers": [{"model": "m", "later": {}}]}) + "\n")
    assert read(path).servers == (RecordedServer("m"),)


def test_a_server_is_described(tmp_path: Path) -> None:
    """Model, pool, tiers, and the engine's blocks of a chunk; `trace show` has it."""
    done = CliRunner().invoke(app, ["trace", "show", str(write(tmp_path / "own.jsonl"))])
    line = "recorded from small: a pool of 2,048 tokens, ram 2.00 GiB, chunks of 256 tokens in 2 blocks"
    assert done.exit_code == 0 and line in done.output
    assert described(RecordedServer()) == "an engine"


def test_a_request_that_tells_no_hits_had_none() -> None:
    """All of its prompt was computed; one that tells more than its prompt had found all of it."""
    alone = Request(1.0, 100, 1, (), ttft_s=0.5)
    assert _prompts([alone]) == ([[1.0, 100.0, 5000.0, 0.0]], [0.5])
    assert _prompts([alone._replace(cached_tokens=40)]) == ([[1.0, 60.0, 4200.0, 40.0]], [0.5])
    assert _prompts([alone._replace(cached_tokens=400)]) == ([[1.0, 0.0, 0.0, 100.0]], [0.5])


def test_a_step_is_that_of_the_quarter_that_shared_theirs_least() -> None:
    """Of 20 answers the sixth quickest: five shared their steps with nobody. Answers of one token have no steps."""
    one = Request(1.0, 100, 1, (), ttft_s=0.5, took_s=0.9)
    answers = [one._replace(answer_tokens=11, took_s=0.5 + n / 10) for n in range(20, 0, -1)]
    assert _answers([one, *answers]) == {"decode_step_s": pytest.approx(6 / 100)}
    assert _answers([one, one._replace(answer_tokens=11, took_s=0.5)]) == {}
