"""`hotspan serve [MODEL]`: hotspan's options, and after them whatever vLLM takes."""

from typing import TYPE_CHECKING, Any

import typer

from hotspan.cli.errors import explained
from hotspan.cli.flags import OWN_OPTIONS, load_checked, show_warnings, takes_configuration

if TYPE_CHECKING:
    from hotspan.config.configuration import Configuration
    from hotspan.server.options import ServeOptions


@takes_configuration
def serve(context: typer.Context, model: str | None, **_flags: Any) -> None:
    """Serve MODEL with an OpenAI API; long texts are computed once.

    Every option of `vllm serve` may follow, such as --dtype, --max-model-len or --tensor-parallel-size. What is not
    given here comes from serving.properties, variables and files: `hotspan config explain` shows from where.
    """
    with explained():
        from hotspan.server.run import run_server

        configuration = load_checked(context, model)
        show_warnings(configuration)
        run_server(serve_options(configuration), OWN_OPTIONS)


def serve_options(configuration: "Configuration") -> "ServeOptions":
    """What the server is started with."""
    from hotspan.server.options import ServeOptions

    server = configuration.server
    return ServeOptions(
        configuration.model,
        server.host,
        server.port,
        configuration.cache,
        configuration.engine_words,
        server=server,
        tenants=configuration.tenants,
        is_isolated=configuration.is_isolated,
        admin_token_file=server.admin_token_file,
        is_insecure=server.is_insecure,
        is_auto=configuration.is_auto or not configuration.names_tiers,
    )
