"""Two minutes on a GPU with torch alone, before anything else is set up: do copies keep the orders that hotspan needs?

usage: python3 -m benchmarks.gpu.alone [--gib 2] [--limit-s 120] [--output FILE]

Needs Python and torch, and neither vLLM nor hotspan. Each check prints a line of JSON as soon as it is known, and a
check that can't be made does not stop the others. What is checked is what docs/gpu.md lists: that a mapping of
/dev/shm can be registered with the driver, that a copy on another stream waits for the kernels before it, that an event
tells the end of a copy and not its begin, that bytes come back, and that copies in batches do the same. A check of an
order is made a second time without the wait that keeps it ("control"): if that goes right too, the check has shown
nothing.
Exit status: 0 if all passed, 1 if not, 2 without a GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.copies import Batches, NoBatches, Slab

ROUNDS: Final = 20
_ROUNDS_OF_ALL: Final = 4
_BLOCK: Final = 8 << 10
_SLEEP_CYCLES: Final = 20_000_000
"""Of the GPU's clock, about 10 ms: a copy that does not wait for a kernel this long is done before it."""

Figures = dict[str, Any]
Say = Callable[[Figures], None]


class Bench:
    """A slab in host memory, a device's blocks, uint8[slots, slot bytes] both, and a stream for each direction."""

    def __init__(self, slab: Slab) -> None:
        self.slab, self.host = slab, slab.rows
        self.device = torch.zeros(self.host.shape, dtype=torch.uint8, device="cuda")
        self.down, self.up = torch.cuda.Stream(), torch.cuda.Stream()

    def write_late(self, row: int, value: int) -> None:
        """A kernel on the compute stream that fills a block when it has run for a while."""
        torch.cuda._sleep(_SLEEP_CYCLES)
        self.device[row].fill_(value)

    def copy(self, stream: torch.cuda.Stream, row: int, *, is_store: bool, waits: bool) -> torch.cuda.Event:
        """A copy of a whole slot, and the event behind it. waits: for the compute stream."""
        source, target = (self.device, self.host) if is_store else (self.host, self.device)
        if waits:
            stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            target[row].copy_(source[row], non_blocking=True)
            event.record(stream)
        return event


def registration(bench: Bench) -> Figures:
    """How long a GiB takes to be registered and to be let go, and whether torch takes it for pinned then."""
    slab = bench.slab
    slab.unregister()
    began_s = time.perf_counter()
    code = slab.register()
    registered_s = time.perf_counter() - began_s
    is_pinned = bench.host.is_pinned()
    gib = slab.size / 2**30
    return {"passed": code == 0 and is_pinned, "code": code, "is_pinned": is_pinned, "s_per_gib": registered_s / gib}


def stores(bench: Bench, *, waits: bool = True) -> Figures:
    """A store behind a kernel that is still at work has what the kernel wrote."""
    wrong = 0
    for turn in range(ROUNDS):
        row, value = turn % len(bench.host), 1 + turn % 250
        bench.host[row].fill_(0)
        bench.write_late(row, value)
        bench.copy(bench.down, row, is_store=True, waits=waits).synchronize()
        wrong += not bool((bench.host[row] == value).all())
        torch.cuda.synchronize()
        bench.device[row].zero_()
    return {"passed": not wrong, "rounds": ROUNDS, "wrong": wrong}


def loads(bench: Bench, *, waits: bool = True) -> Figures:
    """A load into a block that a kernel is still to zero comes after that."""
    wrong = 0
    for turn in range(ROUNDS):
        row, value = turn % len(bench.host), 1 + turn % 250
        bench.host[row].fill_(value)
        bench.write_late(row, 0)
        bench.copy(bench.up, row, is_store=False, waits=waits).synchronize()
        torch.cuda.synchronize()
        wrong += not bool((bench.device[row] == value).all())
    return {"passed": not wrong, "rounds": ROUNDS, "wrong": wrong}


def controlled(check: Callable[..., Figures]) -> Callable[[Bench], Figures]:
    """The check, and without the wait: there it has to find something, in at least one round."""

    def run(bench: Bench) -> Figures:
        found, control = check(bench), check(bench, waits=False)
        return found | {"passed": found["passed"] and control["wrong"] > 0, "control_wrong": control["wrong"]}

    return run


def events(bench: Bench) -> Figures:
    """The host looks at an event until it is done: all bytes are there then, and before it was not done."""
    early = wrong = 0
    for turn in range(ROUNDS):
        row, value = turn % len(bench.host), 1 + turn % 250
        bench.host[row].fill_(0)
        bench.write_late(row, value)
        event = bench.copy(bench.down, row, is_store=True, waits=True)
        early += event.query()
        while not event.query():
            pass
        wrong += not bool((bench.host[row] == value).all())
    return {"passed": not early and not wrong, "rounds": ROUNDS, "early": early, "wrong": wrong}


