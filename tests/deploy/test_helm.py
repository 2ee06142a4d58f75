"""The Helm chart: rendered by Helm itself, and taken by Kubernetes' own schemas and by hotspan's own command lines."""

import base64
import http.server
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click
import kubernetes_validate
import pytest
import typer
import yaml

from hotspan.cli.main import app
from kit.ports import free_port
from tests.deploy.install_helm import HELM

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "hotspan"
DOCS = Path(__file__).parents[2] / "docs" / "kubernetes.md"
OLDEST, NEWEST = "1.27", "1.37"

Values = Mapping[str, Any]
Manifest = dict[str, Any]

LEAST: Values = {"model": "org/name", "auth": {"insecure": True}}
ENGINES = {"--shutdown-timeout", "--tensor-parallel-size", "--kv-events-config"}
"""Options of vLLM's that the chart gives."""

KEYS: Values = {
    "tenantsSecret": {"name": "tenants", "key": "t.yaml"},
    "adminTokenSecret": {"name": "admin", "key": "token"},
}
COMBINATIONS: dict[str, Values] = {
    "least": LEAST,
    "cpu, no router": LEAST | {"replicas": {"gpus": 0, "count": 1}, "router": {"enabled": False}},
    "keys, disk, metrics": {
        "model": "/opt/ml/model",
        "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
        "auth": KEYS,
        "replicas": {"gpus": 8, "disk": {"gib": 1_000_000, "storageClass": "nvme"}, "most": 9, "ramGib": 1024},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]},
        "router": {"kvEvents": True, "strategy": "kvaware"},
    },
    "daemon": LEAST | {"l2": {"kind": "daemon", "options": {"timeout_ms": "1000"}}, "daemon": {"disk": {"gib": 100}}},
    "valkey": {
        "model": "s3://bucket/model",
        "auth": KEYS,
        "l2": {"kind": "valkey"},
        "valkey": {"passwordSecret": {"name": "valkey"}, "tlsSecret": "valkey-tls"},
        "encryption": {"kekSecret": {"name": "kek"}, "keyStoreClaim": "keys"},
        "serviceMonitor": {"enabled": True},
        "router": {"enabled": False},
    },
    "external": LEAST
    | {
        "l2": {"kind": "external", "url": "sagemaker-hyperpod://$(NODE_IP):9200", "log": "redis://r:6379"},
        "replicas": {"disk": {"gib": 100}, "env": [{"name": "AWS_REGION", "value": "eu-west-1"}]},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
        "encryption": {"kek": "aws-kms:alias/kv", "keyStoreClaim": "keys"},
    },
}


def helm(*words: str, values: Values | None = None, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Helm's answer; it fetches nothing."""
    found = HELM if HELM.exists() else shutil.which("helm")
    if found is None:
        pytest.fail("helm is not installed: make helm")
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory or "/nonexistent")}
    files = [] if values is None else ["--values", "-"]
    given = None if values is None else yaml.safe_dump(dict(values))
    return subprocess.run(
        [found, *words, *files], input=given, capture_output=True, text=True, timeout=180, env=environment
    )


def rendered(values: Values, release: str = "kv") -> list[Manifest]:
    done = helm("template", release, str(CHART), "--namespace", "llm", values=values)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pod(manifest: Manifest) -> Manifest:
    return cast(Manifest, manifest["spec"]["template"]["spec"])


def words(manifest: Manifest) -> list[str]:
    return cast(list[str], pod(manifest)["containers"][0]["args"])


