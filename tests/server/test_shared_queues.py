"""What several tenants wait for has a part for each, or nobody can hold it: who adds a queue says here why."""

import ast
from pathlib import Path

import hotspan

SOURCE = Path(hotspan.__file__).parent
PACKAGES = ("server", "router", "http", "formatters", "engine", "cache")
KINDS = (
    *("Semaphore", "BoundedSemaphore", "Queue", "PriorityQueue", "LifoQueue", "SimpleQueue", "Lock", "RLock"),
    *("Condition", "deque"),
    *("Recent", "Parted", "LruCache"),  # whose entries push out each other
    *("Budget", "RetryBudget", "Turns", "AsyncTurns", "InTurn", "FairQueue", "FairOrder", "ThreadPoolExecutor"),
)

PARTS = {
    "server/admission.py:Budget": "divided between principals (server/lmi/test_life.py)",
    "server/admission.py:Turns": "one principal after the other, divided between them (server/test_turns.py)",
    "server/admin.py:Turns": "one tenant after the other, invalidations first (server/test_turns.py)",
    "server/turns.py:Budget": "divided between owners",
    "server/turns.py:AsyncTurns": "one owner after the other",
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
    "formatters/calls.py:AsyncTurns": "one tenant after the other, each so many at most (formatters/test_calls.py)",
    "formatters/calls.py:SimpleQueue": "jobs for threads that are free: who has a job has a turn",
    "formatters/calls.py:Lock": "held for a few steps, by none who waits",
    "formatters/formatters.py:Lock": "the operator's, and adapters that are registered",
    "formatters/script.py:Lock": "files that are loaded",
    "http/bodies.py:Budget": "divided between principals (server/lmi/test_body_budgets.py)",
    "server/warming.py:deque": "the texts of one job",
    "router/matching.py:deque": "the last checks of a replica; the oldest goes",
    "router/queue.py:deque": "one tenant's (router/test_queue.py)",
    "engine/announcing.py:InTurn": "one tenant after the other, slice by slice, 16 of each (engine/test_announcing.py)",
    "engine/texts.py:InTurn": "one tenant after the other, invalidations first (engine/test_texts.py)",
    "engine/texts.py:Condition": "the thread that begins texts sleeps by it",
    "engine/admin.py:deque": "ends of invalidations, no announcement (engine/test_admin.py); commands of the "
    "administrator's port",
    "engine/admin.py:ThreadPoolExecutor": "checks, keys and positions: the administrator's",
    "engine/adapters.py:Lock": "places of the engine for adapters, whose owners have turns (server/adapters)",
    "engine/blend/agreement.py:deque": "the last comparisons; the oldest goes",
    "engine/copies.py:deque": "what the engine has promised to wait for, in the order of its steps",
    "engine/events.py:deque": "one name for each chunk that is stored, or that left since the last step",
    "engine/fingerprint.py:ThreadPoolExecutor": "parts of one file",
    "engine/manager.py:deque": "one request's",
    "engine/net.py:deque": "ends that failed: each step tries them again",
    "engine/receipts.py:Condition": "the thread that writes receipts sleeps by it",
    "engine/spans.py:deque": "one for each span of the engine's own cache; each step looks at so many",
    "engine/traces.py:deque": "one text's media",
    "engine/worker.py:Condition": "the thread that copies sleeps by it",
    "cache/engine_queue.py:deque": "the last steps; the oldest goes",
    "cache/history.py:deque": "one tenant's requests",
    "cache/lower.py:deque": "one call's",
    "cache/prefetch.py:deque": "one announcement's",
    "cache/rates.py:deque": "depths of a tier's queue, as long as that",
    "cache/rhythm.py:deque": "the last gaps of a session or a tenant; the oldest goes",
}
"""By module and kind: how it is divided between those who wait, and where that is tested."""


def test_each_queue_has_a_part_for_each_tenant() -> None:
    """Every lock, queue, pot and pool of what serves HTTP, and of what requests wait for in the engine, is above."""
    found = set()
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                fields = [each.value for each in node.keywords if each.arg == "default_factory"]
                for made in (node.func, *fields):
                    called = made.value if isinstance(made, ast.Subscript) else made
                    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                    if name in KINDS:
                        found.add(f"{path.relative_to(SOURCE).as_posix()}:{name}")
    assert found == set(PARTS)
