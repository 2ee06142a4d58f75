"""What several tenants wait for has a part for each, or nobody can hold it: who adds a queue says here why."""

import ast
from pathlib import Path

import hotspan

SOURCE = Path(hotspan.__file__).parent
PACKAGES = ("server", "router", "http", "formatters")
KINDS = (
    *("Semaphore", "BoundedSemaphore", "Queue", "PriorityQueue", "LifoQueue", "Lock", "Condition"),
    *("Recent", "Parted", "LruCache"),  # whose entries push out each other
    *("Budget", "RetryBudget", "Turns", "InTurn", "FairQueue", "FairOrder", "ThreadPoolExecutor"),
)

PARTS = {
    "server/admission.py:Budget": "divided between principals (server/lmi/test_life.py)",
    "server/admission.py:Turns": "one principal after the other, divided between them (server/test_turns.py)",
    "server/admin.py:Turns": "one tenant after the other, invalidations first (server/test_turns.py)",
    "server/turns.py:Budget": "divided between owners",
    "server/turns.py:InTurn": "one owner after the other",
    "server/run.py:FairOrder": "the engine's queue, by tokens of each tenant (server/test_guard.py)",
    "server/warming.py:Budget": "divided between tenants (server/test_warming.py)",
    "server/warming.py:Turns": "one tenant after the other (server/test_warming.py)",
    "server/warming.py:Lock": "one for each tenant",
    "server/exchange.py:Lock": "a request's own",
    "server/adapters/registry.py:Turns": "one owner's change after another's (server/adapters/test_owners.py)",
    "server/control_app.py:Lock": "the start of an engine core",
    "server/models/run.py:Semaphore": "models that load; no request takes it",
    "server/source.py:ThreadPoolExecutor": "parts of a model that is fetched at the start",
    "server/python_control.py:ThreadPoolExecutor": "one call of the program that has the engine",
    "router/dispatcher.py:FairQueue": "turns of tenants, by tokens (router/test_queue.py)",
    "router/session.py:Parted": "the entry of the owner who has most goes (router/test_session.py)",
    "router/unready.py:Parted": "the entry of the owner who has most goes (router/test_limits_are_not_faults.py)",
    "router/fleet.py:Recent": "sessions that moved: one that is forgotten goes where its name leads, and moves again",
    "router/proxy.py:RetryBudget": "half of it divided between tenants (router/test_retries.py)",
    "router/shadow.py:Queue": "copies: whose place is taken goes without (router/test_shadow.py)",
    "router/caches.py:Lock": "the administrator's",
    "router/caches.py:Semaphore": "the administrator's",
    "formatters/calls.py:Turns": "one tenant after the other, each so many at most (formatters/test_calls.py)",
    "formatters/calls.py:Lock": "held for a few steps, by none who waits",
    "formatters/formatters.py:Lock": "the operator's, and adapters that are registered",
    "formatters/script.py:Lock": "files that are loaded",
    "http/bodies.py:Budget": "divided between principals (server/lmi/test_body_budgets.py)",
}
"""By module and kind: how it is divided between those who wait, and where that is tested."""


def test_each_queue_has_a_part_for_each_tenant() -> None:
    """Every lock, queue, pot and pool of what serves HTTP is listed above."""
    found = set()
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in KINDS:
                    found.add(f"{path.relative_to(SOURCE).as_posix()}:{name}")
    assert found == set(PARTS)
