"""What is tried on a GPU first, with torch alone, and the series of parts, on a machine without one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.alone import CHECKS, Figures, controlled, run
from benchmarks.gpu.copies import SLOT_BYTES, NoBatches, Slab
from benchmarks.gpu.measure import PARTS
from benchmarks.gpu.series import ALONE, Part, is_complete, parts_of
from benchmarks.gpu.series import run as run_series

LONG_S = 600.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """A line of JSON with the reason, in the file too, and an exit status of its own."""
    output = tmp_path / "results/alone.json"
    command = [sys.executable, "-m", "benchmarks.gpu.alone", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["check"] == "GPU" and not line["passed"] and "no CUDA GPU" in line["why"]
    assert json.loads(output.read_text())["checks"] == [line] and not is_complete(output)


def test_it_needs_torch_alone() -> None:
    """Neither vLLM nor hotspan is imported: both may be missing, or broken, where it is run."""
    code = (
        "import sys, benchmarks.gpu.alone; "
        "sys.exit(', '.join({name.partition('.')[0] for name in sys.modules} & {'vllm', 'hotspan', 'kit'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_check_that_fails_stops_no_other() -> None:
    """Errors of the runtime, and a runtime without batches, are lines as well; what there is no time for is one too."""

    def fails(bench: Any) -> Figures:
        raise RuntimeError("an illegal memory access was encountered")

    def is_old(bench: Any) -> Figures:
        raise NoBatches("CUDA runtime 12.4")

    def wrong(bench: Any) -> Figures:
        return {"passed": False, "wrong": 3}

    def right(bench: Any) -> Figures:
        return {"passed": True}

    lines: list[Figures] = []
    checks = {"a": fails, "b": is_old, "c": wrong, "d": right}
    assert not run(checks, None, LONG_S, lines.append)
    assert [(line["check"], line["passed"]) for line in lines] == [("a", False), ("b", True), ("c", False), ("d", True)]
    assert "illegal memory access" in lines[0]["why"] and "12.4" in lines[1]["why"]
    assert run({"b": is_old, "d": right}, None, LONG_S, lines.append)
    lines.clear()
    assert not run({"d": right}, None, -1.0, lines.append)
    assert "over" in lines[0]["why"]


@pytest.mark.parametrize(("wrong", "control", "passed"), [(0, 3, True), (0, 0, False), (1, 3, False)])
def test_a_check_that_its_control_passes_shows_nothing(wrong: int, control: int, passed: bool) -> None:
    """An order is shown only where its absence is seen."""

    def check(bench: Any, *, waits: bool = True) -> Figures:
        found = wrong if waits else control
        return {"passed": not found, "wrong": found}

    assert controlled(check)(None) == {"passed": passed, "wrong": wrong, "control_wrong": control}  # type: ignore[arg-type]


def test_the_slab_is_a_mapping_of_rows(tmp_path: Path) -> None:
    """What is written through the rows is in the mapping; the file has no name that stays."""
    with Slab(3 * SLOT_BYTES, str(tmp_path)) as slab:
        assert slab.rows.shape == (3, SLOT_BYTES) and slab.size == 3 * SLOT_BYTES
        slab.rows[2, 7] = 9
        assert slab._map[2 * SLOT_BYTES + 7] == 9
    assert list(tmp_path.iterdir()) == []
    assert Slab(1, str(tmp_path)).size == 2 * SLOT_BYTES


def test_the_series_goes_on_when_a_part_fails(tmp_path: Path) -> None:
    """A part that fails, hangs or can't be started is a line, and the next runs; what is complete is not repeated."""

    def part(name: str, code: str, limit_s: float = LONG_S) -> Part:
        result = tmp_path / f"{name}.json"
        return Part([sys.executable, "-c", code.format(result=str(result))], result, limit_s)

    writes = "open({result!r}, 'w').write('{{\"state\": \"complete\"}}')"
    parts = {
        "fails": part("fails", "raise SystemExit(3)"),
        "hangs": part("hangs", "import time; time.sleep(3600)", 0.5),
        "missing": Part([str(tmp_path / "nothing")], tmp_path / "missing.json", LONG_S),
        "works": part("works", writes),
    }
    lines: list[dict[str, Any]] = []
    assert not run_series(parts, lines.append)
    assert [(line["part"], line["state"]) for line in lines] == [
        *((name, "failed") for name in ("fails", "hangs", "missing")),
        ("works", "complete"),
    ]
    assert "3" in lines[0]["why"] and "TimeoutExpired" in lines[1]["why"]
    lines.clear()
    assert run_series({"works": part("works", "raise SystemExit(3)")}, lines.append)
    assert lines == [{"part": "works", "state": "complete", "was_there": True}]
    assert not run_series({"works": part("works", "raise SystemExit(3)")}, lines.append, again=True)


def test_identity_that_did_not_hold_is_not_complete(tmp_path: Path) -> None:
    """A part is measured again if its bytes differed, if it was cut short, or if its file can't be read."""
    path = tmp_path / "result.json"
    for content, expected in (
        ({"state": "complete", "measured": {"identity": {"passed": True}}}, True),
        ({"state": "complete", "measured": {"identity": {"passed": False}}}, False),
        ({"state": "cut short", "measured": {}}, False),
    ):
        path.write_text(json.dumps(content))
        assert is_complete(path) is expected
    path.write_text("{")
    assert not is_complete(path) and not is_complete(tmp_path / "none.json")


def test_the_parts_begin_with_what_needs_the_least(tmp_path: Path) -> None:
    """Torch alone first, then the engine's identity; each file is the one that the part writes."""
    options: Any = SimpleNamespace(
        output=tmp_path, parts=(ALONE, *PARTS), model="qwen2.5-7b", commit="", limit_s=570.0, cpu=False
    )
    found = parts_of(options)
    assert list(found) == ["alone", *PARTS] and list(found)[1] == "identity"
    assert found["identity"].result == tmp_path / "identity-qwen2.5-7b-1.json"
    options.cpu, options.parts = True, ("chat",)
    (chat,) = parts_of(options).values()
    assert chat.result == tmp_path / "chat-tiny-1.json" and "--cpu" in chat.command
    assert len(CHECKS) >= 7
