"""`hotspan serve STORE --port PORT WORDS...` over fakes: the whole process but for the models."""

import sys

import typer

from hotspan.cli.output import explained
from hotspan.cli.serve import serve_options
from hotspan.config.configuration import Places, load_configuration
from hotspan.config.environment import environment
from hotspan.config.own import CommandLine
from hotspan.server.models.run import run_store
from hotspan.server.models.store import model_store

from .rig import CHILD


def main() -> None:
    line = CommandLine(sys.argv[1], {"port": sys.argv[2], "no_cache": True}, sys.argv[3:])
    store = model_store(line, environment(), Places().model)
    assert store is not None
    common = load_configuration(line, environment())
    try:
        with explained():
            run_store(store, line, common, serve_options(common), CHILD)
    except typer.Exit as end:
        sys.exit(end.exit_code)


if __name__ == "__main__":
    main()
