"""Traces replayed over simulated replicas, with the policy that the router uses."""
