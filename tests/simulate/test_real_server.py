"""A server that is recorded and simulated without any flag, beside its own counters. `make test-slow` runs it."""

import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm")

from hotspan.cli.admin_client import Admin
from hotspan.cli.collecting import Collected, collect
from hotspan.cli.trace import write_rows
from hotspan.core.metrics_page import HITS, LOOKUPS, POOL_HITS, figures
from hotspan.core.trace import Trace, read
from hotspan.core.types import GIB
from hotspan.simulate.costs import Costs, Setup, Sizes
from hotspan.simulate.recorded import Recorded
from hotspan.simulate.simulation import Outcome, Simulation
from tests.server.conftest import serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK, DOCUMENTS, ROUNDS = 256, 12, 4
TOKEN = "0123456789abcdef0123456789abcdef"


def test_a_recorded_server_is_simulated_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    """Its pool and its RAM hold a part of what is asked for, so that hits depend on the sizes: the simulator, given
    what the recording tells and nothing else, finds within 3 points of what the server counted, and so does the trace.
    """
    sizes = ("--num-gpu-blocks-override", "24", "--max-model-len", "2048")
    options = ("--ram-gib", "0.02", "--chunk-tokens", str(CHUNK), *sizes)
    with serving(tiny_model, tmp_path / "log", *options, variables={"HOTSPAN_ADMIN_TOKEN": TOKEN}) as server:
        admin = Admin(server=server.url, token=TOKEN)
        is_over, found = threading.Event(), list[Collected]()

        def record() -> None:
            def sleep(seconds: float) -> None:
                if is_over.wait(0.1):
                    raise KeyboardInterrupt

            found.append(collect({server.url: admin.post}, 600, sleep=sleep))

        before = figures(admin.text("/metrics"), (LOOKUPS, HITS, POOL_HITS))[0]
        recorder = threading.Thread(target=record)
        recorder.start()
        time.sleep(2)  # until its first fetch: what is asked before it is not recorded
        ask(server.url, server.model)
        is_over.set()
        recorder.join(120)
        time.sleep(2)  # metrics are reported once a second
        after = figures(admin.text("/metrics"), (LOOKUPS, HITS, POOL_HITS))[0]
    counted = {at: after[at] - before.get(at, 0.0) for at in after}
    hits = sum(value for (name, _), value in counted.items() if name in (HITS, POOL_HITS))
    of_server = hits / sum(value for (name, _), value in counted.items() if name == LOOKUPS)
    (told,) = found
    assert not told.lost and not told.silent and len(told.rows) == DOCUMENTS * ROUNDS
    write_rows(tmp_path / "own.jsonl", told.rows, told.servers)
    trace = read(tmp_path / "own.jsonl")
    recorded = Recorded.of(trace)
    (gpu_tokens,), (ram_gib,) = recorded.options["gpu_tokens"], recorded.options["ram_gib"]
    assert trace.block_tokens == CHUNK and gpu_tokens == 24 * 128 and 0 < ram_gib * GIB <= 0.02 * GIB
    outcome, facts = simulated(trace, recorded), trace.facts()
    assert facts.recorded_hit_rate == pytest.approx(of_server, abs=0.03)
    assert 0.1 < of_server < 0.9, "the sizes are of no matter"
    assert outcome.hit_rate == pytest.approx(of_server, abs=0.03)
    assert recorded.doubts(outcome.hit_rate, statistics.fmean(outcome.ttft_s), facts) == []
    check_second_half(trace)


def simulated(trace: Trace, recorded: Recorded) -> Outcome:
    """What becomes of the requests on the server that was recorded."""
    names = ("prefill_tokens_per_s", "attention_s", "latency_s", "kv_bytes", "step_tokens", "ram_gb_per_s")
    own = {name: recorded.options[name] for name in names if name in recorded.options}
    costs = Costs(step_s=recorded.options["decode_step_s"], **own)
    (gpu_tokens,), (ram_gib,) = recorded.options["gpu_tokens"], recorded.options["ram_gib"]
    setup = Setup(1, costs, Sizes(gpu_tokens, ram_gib), None, CHUNK, recorded.block_tokens)
    return Simulation(setup, "roundrobin").run(trace)


def check_second_half(trace: Trace) -> None:
    """Rates that are fitted to the first half of the requests give the times to first token of the second half, which
    the fit never had: within a factor of 2, since the machine is shared.
    """
    half = len(trace.requests) // 2
    outcome = simulated(trace, Recorded.of(replace(trace, requests=trace.requests[:half])))
    of_server = statistics.fmean(each.ttft_s for each in trace.requests[half:] if each.ttft_s is not None)
    assert statistics.fmean(outcome.ttft_s[half:]) == pytest.approx(of_server, rel=0.5)


def ask(url: str, model: str) -> None:
    """Questions about documents, some of them asked about more often, one after the other."""
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(DOCUMENTS * ROUNDS):
            document = number * number % DOCUMENTS if number % 3 else number % DOCUMENTS
            text = [3 + (document * 7 + n) % 60 for n in range(4 * CHUNK)]
            text[::9] = [3 + (document * 31 + n * n) % 60 for n in range(len(text[::9]))]
            body = {"model": model, "prompt": [*text, *(3 + (number + n) % 60 for n in range(40))], "max_tokens": 2}
            client.post("/v1/completions", json=body).raise_for_status()
