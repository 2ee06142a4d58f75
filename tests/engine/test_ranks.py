"""The ranks of a further host end whole, however many signals tell them to."""

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.core.aftermath import Aftermath, stopping_in_order
from hotspan.engine import ranks

pytestmark = pytest.mark.engine


class Executor:
    """vLLM's, which is told to end while its ranks run, and again while they are being ended."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.told: list[str] = []

    def start_worker_monitor(self, *, inline: bool) -> None:
        self.told.append("runs")
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the first signal ends it")

    def shutdown(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        self.told.append("ended whole")


def test_a_signal_does_not_interrupt_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head ended, so that the ranks end; then the orchestrator stops this host, too."""
    executor = Executor()
    parallel = SimpleNamespace(node_rank=1, master_addr="127.0.0.1", master_port=1)
    config = SimpleNamespace(parallel_config=parallel)
    engine = SimpleNamespace(create_engine_config=lambda **more: config)

    @contextmanager
    def ended_with(address: str, port: int) -> Iterator[None]:
        yield

    monkeypatch.setattr(ranks, "AsyncEngineArgs", SimpleNamespace(from_cli_args=lambda arguments: engine))
    monkeypatch.setattr(ranks, "MultiprocExecutor", lambda *arguments, **more: executor)
    monkeypatch.setattr(ranks, "_ended_with", ended_with)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    with Aftermath() as aftermath, pytest.raises(SystemExit), stopping_in_order():
        ranks.run_ranks(Namespace(), aftermath)
    assert executor.told == ["runs", "ended whole"]
    assert {number: signal.getsignal(number) for number in before} == before
