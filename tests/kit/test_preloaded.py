"""Programs from a nursery are children like those of subprocess.Popen, in all that a test can see of one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kit.nursery import NotForked
from kit.preloaded import Preloaded
from kit.spawning import Imports, is_program
from kit.waiting import until

STARTS = """
import json, multiprocessing, os, resource, signal, sys, threading

def child(queue):
    queue.put((os.getpid(), os.getppid(), os.environ["OF_PARENT"], __name__, os.path.exists("/dev/shm/marker")))

if __name__ == "__main__":
    os.environ["OF_PARENT"] = "yes"
    if sys.argv[-1] == "pause":
        print("pauses", flush=True)
        signal.pause()
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    spawned = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
    spawned.start()
    of_child = queue.get()
    spawned.join()
    told = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv, "cwd": os.getcwd()}
    told |= {"environment": dict(os.environ), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    told |= {"spawned": [spawned.pid, *of_child], "code": spawned.exitcode, "path": sys.path[0]}
    told |= {"has_marker": os.path.exists("/dev/shm/marker")}
    told |= {"threads": threading.active_count(), "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:3]}
    print(json.dumps(told))
    print("to stderr", file=sys.stderr)
    raise SystemExit(7)
"""
"""A module hotspan.cli.serve for these tests: imports are no part of what is tested."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a package `hotspan` whose server tells about itself."""
    (tmp_path / "hotspan" / "cli").mkdir(parents=True)
    for name in ("hotspan", "hotspan/cli"):
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "hotspan" / "cli" / "serve.py").write_text(STARTS)
    return tmp_path


@pytest.fixture
def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(place), "KEPT": "1"}


@pytest.fixture
def preloaded(environment: dict[str, str]) -> Iterator[Preloaded]:
    with Preloaded(environment, modules=()) as found:
        yield found


COMMAND = (sys.executable, "-m", "hotspan.cli.serve", "MODEL", "--an-option")


def told(process: "subprocess.Popen[Any]") -> tuple[dict[str, Any], str]:
    """What it prints, and on stderr."""
    out, error = process.communicate(timeout=60)
    return json.loads(out), error.decode()


@pytest.mark.parametrize("way", ["forked", "whole"])
def test_it_is_as_popen_has_it(way: str, preloaded: Preloaded, environment: dict[str, str], place: Path) -> None:
    """Number, parent, session, arguments, directory, environment, limit of files, output and exit status are the same,
    and those of a process that it starts with "spawn"."""
    given = environment | {"OF_TEST": "x"} | ({} if way == "forked" else {"PYTHONHASHSEED": "1"})
    pipe = subprocess.PIPE
    process = preloaded.popen(
        COMMAND, max_files=300, env=given, cwd=place, stdout=pipe, stderr=pipe, start_new_session=True
    )
    said, error = told(process)
    assert process.returncode == 7 and error == "to stderr\n"
    expected = {"pid": process.pid, "parent": os.getpid(), "session": process.pid, "cwd": str(place), "files": 300}
    assert expected.items() <= said.items()
    assert said["argv"][1:] == ["MODEL", "--an-option"] and said["argv"][0].endswith("hotspan/cli/serve.py")
    assert said["environment"] == given | {"OF_PARENT": "yes"}
    assert (said["path"], said["threads"], said["fds"]) == (str(place), 1, [0, 1, 2])
    child, itself, parent, variable, name, _ = said["spawned"]
    assert (child, parent, variable, name) == (itself, process.pid, "yes", "__mp_main__") and said["code"] == 0


def test_only_one_whose_imports_would_do_the_same_is_forked(place: Path, environment: dict[str, str]) -> None:
    """A variable that imports read, or a library when it is loaded, has the same value; others don't matter."""
    imports = Imports({"OMP_NUM_THREADS": "1", "MODE": "a"}, ["MODE", "NEVER_SET", "PATH"])
    assert imports.fit({"OMP_NUM_THREADS": "1", "MODE": "a", "OTHER": "b", "PATH": "/bin"})
    assert not imports.fit({"OMP_NUM_THREADS": "2", "MODE": "a"})
    assert not imports.fit({"OMP_NUM_THREADS": "1", "MODE": "b"})
    assert not imports.fit({"OMP_NUM_THREADS": "1", "MODE": "a", "NEVER_SET": ""})
    assert not imports.fit({"OMP_NUM_THREADS": "1", "MODE": "a", "PYTHONHASHSEED": "0"})
    assert not imports.fit({"MODE": "a"})


