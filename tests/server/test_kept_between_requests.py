"""What server and router keep in memory: whose it is, and how it hears of invalidations. A new place is decided on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hotspan

SOURCE = Path(hotspan.__file__).parent
PACKAGES = ("server", "router")
MADE = {"dict", "set", "list", "deque", "OrderedDict", "defaultdict", "Counter", "LruCache"}

OPERATOR = "what the operator or the model's files say"
REPLICAS = "replicas, their figures, and numbers of places"
TENANTS = "figures by tenant"
REQUEST = "of one request, gone with its answer"
TASKS = "handles of what runs"
HASHES = "hashes under the owner's root (router/test_owners.py), which answer nothing: a replica says what is a hit"

PLACES = {
    "server/adapters/check.py:AdapterLimits.shapes": OPERATOR,
    "server/policy.py:Matched.params": REQUEST,
    "server/adapters/loader.py:AdapterLoader._tasks": TASKS,
    "server/adapters/registry.py:AdapterRegistry._hosted": "adapters by their owner's names (adapters/test_owners.py)",
    "server/adapters/registry.py:AdapterRegistry._refused": "names of adapters that could not be loaded",
    "server/admin.py:CacheAdmin.holders": "who is told of an invalidation before it is acknowledged",
    "server/admin.py:CacheAdmin._names": OPERATOR,
    "server/admission.py:Admission._limits": TASKS,
    "server/exchange.py:AppExchange.answer_headers": REQUEST,
    "router/prompt.py:Prompt.options": REQUEST,
    "server/front.py:Front._own": OPERATOR,
    "server/liveness.py:Liveness._idling_s": "seconds by the engine's cores",
    "server/lmi/schema.py:Rows._told": REQUEST,
    "server/lmi/schema.py:_Told.texts": REQUEST,
    "server/lmi/sessions.py:Sessions._ends": "ends of sessions by their owner (lmi/test_sessions.py); no text",
    "server/models/front.py:StoreFront._by_name": OPERATOR,
    "server/principal.py:Credentials._holders": OPERATOR,
    "server/warming.py:Warming._jobs": "TEXTS by job and tenant: a job that an invalidation concerns ends before it is "
    "acknowledged (server/test_warming.py, adversary/test_withdrawn.py)",
    "server/warming.py:Warming._own_turns": TENANTS,
    "router/blocks.py:Blocks._numbers": HASHES,
    "router/blocks.py:Blocks._free": REPLICAS,
    "router/blocks.py:Blocks._spare": HASHES,
    "router/blocks.py:Blocks._text": HASHES,
    "router/blocks.py:Blocks._inner": HASHES,
    "router/caches.py:FleetCaches._figures": REPLICAS,
    "router/caches.py:FleetCaches._stored": TENANTS,
    "router/caches.py:_Core.hit_tokens": TENANTS,
    "router/caches.py:_Tier.tenants": TENANTS,
    "router/events.py:EventFeed.COUNTS": REPLICAS,
    "router/measured.py:Told.tiers": REPLICAS,
    "router/settings.py:RouterSettings.keys": OPERATOR,
    "router/event_messages.py:Stored.token_ids": "of one event, gone when its blocks are named",
    "router/fleet.py:ReplicaState.assumed": HASHES,
    "router/fleet.py:Fleet.replicas": REPLICAS,
    "router/fleet.py:Fleet.up": REPLICAS,
    "router/fleet.py:Fleet._free_slots": REPLICAS,
    "router/gateway.py:Gateway._replicas": OPERATOR,
    "router/gateway.py:Gateway.health": REPLICAS,
    "router/gateway.py:Gateway.feeds": REPLICAS,
    "router/index.py:PrefixIndex._pieces": HASHES,
    "router/index.py:PrefixIndex._masks": HASHES,
    "router/index.py:PrefixIndex._places": HASHES,
    "router/index.py:PrefixIndex._free": REPLICAS,
    "router/index.py:PrefixIndex._dead": HASHES,
    "router/index.py:PrefixIndex._sweeping": HASHES,
    "router/index.py:PrefixIndex._to_sweep": HASHES,
    "router/index.py:PrefixIndex._hand": HASHES,
    "router/load.py:ReplicaLoad._queue": "tokens and times of requests in flight",
    "router/matching.py:Matching._due": HASHES,
    "router/matching.py:Matching._seen": REPLICAS,
    "router/metrics.py:Metrics._costs_s": REPLICAS,
    "router/parted.py:Parted._entries": "places of sessions and of models that are not ready, by owner; no text",
    "router/parted.py:Parted._sizes": TENANTS,
    "router/queue.py:_Lane.queue": "requests that wait, within their tenant's lane (router/test_queue.py)",
    "router/queue.py:FairQueue._lanes": TENANTS,
    "router/queue.py:FairQueue._heads": TENANTS,
    "router/queue.py:FairQueue._counts": TENANTS,
    "router/queue.py:FairQueue._through": TENANTS,
    "router/ray/policy.py:FleetRouter._away": TASKS,
    "router/ray/reports.py:Tickets._open": "numbers of requests in flight",
    "router/ray/reports.py:Tickets._unreceived": "numbers of requests in flight",
    "router/ray/reports.py:Tickets._reached_s": REPLICAS,
    "router/ray/reports.py:Reporter._known": REPLICAS,
    "router/ray/scaling.py:Waiting._work_s": "numbers of requests in flight",
    "router/retries.py:RetryBudget._parts": TENANTS,
    "router/sections.py:SectionIndex._sections": HASHES,
    "router/session.py:Split._weights": OPERATOR,
    "router/shadow.py:Copy.parts": "A TEXT and its answer while a candidate answers it: dropped before an invalidation "
    "is acknowledged (router/test_shadow.py)",
    "router/shadow.py:_Group.drained": REPLICAS,
    "router/shadow.py:Shadows._groups": OPERATOR,
    "router/shadow.py:Shadows._comparing": TASKS,
    "router/template.py:ChatTemplate._specials": OPERATOR,
    "router/text.py:Roots._adapters": "names of adapters, as replicas tell them",
    "router/tokens.py:AddedTokens._by_content": OPERATOR,
    "router/tokens.py:TokenTable._added": OPERATOR,
}
"""By place: what it holds. What a client sent is kept by these alone: TEXTS and A TEXT hear of invalidations."""


def _is_collection(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if not isinstance(value, ast.Call):
        return False
    called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    made = [each.value for each in value.keywords if name == "field" and each.arg == "default_factory"]
    return name in MADE or any(isinstance(each, ast.Name) and each.id in MADE for each in made)


def _collections(tree: ast.Module) -> Iterator[str]:
    """`Class.attribute` of each dict, set, list and the like that an object of a class has."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            pairs: list[tuple[ast.expr, ast.expr | None]] = []
            if isinstance(node, ast.AnnAssign):
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                pairs = list(zip(node.targets[0].elts, values, strict=False))
            elif isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            for target, value in pairs:
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if (is_own or (isinstance(node, ast.AnnAssign) and node in owner.body)) and _is_collection(value):
                    yield f"{owner.name}.{ast.unparse(target).removeprefix('self.')}"


def test_what_is_kept_between_requests_is_in_the_list() -> None:
    """Each collection of an object, as listed above: whoever adds one says whose it is and how it hears."""
    found = {
        f"{path.relative_to(SOURCE).as_posix()}:{name}"
        for package in PACKAGES
        for path in sorted((SOURCE / package).rglob("*.py"))
        for name in _collections(ast.parse(path.read_text()))
    }
    assert found == PLACES.keys()


def test_a_new_place_is_found() -> None:
    """Assigned or annotated, alone or in a pair, empty or copied, in a class or a dataclass."""
    source = """
class Keeper:
    texts: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()
    def __init__(self, given):
        self.a = {}
        self.b, self.c = set(), 0
        self.d: OrderedDict[str, str] = OrderedDict[str, str]()
        self.e = [each for each in given]
        local = {}
"""
    assert set(_collections(ast.parse(source))) == {f"Keeper.{name}" for name in ("texts", "a", "b", "d", "e")}


def test_engines_are_told_of_invalidations_by_one_alone() -> None:
    """Whoever administers an engine does so by `CacheAdmin`, which has holders of texts let go of them first."""
    called = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "administer"
    }
    assert called == {"server/admin.py", "server/control_app.py"}  # the latter is an engine core's own, for traces
