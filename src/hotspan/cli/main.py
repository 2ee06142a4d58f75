"""The `hotspan` command. Commands import what they need when they run: `hotspan --help` loads no engine."""

from typing import Annotated

import typer

from hotspan import __version__
from hotspan.cli import bench
from hotspan.cli.ab import ab
from hotspan.cli.adapters import adapters
from hotspan.cli.cache import cache
from hotspan.cli.config import config
from hotspan.cli.daemon import daemon
from hotspan.cli.demo import demo, demo_model
from hotspan.cli.deploy import deploy
from hotspan.cli.doctor import doctor
from hotspan.cli.flags import ENGINE_OPTIONS
from hotspan.cli.keys import keys
from hotspan.cli.plan import plan
from hotspan.cli.route import route
from hotspan.cli.serve import serve
from hotspan.cli.simulate import simulate
from hotspan.cli.trace import trace
from hotspan.core.aftermath import stopping_in_order

app = typer.Typer(
    name="hotspan",
    help="Serve large language models on vLLM and compute a long text once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("serve", context_settings=ENGINE_OPTIONS)(serve)
app.add_typer(route, name="route")
app.command("daemon")(daemon)
app.command("demo")(demo)
app.command("demo-model")(demo_model)
app.add_typer(deploy, name="deploy")
app.add_typer(bench.app, name="bench")
app.command("ab")(ab)
app.command("doctor", context_settings=ENGINE_OPTIONS)(doctor)
app.command("plan", context_settings=ENGINE_OPTIONS)(plan)
app.command("simulate")(simulate)
app.add_typer(trace, name="trace")
app.add_typer(keys, name="keys")
app.add_typer(cache, name="cache")
app.add_typer(config, name="config")
app.add_typer(adapters, name="adapters")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hotspan {__version__}")
        raise typer.Exit


@app.callback()
def hotspan(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve large language models on vLLM and compute a long text once."""


def main() -> None:
    """Run the command line; exit status 2 means that what was asked for can't work."""
    with stopping_in_order():
        app()
