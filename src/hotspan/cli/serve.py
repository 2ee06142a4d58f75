"""`hotspan serve [MODEL]`: hotspan's options, and after them whatever vLLM takes."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspan.cli.flags import OWN_OPTIONS, Model, check_engine, given_on, load_checked, show_warnings
from hotspan.cli.options import takes
from hotspan.cli.output import explained
from hotspan.config.configuration import Configuration, Places, load_configuration
from hotspan.config.environment import environment
from hotspan.config.keys import FLAGS
from hotspan.config.own import CommandLine
from hotspan.core.aftermath import stopping_in_order
from hotspan.core.errors import ConfigError, HotspanError

if TYPE_CHECKING:
    from hotspan.server.models.store import ModelStore
    from hotspan.server.options import ServeOptions


def _show_engine_options(about: str | None) -> None:
    if about is not None:
        with explained():
            from hotspan.engine.arguments import show_options

            show_options(about)


_ENGINE_HELP = "--help-engine"
"""vLLM has texts for its options only if `--help` is in a word of the command line."""

OPTIONS = (*OWN_OPTIONS, _ENGINE_HELP)
"""What `hotspan serve` takes, for hints at what was meant."""

EngineHelp = Annotated[
    str | None,
    typer.Option(
        _ENGINE_HELP,
        metavar="all, GROUP or NAME",
        help="Show vLLM's options and exit: all, a group such as CacheConfig, or those with NAME in their names.",
        callback=_show_engine_options,
        is_eager=True,
        show_default=False,
    ),
]


@takes(FLAGS)
def serve(context: typer.Context, model: Model = None, help_engine: EngineHelp = None, **_flags: Any) -> None:
    """Serve MODEL with an OpenAI-compatible API and compute each long text once. A directory of models serves all.

    Options of vLLM: every option of `vllm serve` may follow MODEL, such as --dtype or --tensor-parallel-size. What is
    not listed below goes to vLLM as it is written, and vLLM's parser checks it. `hotspan serve --help-engine all` shows
    these options, `hotspan serve --help-engine max-model-len` those with that name.

    Other values come from serving.properties, environment variables and files: `hotspan config explain` shows the
    origins.
    """
    with explained():
        from hotspan.server.models.store import model_store

        command_line = given_on(context, model)
        store = model_store(command_line, environment(), Places().model)
        if store is not None:
            _serve_store(store, command_line)
            return
        configuration = load_checked(context, model)
        show_warnings(configuration)
        options = serve_options(configuration)
        if "headless" in options.engine_values:
            from hotspan.server.headless import run_headless

            run_headless(options, OPTIONS)
            return
        from hotspan.server.run import run_server

        run_server(options, OPTIONS)


def _serve_store(store: "ModelStore", command_line: CommandLine) -> None:
    from hotspan.server.models.run import run_store

    # No model's own files are among these: what they say holds for all.
    common = replace(command_line, model=str(store.directory))
    configuration = load_configuration(common, environment())
    show_warnings(configuration, is_store=True)
    if {"nnodes", "headless"} & serve_options(configuration).engine_values.keys():
        raise ConfigError("--nnodes and --headless are for one model: give MODEL, not a directory of models")
    words = (sys.executable, "-m", "hotspan.cli.serve")
    run_store(store, command_line, configuration, serve_options(configuration), words)


def serve_options(configuration: Configuration) -> "ServeOptions":
    """What the server is started with."""
    from hotspan.server.options import ServeOptions

    return ServeOptions(
        configuration.model,
        configuration.cache,
        configuration.engine_words,
        server=configuration.server,
        tenants=configuration.tenants,
        is_isolated=configuration.is_isolated,
        extent=configuration.extent,
    )


def _serve_one_of_store() -> None:
    """Serve one model of a directory of models, as told on standard input.

    Exit status 2, and a reason where it was asked for, if that can't work.
    """
    from hotspan.server.models.assignment import assigned
    from hotspan.server.run import run_server

    assignment = assigned()
    try:
        configuration = assignment.configuration(environment())
        if configuration.engine:
            configuration = check_engine(configuration)
        show_warnings(configuration, is_store=True)
        run_server(assignment.applied(serve_options(configuration)), OPTIONS, assignment.link)
    except HotspanError as error:
        Path(assignment.reason).write_text(str(error))
        sys.exit(2)


if __name__ == "__main__":  # `hotspan serve STORE` starts this once for each model
    with stopping_in_order():
        _serve_one_of_store()