def both_ways(bench: Bench) -> Figures:
    """Half of the slots are stored while the other half is loaded; all bytes are those that were there."""
    slots = len(bench.host)
    wrong = 0
    for turn in range(_ROUNDS_OF_ALL):
        bench.device.random_(0, 256, generator=torch.Generator("cuda").manual_seed(turn))
        kept = bench.device.clone()
        torch.cuda.synchronize()
        first, second = (
            (range(0, slots, 2), range(1, slots, 2)) if turn % 2 else (range(1, slots, 2), range(0, slots, 2))
        )
        for row in second:
            bench.copy(bench.down, row, is_store=True, waits=True)
        bench.down.synchronize()
        bench.device[list(second)] = 0
        for mine, other in zip(first, second, strict=False):
            bench.copy(bench.down, mine, is_store=True, waits=True)
            bench.copy(bench.up, other, is_store=False, waits=True)
        torch.cuda.synchronize()
        stored = bench.host[list(first)] != kept.cpu()[list(first)]
        wrong += int(stored.sum()) + int((bench.device != kept).sum())
    return {"passed": not wrong, "rounds": _ROUNDS_OF_ALL, "slots": slots, "wrong": wrong}


def batches(bench: Bench) -> Figures:
    """`cudaMemcpyBatchAsync`, with sources in the stream's order and in any: the same bytes; GB/s beside one copy's."""
    api = Batches()
    rows = bench.host.numel() // _BLOCK
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    host, device = bench.host.view(rows, _BLOCK), bench.device.view(rows, _BLOCK)
    figures: Figures = {"rows": rows, "row_bytes": _BLOCK}
    wrong = 0
    for name, is_store, any_order in (("store", True, False), ("load", False, True)):
        bench.device.random_(0, 256)
        kept = bench.device.clone()
        if not is_store:
            bench.host.copy_(bench.device)
            bench.device.zero_()
        torch.cuda.synchronize()
        source, target = (device, host) if is_store else (host, device)
        began_s = time.perf_counter()
        api.copy(source, target, order, bench.down, any_order=any_order)
        bench.down.synchronize()
        figures[f"{name}_gb_s"] = bench.host.numel() / (time.perf_counter() - began_s) / 1e9
        wrong += int((bench.host != kept.cpu()).sum()) if is_store else int((bench.device != kept).sum())
    return figures | {"passed": not wrong, "wrong": wrong}


def rates(bench: Bench) -> Figures:
    """GB/s of one copy of the whole slab in each direction, the best of five."""
    figures: Figures = {"passed": True}
    for name, target, source in (("store", bench.host, bench.device), ("load", bench.device, bench.host)):
        best_s = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best_s = min(best_s, time.perf_counter() - began_s)
        figures[f"{name}_gb_s"] = source.numel() / best_s / 1e9
    return figures


CHECKS: Final[dict[str, Callable[[Bench], Figures]]] = {
    "registration": registration,
    "a store waits for the kernels before it": controlled(stores),
    "a load waits for the kernels before it": controlled(loads),
    "an event tells the end of a copy": events,
    "stores and loads at a time": both_ways,
    "one large copy": rates,
    "copies in batches": batches,
}


def run(checks: Mapping[str, Callable[[Any], Figures]], bench: Any, limit_s: float, say: Say) -> bool:
    """Each check in turn, whatever became of those before it; whether all passed. None begins after `limit_s`."""
    began_s, passed = time.monotonic(), True
    for name, check in checks.items():
        if time.monotonic() - began_s > limit_s:
            say({"check": name, "passed": False, "why": f"the {limit_s:.0f} s are over"})
            passed = False
            continue
        try:
            found = check(bench)
        except NoBatches as error:  # an old runtime: vLLM copies in another way there
            found = {"passed": True, "why": f"not checked: {error}"}
        except (RuntimeError, OSError, ValueError) as error:
            found = {"passed": False, "why": f"{type(error).__name__}: {error}"}
        say({"check": name} | found)
        passed = passed and bool(found["passed"])
    return passed


def main() -> int:
    options = _options()
    lines: list[Figures] = []

    def save(state: str) -> None:
        if options.output is not None:
            content = {"kind": "gpu", "part": "alone", "state": state, "checks": lines}
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(content, indent=1) + "\n")

    def say(line: Figures) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        save("running")

    if not torch.cuda.is_available():
        say({"check": "GPU", "passed": False, "why": f"torch {torch.__version__} sees no CUDA GPU on this machine"})
        save("failed")
        return 2
    found = torch.cuda.get_device_properties(0)
    say({"check": "GPU", "passed": True, "name": found.name, "torch": torch.__version__, "cuda": torch.version.cuda})
    with Slab(int(options.gib * 2**30)) as slab:
        slab.register()
        passed = run(CHECKS, Bench(slab), options.limit_s, say)
    save("complete" if passed else "failed")
    return 0 if passed else 1


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of the slab, and of the GPU's memory")
    parser.add_argument("--limit-s", type=float, default=120.0, help="no check begins later")
    parser.add_argument("--output", type=Path, help="write the lines to this JSON file, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
