"""The commands of README, docs/ and examples/README.md: how each is run as a reader would paste it, or why it is not.

`python -m tests.docs.pasted` lists them with what is done, and counts those that are left out by their reason.

A page can't know the reader's model, hosts, ports, directories and sizes: these are put in (`REPLACED`).
`hotspan serve` is not started for each of its lines: `Checked` validates the options as `serve` would, the engine's own
parser included (`hotspan config check`). Everything else runs, beside one engine.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROGRAMS = (
    *("hotspan", "vllm", "curl", "make", "python", "python3", "pip", "docker", "helm", "kubectl", "redis-server"),
    *("chmod", "export", "useradd", "install", "openssl", "systemctl", "for"),
)
_BEGINS = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/bin/|)(?:{'|'.join(_PROGRAMS)})(?= )")
_NO_COMMAND = re.compile(r"│|──|\|  |^\S+ +hotspan serve /models", re.MULTILINE)


_COMMENT = re.compile(r"\s+# [^\n\"]*$")


class Pasted(NamedTuple):
    """A command of a page, on one line unless it is a script."""

    page: str
    text: str


@dataclass(frozen=True, slots=True)
class Runs:
    """It runs beside a server, and its exit status is one of these. says: what its output has, as the page shows it."""

    statuses: tuple[int, ...] = (0,)
    says: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A server's options are checked, and it is not started."""


@dataclass(frozen=True, slots=True)
class Starts:
    """It goes on until it is told to stop: it is started, answers, and ends on SIGTERM with status 0."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A test of its own runs it: FILE::TEST, below tests/."""

    test: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """It does not run. why: what this machine has not, or whose command it is."""

    why: str


How = Runs | Checked | Starts | Elsewhere | LeftOut

_CONTAINERS = "it needs a container runtime or a cluster"
_ROOT = "it changes the machine's own users and services"
_INSTALLS = "it installs into an environment of its own, which takes minutes"
_THE_GATE = "it is the gate, or the demo itself"
_HOSTS = "it needs two hosts"

HOW: tuple[tuple[str, How], ...] = (
    (r"^make (demo|test)", LeftOut(_THE_GATE)),
    (r"^hotspan demo --output", LeftOut(_THE_GATE)),
    (r"^(docker|kubectl)", LeftOut(_CONTAINERS)),
    (r"^helm install", Elsewhere("deploy/test_helm.py::test_kubernetes_takes_it")),
    (r"^(useradd|install|systemctl|openssl|python3 -m venv /opt)", LeftOut(_ROOT)),
    (r"pip install|-m venv", LeftOut(_INSTALLS)),
    (r"--nnodes", LeftOut(_HOSTS)),
    (r"^hotspan deploy ray .*--address auto", LeftOut("it needs a Ray cluster that runs")),
    (r"^hotspan deploy ray", Elsewhere("docs/test_paths_of_platforms.py::test_a_user_of_ray")),
    (r"^redis-server", LeftOut("it is another program's, for a host of its own")),
    (
        r"^vllm serve MODEL --middleware",
        Elsewhere("engine/test_control.py::test_vllm_serve_is_administered_by_the_command_line"),
    ),
    (r"LMCacheConnectorV1.*|^LMCACHE_CONFIG_FILE", Elsewhere("docs/test_paths.py::test_a_user_of_lmcache")),
    (r"vllm serve", Elsewhere("docs/test_paths.py::test_a_user_of_vllm")),
    (r"^hotspan serve /opt/ml/model --compat", Elsewhere("docs/test_paths.py::test_a_user_of_lmi")),
    (r"^hotspan config (explain|check) MODEL \.\.\.", Runs()),
    (r"s3://", LeftOut("it needs a bucket")),
    (r"^(\.venv/bin/)?hotspan serve", Checked()),
    (r"^hotspan (route|daemon)", Starts()),
    (r"^curl .*\$HOTSPAN_ADMIN_TOKEN|^curl .*\"legal\"", Elsewhere("examples/test_run.py::test_lora")),
    (r"^curl .*/invocations", Runs(says="generated_text")),
    (r"^curl .*hotspan/cache/(invalidate|pin|prefetch|warm)", Runs()),
    (r"^curl", Runs()),
    (r"^python3 - <<", Elsewhere("docs/test_paths.py::test_quick_start")),
    (r"^hotspan demo-model", Runs()),
    (r"^hotspan doctor", Runs(statuses=(0, 1), says="ok")),
    (r"^hotspan ab --a-serve", LeftOut("it starts two engines")),
    (r"^hotspan ab --router", LeftOut("it needs a router with a canary")),
    # Of few questions the verdict is "can't tell", status 2.
    (r"^hotspan ab", Runs(statuses=(0, 2), says="of 2")),
    (r"^hotspan bench report", Runs()),
    (r"^hotspan bench", Runs(statuses=(0, 1))),
    (r"^hotspan cache explain", Runs(statuses=(0, 1))),
    (r"^hotspan cache lookup", Runs(statuses=(0, 1))),
    (r"^hotspan cache", Runs()),
    (r"^hotspan config", Runs()),
    (r"^hotspan keys init", Runs()),
    (r"^hotspan keys shred", LeftOut("the server of this test has no keys")),
    (r"^hotspan plan", Runs()),
    (r"^hotspan simulate", Runs()),
    (r"^hotspan trace", Runs()),
    (r"^chmod|^export", Runs()),
)
"""By the first pattern that is found in a command."""

