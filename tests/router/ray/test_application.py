"""`hotspan deploy ray` as far as it goes without a cluster."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hotspan.cli.deploy import RayOptions
from hotspan.cli.main import app
from hotspan.config.options import options_of
from hotspan.core.errors import ConfigError

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hotspan[ray]'")

from ray.serve.schema import ServeDeploySchema

from hotspan.router.ray.application import application, build
from hotspan.router.ray.plan import Launch, Plan, checked_words
from hotspan.router.ray.scaling import QueueSeconds

PAGE = Path(__file__).parents[3] / "docs/ray.md"


def deploy(*words: str) -> Result:
    return CliRunner().invoke(app, ["deploy", "ray", *words], env={"HOTSPAN_INSECURE": "", "HOTSPAN_TENANTS": ""})


def test_what_is_printed_is_what_serve_takes() -> None:
    """--dry-run prints a config file that Ray's own schema takes, whose arguments build the same application."""
    words = ["--replicas", "3", "--autoscale", "2:8", "--target-queue-seconds", "1.5", "--gpus", "0"]
    done = deploy("org/name", *words, "--dry-run", "--", "--insecure", "--max-model-len", "4096")
    assert done.exit_code == 0, done.output
    found = ServeDeploySchema(**yaml.safe_load(done.output))
    [given] = found.applications
    assert given.route_prefix == "/" and given.import_path == "hotspan.router.ray.application:build"
    assert given.args["words"] == ["org/name", "--insecure", "--max-model-len", "4096"]
    build(given.args)
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in done.output


def test_replicas_are_as_planned() -> None:
    """Numbers, GPUs, the request router and the autoscaler's policy reach Ray's configuration."""
    made: Any = application(Plan(words=("m",), replicas=3, min_replicas=2, max_replicas=8, target_queue_s=1.5, gpus=2))
    replica = made._bound_deployment
    assert replica.ray_actor_options["num_gpus"] == 2
    config = replica._deployment_config
    assert config.request_router_config.request_router_class.endswith("FleetRouter")
    scaling = config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 3, 8)
    assert scaling.policy.policy_kwargs == {"target_s": 1.5}
    assert scaling.policy.get_policy().__qualname__ == QueueSeconds.__qualname__
    assert application(Plan(words=("m",), replicas=3))._bound_deployment.num_replicas == 3
    assert made._ingress_request_router is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m"], "--tenants"),
        (["m", "--", "--insecure", "--port", "80"], "--port"),
        (["m", "--autoscale", "8", "--", "--insecure"], "MIN:MAX"),
        (["m", "--autoscale", "4:2", "--", "--insecure"], "MIN <= MAX"),
        (["m", "--strategy", "fast", "--dry-run", "--", "--insecure"], "prefixaware"),
        (["m", "--replicas", "0", "--dry-run", "--", "--insecure"], "--replicas"),
        (["m", "--target-queue-seconds", "0", "--dry-run", "--", "--insecure"], "--target-queue-seconds"),
    ],
)
def test_what_can_not_work_is_refused(words: list[str], said: str) -> None:
    """Exit status 2 and a sentence with what to give instead, before anything is started."""
    done = deploy(*words)
    assert done.exit_code == 2 and said in done.output.replace("\n", " ")


@pytest.mark.parametrize("spelling", ["--tenants={}", "--tenants {}", ""])
def test_tenants_without_keys_leave_nothing_open(tmp_path: Path, spelling: str) -> None:
    """A file of tenants in which nobody has a key is no protection; with a key, or --insecure, it may be deployed."""
    file = tmp_path / "tenants.yaml"
    file.touch(0o600)
    words = spelling.format(file).split()
    surroundings = {} if words else {"HOTSPAN_TENANTS": str(file)}
    file.write_text("retention: [{tag: pii, ttl: 1h}]")
    with pytest.raises(ConfigError, match="has no API keys"):
        checked_words(["m", *words], surroundings)
    checked_words(["m", *words, "--insecure"], surroundings)
    file.write_text("tenants: {acme: {keys: [sk-acme-0123456789]}}")
    checked_words(["m", *words], surroundings)
    if words:
        file.write_text("retention: [{tag: pii, ttl: 1h}]")
        assert "has no API keys" in deploy("m", "--dry-run", "--", *words).output.replace("\n", " ")


def test_the_environment_reaches_the_replicas() -> None:
    """What this machine's environment says of keys goes with the words: the nodes of the cluster do not have it."""
    assert checked_words(["m"], {"HOTSPAN_TENANTS": "/t.yaml"}) == ["m", "--tenants=/t.yaml"]
    assert checked_words(["m"], {"HOTSPAN_INSECURE": "True"}) == ["m", "--insecure"]
    given = ["m", "--tenants", "/mine.yaml"]
    assert checked_words(given, {"HOTSPAN_TENANTS": "/t.yaml"}) == given


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray Serve is missing, the answer is the line that installs it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.startswith("ray") else find(name, *rest)
    )
    done = deploy("m", "--", "--insecure")
    assert done.exit_code == 2 and "pip install 'hotspan[ray]'" in done.output


def test_unknown_arguments_are_named() -> None:
    """A config file with an argument that there is not is refused by name."""
    with pytest.raises(ConfigError, match="replica_count"):
        build({"words": ["m"], "replica_count": 2})


def test_defaults_are_those_of_the_page() -> None:
    """docs/ray.md has the default of each option in its table."""
    rows = re.findall(r"^\| `--([a-z-]+)[^`]*` \| (\S*) ?\| ", PAGE.read_text(), re.MULTILINE)
    options = [each for part in (RayOptions, Plan, Launch) for each in options_of(part)]
    defaults = {each.name.replace("_", "-"): each.shown or each.default for each in options}
    assert {"port", "replicas", "name"} <= {name for name, _ in rows}
    for name, default in rows:
        assert not default or str(defaults[name]).removesuffix(".0") == default, name
