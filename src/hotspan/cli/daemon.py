"""`hotspan daemon`: one cache in shared memory for all replicas of a node."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def daemon(
    size_gib: Annotated[float, typer.Option(help="Size of the cache, in GiB of /dev/shm.")],
    host: Annotated[str, typer.Option(help="Address to listen on. The protocol has no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 9200,
    shared_memory_name: Annotated[
        str, typer.Option(help="Name of the shared memory; clients need the same one.")
    ] = "ai_toolkit_cache",
    mode: Annotated[str, typer.Option(help="Permissions of the shared memory and the local socket, in octal.")] = "600",
    max_lease_s: Annotated[
        float, typer.Option(help="Maximum duration of a lease, in seconds; longer ones are refused.")
    ] = 600.0,
    disk: Annotated[
        Path | None, typer.Option(help="Directory for copies of the objects, which survive a restart.")
    ] = None,
    disk_gib: Annotated[float, typer.Option(help="Size of --disk, in GiB.")] = 0.0,
    metrics_port: Annotated[
        int | None, typer.Option(help="Additional port that serves /metrics and /health only, for monitoring.")
    ] = None,
) -> None:
    """Serve one L2 cache to all replicas of this node, and to clients of HyperPod's managed tiered storage.

    Objects and the log of invalidations are in memory and are lost together when the daemon ends. With --disk, both
    survive a restart.
    """
    with explained():
        from hotspan.core.errors import ConfigError
        from hotspan.daemon.server import DaemonOptions, run_daemon

        try:
            permissions = int(mode, 8)
        except ValueError as error:
            raise ConfigError(f"--mode {mode!r} is not octal: give one like 600 or 660") from error
        run_daemon(
            DaemonOptions(
                host,
                port,
                shared_memory_name,
                size_gib,
                permissions,
                max_lease_s,
                disk=disk,
                disk_gib=disk_gib,
                metrics_port=metrics_port,
            )
        )
