"""Figures of the router's state that are read when somebody asks for them."""

from collections.abc import Callable, Mapping

from hotspan.core.breaker import BreakerState
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.fleet import Fleet
from hotspan.router.health import HealthState, ReplicaHealth
from hotspan.router.metrics import Figure, Sample
from hotspan.router.stateful import StatefulSessions
from hotspan.router.text import Prompts

_REPLICA = ("replica",)


def figures(
    fleet: Fleet,
    replica_health: Mapping[str, ReplicaHealth],
    dispatcher: Dispatcher,
    sessions: StatefulSessions,
    prompts: Prompts,
) -> list[Figure]:
    """All of them."""
    index, queue = fleet.index, dispatcher.queue
    return [
        *_of_replicas(fleet, replica_health, dispatcher),
        _one("queue_requests", "Requests that wait.", lambda: len(queue)),
        _one("queue_tenants", "Tenants that have some waiting.", lambda: queue.tenants),
        _count("queue_refused", "Requests turned away because the queue was full.", lambda: queue.refused),
        _count("queue_overdue", "Requests that waited for too long.", lambda: dispatcher.overdue),
        _count("queue_wait_seconds", "Spent in the queue, by all requests together.", lambda: dispatcher.waited_s),
        _one("index_bytes", "Memory of what replicas are known or assumed to hold.", lambda: index.bytes),
        _one("index_pieces", "Pieces of prompts that are known.", lambda: len(index)),
        _count("index_evicted_pieces", "Pieces forgotten for want of memory.", lambda: index.evicted),
        _one("moved_sessions", "Sessions that live elsewhere than computed.", lambda: fleet.overrides),
        _one("stateful_sessions", "Sessions bound to the replica that made them.", lambda: len(sessions)),
        _count("lost_sessions", "Such sessions whose replica was gone.", lambda: sessions.lost),
        _one("bytes_per_token", "Of prompts, as learnt from answers.", lambda: prompts.bytes_per_token),
        _count("templates_failed", "Chats that the template refused.", lambda: prompts.failed),
    ]


def _of_replicas(fleet: Fleet, replica_health: Mapping[str, ReplicaHealth], dispatcher: Dispatcher) -> list[Figure]:
    def each(value: Callable[[str], float]) -> Callable[[], list[Sample]]:
        return lambda: [Sample((name,), value(name)) for name in replica_health]

    def states(kind: type[HealthState] | type[BreakerState], now: Callable[[str], object]) -> list[Sample]:
        return [Sample((name, state.value), float(now(name) is state)) for name in replica_health for state in kind]

    by_state = ("replica", "state")
    return [
        Figure(
            "replica_can_take",
            "1 if requests may go to a replica.",
            _REPLICA,
            each(lambda name: float(replica_health[name].can_take)),
        ),
        Figure(
            "replica_health",
            "What a replica says of itself; 1 at the state.",
            by_state,
            lambda: states(HealthState, lambda name: replica_health[name].health),
        ),
        Figure(
            "breaker_state",
            "Whether failures keep requests away; 1 at the state.",
            by_state,
            lambda: states(BreakerState, lambda name: replica_health[name].breaker.state),
        ),
        Figure(
            "breaker_opened",
            "How often a breaker opened.",
            _REPLICA,
            each(lambda name: replica_health[name].breaker.opened),
            is_counter=True,
        ),
        Figure(
            "health_checks_failed",
            "Questions that a replica did not answer well.",
            _REPLICA,
            each(lambda name: replica_health[name].failed_checks),
            is_counter=True,
        ),
        Figure("in_flight_requests", "At a replica now.", _REPLICA, each(lambda name: dispatcher.in_flight[name])),
        Figure(
            "replica_tokens_per_second",
            "Prompt tokens that a replica is taken to compute.",
            _REPLICA,
            each(lambda name: fleet.replicas[name].tokens_per_s),
        ),
        Figure(
            "replica_waiting_tokens",
            "Sent to a replica, and not answered yet.",
            _REPLICA,
            each(lambda name: fleet.replicas[name].waiting_tokens),
        ),
        Figure(
            "replica_is_exact",
            "1 if events tell what a replica holds, 0 if it is assumed.",
            _REPLICA,
            each(lambda name: float(fleet.is_exact(name))),
        ),
    ]


def _one(name: str, meaning: str, read: Callable[[], float]) -> Figure:
    return Figure(name, meaning, (), lambda: [Sample((), float(read()))])


def _count(name: str, meaning: str, read: Callable[[], float]) -> Figure:
    return Figure(name, meaning, (), lambda: [Sample((), float(read()))], is_counter=True)
