"""What every test begins with."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kit.environment import prepare_environment
from kit.inspection import inspect_in_process
from kit.preloaded import SERVERS
from tests.bytecode import pytest_sessionstart  # noqa: F401
from tests.garbage import pytest_collection, pytest_collection_finish  # noqa: F401
from tests.groups import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_xdist_make_scheduler,
)
from tests.leftovers import (  # noqa: F401
    pytest_configure,
    pytest_runtest_protocol,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_unconfigure,
)
from tests.tls import share_tls_context

prepare_environment()  # before any module of tests imports torch
inspect_in_process()
share_tls_context()

# The same examples in every run; others with --hypothesis-profile=random. Neither an example nor its drawing has a time
# limit: on a busy machine both take as long as they take.
_UNTIMED = (HealthCheck.too_slow,)
settings.register_profile("gate", deadline=None, derandomize=True, suppress_health_check=_UNTIMED)
settings.register_profile("random", deadline=None, print_blob=True, suppress_health_check=_UNTIMED)
settings.load_profile("gate")


@pytest.fixture(autouse=True)
def _warnings_are_heard() -> None:
    """An application that an earlier test built may have raised the root logger's level."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def _servers_are_forked() -> Iterator[None]:
    """Servers begin where one process has finished its imports; tests/server/test_serve.py starts whole programs."""
    with SERVERS.forked():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nobody trained, small enough to be served within seconds."""
    from hotspan.demo.model import make_demo_model  # it imports torch

    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny", "tiny").path
