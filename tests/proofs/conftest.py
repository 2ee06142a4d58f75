"""The proofs make faults by the thousand: what they log is not kept."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warnings of the tiers while a proof runs."""
    logger = logging.getLogger("hotspan")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
