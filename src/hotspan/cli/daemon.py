"""`hotspan daemon`: one cache in shared memory for all replicas of a node."""

from typing import Any

import typer

from hotspan.cli.errors import explained
from hotspan.cli.options import built, takes
from hotspan.config.options import options_of
from hotspan.daemon.options import DaemonOptions


@takes(options_of(DaemonOptions))
def daemon(context: typer.Context, **_flags: Any) -> None:
    """Serve one L2 cache to all replicas of this node, and to clients of HyperPod's managed tiered storage.

    Objects and the log of invalidations are in memory and are lost together when the daemon ends. With --disk, both
    survive a restart.
    """
    with explained():
        from hotspan.daemon.server import run_daemon

        run_daemon(built(DaemonOptions, context))
