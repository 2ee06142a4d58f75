"""Edges of values and files that no other test of this package stands on (`make mutants` found them)."""

import inspect
import json
import socket
from pathlib import Path
from typing import Any

import pytest

import hotspan
from hotspan.config import kinds
from hotspan.config.configuration import _model_directory
from hotspan.config.connector import connector_settings
from hotspan.config.control import engine_sockets, peers, socket_path
from hotspan.config.engine_options import check_options, split_words
from hotspan.config.kv_events import published
from hotspan.config.lmcache import _unquoted
from hotspan.config.lmi import LmiReader
from hotspan.config.origin import COMMAND_LINE, Source
from hotspan.config.own import CommandLine, read_command_line
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import AdminSettings, CacheOptions
from hotspan.config.tenants import load_tenants
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from tests.config.rig import configured
from tests.config.test_engine_options import DEFAULTS, option, parse


@pytest.mark.parametrize("word", ["true", "yes", "on", "1", "True", "YES"])
def test_words_for_true(word: str) -> None:
    """Each word, in any case; its opposites are false, and both are turned round where a name says the opposite."""
    assert kinds.BOOLEAN.parse(word, "--x") is True
    assert kinds.INVERTED.parse(word, "--x") is False


@pytest.mark.parametrize("word", ["false", "no", "off", "0", "False"])
def test_words_for_false(word: str) -> None:
    """As above."""
    assert kinds.BOOLEAN.parse(word, "--x") is False
    assert kinds.INVERTED.parse(word, "--x") is True


def test_nothing_is_shared_between_tenants_unless_somebody_says_so() -> None:
    """The default of --share-across-tenants."""
    assert CacheOptions().share_across_tenants is False


def test_choices_are_all_named() -> None:
    """By the kind and by the error, the default among them; of two both are the type's name."""
    assert kinds.one_of("auto", "lru", "arc", "learned").wants == "auto (the default), lru, arc or learned"
    assert kinds.one_of("even", "odd").wants == "even (the default) or odd"
    assert (kinds.one_of("even", "odd").name, kinds.one_of("a", "b", "c").name) == ("even or odd", "name")
    assert kinds.one_of("even", "odd").parse("ODD", "--x") == "odd"
    with pytest.raises(ConfigError, match=r"lru, arc or learned"):
        kinds.one_of("auto", "lru", "arc", "learned").parse("fifo", "--x")


def test_whole_numbers_of_lists() -> None:
    """The first of several; a fraction is none, and says so."""
    assert kinds.FIRST_INTEGER.parse("2", "x") == kinds.FIRST_INTEGER.parse([2.0, 3], "x") == 2
    for wrong in ("2.5", [2.5], "two"):
        with pytest.raises(ConfigError, match="a whole number"):
            kinds.FIRST_INTEGER.parse(wrong, "x")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("h:1", True), ("127.0.0.1:65535", True), ("[::1]:80", True), ("h:0", False), ("h:65536", False), ("h", False)]
    + [(wrong, False) for wrong in (":80", "http://h:80", "::1:80", "h:80/x", "h:8x")],
)
def test_addresses(text: str, is_right: bool) -> None:
    """HOST:PORT with a port that there can be, IPv6 in brackets."""
    if is_right:
        assert kinds.ADDRESS.parse(text, "--x") == text
    else:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            kinds.ADDRESS.parse(text, "--x")


@pytest.mark.parametrize(("size", "gib"), [("3GiB", 3.0), ("512 MiB", 0.5), ("2TiB", 2048.0), ("1.5GiB", 1.5)])
def test_sizes_of_an_llm(size: str, gib: float) -> None:
    """Each unit."""
    found = hotspan.transfer_config(ram=size)["kv_connector_extra_config"]["hotspan"]
    assert found["ram_bytes"] == gib * GIB


