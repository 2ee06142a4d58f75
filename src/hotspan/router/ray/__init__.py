"""Replicas on a Ray cluster, chosen by the same policy: the only code that knows Ray. Its modules import it."""
