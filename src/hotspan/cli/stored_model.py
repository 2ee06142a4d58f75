"""The server of one model of a store: `python -m hotspan.cli.stored_model NAME`, which `hotspan serve STORE` starts."""

import sys
from pathlib import Path

from hotspan.cli.flags import OWN_OPTIONS, check_engine, show_warnings
from hotspan.cli.serve import serve_options
from hotspan.config.environment import environment
from hotspan.core.aftermath import stopping_in_order
from hotspan.core.errors import HotspanError
from hotspan.server.models.assignment import assigned
from hotspan.server.run import run_server


def main() -> None:
    """Serve as told on standard input; exit status 2, and a reason where it was asked for, if that can't work."""
    assignment = assigned()
    try:
        configuration = assignment.configuration(environment())
        if configuration.engine:
            configuration = check_engine(configuration)
        show_warnings(configuration, is_store=True)
        run_server(assignment.applied(serve_options(configuration)), OWN_OPTIONS, assignment.link)
    except HotspanError as error:
        Path(assignment.reason).write_text(str(error))
        sys.exit(2)


if __name__ == "__main__":
    with stopping_in_order():
        main()