def test_an_address_for_administration(tmp_path: Path) -> None:
    """By one name or by two, with a token's file or without; none is none; a file without an address is an error."""
    ram = {"hotspan.ram_gib": 1}
    read = lambda more, **variables: connector_settings(ram | more, variables).cache.admin  # noqa: E731
    assert read({}) is None
    assert read({"hotspan.admin_address": "127.0.0.1:8081"}) == AdminSettings("127.0.0.1", 8081)
    assert read({}, HOTSPAN_ADMIN_ADDRESS="[::1]:8081") == AdminSettings("::1", 8081)
    assert read({"hotspan.admin_port": 8081, "hotspan.admin_host": "h"}) == AdminSettings("h", 8081)
    file = tmp_path / "token"
    given = {"hotspan.admin_address": "h:1", "hotspan.admin_token_file": str(file)}
    assert read(given) == AdminSettings("h", 1, str(file))
    with pytest.raises(ConfigError, match=r"leave .*admin.port out"):
        read({"hotspan.admin_address": "h:1", "hotspan.admin_port": 2})
    made = hotspan.transfer_config(ram="1GiB", admin_address="[::1]:9", admin_token_file=file)
    assert made["kv_connector_extra_config"]["hotspan"]["admin"] == {"host": "::1", "port": 9, "token_file": str(file)}
    with pytest.raises(ConfigError, match="belongs to an address"):
        hotspan.transfer_config(ram="1GiB", admin_token_file=file)
    server = configured(flags={"admin_address": "127.0.0.2:99"}).server
    assert (server.admin_host, server.admin_port) == ("127.0.0.2", 99)


@pytest.mark.parametrize("value", [True, 1, "true", "yes", "1"])
def test_events_that_are_on(value: Any) -> None:
    """Whatever vLLM could take for true; without a value or with one for false nothing is published."""
    assert published({"kv_events_config": json.dumps({"enable_kv_cache_events": value})}) is not None


@pytest.mark.parametrize("value", [False, 0, "false", "No", " off ", "0.0", "F", "n"])
def test_events_that_are_off(value: Any) -> None:
    """As above."""
    assert published({"kv_events_config": json.dumps({"enable_kv_cache_events": value})}) is None
    assert published({"kv_events_config": "{"}) is None and published({}) is None
    null = {"enable_kv_cache_events": True, "publisher": "null"}
    assert published({"kv_events_config": json.dumps(null)}) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'", "'"),
        ("''", ""),
        ("'a'", "a"),
        ('"a"', "a"),
        ("'a\"", "'a\""),
        (" none ", None),
        ("'null'", None),
        ("", ""),
    ],
)
def test_quotes_of_lmcaches_values(text: str, expected: str | None) -> None:
    """Both ends the same, and two of them."""
    assert _unquoted(text) == expected


def test_floors_may_add_up_to_all(tmp_path: Path) -> None:
    """Ten times a tenth is no more than 1, whatever floating point makes of it; a little more is too much."""
    file = tmp_path / "tenants.yaml"

    def load(floors: list[float]) -> int:
        rows = [f"  t{n}: {{keys: [key-of-tenant-{n}-0123456789], floor: {floor}}}" for n, floor in enumerate(floors)]
        file.write_text("tenants:\n" + "\n".join(rows) + "\n")
        file.chmod(0o600)
        return len(load_tenants(file).tenants)

    assert load([0.1] * 10) == 10 and load([0.7, 0.2, 0.1]) == 3 and load([1.0]) == 1
    with pytest.raises(ConfigError, match=r"add up to 1\.01"):
        load([0.51, 0.5])


def test_a_long_name_in_a_wrong_place_is_not_shown(tmp_path: Path) -> None:
    """It may be a key; one of 24 characters is shown."""
    file = tmp_path / "tenants.yaml"
    for name, is_shown in (("x" * 24, True), ("x" * 25, False), ("sk-short", False)):
        file.write_text(f"tenants: {{acme: {{{name}: 1}}}}\n")
        file.chmod(0o600)
        with pytest.raises(ConfigError) as caught:
            load_tenants(file)
        assert (name in str(caught.value)) is is_shown


@pytest.mark.parametrize(("share", "is_noted"), [("quota: 0.5", True), ("floor: 0.1", True), ("quota: 1", False)])
def test_shares_without_tiers_are_noted(tmp_path: Path, share: str, is_noted: bool) -> None:
    """A floor or a quota alone is enough."""
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: {{acme: {{keys: [key-of-acme-0123456789], {share}}}}}\n")
    file.chmod(0o600)
    done = configured(flags={"tenants": str(file), "no_cache": True})
    assert any("floors, quotas" in str(note) for note in done.notes) is is_noted


def test_what_stands_on_the_command_line_is_its_own_origin() -> None:
    """The option, not its value, in both spellings."""
    words = ("--max-num-seqs", "4", "--dtype=half")
    found = {given.key: given.origin for given in read_command_line(CommandLine("m", {}, words))}
    assert found == {"model": "MODEL", "max_num_seqs": "--max-num-seqs", "dtype": "--dtype"}, COMMAND_LINE


