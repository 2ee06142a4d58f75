"""The node's daemon: one cache in shared memory for all replicas, over HTTP and over a local door (docs/daemon.md)."""
