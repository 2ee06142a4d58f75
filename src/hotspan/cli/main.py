"""The `hotspan` command. Commands import what they need when they run: `hotspan --help` loads no engine."""

import typer

from hotspan.cli.demo_model import demo_model

app = typer.Typer(
    name="hotspan",
    help="Serve large language models on vLLM and compute a long text once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo-model")(demo_model)


@app.callback()
def hotspan() -> None:
    """Serve large language models on vLLM and compute a long text once."""


def main() -> None:
    """Run the command line; exit status 2 means that what was asked for can't work."""
    app()
