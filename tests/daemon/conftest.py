"""Daemons for tests."""

from collections.abc import Iterator

import pytest

from tests.daemon.rig import DaemonProcess


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon for all tests of a file that do it no harm."""
    daemon = DaemonProcess()
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture
def fresh_daemon() -> Iterator[DaemonProcess]:
    """A daemon for one test, which may kill it."""
    daemon = DaemonProcess()
    daemon.start()
    yield daemon
    daemon.close()
