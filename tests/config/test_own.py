"""hotspan's own YAML, variables and flags; typos everywhere."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotspan.cli.config import key_table, store_table
from hotspan.config.engine_options import check_options
from hotspan.config.keys import BY_NAME, CONFIG_FILE, FLAGS, KEYS
from hotspan.config.lmcache import _TARGETS
from hotspan.config.lmcache_names import ACCEPTED
from hotspan.config.lmi import lmi_names
from hotspan.config.own import CommandLine, read_command_line
from hotspan.config.planned import planned_settings, with_named
from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.l2 import options
from hotspan.l2.open import store_options
from hotspan.plan.tiers import DiskChoice, TierPlan
from tests.config.rig import configured, value

ENGINE = dict.fromkeys((key.name for key in KEYS if not key.is_own), None) | {"seed": 0, "enable_prefix_caching": None}


def check(done: object) -> None:
    check_options(done.engine, (), ENGINE, lambda words: None)  # type: ignore[attr-defined]


def test_yaml_with_flags_names() -> None:
    """The file takes hotspan's flags and the engine's options, with dashes or underscores, as YAML types or as text."""
    own = {
        "model": "org/name",
        "ram-gib": 8,
        "disk": "/nvme/kv",
        "disk_gib": "100",
        "no-sessions": True,
        "l2": "redis://cache",
        "l2-option": {"timeout_s": 2, "prefix": "a"},
        "host": "0.0.0.0",
        "insecure": True,
        "tensor-parallel-size": 2,
        "max_model_len": 32768,
        "enable-prefix-caching": False,
        "seed": -1,
        "compilation-config": {"level": 3},
        "served-model-name": ["a", "b"],
        "revision": None,
    }
    done = configured(model=None, own=own)
    assert done.cache is not None and done.cache.disk is not None and done.cache.l2 is not None
    assert (done.model, done.cache.ram_bytes, done.cache.disk.bytes) == ("org/name", 8 * GIB, 100 * GIB)
    assert done.cache.l2.options == {"timeout_s": "2", "prefix": "a"}
    assert done.server.no_sessions and done.server.insecure
    words = " ".join(done.engine_words)
    for expected in (
        *("--tensor-parallel-size 2", "--max-model-len 32768", "--no-enable-prefix-caching", "--seed=-1"),
        *('--compilation-config {"level": 3}', "--served-model-name a b"),
    ):
        assert expected in words
    assert "--max-num-seqs" not in words and "revision" not in words


def test_variables() -> None:
    """HOTSPAN_* are the flags; the admin's token is no flag, and the file may be named by one."""
    done = configured(
        own={"port": 9000, "ram_gib": 2},
        variables={"HOTSPAN_PORT": "9001", "HOTSPAN_L2": "redis://c", "HOTSPAN_L2_OPTION": "timeout_s=1,prefix=a=b"}
        | {"HOTSPAN_ADMIN_TOKEN": "0123456789abcdef", "HOTSPAN_NO_SESSIONS": "yes"},
    )
    assert done.server.port == 9001 and value(done, "ram_gib") == 2.0 and done.server.no_sessions
    assert done.cache is not None and done.cache.l2 is not None
    assert done.cache.l2.options == {"timeout_s": "1", "prefix": "a=b"}
    with pytest.raises(ConfigError, match=r"/none/x\.yaml can't be read"):
        configured(variables={"HOTSPAN_CONFIG": "/none/x.yaml"})


def test_flags_are_checked() -> None:
    """A flag's value of the wrong type is named by the flag alone."""
    for flags, expected in (
        ({"ram_gib": "abc"}, "--ram-gib is 'abc': give GiB"),
        ({"port": "8080x"}, "--port is '8080x': give a whole number"),
        ({"l2_option": ["timeout_s"]}, "--l2-option is .*: give NAME=VALUE"),
        ({"job_queue_size": "0"}, "--job-queue-size is '0': give a whole number above 0"),
        ({"compat": "djl"}, "--compat is 'djl': give none"),
    ):
        with pytest.raises(ConfigError, match=f"^{expected}"):
            configured(flags=flags)
    with pytest.raises(ConfigError, match=r"hotspan.yaml:1: config: one file"):
        configured(own={"config": "other.yaml"})


def test_command_line_words_stay_as_they_are() -> None:
    """Words for the engine come back unchanged, in their order, after what files say; the last of two counts."""
    words = (
        "stray",
        "--dtype",
        "half",
        "-tp",
        "2",
        "--no-enable-prefix-caching",
        "--x=-1",
        "--y",
        "-1",
        "--dtype=bfloat16",
    )
    done = configured(*words, own={"seed": 1, "dtype": "fp32"})
    assert done.engine_words == ("--seed", "1", *words)
    assert (
        value(done, "dtype") == "bfloat16" and value(done, "y") == "-1" and value(done, "tensor_parallel_size") == "2"
    )
    assert value(done, "enable_prefix_caching") is False


