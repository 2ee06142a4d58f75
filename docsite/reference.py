"""The reference pages and Grafana's dashboard, from the code: `make reference`."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from prometheus_client.core import Metric

from docsite import alerts
from docsite.grafana import BOARD, board
from docsite.metrics import daemon, router, store
from docsite.routes import http_page

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"

_NAMED_BY_USERS = {"replica", "group", "model", "strategy"}
"""Labels whose values follow from what a user configures."""


def commands(command: Any, name: str = "hotspan") -> Iterator[tuple[str, Any]]:
    """Every command that can be run, with its words, from typer's tree."""
    if hasattr(command, "commands"):
        if command.invoke_without_command and name != "hotspan":
            yield name, command
        for word, each in command.commands.items():
            yield from commands(each, f"{name} {word}")
    else:
        yield name, command


def cli_page() -> str:
    """docs/reference/cli.md."""
    from hotspan.cli.main import app

    lines = [
        "# Commands",
        "",
        "Written from the code by `make reference`. Every command has `--help`; `hotspan --install-completion` sets up",
        "completion of the shell.",
    ]
    for name, command in commands(typer.main.get_command(app)):
        lines += ["", f"## {name}", "", _prose(command.help or ""), ""]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        lines += ["```", " ".join([name, *map(_argument, arguments), "[OPTIONS]"]), "```", ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [f"| `{_argument(each)}` | | {_cell(each.help or '')} |" for each in arguments]
        lines += map(_option, options)
        if lines[-1] == "|---|---|---|":
            lines[-2:] = ["It has no options."]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """docs/reference/metrics.md. Imports vLLM."""
    from hotspan.engine import gpus
    from hotspan.engine.metrics import DEFINITIONS
    from hotspan.engine.series import series_of

    rows = [
        _metric(
            name,
            type(each).__name__.removeprefix("Offloading").removesuffix("Metadata").lower(),
            _with_values(
                each.labelnames, [dict(zip(each.labelnames, values, strict=True)) for values in series_of(name)]
            ),
            each.documentation,
        )
        for name, each in DEFINITIONS.items()
    ]
    rows.append(_metric(gpus.NAME, "gauge", {"gpu": ()}, gpus.MEANING))
    lines = [
        "# Metrics",
        "",
        "Written from the code by `make reference`. A histogram has `_bucket`, `_sum` and `_count`. Labels have their",
        "values behind them, unless these are names that users give.",
        *_section("hotspan serve", rows),
        *_section("A directory of models", _families(store())),
        *_section("hotspan route", _families(router())),
        *_section("hotspan daemon", _families(daemon())),
    ]
    return "\n".join(lines) + "\n"


def reasons_page() -> str:
    """docs/reference/reasons.md."""
    from hotspan.cache.reasons import REASONS

    rows = [f"| `{name}` | {_cell(each.says)} | {_cell(each.todo)} |" for name, each in REASONS.items()]
    lines = [
        "# Reasons",
        "",
        "Why prompt tokens were computed and not cached, as `hotspan cache explain`, `explain` in `kv_transfer_params`",
        "and the metric `hotspan_cache_computed_tokens_total` have it. Written from the code by `make reference`. Of",
        "several reasons that hold, the first one is given; a prompt can have one for what was there before, one for",
        "what is new, and `tail`.",
        "",
        "| reason | the tokens were computed because | what helps |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def _prose(help: str) -> str:
    return " ".join(help.replace("\b", "").split())


def _argument(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    shown = option.show_default
    default = shown if isinstance(shown, str) else option.default if shown and option.default is not None else ""
    if isinstance(default, bool) or callable(default):
        default = ""
    return f"| {names} | {_cell(str(default))} | {_cell(option.help or '')} |"


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("<", "&lt;")


def _section(title: str, rows: Iterable[str]) -> list[str]:
    return ["", f"## {title}", "", "| metric | labels | type | meaning |", "|---|---|---|---|", *rows]


def _metric(name: str, kind: str, labels: Mapping[str, Iterable[str]], meaning: str) -> str:
    """A row. labels: with their values, if these are known."""
    shown = name + "_total" if kind == "counter" else name
    named = (f"`{label}`" + (f": {', '.join(values)}" if values else "") for label, values in labels.items())
    return f"| `{shown}` | {'; '.join(named)} | {kind} | {_cell(meaning)} |"


def _with_values(names: Iterable[str], series: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """The labels of a metric, each with the values that it has in any of these series."""
    known = list(series)
    values = {name: dict.fromkeys(each[name] for each in known if each.get(name)) for name in names}
    return {name: [] if name in _NAMED_BY_USERS else list(found) for name, found in values.items()}


def _families(families: Iterable[Metric]) -> list[str]:
    return [
        _metric(
            each.name,
            each.type,
            _with_values(getattr(each, "_labelnames", ()), (sample.labels for sample in each.samples)),
            each.documentation,
        )
        for each in sorted(families, key=lambda family: family.name)
    ]


def main() -> None:
    """Write the pages."""
    REFERENCE.mkdir(exist_ok=True)
    (REFERENCE / "cli.md").write_text(cli_page())
    (REFERENCE / "metrics.md").write_text(metrics_page())
    (REFERENCE / "http.md").write_text(http_page())
    (REFERENCE / "reasons.md").write_text(reasons_page())
    BOARD.write_text(board() + "\n")
    alerts.FILE.write_text(alerts.file())
    alerts.PAGE.write_text(alerts.page())


if __name__ == "__main__":
    main()
