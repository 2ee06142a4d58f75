"""Pages name what exists: links, anchors, commands, options, metrics, log events, and examples that parse."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

from docsite.reference import cli_page, commands
from hotspan.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALL_PAGES = [ROOT / "README.md", *PAGES]
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "hotspan").rglob("*.py")))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
MADE = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages that the site takes from the root (docsite/hooks.py)."""


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", found) for found in HEADING.findall(without_code(path.read_text())))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in plain}


def test_nav_has_every_page() -> None:
    """Each page under docs/ is in the navigation once, and each entry there is a page."""
    found: list[str] = []

    def walk(entry: object) -> None:
        if isinstance(entry, str):
            found.append(entry)
        elif isinstance(entry, dict):
            for each in entry.values():
                walk(each)
        elif isinstance(entry, list):
            for each in entry:
                walk(each)

    walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {str(path.relative_to(DOCS)) for path in PAGES}
    assert sorted(found) == sorted(pages | MADE.keys())
    assert all((ROOT / name).is_file() for name in MADE.values())


def test_links_lead_to_anchors() -> None:
    """Every link within the pages leads to a file, and its anchor to a heading there."""
    broken = []
    for page in ALL_PAGES:
        for target, anchor in LINK.findall(without_code(page.read_text())):
            if "://" in target:
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken


TOP = typer.main.get_command(app)
COMMANDS = dict(commands(TOP))
ENDS = {"|", "&&", ";", ">", "<", "&", "||"}


def written_commands() -> Iterator[tuple[str, list[str]]]:
    """Each command line of hotspan's in the pages' examples, with its page."""
    for page in ALL_PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language not in ("", "bash", "sh", "console"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                if (
                    line.isascii()
                    and "hotspan " in line
                    and re.match(r"(\$ |\S*=\S+ )*(\S*bin/)?hotspan [a-z-]", line.strip())
                ):
                    words = shlex.split(line.strip().removeprefix("$ ").split("  #")[0], comments=True)
                    start = next(index for index, word in enumerate(words) if word.rpartition("/")[2] == "hotspan")
                    rest = words[start + 1 :]
                    end = next((index for index, word in enumerate(rest) if word in ENDS), len(rest))
                    yield str(page.relative_to(ROOT)), rest[:end]


@cache
def engine_options() -> set[str]:
    """The options of `vllm serve`, as its sources spell them; vLLM is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    files = [package / "engine" / "arg_utils.py", *package.glob("entrypoints/*/cli_args.py")]
    text = "\n".join(path.read_text() for path in files)
    named = {"--" + name.replace("_", "-") for name in re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE)}
    return named | set(re.findall(r"--[a-z0-9-]+", text))


def test_commands_in_pages_exist() -> None:
    """Each `hotspan ...` line in an example names a command, and options that this command has."""
    of_engine = engine_options()
    wrong, seen = [], 0
    for page, words in written_commands():
        seen += 1
        name = next(
            (" ".join(words[:length]) for length in (2, 1) if f"hotspan {' '.join(words[:length])}" in COMMANDS), ""
        )
        if not name and not words[0].startswith("-"):
            wrong.append(f"{page}: hotspan {' '.join(words)}: no such command")
            continue
        command = COMMANDS.get(f"hotspan {name}", TOP)
        own = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
        known = own | of_engine if command.context_settings.get("ignore_unknown_options") else own
        words = words[: words.index("--")] if "--" in words else words
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        wrong += [f"{page}: hotspan {name} {flag}" for flag in given if flag not in known]
    assert not wrong
    assert seen > 60


def test_options_in_prose_exist() -> None:
    """Each `--option` in backticks is an option of a command of hotspan's, of vLLM, or of a named other tool."""
    own = {
        flag for command in COMMANDS.values() for each in command.params for flag in (*each.opts, *each.secondary_opts)
    }
    known = own | engine_options() | OTHERS
    wrong = {
        f"{page.relative_to(ROOT)}: {flag}"
        for page in DOCS.glob("guides/*.md")
        for code in re.findall(r"`([^`\n]+)`", without_code(page.read_text()))
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code)
        if flag not in known
    }
    assert not wrong


OTHERS = {"--shm-size", "--cpunodebind", "--membind", "--prefix-caching-hash-algo", "--otlp-traces-endpoint"}
"""Of Docker, numactl, and of vLLM where its sources do not spell them out."""


def unknown_metrics(text: str) -> set[str]:
    """The metrics of hotspan's in a text that the code does not have; counters need their _total."""
    made = set(re.findall(r"^\| `(hotspan_\w+)` ", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE))
    assert len(made) > 90
    named = re.findall(r"\bhotspan_(?:cache|cost|keys|l2|router|daemon|model)_\w+[a-z](?![\w*])(?!\{\w+,)", text)
    return {name for name in named if name not in made and re.sub(r"_(bucket|sum|count)$", "", name) not in made}


def test_metrics_in_pages_exist() -> None:
    """Each metric of hotspan's in a page is one that the code has."""
    assert not [(page.relative_to(ROOT), found) for page in ALL_PAGES if (found := unknown_metrics(page.read_text()))]


def test_log_events_exist() -> None:
    """Each event in the table of log events is one that the code logs."""
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    table = page.split("## Log events")[1].split("\n## ")[0]
    events = [
        name for cell in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert len(events) > 40
    # Names that are put together from parts, such as the router's replica_%s, are not in the table.
    assert not [event for event in events if not re.search(rf'"{event}\b', SOURCES)]


@pytest.mark.parametrize(
    "page", [path for path in PAGES if "```python" in path.read_text()], ids=lambda path: path.stem
)
def test_python_examples_are_python(page: Path) -> None:
    """Each example in Python parses, and what it imports of hotspan is there."""
    import hotspan

    for language, block in FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(block)
            assert all(hasattr(hotspan, name) for name in re.findall(r"\bhotspan\.(\w+)\(", block))


def test_yaml_examples_are_yaml() -> None:
    """Each example in YAML parses."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language == "yaml":
                list(yaml.safe_load_all(block))


def test_files_of_tenants_are_valid(tmp_path: Path) -> None:
    """Each example of a file of tenants in the guides is one that the server takes."""
    from hotspan.config.tenants import load_tenants

    blocks = [
        block
        for page in sorted(DOCS.glob("guides/*.md"))
        for _, block in FENCE.findall(page.read_text())
        if block.startswith("# tenants.yaml")
    ]
    assert len(blocks) >= 3
    for block in blocks:
        file = tmp_path / "tenants.yaml"
        file.write_text(block)
        file.chmod(0o600)
        assert load_tenants(file)


def test_reference_of_commands_is_that_of_the_code() -> None:
    """docs/reference/cli.md is what `make reference` writes."""
    assert (DOCS / "reference" / "cli.md").read_text() == cli_page()


def test_lists_follow_a_blank_line() -> None:
    """A list directly below a paragraph is none on the site."""
    wrong = [
        f"{page.relative_to(ROOT)}: {found[0]!r}"
        for page in PAGES
        for found in re.finditer(r"^(?![-*|#>\s\d]).+\n- .*$", without_code(page.read_text()), re.MULTILINE)
    ]
    assert not wrong


def test_every_command_has_help() -> None:
    """Every command, argument and option says what it is for."""
    silent = [
        f"{name} {each.name}"
        for name, command in COMMANDS.items()
        for each in command.params
        if each.param_type_name == "option" and not each.hidden and not each.help and each.name != "help"
    ]
    assert not silent