def typo(name: str, draw: st.DrawFn) -> str:
    """The name with one letter gone, doubled, changed or swapped with the next."""
    at = draw(st.integers(1, len(name) - 2))
    letter = draw(st.sampled_from("aeinoqrstxz"))
    letter = letter.upper() if name.isupper() else letter
    return draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at + 1] + name[at] + name[at + 2 :],
            ]
        )
    )


LMCACHE = (*_TARGETS, *ACCEPTED)
OWN = tuple(key.name.replace("_", "-") for key in KEYS)
FLAG_VARIABLES = tuple("HOTSPAN_" + key.name.upper() for key in KEYS if key.is_own)
BARE = ("SAGEMAKER_STARTUP_TIMEOUT", "SAGEMAKER_MAX_PAYLOAD_IN_MB", "HF_MODEL_ID", "HF_MODEL_TRUST_REMOTE_CODE")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_typo_is_an_error_that_says_what_was_meant(data: st.DataObject) -> None:
    """One wrong letter in any name that is known, wherever it stands, is refused; the right name is suggested."""
    way = data.draw(st.sampled_from(["serving", "OPTION", "own", "HOTSPAN", "LMCACHE", "lmcache", "bare"]))
    names = {
        "serving": tuple(name for name in lmi_names() if len(name.removeprefix("option.")) > 4),
        "OPTION": tuple("OPTION_" + key.name.upper() for key in KEYS if len(key.name) > 4),
        "own": tuple(name for name in OWN if len(name) > 4),
        "HOTSPAN": tuple(name for name in FLAG_VARIABLES if len(name) > 12),
        "LMCACHE": tuple("LMCACHE_" + name.upper() for name in LMCACHE),
        "lmcache": LMCACHE,
        "bare": BARE,
    }[way]
    name = data.draw(st.sampled_from(names))
    start = {"serving": "option." if name.startswith("option.") else "", "OPTION": "OPTION_", "HOTSPAN": "HOTSPAN_"}
    start |= {"LMCACHE": "LMCACHE_", "bare": "SAGEMAKER_" if name.startswith("SAG") else "HF_MODEL_"}
    prefix = start.get(way, "")
    rest = name.removeprefix(prefix)
    wrong = prefix + (typo(rest, data.draw) if len(rest) > 3 else rest[0] + rest)
    every = {one.lower().replace("-", "_") for one in (*names, *lmi_names(), *ENGINE, *OWN)}
    every |= {f"option.{one}" for one in ENGINE} | {f"option_{one}" for one in ENGINE} | {"ec_", "config"}
    assume(wrong.lower().replace("-", "_") not in every)
    assume(not wrong.lower().startswith(("lmcache_ec_", "lmcache_log_", "option.config")))
    with pytest.raises(ConfigError) as error:
        if way == "serving":
            check(configured(serving=f"{wrong}=1"))
        elif way in ("own", "lmcache"):
            check(configured(**{way: {wrong: "1"}}))  # type: ignore[arg-type]
        else:
            check(configured(variables={wrong: "1"}))
    said = str(error.value)
    assert wrong in said and name in said.partition("did you mean")[2], said


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1", "5GB", "a=b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(st.data(), ANYTHING)
def test_any_value_is_taken_or_refused(data: st.DataObject, given_value: object) -> None:
    """Whatever stands behind a known name, in any file or variable, it is taken or an error names the name."""
    way, name = data.draw(
        st.sampled_from(
            [
                *(("own", name) for name in OWN if name != "model"),
                *(("lmcache", name) for name in LMCACHE),
                *(("serving", name) for name in lmi_names() if name not in ("option.model", "option.model_id")),
                *(("variables", name) for name in (*FLAG_VARIABLES, *BARE)),
            ]
        )
    )
    text = str(given_value).replace("\0", "").replace("\n", " ")
    try:
        if way in ("own", "lmcache"):
            done = configured(**{way: yaml.safe_dump({name: given_value})})  # type: ignore[arg-type]
        elif way == "serving":
            done = configured(serving=f"{name}={text.replace(chr(92), '')}")
        else:
            done = configured(variables={name: text})
    except ConfigError as error:
        assert name.removeprefix("option.").replace("-", "_") in str(error).replace("-", "_")
    else:
        assert all(isinstance(word, str) for word in done.engine_words)


def test_all_flags_are_keys() -> None:
    """Each flag can be given on the command line, and each key has a meaning to show."""
    assert {key.name for key in FLAGS} == {key.name for key in KEYS if key.is_own} - {"model"} | {CONFIG_FILE.name}
    assert all(key.help for key in KEYS) and len(BY_NAME) == len(KEYS)
    for key in FLAGS:
        word = (key.kind.wants if key.kind.name == "name" else key.kind.name).rpartition(" or ")[2]
        sample = {
            "false": True,
            "NAME=VALUE": ["a=b"],
            "lmi": "lmi",
            "sampled": "sampled",
            "none": "none",
            "query": "query",
            "always": "always",
            "HOST:PORT": "127.0.0.1:1",
        }.get(word, "1")
        [given] = read_command_line(CommandLine(None, {key.name: sample}))
        assert given.origin == key.flag


PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def test_examples() -> None:
    """The examples of docs/configuration.md are taken as they are written there."""
    own, lmcache = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    [serving] = re.findall(r"```properties\n(.*?)```", PAGE, re.DOTALL)
    serving = serving.replace("option.lmcache_config_file=lmcache_config.yaml", "")
    done = configured(own=own)
    assert done.cache is not None and done.cache.disk is not None and done.model == "org/name"
    done = configured(model=None, serving=serving, lmcache=lmcache, gpus=2)
    assert done.cache is not None and done.cache.ram_bytes == 40 * GIB and done.cache.l2 is not None
    assert [str(note) for note in done.notes if note.is_warning] == []


def test_documented() -> None:
    """docs/configuration.md has the tables of keys and of an L2's options as they are."""
    for table in (key_table(), store_table()):
        assert table in PAGE, "write what `hotspan config keys` prints into docs/configuration.md"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://h", options.RedisOptions),
        ("rediss://h", options.RedisOptions),
        ("file:///d", options.FileOptions),
        ("s3://b/p", options.S3Options),
        ("sagemaker-hyperpod://h", options.HyperpodOptions),
    ],
)
def test_each_option_of_an_l2_acts(url: str, kind: type) -> None:
    """Each is taken by the kind of L2 that has it and changes its settings; another name is refused."""
    samples = {"bool": "false", "int": "1024", "float": "7.5", "str": "env:X"}
    scheme = url.partition(":")[0]
    for option in options.options_of(kind):
        name = str(getattr(option.type, "__name__", option.type)).split()[0]
        text = "true" if option.default is False else samples[name]
        done = configured(flags={"ram_gib": 1.0, "l2": url, "l2_option": {option.name: text}})
        assert done.cache is not None and done.cache.l2 is not None and done.cache.l2.options == {option.name: text}
        assert store_options(scheme, {option.name: text}) != store_options(scheme, {})
    with pytest.raises(ConfigError, match="no such option"):
        configured(flags={"ram_gib": 1.0, "l2": url, "l2_option": {"nobodys_option": "1"}})


@pytest.mark.parametrize("name", [key.name for key in FLAGS])
def test_every_option_has_a_no_or_says_why_not(name: str) -> None:
    """`--no-X` turns off what a file asks for, if X can be off; else it is refused by its name. vLLM never gets it."""
    key, word = {key.name: key for key in FLAGS}[name], f"--no-{name.replace('_', '-')}"
    tiers = {"disk": "/kv", "disk-gib": 10, "l2": "redis://host:6379"} if name.endswith("_compress") else {}
    try:
        found = configured(word, own=tiers or None)
    except ConfigError as error:
        assert str(error).startswith(f"{word}: {key.flag} ") and key.default is not None
        return
    setting = found.settings.get(name)
    assert setting is None or setting.value in (None, False, "off", "never", "none")
    assert word not in found.words


def test_a_no_beats_what_files_say() -> None:
    """A disk and an L2 that a file names are not used; what goes with them is not asked for either."""
    own = {"disk": "/kv", "disk-gib": 10, "l2": "redis://host:6379", "prompts-only": True, "dtype": "float16"}
    words = ("--no-disk", "--no-disk-gib", "--no-l2", "--no-prompts-only", "--no-enable-chunked-prefill")
    found = configured(*words, own=own)
    assert found.cache is not None and found.cache.disk is None and found.cache.l2 is None
    plan = TierPlan(GIB, DiskChoice(Path("/found"), GIB), "redis://found:6379", None, ())
    for settings_ in (found.cache, CacheSettings.from_json(found.cache.to_json())):
        chosen, named = planned_settings(settings_, plan), with_named(plan, settings_)
        assert chosen is not None and chosen.disk is None and chosen.l2 is None, "neither are others chosen"
        assert named.disk is None and named.l2 is None
    assert not found.cache.prompts_only and value(found, "dtype") == "float16"
    assert found.words == ("--no-enable-chunked-prefill",)


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        (("--no-disk", "/kv"), {}, "--no-disk takes no value"),
        (("--no-disk=/kv",), {}, "--no-disk takes no value"),
        (("--no-disk",), {"disk": "/kv"}, "--disk and --no-disk"),
        (("--no-ram-gib",), {}, "--no-ram-gib: --ram-gib can't be off: give GiB"),
    ],
)
def test_a_no_that_makes_no_sense_is_refused(words: tuple[str, ...], flags: dict[str, str], message: str) -> None:
    """With a value, beside the option itself, or of what is always there."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        configured(*words, flags=flags)
