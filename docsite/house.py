"""The measures of the house: forms of each idea, arrows between its parts, and rooms: `make house`.

    forms    top-level definitions that do the same, by what stands in them: each idea once is 1
    arrows   imports between proofs, benchmarks, tests and docsite, which share the kit alone
    rooms    lines of each package beside docs/design/house.md; files over 400 lines, functions over 60

usage: python -m docsite.house [--places] [--write] [ROOT]      --write: put today's lines on the page
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/design/house.md"

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
GROWTH = 1.05
"""A package may have so many times the lines that the page says."""

PARTS = ("kit", "proofs", "benchmarks", "tests", "docsite")
"""Beside the packages of src/hotspan."""

_APART = ("proofs", "benchmarks", "tests", "docsite")
_THEIR_TESTS = (("tests/proofs", "proofs"), ("tests/benchmarks", "benchmarks"), ("tests/docs", "docsite"))
"""Folders of tests, and what they may import, since they test it."""

_ROW = re.compile(r"^\| `(?:(?:src/hotspan|\.)/)?(\w+)`(.*)\| ([\d,]+) \|$", re.MULTILINE)


class Idea(NamedTuple):
    """One idea. name: a pattern of the definitions' names. holds: patterns that all stand in a definition.

    within: the folders that are read; none: all. lacks: a pattern of what uses another's form, and is none itself.
    """

    title: str
    name: str = ""
    holds: Sequence[str] = ()
    within: Sequence[str] = ()
    lacks: str = "(?!)"


IDEAS = (
    Idea(
        "a child process, started and stopped",
        holds=(r"\b(Popen|create_subprocess_exec|get_context|mp\.Process)\(", r"\b(kill|terminate|wait|killpg)\b"),
    ),
    Idea("waiting for a condition", r"(until|eventually|wait_for|wait_until|at_last)(_async)?"),
    Idea(
        "a fake OpenAI server, replica or engine",
        holds=(
            r"http\.response|BaseHTTPRequestHandler|start_server\(|FastAPI\(|HTTP/1\.1 200|send_response|Response\(",
            r"/v1/|choices|/invocations|/ping|completion",
        ),
        within=("tests", "benchmarks", "kit"),
    ),
    Idea(
        "a replica in simulated time",
        holds=(r"\bTieredCache\(",),
        within=("tests", "benchmarks", "proofs", "kit"),
    ),
    Idea("a maker of small models", holds=(r"\b(save_pretrained|write_safetensors|save_file)\(",)),
    Idea("KV bytes per token", r"_?(kv_)?(bytes_per_token|token_bytes)"),
    Idea("the bytes of a token on a metrics page", holds=(r"re\.(compile|search|findall)\([^)]*token_bytes",)),
    Idea(
        "a quantile",
        holds=(r"\b(np\.(percentile|quantile)|statistics\.quantiles)\(|ordered\[min\(",),
        within=("src", "benchmarks", "proofs", "kit"),
    ),
    Idea(
        "a ratio of two ways with its spread",
        holds=(r"\bratios?\b", r"\b(median|quantiles?|percentile)\(", r"\bfor\b"),
        within=("src", "benchmarks", "kit"),
        lacks=r"\bpaired_ratio\(\[?\w",
    ),
    Idea(
        "a streaming client that takes times",
        holds=(r"data: |\bDONE\b", r"\b(perf_counter|monotonic)\(|_clock\b"),
        within=("src/hotspan/bench", "src/hotspan/demo", "src/hotspan/ab", "benchmarks"),
    ),
    Idea(
        "the rate of a disk",
        holds=(r"\b(pwrite|pread|preadv|pwritev)\(", r"\b(perf_counter|monotonic)\(", r"gb_s|/ 1e9|mb_s"),
    ),
    Idea("a table of figures", holds=(r"\.add_column\(",), within=("src", "benchmarks", "proofs", "kit")),
    Idea("colours of tiers", r"[A-Z_]+", holds=(r"#[0-9a-f]{6}|\b(grey|cyan|green)", r"\bram\b|\bRAM\b")),
    Idea("arguments without this machine's paths; sizes as a flag", r"_?(portable|gib)"),
    Idea("a free port", r"_?free_port"),
    Idea("progress from time to time", r"_?(Lines|Spoken)"),
)


class Definition(NamedTuple):
    """A function, class or constant of a module."""

    path: str
    name: str
    line: int
    text: str


def sources(root: Path, within: Sequence[str] = ()) -> Iterator[Path]:
    """The Python files of these folders."""
    for folder in within or ("src", *PARTS):
        yield from sorted((root / folder).rglob("*.py"))


def definitions(root: Path, within: Sequence[str] = ()) -> Iterator[Definition]:
    """All that modules define at their top."""
    for path in sources(root, within):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    pass
                case _:
                    continue
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            yield Definition(str(path.relative_to(root)), name, node.lineno, body)


def forms(root: Path) -> dict[str, list[Definition]]:
    """The forms of each idea. This file has none."""
    found: dict[str, list[Definition]] = {idea.title: [] for idea in IDEAS}
    for each in definitions(root):
        if each.path == "docsite/house.py" or re.match(r"test_", each.name):
            continue
        for idea in IDEAS:
            if idea.within and not each.path.startswith(tuple(f"{folder}/" for folder in idea.within)):
                continue
            is_named = not idea.name or re.fullmatch(idea.name, each.name)
            if (
                is_named
                and all(re.search(pattern, each.text) for pattern in idea.holds)
                and not re.search(idea.lacks, each.text)
            ):
                found[idea.title].append(each)
    return found


def arrows(root: Path) -> list[tuple[str, str]]:
    """Imports between the parts that share the kit alone: a file and the module that it imports."""
    found = set()
    for path in sources(root, _APART):
        name = str(path.relative_to(root))
        part = name.partition("/")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for module in modules:
                top = module.partition(".")[0]
                is_test_of = any(name.startswith(folder + "/") and top == tested for folder, tested in _THEIR_TESTS)
                if top in _APART and top != part and not is_test_of:
                    found.add((name, module))
    return sorted(found)


def rooms(root: Path) -> dict[str, int]:
    """Lines of Python by package of hotspan and by part."""
    packages = sorted(path.name for path in (root / "src/hotspan").iterdir() if (path / "__init__.py").is_file())
    folders = {name: root / "src/hotspan" / name for name in packages} | {name: root / name for name in PARTS}
    return {
        name: sum(path.read_text().count("\n") for path in folder.rglob("*.py")) for name, folder in folders.items()
    }


def budgets(page: str) -> dict[str, int]:
    """Lines of each package and part, as the page says."""
    return {name: int(lines.replace(",", "")) for name, _, lines in _ROW.findall(page)}


def outgrown(lines: Mapping[str, int], budget: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Packages with more than 5 % over what the page says, or not on the page: lines and budget."""
    return {name: (n, budget.get(name, 0)) for name, n in lines.items() if n > GROWTH * budget.get(name, 0)}


