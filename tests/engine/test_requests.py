"""The record of one request, and what of a request is not cached at all."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hotspan.config.settings import CacheOptions
from hotspan.core.directives import Directives
from hotspan.core.namespace import ChunkKeyer
from hotspan.engine.blend.isolation import isolated
from hotspan.engine.requests import SERVER_DIRECTIVES, Admission, ChunkGroup, RequestRecord
from tests.operations import operations

GROUPS = (ChunkGroup(0, 1, 16, is_chain=False), ChunkGroup(1, 2, 32, is_chain=True))


def record(hashes: int) -> RequestRecord:
    request = SimpleNamespace(block_hashes=[n.to_bytes(32) for n in range(hashes)], lora_request=None)
    return RequestRecord(request=request, keyer=ChunkKeyer(bytes(32)), groups=GROUPS)  # type: ignore[arg-type]


def test_a_request_that_waits_costs_the_same_however_long_its_text_is() -> None:
    """The chunks of a text are named once: to be asked for them again costs the same with 4 chunks as with 4,000."""

    def cost(hashes: int) -> int:
        asked = record(hashes)
        assert [len(chunks) for chunks in asked.by_group()] == [hashes // 2, hashes]
        return operations(asked.by_group)

    assert cost(4_000) == cost(4)


def test_a_text_that_grows_is_named_on() -> None:
    """Chunks that are completed later are named then, each standing on the one before it in a chain."""
    asked = record(4)
    asked.by_group()
    asked.request.block_hashes += [n.to_bytes(32) for n in range(4, 8)]
    chain, alone = asked.by_group()
    assert [chunk.parent for chunk in chain] == [None, *(chunk.key for chunk in chain[:-1])]
    assert all(chunk.parent is None for chunk in alone) and len(alone) == 8
    assert asked.keys == {chunk.key for chunk in [*chain, *alone]}


def admitted(*, is_strict: bool = False, is_served: bool = True, lora: Any = None, **params: Any) -> RequestRecord:
    settings = replace(CacheOptions(ram_gib=0.1).settings(), is_strict=is_strict, is_served=is_served)
    request: Any = SimpleNamespace(
        request_id="asked",
        kv_transfer_params=params or None,
        mm_features=[],
        lora_request=lora,
        block_hashes=[],
        resumable=False,
    )
    return Admission(settings, bytes(32), GROUPS, 32).admit(request)


def is_cached(record: RequestRecord) -> bool:
    """Whether anything of it can be found or stored; who may store without a name has none to store under."""
    return record.keyer is not None and record.may_store


BY_SERVER = {SERVER_DIRECTIVES: Directives(tags=("doc",)).to_json()}


@pytest.mark.parametrize(
    ("params", "lax", "strict"),
    [
        ({}, True, False),
        ({"tags": ["doc"]}, True, False),
        ({"remote_host": "of another connector"}, True, False),
        ({"ttl": "soon"}, False, False),
        ({"tags": ["doc"], "no_store": "yes"}, False, False),
        (BY_SERVER, True, True),
        (BY_SERVER | {"ttl": "soon"}, True, True),
    ],
)
def test_whose_directives_can_t_be_known_is_not_cached(params: dict[str, Any], lax: bool, strict: bool) -> None:
    """Directives that are refused leave nothing, rather than a text on other terms than it asked for; in a strict
    engine neither does what no server of hotspan's has judged. What the server says goes before all else."""
    for is_strict, expected in ((False, lax), (True, strict)):
        record = admitted(is_strict=is_strict, **params)
        assert is_cached(record) == expected
        assert expected or (record.keyer is None and not record.may_store and not record.all_chunks())
        assert bool(record.objection) is not expected


@pytest.mark.parametrize(
    ("given", "is_right"),
    [(Directives(tenant="other").to_json(), True)]
    + [(given, False) for given in ("x", {}, {"tenant": 1}, {"tenant": "a", "what": 2}, [], 7, True)],
)
def test_directives_of_the_server_are_taken_from_it_alone(given: Any, is_right: bool) -> None:
    """Where no server of hotspan's stands before the engine, who sends what only that may send is not cached; where one
    does, what it would not send leaves the request uncached, and raises nothing."""
    assert not is_cached(admitted(is_served=False, **{SERVER_DIRECTIVES: given}))
    assert is_cached(admitted(is_served=True, **{SERVER_DIRECTIVES: given})) == is_right


@pytest.mark.parametrize("params", ["x", [1], 7, True, ("a", "b")])
def test_parameters_that_are_no_object_are_not_cached(params: Any) -> None:
    """vLLM itself would fail on them: they are dropped, and the request is not cached."""
    settings = CacheOptions(ram_gib=0.1).settings()
    request: Any = SimpleNamespace(
        request_id="r", kv_transfer_params=params, mm_features=[], lora_request=None, resumable=False
    )
    assert (
        not is_cached(Admission(settings, bytes(32), GROUPS, 32).admit(request)) and request.kv_transfer_params is None
    )


def test_an_adapter_that_can_t_be_read_is_not_cached(tmp_path: Path) -> None:
    """Without its files, or with an empty directory, nobody can say what computes; with them its texts have names."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "adapter.safetensors").write_bytes(b"weights")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "adapter.safetensors").symlink_to(tmp_path / "locked" / "adapter.safetensors")
    for name, expected in (("missing", False), ("empty", False), ("locked", False), ("there", True)):
        lora = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path / name), lora_name=name)
        record = admitted(lora=lora)
        assert is_cached(record) == expected
        record.request.block_hashes.extend(n.to_bytes(32) for n in range(4))
        assert bool(record.all_chunks()) == expected


@pytest.mark.parametrize("first", [0, 31, 32, 100, 159])
def test_names_of_the_engine_itself_become_private(first: int) -> None:
    """vLLM's own request and hasher: exact blocks keep their names, later ones are private, answers included."""

    def made() -> Request:
        hasher = get_request_block_hasher(32, sha256_cbor)
        return Request("r", list(range(160)), SamplingParams(max_tokens=99), None, block_hasher=hasher)

    init_none_hash(sha256_cbor)
    exact, private, other = made(), made(), made()
    for request, nonce in ((private, bytes(16)), (other, bytes(15) + b"x")):
        request.block_hashes[:] = isolated(request.block_hashes, first, 32, nonce)
    for request in (exact, private, other):
        request.append_output_token_ids([7] * 96)
    assert len(exact.block_hashes) == len(private.block_hashes) == 8
    for index, names in enumerate(zip(exact.block_hashes, private.block_hashes, other.block_hashes, strict=True)):
        assert len(set(names)) == (1 if (index + 1) * 32 <= first else 3)


def test_a_session_is_its_tenants() -> None:
    """The same name at another tenant is another session; a request that names none has none."""

    def session(tenant: str, name: str | None) -> Any:
        return admitted(**{SERVER_DIRECTIVES: Directives(tenant=tenant, session=name).to_json()}).session

    assert session("a", "chat") == session("a", "chat") != session("b", "chat")
    assert session("a", "other") not in (session("a", "chat"), None) and session("a", None) is None
