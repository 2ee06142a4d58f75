"""What every test begins with."""

import logging

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair, which others use, too.
settings.register_profile("hotspan", deadline=None)
settings.load_profile("hotspan")


@pytest.fixture(autouse=True)
def _warnings_are_heard() -> None:
    """An application that an earlier test built may have raised the root logger's level."""
    logging.getLogger().setLevel(logging.WARNING)