@pytest.mark.parametrize("name", COMBINATIONS)
def test_kubernetes_takes_it(name: str) -> None:
    """The oldest and the newest Kubernetes that we support take every manifest, and know each of its fields."""
    manifests = rendered(COMBINATIONS[name])
    assert len({(each["kind"], each["metadata"]["name"]) for each in manifests}) == len(manifests)
    for manifest in manifests:
        if manifest["kind"] == "ServiceMonitor":  # of the Prometheus operator, which Kubernetes does not know
            continue
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_would_notice() -> None:
    """Kubernetes' schemas, as they are used here, refuse a misspelt field."""
    manifest = one(rendered(LEAST), "StatefulSet", "kv-hotspan-replica")
    pod(manifest)["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def test_lint() -> None:
    """Helm has nothing against the chart."""
    done = helm("lint", str(CHART), "--strict", values=LEAST)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", COMBINATIONS)
def test_hotspan_takes_the_arguments(name: str) -> None:
    """hotspan's own parser takes every word that a container of ours is started with; vLLM's are as expected."""
    commands = cast(click.Group, typer.main.get_command(app)).commands
    called = set()
    for manifest in rendered(COMBINATIONS[name]):
        if manifest["kind"] not in ("StatefulSet", "Deployment", "DaemonSet"):
            continue
        command, *arguments = words(manifest)
        if command not in commands:
            assert manifest["metadata"]["name"] == "kv-hotspan-valkey" or command == "route", command
            continue
        called.add(command)
        with commands[command].make_context(command, list(arguments)) as context:
            assert {word.partition("=")[0] for word in context.args} <= ENGINES
    assert "serve" in called


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_configuration_is_right(name: str) -> None:
    """What a replica is started with is a configuration that hotspan takes, with the tiers that were asked for."""
    from hotspan.config.configuration import load_configuration
    from hotspan.config.own import CommandLine

    values = COMBINATIONS[name]
    command = cast(click.Group, typer.main.get_command(app)).commands["serve"]
    arguments = words(one(rendered(values), "StatefulSet", "kv-hotspan-replica"))[1:]
    # The file of tenants is another machine's.
    arguments = ["--insecure" if word.startswith("--tenants") else word for word in arguments]
    with command.make_context("serve", arguments) as context:
        flags = {key: value for key, value in context.params.items() if _given(context, key) and key != "model"}
        line = CommandLine(context.params["model"], flags, context.args)
    surroundings = {"L2_PASSWORD": "p", "KEK": "00" * 32, "HOTSPAN_INSECURE": "false"}
    cache = load_configuration(line, surroundings).cache
    assert cache is not None
    replicas = values.get("replicas", {})
    assert cache.ram_bytes == replicas.get("ramGib", 16) << 30
    assert (cache.disk is not None) == (replicas.get("disk", {}).get("gib", 0) > 0)
    assert (cache.l2 is not None) == ("l2" in values)


def _given(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


WRONG: list[tuple[Values, str]] = [
    ({"model": "m"}, "nobody would need a key"),
    ({"auth": {"insecure": True}}, "model is empty"),
    (LEAST | {"router": {"kvEvents": True}}, "router.kvEvents"),
    (LEAST | {"modle": "m"}, "modle"),
    (LEAST | {"replicas": {"counts": 2}}, "counts"),
    (LEAST | {"replicas": {"count": 0}}, "count"),
    (LEAST | {"replicas": {"count": "two"}}, "count"),
    (LEAST | {"replicas": {"count": 3, "most": 2}}, "replicas.most"),
    (LEAST | {"replicas": {"resources": {"limit": {}}}}, "limit"),
    (LEAST | {"replicas": {"args": "--max-model-len 5"}}, "args"),
    (LEAST | {"replicas": {"env": [{"name": "A", "values": "b"}]}}, "values"),
    (LEAST | {"router": {"strategy": "fastest"}}, "strategy"),
    (LEAST | {"l2": {"kind": "redis"}}, "kind"),
    (LEAST | {"l2": {"kind": "external"}}, "l2.url"),
    (LEAST | {"l2": {"url": "redis://r:6379"}}, "l2.kind"),
    (LEAST | {"l2": {"kind": "external", "url": "lm://host:65432"}}, "url"),
    (LEAST | {"l2": {"options": {"password": "secret"}}}, "password"),
    (LEAST | {"encryption": {"kek": "aws-kms:k"}}, "keyStoreClaim"),
    (LEAST | {"encryption": {"kek": "aws-kms:k", "kekSecret": {"name": "k"}, "keyStoreClaim": "c"}}, "two keys"),
    (LEAST | {"encryption": {"kek": "00112233", "keyStoreClaim": "c"}}, "kek"),
    (LEAST | {"podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_refused(values: Values, said: str) -> None:
    """Values that can't work are refused before anything is made, in words that name them."""
    done = helm("template", "kv", str(CHART), values=values)
    assert done.returncode != 0
    assert said in done.stderr


def test_every_value_is_described() -> None:
    """The schema is closed at every level, describes each value, and knows all that values.yaml has."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def look(place: str, given: Any, said: Mapping[str, Any]) -> None:
        said = {**schema["$defs"][said["$ref"].rpartition("/")[2]], **said} if "$ref" in said else said
        assert said["description"].endswith("."), place
        if "properties" not in said:
            return
        assert said["additionalProperties"] is False, place
        if said.get("properties", {}).keys() == {"requests", "limits", "claims"}:
            return
        assert given is None or given.keys() <= said["properties"].keys(), place
        for name, inner in said["properties"].items():
            assert given is None or name in given or name == "global", f"values.yaml has no {place}.{name}"
            look(f"{place}.{name}", None if given is None else given.get(name), inner)

    look("", values, schema)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_nobody_is_root(name: str) -> None:
    """Containers run without root, privileges and a writable root; but one makes directories on the node as root."""
    for manifest in rendered(COMBINATIONS[name]):
        if "template" not in manifest.get("spec", {}):
            continue
        inside = pod(manifest)
        assert inside["securityContext"]["runAsNonRoot"] is True and inside["automountServiceAccountToken"] is False
        for container in (*inside["containers"], *inside.get("initContainers", ())):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            is_exempt = (manifest["kind"], container["name"]) == ("DaemonSet", "directories")
            assert ("runAsUser" in context) == is_exempt
            assert "limits" in container["resources"]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_secrets_are_references(name: str) -> None:
    """What sounds like a secret is taken from one; a Secret holds nothing but what was made by chance."""
    again = rendered(COMBINATIONS[name])
    for manifest in rendered(COMBINATIONS[name]):
        if manifest["kind"] == "Secret":
            [(key, value)] = manifest["data"].items()
            assert len(base64.b64decode(value)) == 48
            assert one(again, "Secret", manifest["metadata"]["name"])["data"][key] != value
            continue
        if "template" not in manifest.get("spec", {}):
            continue
        for container in pod(manifest)["containers"]:
            for variable in container.get("env", ()):
                if variable["name"] in ("HOTSPAN_ADMIN_TOKEN", "KEK", "L2_PASSWORD", "PASSWORD", "VALKEYCLI_AUTH"):
                    assert set(variable) == {"name", "valueFrom"}


def test_it_has_time_to_stop() -> None:
    """A pod that stops has the seconds of requests in flight, those of the cache's writes, and some more."""
    from hotspan.config.settings import CacheSettings

    values = LEAST | {"replicas": {"drainSeconds": 100}}
    manifest = one(rendered(values), "StatefulSet", "kv-hotspan-replica")
    assert "--shutdown-timeout=100" in words(manifest)
    assert pod(manifest)["terminationGracePeriodSeconds"] > 100 + CacheSettings(1).drain_s


def test_probes() -> None:
    """Liveness asks /health, which answers while draining; readiness asks /ping, which refuses then."""
    [container] = pod(one(rendered(LEAST), "StatefulSet", "kv-hotspan-replica"))["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ping"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > 1200, "it is killed before it says why it failed"


def test_the_router_knows_every_replica() -> None:
    """It is given the names that the StatefulSet's pods have behind their service, up to the most there may be."""
    manifests = rendered(LEAST | {"replicas": {"count": 2, "most": 4}, "router": {"strategy": "session"}})
    replicas = one(manifests, "StatefulSet", "kv-hotspan-replica")
    service = one(manifests, "Service", replicas["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    name = replicas["metadata"]["name"]
    expected = [f"http://{name}-{i}.{service['metadata']['name']}.llm.svc:8080" for i in range(4)]
    given = words(one(manifests, "Deployment", "kv-hotspan-router"))
    assert [word.partition("=")[2] for word in given if word.startswith("--replica=")] == expected
    assert "--strategy=session" in given


def test_events_are_where_the_router_looks() -> None:
    """With kvEvents the router follows each replica at the ports that it is told to publish on, and may reach them."""
    manifests = rendered(COMBINATIONS["keys, disk, metrics"])
    given = words(one(manifests, "Deployment", "kv-hotspan-router"))
    [option] = [
        word for word in words(one(manifests, "StatefulSet", "kv-hotspan-replica")) if "kv-events-config" in word
    ]
    config = json.loads(option.partition("=")[2])
    assert (config["endpoint"], config["replay_endpoint"]) == ("tcp://*:5557", "tcp://*:5558")
    assert config["publisher"] == "zmq" and config["enable_kv_cache_events"] is True
    replicas = [word.partition("=")[2] for word in given if word.startswith("--replica=")]
    assert len(replicas) == 9
    for replica in replicas:
        url, events, replay = replica.split(",")
        host = url.removeprefix("http://").removesuffix(":8080")
        assert (events, replay) == (f"events=tcp://{host}:5557", f"replay=tcp://{host}:5558")
    ports = {"port": 5557, "endPort": 5558}
    rules = one(manifests, "NetworkPolicy", "kv-hotspan-replica")["spec"]["ingress"]
    assert ports in [port for rule in rules for port in rule["ports"]]
    rules = one(manifests, "NetworkPolicy", "kv-hotspan-router")["spec"]["egress"]
    assert ports in [port for rule in rules for port in rule["ports"]]


@pytest.mark.parametrize("given", [{}, {"name": "mine", "key": "k"}])
def test_events_have_a_key(given: Values) -> None:
    """Replicas and router read the key of KV events from one Secret, as a file that they alone can read."""
    values = LEAST | {
        "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
        "router": {"kvEvents": True} | ({"kvEventsSecret": given} if given else {}),
    }
    manifests = rendered(values)
    made = [each["metadata"]["name"] for each in manifests if each["kind"] == "Secret"]
    assert made == ([] if given else ["kv-hotspan-kv-events"])
    for kind, name in (("StatefulSet", "kv-hotspan-replica"), ("Deployment", "kv-hotspan-router")):
        manifest = one(manifests, kind, name)
        assert "--kv-events-key=/etc/hotspan/own/events.key" in words(manifest)
        [volume] = [volume for volume in pod(manifest)["volumes"] if volume["name"] == "given"]
        [source] = volume["projected"]["sources"]
        assert source["secret"]["name"] == (given.get("name") or made[0])
        [init] = pod(manifest)["initContainers"]
        assert init["command"] == ["install", "-m", "0600", "/etc/hotspan/given/events.key", "/etc/hotspan/own/"]


def test_files_of_secrets_become_private(tmp_path: Path) -> None:
    """The init container's command, run as it is, leaves each file of a secret to its user alone."""
    manifest = one(rendered(COMBINATIONS["keys, disk, metrics"]), "Deployment", "kv-hotspan-router")
    [init] = pod(manifest)["initContainers"]
    for name in ("given", "own"):
        (tmp_path / name).mkdir()
    files = ("tenants.yaml", "events.key")
    for name in files:
        (tmp_path / "given" / name).write_text(name)
        (tmp_path / "given" / name).chmod(0o440)
    subprocess.run([word.replace("/etc/hotspan", str(tmp_path)) for word in init["command"]], check=True)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "own").iterdir()}
    assert found == dict.fromkeys(files, 0o600)


OUTSIDE: list[tuple[Values, list[int]]] = [
    ({"model": "/opt/ml/model"}, []),
    ({"model": "org/name"}, [443]),
    ({"model": "s3://bucket/model"}, [443]),
    ({"model": "/m", "l2": {"kind": "external", "url": "redis://r:7000", "log": "rediss://r/0?a=b"}}, [7000, 6379]),
    ({"model": "/m", "l2": {"kind": "external", "url": "sagemaker-hyperpod://$(NODE_IP):9200"}}, [9200]),
    ({"model": "/m", "l2": {"kind": "external", "url": "s3://bucket/kv", "log": "file:///shared"}}, [443]),
    ({"model": "/m", "encryption": {"kek": "aws-kms:k", "keyStoreClaim": "c"}}, [443]),
]


@pytest.mark.parametrize(("values", "ports"), OUTSIDE)
def test_pods_reach_what_they_need_and_nothing_else(values: Values, ports: list[int]) -> None:
    """The router reaches replicas, replicas the L2 and what values name, never a node's metadata; nobody else asks."""
    manifests = rendered(values | {"auth": {"insecure": True}})
    policies = {
        each["metadata"]["name"].removeprefix("kv-hotspan-"): each["spec"]
        for each in manifests
        if each["kind"] == "NetworkPolicy"
    }
    for policy in policies.values():
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    names, *others = policies["router"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    [rule] = others
    assert rule["ports"] == [{"port": 8080}]
    assert rule["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "replica"
    names, *others = policies["replica"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert [port["port"] for rule in others for port in rule["ports"]] == ports
    for rule in others:
        blocks = {each["ipBlock"]["cidr"]: each["ipBlock"]["except"] for each in rule["to"]}
        assert "169.254.0.0/16" in blocks["0.0.0.0/0"] and blocks.keys() == {"0.0.0.0/0", "::/0"}


@pytest.mark.parametrize(("kind", "port"), [("daemon", 9200), ("valkey", 6379)])
def test_monitors_reach_no_port_of_the_cache(kind: str, port: int) -> None:
    """Only replicas reach the shared cache, which asks nobody; monitors read the daemon's figures at their own port."""
    monitors = [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]
    more = {"ports": [{"port": 4318}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    values = {"l2": {"kind": kind}, "networkPolicy": {"monitors": monitors, "egress": {"replicas": [more]}}}
    manifests = rendered(LEAST | values | {"serviceMonitor": {"enabled": True}})
    policy = one(manifests, "NetworkPolicy", f"kv-hotspan-{kind}")["spec"]
    [rule] = [rule for rule in policy["ingress"] if {"port": port} in rule["ports"]]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "replica"
    assert policy["egress"] == []
    others = [rule for rule in policy["ingress"] if {"port": port} not in rule["ports"]]
    assert others == ([{"ports": [{"port": 9201}], "from": monitors}] if kind == "daemon" else [])
    rules = one(manifests, "NetworkPolicy", "kv-hotspan-replica")["spec"]["egress"]
    assert [port] in [[each["port"] for each in rule["ports"]] for rule in rules] and more in rules
    if kind == "daemon":
        daemon = one(manifests, "DaemonSet", "kv-hotspan-daemon")
        assert "--metrics-port=9201" in words(daemon)
        [endpoint] = one(manifests, "ServiceMonitor", "kv-hotspan-daemon")["spec"]["endpoints"]
        ports = {each["name"]: each["port"] for each in one(manifests, "Service", "kv-hotspan-daemon")["spec"]["ports"]}
        assert ports[endpoint["port"]] == 9201


def test_valkey_has_a_password_by_default() -> None:
    """One is made where none is given, and server and replicas take it from the same Secret."""
    manifests = rendered(LEAST | {"l2": {"kind": "valkey"}})
    [secret] = [each for each in manifests if each["kind"] == "Secret"]
    assert secret["metadata"]["name"] == "kv-hotspan-valkey"
    replica, server = (one(manifests, "StatefulSet", f"kv-hotspan-{part}") for part in ("replica", "valkey"))
    assert "--l2-option=password=env:L2_PASSWORD" in words(replica)
    [script] = words(server)
    assert 'requirepass "$PASSWORD"' in script and "protected-mode" not in script
    for manifest, variable in ((replica, "L2_PASSWORD"), (server, "PASSWORD")):
        [found] = [each for each in pod(manifest)["containers"][0]["env"] if each["name"] == variable]
        assert found["valueFrom"]["secretKeyRef"] == {"name": "kv-hotspan-valkey", "key": "password"}


class Cluster(http.server.BaseHTTPRequestHandler):
    """As much of Kubernetes' API as Helm needs to look for one Secret."""

    kept = base64.b64encode(b"the password of before").decode()
    path_of_secret = "/api/v1/namespaces/llm/secrets/kv-hotspan-valkey"

    def do_GET(self) -> None:
        kind = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
        known: dict[str, Manifest] = {
            "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [kind]},
            self.path_of_secret: {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": "kv-hotspan-valkey",
                    "namespace": "llm",
                    "labels": {"app.kubernetes.io/managed-by": "Helm"},
                    "annotations": {"meta.helm.sh/release-name": "kv", "meta.helm.sh/release-namespace": "llm"},
                },
                "data": {"password": self.kept},
            },
        }
        found = known.get(self.path.partition("?")[0])
        said = found or {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
        content = json.dumps(said).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: Helm's questions are not the test's to print."""


def test_passwords_that_were_made_are_kept(tmp_path: Path) -> None:
    """Where the cluster has a Secret that the chart made, an upgrade keeps its value; what is missing is made."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    for name in ("Chart.yaml", "values.yaml", "values.schema.json", "templates/_helpers.tpl", "templates/secrets.yaml"):
        shutil.copy(CHART / name, chart / name)
    cluster = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=cluster.serve_forever, daemon=True).start()
    try:
        server = ("--kube-apiserver", f"http://127.0.0.1:{cluster.server_port}")
        words = ("--namespace", "llm", "--dry-run=server", "--disable-openapi-validation", *server)
        events = {"modelVolume": {"emptyDir": {}}, "router": {"kvEvents": True}}
        given = LEAST | events | {"l2": {"kind": "valkey"}}
        done = helm("template", "kv", str(chart), *words, values=given, directory=tmp_path)
    finally:
        cluster.shutdown()
        cluster.server_close()
    assert done.returncode == 0, done.stderr
    found = {each["metadata"]["name"]: each["data"] for each in yaml.safe_load_all(done.stdout) if each}
    assert found["kv-hotspan-valkey"] == {"password": Cluster.kept}
    assert len(base64.b64decode(found["kv-hotspan-kv-events"]["key"])) == 48


def test_selectors_find_their_pods() -> None:
    """Each service, budget and policy selects exactly one part's pods, and the front those of the router."""
    for name in COMBINATIONS:
        manifests = rendered(COMBINATIONS[name])
        pods = [
            each["spec"]["template"]["metadata"]["labels"] for each in manifests if "template" in each.get("spec", {})
        ]
        for manifest in manifests:
            if manifest["kind"] == "Service":
                selector = manifest["spec"]["selector"]
            elif manifest["kind"] == "PodDisruptionBudget":
                selector = manifest["spec"]["selector"]["matchLabels"]
            elif manifest["kind"] == "NetworkPolicy":
                selector = manifest["spec"]["podSelector"]["matchLabels"]
            else:
                continue
            assert sum(selector.items() <= labels.items() for labels in pods) == 1, manifest["metadata"]["name"]


def test_the_daemon_shares_the_nodes_memory() -> None:
    """Daemon and replicas share a directory of the node's memory, as the same user, and no other release sees it."""
    manifests = rendered(COMBINATIONS["daemon"])
    paths = {path for release in ("kv", "other") for path in _on_node(rendered(COMBINATIONS["daemon"], release))}
    assert paths == {
        *("/dev/shm/llm_kv-hotspan", "/dev/shm/llm_other-hotspan"),
        *("/var/lib/hotspan-daemon/llm_kv-hotspan", "/var/lib/hotspan-daemon/llm_other-hotspan"),
    }
    daemon = one(manifests, "DaemonSet", "kv-hotspan-daemon")
    replica = one(manifests, "StatefulSet", "kv-hotspan-replica")
    for each in (daemon, replica):
        [volume] = [volume for volume in pod(each)["volumes"] if volume["name"] == "shm"]
        assert volume["hostPath"] == {"path": "/dev/shm/llm_kv-hotspan", "type": "DirectoryOrCreate"}
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod(each)["containers"][0]["volumeMounts"]
    assert pod(daemon)["securityContext"]["runAsUser"] == pod(replica)["securityContext"]["runAsUser"]
    service = one(manifests, "Service", "kv-hotspan-daemon")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert f"--l2=sagemaker-hyperpod://{service['metadata']['name']}:9200" in words(replica)


def test_no_two_releases_share_a_directory_of_the_node() -> None:
    """Namespaces and releases whose names only join to the same text have directories of their own."""
    found = []
    for namespace, release in (("a-b", "hotspan"), ("a", "b-hotspan")):
        done = helm("template", release, str(CHART), "--namespace", namespace, values=COMBINATIONS["daemon"])
        assert done.returncode == 0, done.stderr
        found.append(_on_node([each for each in yaml.safe_load_all(done.stdout) if each]))
    assert len(found[0]) == len(found[1]) == 2 and not found[0] & found[1]


def _on_node(manifests: list[Manifest]) -> set[str]:
    """The paths of the node that pods use."""
    volumes = [volume for each in manifests if "template" in each.get("spec", {}) for volume in pod(each)["volumes"]]
    return {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}


def test_a_replica_waits_for_its_directory_on_the_node() -> None:
    """It starts once the daemon's pod has made the directory in the node's memory, and made it this user's."""
    manifests = rendered(COMBINATIONS["daemon"])
    [wait] = pod(one(manifests, "StatefulSet", "kv-hotspan-replica"))["initContainers"]
    assert wait["command"][-1] == "until [ -w /dev/shm ]; do sleep 1; done"
    subprocess.run(wait["command"], check=True, timeout=60)
    [make] = pod(one(manifests, "DaemonSet", "kv-hotspan-daemon"))["initContainers"]
    assert make["command"][-2:] == ["/node/shm", "/node/disk/daemon"]
    assert {"name": "shm", "mountPath": "/node/shm"} in make["volumeMounts"]


def test_metrics_are_read_once_and_with_the_token() -> None:
    """A monitor of each part selects one service; that of the replicas shows the admin token, which they ask for."""
    for name in ("keys, disk, metrics", "valkey"):
        manifests = rendered(COMBINATIONS[name])
        services = [each["metadata"]["labels"] for each in manifests if each["kind"] == "Service"]
        monitors = {
            each["metadata"]["name"].removeprefix("kv-hotspan-"): each["spec"]
            for each in manifests
            if each["kind"] == "ServiceMonitor"
        }
        for spec in monitors.values():
            chosen = [labels for labels in services if spec["selector"]["matchLabels"].items() <= labels.items()]
            if "matchExpressions" in spec["selector"]:
                chosen = [labels for labels in chosen if "hotspan/front" not in labels]
            assert len(chosen) == 1
        [endpoint] = monitors["replica"]["endpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "admin", "key": "token"}


def test_valkey_starts_as_it_is_told(tmp_path: Path) -> None:
    """Its script, run with a real server, asks for the password, which is on no command line, and evicts when full."""
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        pytest.fail("redis-server is not installed: make servers")
    manifest = one(
        rendered(LEAST | {"l2": {"kind": "valkey"}, "valkey": {"passwordSecret": {"name": "v"}}}),
        "StatefulSet",
        "kv-hotspan-valkey",
    )
    port = free_port()
    [script] = words(manifest)
    script = script.replace("port 6379", f"port {port}\nbind 127.0.0.1").replace("dir /tmp", f"dir {tmp_path}")
    fake = tmp_path / "valkey-server"
    fake.write_text(f'#!/bin/sh\nexec {server} "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PASSWORD": "s3cret"}
    process = subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        from redis import AuthenticationError, Redis
        from redis.exceptions import ConnectionError as Refused

        client = Redis(port=port, password="s3cret")
        deadline = time.monotonic() + 60
        while True:
            try:
                client.ping()
                break
            except Refused:
                assert time.monotonic() < deadline and process.poll() is None, "it does not answer"
                time.sleep(0.05)
        said = client.config_get("maxmemory*")
        assert (said["maxmemory"], said["maxmemory-policy"]) == (str(32 << 30), "allkeys-lru")
        with pytest.raises(AuthenticationError):
            Redis(port=port).ping()
        assert b"s3cret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.kill()
        process.wait()


def test_examples_of_the_docs() -> None:
    """Every example of values in docs/kubernetes.md renders to what Kubernetes takes."""
    examples = [block.partition("```")[0] for block in DOCS.read_text().split("```yaml\n# values")[1:]]
    assert examples
    for example in examples:
        values = yaml.safe_load("# values" + example)
        for manifest in rendered(values):
            if manifest["kind"] != "ServiceMonitor":
                kubernetes_validate.validate(manifest, NEWEST, strict=True)
