"""Which tests run in one worker of xdist: those of a module, or of a package that has one server; the longest first.

It is `--dist loadscope` with these groups. (`--dist loadgroup` does nothing with pytest 9.2: xdist 3.8 can't rename.)

A run of the tests with an engine, or without, does not import the modules that have none of these: each worker imports
all modules, and what they import, before its first test.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

PACKAGES = {
    "tests/adversary": (),
    "tests/server/contract": ("test_auto.py", "test_embeddings.py", "test_strict.py"),
}
"""Packages whose modules share a server, and the modules that have their own."""

LONGEST_FIRST = (
    "tests/proofs/test_proofs.py",
    "tests/proofs/test_l2.py",
    "tests/l2/test_s3.py",
    "tests/daemon/test_warm.py",
    "tests/tiers/test_disk.py",
    "tests/l2/test_redis.py",
    "tests/tiers/test_eviction.py",
    "tests/simulate/test_simulation.py",
    "tests/server/test_refusals.py",
    "tests/test_tree.py",
    "tests/proofs/test_load.py",
    "tests/daemon/test_disk.py",
    "tests/metrics/test_every_metric_moves.py",
    "tests/demo/test_killed.py",
    # With engines, in a run of their own:
    "tests/router/ray/test_cluster.py",
    "tests/server/test_replicas.py",
    "tests/adversary",
    "tests/server/contract",
    "tests/server/test_two_nodes.py",
    "tests/server/test_serve.py",
    "tests/server/test_admin.py",
    "tests/server/models/test_engine.py",
    "tests/server/test_stalled.py",
    "tests/engine/test_identity.py",
    "tests/engine/families/test_families.py",
    "tests/engine/test_weights_engine.py",
    "tests/engine/test_speculative.py",
    "tests/server/contract/test_unexpected.py",
    "tests/server/contract/test_strict.py",
    "tests/server/contract/test_auto.py",
    "tests/server/contract/test_embeddings.py",
    "tests/engine/test_tensor_parallel.py",
    "tests/engine/test_simulator.py",
    "tests/engine/test_media.py",
    "tests/engine/test_layouts.py",
    "tests/engine/test_adapters.py",
)
"""What begins last is what the other workers wait for at the end."""


def group(nodeid: str) -> str:
    """The path of a test's group."""
    path = nodeid.partition("::")[0]
    directory, _, module = path.rpartition("/")
    return directory if directory in PACKAGES and module not in PACKAGES[directory] else path


HAS_ENGINE = re.compile(r"mark\.engine\b")
ALL_HAVE_ENGINE = re.compile(r"^pytestmark = (\[.*)?pytest\.mark\.engine\b", re.MULTILINE)
NEEDS_ENGINE = re.compile(r"(not )?\bengine\b")


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Whether a module has no test that the run's expression of marks selects; False if that is not sure."""
    asked = NEEDS_ENGINE.findall(config.option.markexpr)
    if len(asked) != 1 or " or " in config.option.markexpr or "not (" in config.option.markexpr:
        return False
    text = path.read_text()
    return bool(ALL_HAVE_ENGINE.search(text)) if asked[0] else not HAS_ENGINE.search(text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules in a run of all tests; one that was named is collected."""
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return True if is_module and is_whole and is_left_out(collection_path, config) else None


class Scheduling(LoadScopeScheduling):
    """Of tests by their group."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """A worker is gone: the test that it was at has failed, and others run the rest.

        xdist 3.8 runs that test again, which ends the next worker, until it gives up with all of them.
        """
        units = {scope: unit for scope, unit in self.assigned_work.pop(node).items() if not all(unit.values())}
        if not units:
            return None
        first = next(iter(units.values()))
        crashed: str = next(test for test, is_completed in first.items() if not is_completed)
        first[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Give a worker its next group when it has one test left. xdist does so at two, which may be minutes earlier.

        Without it the worker waits: what a test's fixtures tear down depends on the next test.
        """
        if self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def check_marks(items: list[pytest.Item]) -> None:
    """Raise UsageError for a module that would be left out of a run with engines although one of its tests has one."""
    marked = {item.path for item in items if item.get_closest_marker("engine")}
    for path in sorted(marked):
        if not HAS_ENGINE.search(path.read_text()):
            raise pytest.UsageError(f"{path} has tests with an engine: say so there, with pytest.mark.engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first; with --no-loadscope-reorder workers take them in this order."""
    check_marks(items)
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(group(item.nodeid), len(places)))
