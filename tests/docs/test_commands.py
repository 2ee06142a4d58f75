"""Each command of README, docs/ and examples/README.md, as a reader would paste it: `make docs-commands`.

What is done with which is in pasted.py. One server of a small trained model answers all of them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from hotspan.demo.trained import trained_model
from hotspan.l2.file import FileStore
from hotspan.tiers.directory import open_directory
from kit.ports import free_port
from tests.docs.pasted import HOW, ROOT, Checked, Elsewhere, LeftOut, Pasted, Runs, Starts, commands, filled, how

from .test_paths import ENVIRONMENT, HANG_S, SMALL, running

TOKEN = "an-admin-token-of-this-test"
COMMANDS = commands()
RUN = [each for each in COMMANDS if isinstance(how(each), Runs | Checked | Starts)]
CACHE = Path("~/.cache/hotspan/real-model").expanduser()


def test_each_command_has_its_way() -> None:
    """A new command of a page is run, or left out with a reason; no way is left without a command."""
    assert [each for each in COMMANDS if how(each) is None] == []
    used = {next(pattern for pattern, _ in HOW if re.search(pattern, each.text, re.DOTALL)) for each in COMMANDS}
    assert {pattern for pattern, _ in HOW} == used
    assert len(COMMANDS) > 120
    assert sum(isinstance(how(each), LeftOut) for each in COMMANDS) <= 35


def test_tests_that_run_commands_elsewhere_exist() -> None:
    """File and function."""
    for _, found in HOW:
        if isinstance(found, Elsewhere):
            file, _, test = found.test.partition("::")
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), found.test


def test_what_a_page_can_not_know_is_put_in() -> None:
    """No placeholder of a page is left in a command that runs."""
    for each in RUN:
        text = filled(each.text, lambda name: f"<{name}>")
        assert not re.search(r"\bMODEL\b|10\.0\.0\.|\.\.\.|/nvme|\{(model|port|free|other|here|token)\}", text), text


def test_each_body_says_what_it_is() -> None:
    """curl sends a form if it is told nothing, which hotspan and vLLM refuse."""
    bodies = [each for each in COMMANDS if re.match(r"curl ", each.text) and re.search(r" (-d|--data\S*) ", each.text)]
    assert len(bodies) > 5
    assert [each for each in bodies if "content-type: " not in each.text.lower()] == []


class House:
    """A server with a real model, and a directory as the pages' reader has it."""

    def __init__(self, directory: Path, model: Path, port: int) -> None:
        self.directory = directory
        self.values = {"model": str(model), "port": str(port), "here": str(directory), "token": TOKEN}
        self.environment = ENVIRONMENT | {
            "PATH": f"{directory / 'bin'}:{ENVIRONMENT['PATH']}",
            "HOTSPAN_ADMIN_TOKEN": TOKEN,
            "COLUMNS": "160",
            "NO_PROXY": "*",
        }

    def text(self, command: Pasted) -> str:
        """The command with what its page can't know."""
        return filled(command.text, lambda name: self.values.get(name) or str(free_port()))

    def shell(self, text: str) -> subprocess.CompletedProcess[str]:
        """What came of it."""
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    def ask(self, prompt: str = "The archive of the town keeps every letter.") -> None:
        """A request."""
        body = {"model": self.values["model"], "prompt": prompt, "max_tokens": 2}
        httpx.post(
            f"http://127.0.0.1:{self.values['port']}/v1/completions", json=body, timeout=HANG_S
        ).raise_for_status()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The server, and the files that pages have their reader write."""
    directory = tmp_path_factory.mktemp("house")
    model = trained_model(CACHE).path
    (directory / "bin").mkdir()
    hotspan = directory / "bin" / "hotspan"
    hotspan.write_text(f'#!/bin/sh\nexec {sys.executable} -m hotspan "$@"\n')
    hotspan.chmod(0o755)
    (directory / "docs").mkdir()
    (directory / "docs" / "page.md").write_text("A handbook of the town. " * 20)
    (directory / "prompt.txt").write_text("Answer from this handbook. " * 80 + "\n{document}\n{question}")
    (directory / "password").write_text("a-password")
    (directory / "password").chmod(0o600)
    tenants = directory / "tenants.yaml"
    shutil.copy(ROOT / "examples" / "multi_tenant" / "tenants.yaml", tenants)
    tenants.chmod(0o600)
    open_directory(directory / "hotspan", 1 << 16, 1 << 20).close()  # a disk tier's that no server uses
    with closing(FileStore(directory / "shared" / "hotspan")) as l2:
        l2.log.read(0)  # as its first replica does
    port = 8080  # where the pages' commands ask
    found = House(directory, model, port)
    served = ["--ram-gib", "0.5", "--disk", str(directory / "kv"), "--disk-gib", "1", *SMALL]
    words = ["hotspan", "serve", str(model), "--port", str(port), *served]
    with running(" ".join(words), port, directory / "log", hang_s=900, **found.environment):
        found.ask()
        (directory / "my.jsonl").write_text(_trace())
        yield found


def _trace() -> str:
    """A trace in Mooncake's format."""
    row = {"input_length": 1024, "output_length": 8}
    return "".join(json.dumps(row | {"timestamp": at, "hash_ids": [0, at]}) + "\n" for at in range(40))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", RUN, ids=[f"{each.page}-{number}" for number, each in enumerate(RUN)])
def test_a_command_of_a_page(house: House, command: Pasted) -> None:
    """It ends as the page has it, with what the page shows."""
    text, found = house.text(command), how(command)
    if isinstance(found, Checked):
        done = house.shell(re.sub(r"\bhotspan serve\b", "hotspan config check", text))
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    elif isinstance(found, Starts):
        _starts(house, text)
    elif isinstance(found, Runs):
        done = _with_requests(house, text) if "trace record" in text else house.shell(text)
        said = done.stdout + done.stderr
        assert done.returncode in found.statuses, f"{text}\n{said}"
        assert "Traceback" not in said and '"error"' not in done.stdout, f"{text}\n{said}"
        assert found.says in said, f"{text}\n{said}"


def _with_requests(house: House, text: str) -> subprocess.CompletedProcess[str]:
    """A command that waits for requests."""
    is_over = threading.Event()

    def ask() -> None:
        for number in range(60):
            if is_over.wait(0.5):
                return
            house.ask(f"Letter {number}. " + "The archive of the town keeps every letter. " * 40)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return house.shell(text)
    finally:
        is_over.set()
        asking.join()


def _starts(house: House, text: str) -> None:
    """A program that goes on: it says that it is ready, answers, and ends when it is told to."""
    text += f" --shared-memory-name hotspan_pasted_{os.getpid()}" if "hotspan daemon" in text else ""
    text += f" --port {free_port()}" if " --port" not in text else ""
    (port,) = re.findall(r" --port (\d+)", text)
    said = "is ready" if "hotspan daemon" in text else "routes to"
    with running(text, int(port), house.directory / f"log-{port}", said=said, **house.environment):
        pass
