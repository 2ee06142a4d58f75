"""Whatever server and router keep by a name has a bound: who adds a mapping or a cache writes here which."""

import ast
from pathlib import Path

import hotspan

SOURCE = Path(hotspan.__file__).parent
PACKAGES = ("server", "router", "http")
MAPPINGS = ("dict", "OrderedDict", "defaultdict", "Counter")
CACHES = ("lru_cache", "cache")

BOUNDS = {
    "server/adapters/check.py:shapes": "of the model's layers, read once",
    "server/adapters/registry.py:_hosted": "--max-client-adapters of each tenant; names are checked",
    "server/adapters/registry.py:_refused": "the operator's files at the start",
    "http/exchange.py:blended": "a request's: figures with names of hotspan's",
    "router/prompt.py:options": "a request's: a few fields of its body",
    "server/exchange.py:answer_headers": "a request's: headers with names of hotspan's",
    "server/lmi/schema.py:_told": "a request's: one for each choice that the engine answers",
    "server/lmi/sessions.py:_ends": "tenants, and the sessions that each may have; ids are checked",
    "server/policy.py:params": "a request's: parts of its path, which has a size",
    "server/warming.py:_jobs": "MAX_JOBS that run, _KEPT_JOBS that are over; ids are the server's own",
    "server/warming.py:_own_turns": "tenants with a warm-up that runs",
    "router/blocks.py:_inner": "the blocks' cap (_cap); hashes as numbers",
    "router/blocks.py:_numbers": "the blocks' cap (_cap); hashes as numbers",
    "router/blocks.py:_spare": "the blocks' cap (_cap)",
    "router/caches.py:_figures": "replicas; each page has a size",
    "router/caches.py:_stored": "replicas; each answer has a size",
    "router/fleet.py:assumed": "assumed_pieces; digests",
    "router/fleet.py:replicas": "replicas",
    "router/gateway.py:feeds": "replicas",
    "router/index.py:_masks": "_max_masks",
    "router/index.py:_pieces": "max_pieces and cap_bytes; digests",
    "router/index.py:_places": "replicas and tiers",
    "router/load.py:_queue": "requests in work at a replica; numbers",
    "router/measured.py:tiers": "tiers",
    "router/parted.py:_entries": "max_entries; ids that replicas made, of at most 256 characters, or digests",
    "router/parted.py:_sizes": "max_entries; numbers, and marks of owners",
    "router/queue.py:_counts": "tenants with requests that wait; the queue has a length",
    "router/queue.py:_lanes": "requests that wait; the queue has a length",
    "router/queue.py:_through": "_LEAST_TENANTS and twice the tenants that wait",
    "router/ray/policy.py:_away": "replicas",
    "router/ray/reports.py:_open": "_max_s; numbers",
    "router/ray/reports.py:_reached_s": "replicas",
    "router/ray/reports.py:_unreceived": "RECEIVED_S; numbers",
    "router/ray/scaling.py:_work_s": "requests in work; numbers",
    "router/retries.py:_parts": "_MAX_OWNERS; names made of tenants' keys",
    "router/sections.py:_sections": "_max_entries; digests",
    "router/session.py:_seed": "4,096; names of replicas",
    "router/settings.py:keys": "the operator's file",
    "router/text.py:_adapters": "_MAX_NAMES; adapters that replicas report",
    "router/text.py:_tenant_salt": "_MAX_TENANTS; tenants of the operator's file",
    "router/tokens.py:_runs": "one, without arguments",
    "http/bodies.py:_used": "principals: tenants of the operator's file and two more",
    "http/dashboard.py:dashboard": "one, without arguments",
    "http/errors.py:_body": "an error's: its own fields",
    "http/upstream.py:_urls": "replicas and the paths in _KNOWN: what clients make up is not kept",
}
"""What bounds the number of keys, and their size where clients choose them."""


def _called(node: ast.AST | None) -> str:
    """The name of what an expression calls, without its module and type arguments."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_mapping(value: ast.AST | None) -> bool:
    """Whether an expression is a mapping that begins empty, to be filled later."""
    if isinstance(value, ast.Dict):
        return not value.keys
    return (
        _called(value) in MAPPINGS
        and isinstance(value, ast.Call)
        and len(value.args) <= (_called(value) == "defaultdict")
    )


def kept(source: str) -> set[str]:
    """Attributes and names of a module that begin as empty mappings, fields that do, and functions that are cached."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [_called(each) or getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list]
            found |= {node.name for name in names if name in CACHES}
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value
        is_cached = isinstance(value, ast.Call) and (_called(value) in CACHES or _called(value.func) in CACHES)
        is_field = _called(value) == "field" and any(
            each.arg == "default_factory" and ast.unparse(each.value).partition("[")[0] in MAPPINGS
            for each in getattr(value, "keywords", ())
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and _is_mapping(value):
                found.add(target.attr)
            elif isinstance(target, ast.Name) and (is_cached or is_field or (node in tree.body and _is_mapping(value))):
                found.add(target.id)
    return found


def test_what_is_kept_by_name_has_a_bound() -> None:
    """Each mapping and cache of server, router and http stands in the table with its bound, and nothing else does."""
    there = {
        f"{path.relative_to(SOURCE)}:{name}"
        for package in PACKAGES
        for path in sorted((SOURCE / package).rglob("*.py"))
        for name in kept(path.read_text())
    }
    assert there == BOUNDS.keys(), "write what bounds the number and the size of its keys"


def test_what_is_new_is_found() -> None:
    """Each way to write such a thing is seen; a mapping that is made full, or ends with its function, is none."""
    source = """
from functools import cache, lru_cache
names: dict[str, int] = {}
salted = lru_cache(maxsize=9)(str)
table = {"a": 1}
@lru_cache(maxsize=4)
def seed(name): ...
@functools.cache
def page(): ...
class Kept:
    of_field: dict[str, int] = field(default_factory=dict)
    def __init__(self):
        self._own: OrderedDict[str, int] = OrderedDict()
        self._counts = Counter[str]()
        self._lists = defaultdict(list)
        self._full = {"a": 1}
        local = {}
"""
    found = {"names", "salted", "seed", "page", "of_field", "_own", "_counts", "_lists"}
    assert kept(source) == found
