"""Whether the fast tests notice small faults: `make mutants`.

    python -m tests.mutants --each 51 --output benchmarks/results/mutants.json

Draws mutants of each package (tests/mutants/mutate.py), runs for each the tests that run its line, and lists those
that no test noticed. A survivor that changes nothing a caller could see stands in `equivalent.json` with the reason;
every other one is real. Ends with status 1 if more than 5 % are.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tests.mutants.house import House, Outcome, preload
from tests.mutants.mutate import Mutant, is_python, mutants

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.json"
PACKAGES = ("plan", "config", "formatters", "simulate", "http", "router")
TESTS = ("plan", "config", "formatters", "simulate", "http", "router", "cli", "server")
"""Folders of tests that are run, without those that load an engine or take minutes."""

MOST_REAL = 0.05
_MOST_TESTS, _MOST_S, _MOST_OTHERS = 80, 20.0, 250
"""The quickest tests of one mutant and their seconds, and how many others are tried after them."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A test: its seconds, and the lines that it ran of each module."""

    test: str
    seconds: float
    lines: dict[str, frozenset[int]]


def traced(house: House, workers: int) -> list[dict[str, Any]]:
    """All tests, with the lines that each runs; without those that fail as it is."""
    output, report = house.path.parent / "trace", house.path.parent / "report"
    environment = os.environ | {
        "PYTHONPATH": f"{house.path / 'src'}:{house.path}",
        "MUTANTS_ROOT": str(house.path),
        "MUTANTS_TRACE": str(output),
    }
    chosen = ["-m", "not slow and not engine", "-p", "no:schemathesis", "-p", "tests.mutants.trace"]
    chosen += ["-n", str(workers)] if workers > 1 else []
    words = [sys.executable, "-m", "pytest", *chosen, "-q", "-rfE", *(f"tests/{each}" for each in TESTS)]
    with report.open("w") as out:
        subprocess.run(words, cwd=house.path, env=environment, stdout=out, stderr=out)
    failed = {line.split()[1] for line in report.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))}
    rows = [json.loads(line) for file in output.parent.glob("trace.*") for line in file.read_text().splitlines()]
    print(f"{len(rows)} tests, {len(failed)} of them fail without a mutant: {sorted(failed)[:5]}", flush=True)
    return [row for row in rows if row["test"] not in failed]


def ran(rows: list[dict[str, Any]]) -> list[Ran]:
    """Tests with the lines that they run."""
    return [
        Ran(row["test"], row["seconds"], {path: frozenset(lines) for path, lines in row["lines"].items()})
        for row in rows
    ]


def chosen(mutant: Mutant, tests: list[Ran]) -> tuple[list[Ran], list[Ran]]:
    """The tests that run a mutant's line, the quickest of its package first, and the others.

    Of what runs at the import, those that use the module, or whose files name it.
    """
    at = range(mutant.lines[0], mutant.lines[1] + 1)
    is_import = mutant.function == "module" or mutant.function.split(".")[-1][:1].isupper()
    found = [
        each
        for each in tests
        if ((lines := each.lines.get(mutant.path)) and (is_import or any(line in lines for line in at)))
        or (is_import and _is_named(mutant.path, each.test.partition("::")[0]))
    ]
    if not found:  # a function that only the import calls
        found = [each for each in tests if mutant.path in each.lines]
    own = f"tests/{mutant.path.split('/')[2]}/"
    found.sort(key=lambda each: (not each.test.startswith(own), each.seconds))
    count, seconds = 0, 0.0
    while count < min(len(found), _MOST_TESTS) and (not count or seconds + found[count].seconds <= _MOST_S):
        seconds += found[count].seconds
        count += 1
    return found[:count], found[count : count + _MOST_OTHERS]


@cache
def _is_named(path: str, test: str) -> bool:
    module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return module in (ROOT / test).read_text()


def drawn(each: int, seed: int, only: str = "") -> list[Mutant]:
    """So many mutants of each package; with `only`, all whose names have it.

    Each has its place in its package's order by its name: a change of one module leaves the choice among the others as
    it is. The first of all packages come first: a run that is cut off has as many of each.
    """
    found: list[tuple[int, Mutant]] = []
    for package in PACKAGES:
        sources = {
            str(file.relative_to(ROOT)): file.read_text()
            for file in sorted((ROOT / "src" / "hotspan" / package).rglob("*.py"))
        }
        all_of = [mutant for path, source in sources.items() for mutant in mutants(path, source)]
        all_of = [mutant for mutant in all_of if only in mutant.name]
        all_of.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
        valid = (mutant for mutant in all_of if is_python(mutant, sources[mutant.path]))
        found += enumerate(islice(valid, None if only else each))
    return [mutant for _, mutant in sorted(found, key=lambda one: one[0])]


