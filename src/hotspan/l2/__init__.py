"""The L2: a cache that replicas share, over Redis, a directory, S3 or a node's daemon."""