REPLACED: tuple[tuple[str, str], ...] = (
    (r"^hotspan demo-model /tmp/model", "hotspan demo-model {here}/demo-{free}"),
    (r"^(hotspan daemon .*--disk) \S+", r"\1 {here}/daemon-{free}"),
    (r"^curl -s localhost:8080/metrics", "curl -s localhost:8080/metrics -H 'authorization: Bearer {token}'"),
    (r"--workload long-doc-qa", "--workload long-doc-qa --ldqa-document-length 500 --ldqa-max-output-length 4"),
    (r"\.venv/bin/hotspan", "hotspan"),
    (r"^\$ ", ""),
    (r"\[the options that `hotspan serve` will get\]", ""),
    (r" \.\.\.(?= |$)", ""),
    (r"\"\.\.\.\"", '"Hello"'),
    (r"\[\.\.\.\]", '[{"role": "user", "content": "Hello"}]'),
    (r"(?<![\w/])(MODEL|/tmp/model|/path/to/model|/opt/ml/model)(?![\w/])", "{model}"),
    (r"\"model\": \"(Hello|m|lmi)\"", '"model": "{model}"'),
    (r"--model lmi", "--model {model}"),
    (r"http://10\.0\.0\.6:8080", "http://127.0.0.2:{port}"),
    (r"http://(?:10\.0\.0\.\d|old|new|server|router|localhost|127\.0\.0\.1):80(?:80|81|00)", "http://127.0.0.1:{port}"),
    (r"localhost:80(80|81|00)", "127.0.0.1:{port}"),
    (r"--port \d+", "--port {free}"),
    (r"--host 0\.0\.0\.0", "--host 127.0.0.1"),
    (r"--admin-port \d+", "--admin-port {other}"),
    (r"/mnt/shared(?=/)", "{here}/shared"),
    (r"(/nvme|/mnt/nvme)(?=/| )", "{here}"),
    (r"/var/lib/hotspan/keys", "{here}/keys"),
    (r"/etc/hotspan", "{here}"),
    (r"--(ram|disk|size)-gib \d+", r"--\1-gib 1"),
    (r"capacity_gib=\d+", "capacity_gib=1"),
    (r"--kv-cache-volume \d+", "--kv-cache-volume 0.01"),
    (r"--seconds 3600", "--seconds 5"),
    (r"^hotspan simulate", "hotspan simulate --requests 100"),
    (r"^hotspan ab(?= )", "hotspan ab --items 2 --max-tokens 4"),
    (r"Bearer sk-[\w.-]+", "Bearer {token}"),
    (r"--repetitions 5", "--repetitions 2"),
    (r"env:REDIS_PASSWORD", "file:{here}/password"),
    (r"\$NODE_IP", "127.0.0.1"),
)
"""What a page can't know, and sizes and times that are too large for a test."""


def commands() -> list[Pasted]:
    """Each command of each page, in their order."""
    found = []
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs" / "reference"):  # written from the code
            continue
        for language, block in _FENCE.findall(page.read_text()):
            if language in ("", "bash", "sh", "console") and not _NO_COMMAND.search(block):
                found += [Pasted(str(page.relative_to(ROOT)), text) for text in _of_block(block)]
    return found


def _of_block(block: str) -> list[str]:
    if "<<" in block:
        return [block]
    found: list[str] = []
    waiting = ""
    for line in block.replace("\\\n", " ").splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        try:
            shlex.split(waiting, comments=True)
        except ValueError:
            continue  # within quotes: the next line belongs to it
        if _BEGINS.match(waiting.strip()):
            text = waiting.strip().removeprefix("$ ")
            found.append(_COMMENT.sub("", text))
        waiting = ""
    return found


def how(command: Pasted) -> How | None:
    """What is done with a command; None if nothing says it."""
    return next((found for pattern, found in HOW if re.search(pattern, command.text, re.DOTALL)), None)


def filled(text: str, values: Callable[[str], str]) -> str:
    """A command with what a page can't know."""
    for pattern, by in REPLACED:
        text = re.sub(pattern, by, text)
    return re.sub(r"\{(model|port|free|other|here|token)\}", lambda found: values(found[1]), text)


def main() -> None:
    """Print what is done with each command, and the counts."""
    counts: Counter[str] = Counter()
    why: Counter[str] = Counter()
    for command in commands():
        found = how(command)
        kind = type(found).__name__
        counts[kind] += 1
        if isinstance(found, LeftOut):
            why[found.why] += 1
        print(f"{kind:9} {command.page}: {' '.join(command.text.split())[:110]}")
    print(f"\n{sum(counts.values())} commands: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    print("left out:")
    for reason, count in why.most_common():
        print(f"  {count:3} {reason}")


if __name__ == "__main__":
    main()
