"""The paths of those who run hotspan on a platform, and of those who change it, up to the first hit or a green test.

No cluster is at hand: the containers of the Helm chart run as processes on loopback, with the arguments that the chart
gives them.
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.ports import free_port
from tests.deploy.test_helm import one, rendered, words

from .test_pages import DOCS, FENCE
from .test_paths import SMALL, TEXT, block, cached, command, completion, reached, running, shell
from .test_paths import model as model
from .test_paths import timed as timed

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = DOCS.parent
LONG = TEXT * 2
"""With a tiny model a shorter text may be computed as soon as it is loaded: the server then computes it."""


def values(page: str, title: str) -> dict[str, Any]:
    """The values file of a page with this title."""
    [found] = [text for language, text in FENCE.findall((DOCS / page).read_text()) if text.startswith(f"# {title}")]
    parsed: dict[str, Any] = yaml.safe_load(found)
    return parsed


def test_a_user_of_kubernetes(model: str, tmp_path: Path) -> None:
    """A daemon on each node: a replica loads what another one has computed, and the router answers with it."""
    given = values("kubernetes.md", "values: a daemon on each node")
    given |= {"model": model, "daemon": {"sizeGib": 1}}
    given["replicas"] |= {"count": 2, "ramGib": 1, "args": SMALL}
    manifests = rendered(given)
    daemon, ports = free_port(), [free_port(), free_port()]
    name = f"hotspan_chart_{daemon}"
    local = {
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--sessions-path=/tmp/hotspan-sessions": f"--sessions-path={tmp_path / 'sessions'}",
        "--l2=sagemaker-hyperpod://kv-hotspan-daemon:9200": f"--l2=sagemaker-hyperpod://127.0.0.1:{daemon}",
    }

    def container(kind: str, role: str, port: int, *more: str) -> str:
        """The command line of a pod's container, at a port of this machine's."""
        found = " ".join(local.get(word, word) for word in words(one(manifests, kind, f"kv-hotspan-{role}")))
        for number, at in enumerate(ports):
            found = re.sub(rf"http://kv-hotspan-replica-{number}\.\S+", f"http://127.0.0.1:{at}", found)
        return " ".join(["hotspan", found.replace("--port=8080", f"--port={port}"), *more])

    def replica(number: int) -> str:
        return container("StatefulSet", "replica", ports[number], f"--l2-option=shared_memory_name={name}")

    node = container("DaemonSet", "daemon", daemon, f"--shared-memory-name={name}")
    node = node.replace("--port=9200", f"--port={daemon}").replace(
        "--metrics-port=9201", f"--metrics-port={free_port()}"
    )
    with running(node, daemon, tmp_path / "daemon"):
        with running(replica(0), ports[0], tmp_path / "replica-0"):
            assert cached(json.dumps(completion(ports[0], model, LONG))) == 0
        router = free_port()
        with (
            running(replica(1), ports[1], tmp_path / "replica-1"),
            running(container("Deployment", "router", router), router, tmp_path / "router"),
        ):
            assert cached(json.dumps(completion(router, model, LONG))) >= 1024
            page = shell(f"curl -s localhost:{ports[1]}/metrics")
            assert re.search(r'hotspan_cache_hit_tokens_total\{.*tier="l2"', page)


def test_a_user_of_ray(model: str, tmp_path: Path) -> None:
    """`hotspan deploy ray` on a Ray of this machine's own: the second request hits, behind HAProxy."""
    deploy = command(block("ray.md", "hotspan deploy ray MODEL --replicas 2"), "--replicas 2")
    ours, _, theirs = deploy.replace("MODEL", model).replace("--replicas 2", "--replicas 1").partition(" -- ")
    theirs = theirs.replace("--tenants tenants.yaml --max-model-len 32768", "--insecure --ram-gib 0.25")
    port = free_port()
    text = " ".join([ours, "--gpus 0 --cpus 1 --port", str(port), "--", theirs, *SMALL])
    # multiprocessing leaves a directory in TMPDIR for each process of Ray's that is killed. Sockets have short names.
    sockets = {"RAY_TMPDIR": tempfile.gettempdir()}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place,
        running(text, port, tmp_path / "log", said="hotspan is ready on", TMPDIR=place, **sockets),
    ):
        completion(port, model, TEXT)
        assert cached(json.dumps(completion(port, model, TEXT))) >= 256


def test_a_contributor(tmp_path: Path) -> None:
    """A clone installs what development needs, and its own lint and a first test pass."""
    clone = tmp_path / "hotspan"
    shell(f"git clone -q {ROOT} {clone}")
    shell(f"cd {clone} && make develop PYTHON={Path(sys.base_prefix) / 'bin' / 'python3'}", hang_s=1500)
    shell(f"cd {clone} && make lint && .venv/bin/python -m pytest -q tests/core", hang_s=600)
    reached()
    shutil.rmtree(clone)  # some GB