def long_files(root: Path) -> dict[str, int]:
    """Files of src with more than 400 lines."""
    found = {str(path.relative_to(root)): path.read_text().count("\n") for path in sources(root, ("src",))}
    return {name: lines for name, lines in found.items() if lines > MAX_FILE_LINES}


def long_functions(root: Path) -> dict[str, int]:
    """Functions of src with more than 60 lines."""
    return {
        f"{path.relative_to(root)}:{node.name}": lines
        for path in sources(root, ("src",))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }


def with_lines(page: str, lines: Mapping[str, int]) -> str:
    """The page with these lines in its tables."""
    return _ROW.sub(
        lambda row: f"{row[0].rpartition(' | ')[0]} | {lines[row[1]]:,} |" if row[1] in lines else row[0], page
    )


def main() -> None:
    """Print all three."""
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    root = Path(next((word for word in sys.argv[1:] if not word.startswith("--")), ROOT))
    lines = rooms(root)
    if "--write" in options:
        (root / PAGE).write_text(with_lines((root / PAGE).read_text(), lines))
    found = forms(root)
    print(f"forms: {sum(map(len, found.values()))} of {len(found)} ideas")
    for title, places in found.items():
        print(f"  {len(places):3}  {title}")
        for each in places if "--places" in options else ():
            print(f"         {each.path}:{each.line} {each.name}")
    crossing = arrows(root)
    print(f"arrows: {len(crossing)} imports between {', '.join(_APART)}")
    for source, target in crossing if "--places" in options else ():
        print(f"         {source} -> {target}")
    budget = budgets((root / PAGE).read_text())
    print(f"rooms: {sum(lines.values()):,} lines")
    for name, count in lines.items():
        print(f"  {count:7,}  {name:12} {budget.get(name, 0):7,} on the page")
    for what, long in (("files over 400 lines", long_files(root)), ("functions over 60 lines", long_functions(root))):
        print(f"{what}: {len(long)}")
        for name, count in sorted(long.items()):
            print(f"  {count:7,}  {name}")


if __name__ == "__main__":
    main()
