"""The collector of garbage in a run of tests: it looks at what tests make, and not at what is there before them.

The modules of all tests, what they import and the tests themselves are millions of objects that stay. Each look at all
of them takes a second of CPU time, in each worker, and finds nothing.
"""

import atexit
import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Look at nothing while tests are collected."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there now stays."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # the interpreter takes down what is not frozen alone