def tried(house: House, mutant: Mutant, known: list[Ran]) -> dict[str, Any]:
    """The row of one mutant: the quickest tests, and if none of them notices it the others."""
    quick, others = chosen(mutant, known)
    row: dict[str, Any] = {"mutant": mutant.name, "line": mutant.lines[0], "tests": len(quick) + len(others)}
    if not quick:
        return row | {"outcome": Outcome.SURVIVED.value, "by": "no test uses its module"}
    outcome, by = Outcome.SURVIVED, ""
    for tests in filter(None, (quick, others)):
        if outcome is Outcome.SURVIVED:
            seconds = sum(each.seconds for each in tests)
            names = [each.test for each in tests]
            outcome, by = house.trial(mutant, names, 20 + 3 * seconds, 240 + 10 * seconds)
            if outcome is Outcome.BROKEN:  # it has changed the tests' parameters, which are in their names
                files = sorted({name.partition("::")[0] for name in names})
                outcome, by = house.trial(mutant, files, 60 + 3 * seconds, 240 + 10 * seconds)
    return row | {"outcome": outcome.value, "by": by}


def summed(rows: list[dict[str, Any]], equivalent: dict[str, str]) -> dict[str, Any]:
    """The result: counts by package, and the survivors, with the reason of those that change nothing."""
    by_package: dict[str, Counter[str]] = defaultdict(Counter)
    survivors, real = [], 0
    for row in rows:
        counts = by_package[row["mutant"].split("/")[2]]
        counts["mutants"] += 1
        if row["outcome"] in (Outcome.KILLED, Outcome.ENDLESS):
            continue
        reason = equivalent.get(row["mutant"])
        counts["equivalent" if reason else "real"] += 1
        real += not reason
        survivors.append(row | ({"equivalent": reason} if reason else {}))
    return {
        "mutants": len(rows),
        "real_survivors": real,
        "share": round(real / max(1, len(rows)), 4),
        "by_package": {name: dict(counts) for name, counts in by_package.items()},
        "survivors": survivors,
    }


def _kept(path: Path | None, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a file has; what is made is written there."""
    if path is not None and path.exists():
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows = make()
    if path is not None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--each", type=int, default=51, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="mutants whose name has this, all of them")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=Path, help="file to which each outcome is written at once, and read from again")
    parser.add_argument("--trace", type=Path, help="file for the lines that tests run, which is read if it is there")
    parser.add_argument("--part", default="1/1", help="of the mutants that are drawn: 1/2 are those of the first half")
    parser.add_argument("--workers", type=int, default=1, help="processes that trace the tests")
    given = parser.parse_args()
    equivalent = json.loads(EQUIVALENT.read_text())
    begun: dict[str, dict[str, Any]] = {}
    if given.rows and given.rows.exists():
        begun = {row["mutant"]: row for row in map(json.loads, given.rows.read_text().splitlines())}
    part, parts = map(int, given.part.split("/"))
    picked = drawn(given.each, given.seed, given.only)
    picked = picked[part - 1 :: parts]
    preload()
    rows = []
    with House(ROOT) as house:
        tests: list[Ran] = []
        if any(each.name not in begun for each in picked):
            tests = ran(_kept(given.trace, lambda: traced(house, given.workers)))
        for mutant in picked:
            row = begun.get(mutant.name) or tried(house, mutant, tests)
            if mutant.name not in begun:
                print(time.strftime("%H:%M:%S"), row["outcome"], row["mutant"], row["by"], flush=True)
                if given.rows:
                    with given.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            rows.append(row)
    from hotspan.bench.machine import results

    command = f"python -m tests.mutants --each {given.each} --seed {given.seed}"
    about = {"seed": given.seed, "tests": [f"tests/{each}" for each in TESTS], **summed(rows, equivalent)}
    result = results("mutants", command=command, **about)
    print(json.dumps({name: value for name, value in result.items() if name != "survivors"}))
    for row in result["survivors"]:
        print("  equivalent" if "equivalent" in row else "  REAL", row["mutant"], f"(line {row['line']}, {row['by']})")
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["real_survivors"] > MOST_REAL * len(rows))


if __name__ == "__main__":
    sys.exit(main())
