"""What every test begins with."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _warnings_are_heard() -> None:
    """An application that an earlier test built may have raised the root logger's level."""
    logging.getLogger().setLevel(logging.WARNING)