def test_variables_that_imports_read_are_recorded(place: Path, environment: dict[str, str]) -> None:
    """One that a module reads as it is imported makes a server a program of its own; one that it copies does not."""
    (place / "reads.py").write_text("import os\nos.environ.get('READ'), dict(os.environ), os.environ.copy()\n")
    with Preloaded(environment | {"READ": "1"}, modules=["reads"]) as preloaded:
        for variables, is_forked in (({"READ": "1", "KEPT": "2"}, True), ({"READ": "2"}, False)):
            how = {"env": environment | variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = preloaded.popen([*COMMAND, "pause"], cwd=place, **how)
            assert process.stdout is not None and process.stdout.readline() == b"pauses\n"
            assert bool(psutil.Process(process.pid).children()) == is_forked  # its nursery
            process.kill()
            process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_end_it_and_what_it_was_given(
    number: signal.Signals, preloaded: Preloaded, environment: dict[str, str], place: Path
) -> None:
    """The exit status is the signal's, and its nursery ends with it."""
    how = {"env": environment, "cwd": place, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = preloaded.popen([*COMMAND, "pause"], **how)
    assert process.stdout is not None and process.stdout.readline() == b"pauses\n"
    itself = psutil.Process(process.pid)
    assert " ".join(itself.cmdline()).split() == [*COMMAND, "pause"] and itself.name() == Path(sys.executable).name
    (nursery,) = itself.children()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    until(lambda: not nursery.is_running() or nursery.status() == psutil.STATUS_ZOMBIE)


def test_a_server_outlives_the_process_with_the_imports(
    preloaded: Preloaded, environment: dict[str, str], place: Path
) -> None:
    """Closing that one ends no server; another server is forked from a new one."""
    how = {"env": environment, "cwd": place, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = preloaded.popen([*COMMAND, "pause"], **how)
    assert process.stdout is not None and process.stdout.readline() == b"pauses\n"
    preloaded.close()
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    said, _ = told(preloaded.popen(COMMAND, **how))
    assert said["parent"] == os.getpid()


def test_other_commands_are_started_as_ever(preloaded: Preloaded, environment: dict[str, str]) -> None:
    """Only servers, by this Python, are forked."""
    process = preloaded.popen(["sh", "-c", "echo $0 $KEPT"], env=environment, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b"sh 1\n"


def test_it_may_have_shared_memory_of_its_own(
    preloaded: Preloaded, environment: dict[str, str], place: Path, tmp_path: Path
) -> None:
    """A directory is its /dev/shm, and that of what it spawns; a program after it has that of this host."""
    if os.geteuid():
        pytest.skip("a /dev/shm of its own needs root")
    (own := tmp_path / "own").mkdir()
    (own / "marker").touch()
    how = {"env": environment, "cwd": place, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    said, _ = told(preloaded.popen(COMMAND, shared=own, **how))
    assert said["has_marker"] and said["spawned"][-1]
    said, _ = told(preloaded.popen(COMMAND, **how))
    assert not said["has_marker"] and not said["spawned"][-1] and not Path("/dev/shm/marker").exists()


def test_what_is_to_have_its_own_shared_memory_is_not_started_without(
    preloaded: Preloaded, environment: dict[str, str], tmp_path: Path
) -> None:
    """A program that can't be forked has no other way to a /dev/shm of its own."""
    for command, variables in ((["sh", "-c", "true"], {}), (COMMAND, {"PYTHONHASHSEED": "1"})):
        with pytest.raises(NotForked):
            preloaded.popen(command, shared=tmp_path, env=environment | variables)


def test_the_chosen_programs_are_forked(environment: dict[str, str], tmp_path: Path) -> None:
    """Such as any module or file of Python's, where a test asks for that; a file's children are of that file."""
    script = tmp_path / "own.py"
    script.write_text(STARTS)
    how = {"env": environment, "cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Preloaded(environment, modules=(), chosen=is_program) as preloaded:
        process = preloaded.popen([sys.executable, str(script), "pause"], **how)
        assert process.stdout is not None and process.stdout.readline() == b"pauses\n"
        assert psutil.Process(process.pid).children()  # its nursery
        process.kill()
        process.communicate(timeout=60)
        said, _ = told(preloaded.popen([sys.executable, str(script)], **how))
    assert said["argv"] == [str(script)] and said["path"] == str(tmp_path) and said["spawned"][4] == "__mp_main__"
