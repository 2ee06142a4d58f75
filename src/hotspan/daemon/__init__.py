"""The node's daemon: one cache in shared memory for all replicas, over HTTP and a Unix socket (docs/daemon.md)."""
