"""What tests, proofs and benchmarks share; not in any wheel.

It imports hotspan, and nothing imports it in `src/`. Proofs, benchmarks and tests import the kit, never each other;
`tests/test_tree.py` counts the exceptions in pyproject.toml, which only become fewer.
"""
