"""`hotspan daemon`: one cache in shared memory for all replicas of a node."""

from hotspan.cli.options import runs
from hotspan.daemon.options import DaemonOptions


@runs(DaemonOptions)
def daemon(options: DaemonOptions) -> None:
    """Serve one L2 cache to all replicas of this node, and to clients of HyperPod's managed tiered storage.

    Objects and the log of invalidations are in memory and are lost together when the daemon ends. With --disk, both
    survive a restart.
    """
    from hotspan.daemon.server import run_daemon

    run_daemon(options)
