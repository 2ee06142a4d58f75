"""Which tests run in one worker of xdist: those of a module, or of a package that has one server; the longest first.

It is `--dist loadscope` with these groups. (`--dist loadgroup` does nothing with pytest 9.2: xdist 3.8 can't rename.)
"""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

PACKAGES = {
    "tests/adversary": ("test_media.py",),
    "tests/server/contract": ("test_auto.py", "test_embeddings.py", "test_strict.py"),
}
"""Packages whose modules share a server, and the modules that have their own."""

LONGEST_FIRST = (
    "tests/router/ray/test_cluster.py",
    "tests/server/test_replicas.py",
    "tests/server/contract",
    "tests/server/test_two_nodes.py",
    "tests/adversary",
    "tests/server/test_serve.py",
    "tests/server/test_admin.py",
    "tests/server/models/test_engine.py",
    "tests/adversary/test_media.py",
    "tests/server/contract/test_strict.py",
    "tests/server/contract/test_auto.py",
    "tests/server/contract/test_embeddings.py",
    "tests/engine/test_tensor_parallel.py",
)
"""What begins last is what the other workers wait for at the end."""


def group(nodeid: str) -> str:
    """The path of a test's group."""
    path = nodeid.partition("::")[0]
    directory, _, module = path.rpartition("/")
    return directory if directory in PACKAGES and module not in PACKAGES[directory] else path


class Scheduling(LoadScopeScheduling):
    """Of tests by their group."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first; with --no-loadscope-reorder workers take them in this order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(group(item.nodeid), len(places)))
