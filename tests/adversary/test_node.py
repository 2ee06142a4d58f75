"""Another user of the same machine: no file, socket or segment of the house opens for them."""

import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from .conftest import House

pytestmark = pytest.mark.engine

ANOTHER = 65534
"""The user `nobody`."""

OPENS = 'for path; do if [ -r "$path" ] || [ -w "$path" ] || [ -x "$path" ]; then echo "$path"; fi; done'
"""Prints what may be opened or connected to. A shell of the system: another user may not reach this environment's."""


def private_files(house: House) -> list[Path]:
    """All that server and daemon made."""
    kept = [house.disk, house.directory / "store", house.directory / "kek", house.directory / "sessions"]
    kept += [path for top in tuple(kept) for path in top.rglob("*")]
    kept += [
        house.shared,
        house.daemon.segment,
        house.daemon.unix_socket,
    ]  # nobody enters what is below a private directory
    return [path for path in kept if path.exists()]


def test_what_is_made_is_its_owners_alone(house: House) -> None:
    """No bit for the group or others on any file or directory that holds KV, keys or sessions."""
    files = private_files(house)
    assert len(files) > 10
    wrong = [f"{path} {stat.filemode(path.stat().st_mode)}" for path in files if path.stat().st_mode & 0o077]
    assert wrong == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_opens_nothing(house: House) -> None:
    """A process of another user neither opens the segment, the sockets, nor anything of the server's in /dev/shm."""
    paths = [
        str(path) for path in (house.daemon.segment, house.daemon.unix_socket, *Path("/dev/shm").glob("**/*hotspan*"))
    ]
    done = subprocess.run(
        ["/bin/sh", "-c", OPENS, "sh", *paths],
        user=ANOTHER,
        group=ANOTHER,
        extra_groups=[],
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == []


def test_the_servers_memory_has_no_name(house: House) -> None:
    """Once the server is ready its slab is in no directory: who lists /dev/shm finds nothing to open."""
    server = psutil.Process(house.server.process.pid)
    maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in (server, *server.children(recursive=True))]
    slabs = {name for text in maps for name in re.findall(r" (/dev/shm/hotspan-slab-.*)$", text, re.MULTILINE)}
    assert slabs and all(name.endswith(" (deleted)") for name in slabs)
    assert not any(Path(name.removesuffix(" (deleted)")).exists() for name in slabs)


def test_no_port_listens_beyond_loopback(house: House) -> None:
    """What was started without naming a host can't be reached by another machine."""
    ports = (*house.ports.values(), *house.event_ports)
    for port in ports:
        with socket.socket() as peer:
            peer.bind(("127.0.0.1", 0))
            peer.settimeout(60)
            assert peer.connect_ex(("127.0.0.1", port)) == 0
    listening = _listening()
    for port in ports:
        assert listening[port] == {"0100007F"}, (port, listening[port])


def _listening() -> dict[int, set[str]]:
    """Addresses (hexadecimal) that each port listens at, IPv4 and IPv6."""
    found: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                address, _, port = local.partition(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found