def test_one_that_is_wrong_alone_is_named_although_others_contradict() -> None:
    """Of several that fail together, that one."""
    given = [option("needs_length", True, "file:1"), option("dtype", "half", "file:2")]
    with pytest.raises(ConfigError, match=r"^file:1: option.needs_length"):
        check_options(given, ["--max-model-len", "5"], DEFAULTS, parse)


def test_where_files_beside_a_model_are_looked_for(tmp_path: Path) -> None:
    """In a directory that is named; in the container's, or its one model; nowhere for a model of another place."""

    def model(path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        return path

    container = tmp_path / "container"
    inner = model(container / "llama")
    assert _model_directory(None, container, "") == inner
    assert _model_directory("org/name", container, "") is None
    assert _model_directory(str(inner), container, "") == inner
    assert _model_directory(None, tmp_path / "none", "") is None
    assert _model_directory(None, tmp_path / "none", str(inner)) == inner
    model(container / "qwen")
    with pytest.raises(ConfigError, match="several models"):
        _model_directory(None, container, "")


def test_sockets_of_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that answer, by owner and rank; what nobody answers is removed, and what is no socket's name is left."""
    place = tmp_path / "h"
    monkeypatch.setattr("hotspan.config.control.runtime_directories", lambda surroundings: (place,))
    listeners = []
    for rank in (1, 0):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(socket_path(7, "name", rank, {})))
        listener.listen(1)
        listeners.append(listener)
    dead = socket_path(8, "gone", 0, {})
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(dead))
        ended.listen(1)
    (place / "note").write_text("")
    (found,) = engine_sockets({})
    assert (found.owner, found.name, sorted(found.cores)) == (7, "name", [0, 1])
    assert found.url == f"unix:{place / 'engine-7-name-0.sock'}"
    assert peers(found.cores[1]) == dict(found.cores) and not dead.exists() and (place / "note").exists()
    for listener in listeners:
        listener.close()
    assert engine_sockets({}) == []


def test_defaults_are_those_of_the_documentation() -> None:
    """The ones that no command shows by itself."""
    server, cache = ServerSettings(), CacheOptions()
    assert not server.partial and not server.secure and not server.insecure and not server.no_sessions
    assert cache.blend_check_layer == 2 and cache.blend_min_tokens == 512 and cache.blend_first_k == 16
    assert inspect.signature(connector_settings).parameters["workers"].default == 1


def test_each_source_has_a_place_of_its_own() -> None:
    """No two are equally strong."""
    assert len({*Source}) == len(Source.__members__)
    assert min(Source) is Source.COMMAND_LINE and max(Source) is Source.DEFAULT


@pytest.mark.parametrize("name", ["SAGEMAKER_MAX_REQUEST_SIZES", "HF_MODEL_IDS"])
def test_a_variable_that_is_nearly_one_of_lmis_is_refused(name: str) -> None:
    """With what was meant; one that is far from all is somebody else's."""
    with pytest.raises(ConfigError, match="did you mean"):
        LmiReader().read_variables({name: "5"})
    LmiReader().read_variables({"SAGEMAKER_SOMETHING_ELSE": "5"})


@pytest.mark.parametrize(("ttl", "is_right"), [("1.5", True), ("60", True), (".inf", False), (".nan", False)])
def test_a_time_to_live_has_an_end(tmp_path: Path, ttl: str, is_right: bool) -> None:
    """Fractions of a second are taken; what never ends, or is no number, is an error."""
    file = tmp_path / "tenants.yaml"
    file.write_text(f"retention: [{{ttl: {ttl}}}]\n")
    file.chmod(0o600)
    if is_right:
        assert load_tenants(file).retention[0].ttl_s
    else:
        with pytest.raises(ConfigError, match="ttl"):
            load_tenants(file)


def test_short_options_are_options() -> None:
    """Two characters are enough; a negative number is a value."""
    found = [group.words for group in split_words(["--a", "1", "-q", "2", "--b", "-1"])]
    assert found == [("--a", "1"), ("-q", "2"), ("--b", "-1")]


def test_a_value_is_shown_with_the_default_that_it_is_over() -> None:
    """Where there is one."""
    settings = configured(flags={"chunk_tokens": "256", "disk": "/x", "disk_gib": "1"}).settings
    assert [given.source for given in settings["chunk_tokens"].overridden] == [Source.DEFAULT]
    assert not settings["disk"].overridden and settings["l2"].value is None
