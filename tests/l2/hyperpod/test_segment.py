"""What is in the shared memory is not believed: other bytes, lengths and files are a miss."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from hotspan.core.frame import HEADER_BYTES, FrameFault, verify
from hotspan.l2.base import PREAMBLE_BYTES
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.testing.chunks import content
from tests.daemon_protocol.peer import Peer
from tests.l2.hyperpod.rig import SIZE, Object, found_in, missed, scribble, there


class TestSegment:
    @pytest.mark.parametrize("at", [0, 8, 40, 100, 255])
    def test_another_record_is_a_miss(self, peer: Peer, store: HyperpodStore, at: int) -> None:
        """A byte of the record that is wrong is a miss, in `find` and in `get` after it."""
        one = Object()
        one.put(store)
        found = there(store, one.key)
        scribble(peer, one.key, at, bytes([one.value[at] ^ 1]))
        assert not one.get(store, found)
        assert found_in(store, one.key) is None

    def test_another_chunks_object_is_a_miss(self, peer: Peer, store: HyperpodStore) -> None:
        """A whole object of another key under this one's name, or between `find` and `get`, is a miss."""
        one, two = Object("a"), Object("b")
        one.put(store)
        found = there(store, one.key)
        for at in range(0, len(two.value), 4096):
            scribble(peer, one.key, at, two.value[at : at + 4096])
        assert not one.get(store, found)
        assert found_in(store, one.key) is None

    def test_wrong_payload_is_the_frames_to_see(self, peer: Peer, store: HyperpodStore) -> None:
        """Bytes behind the record that are wrong come as they are, and the frame says so."""
        one = Object()
        one.put(store)
        scribble(peer, one.key, PREAMBLE_BYTES + HEADER_BYTES + 9, b"wrong")
        into = [memoryview(bytearray(len(part))) for part in one.frame]
        assert store.get(there(store, one.key), into)
        assert verify(into[0], into[1], one.identity) is FrameFault.PAYLOAD

    @pytest.mark.parametrize("size", [1, 17, 256, 4095, 8191, 8192, PREAMBLE_BYTES + HEADER_BYTES + SIZE - 1])
    def test_an_object_of_another_length_is_a_miss(self, store: HyperpodStore, size: int) -> None:
        """What is shorter or longer than its record says is none, whoever put it there."""
        one = Object()
        name = one.key.hex()
        assert store.blobs.daemon.put(name, [one.value[:size]])
        long = Object("long")
        assert store.blobs.daemon.put(long.key.hex(), [long.value, b"x"])
        for each in (one, long):
            found = found_in(store, each.key)
            assert found is None or not each.get(store, found)

    def test_other_clients_objects_are_a_miss(self, store: HyperpodStore) -> None:
        """Bytes that another client keeps under such a name are no object."""
        one = Object()
        assert store.blobs.daemon.put(one.key.hex(), [content(one.key, len(one.value))])
        assert found_in(store, one.key) is None

    def test_a_replaced_segment(self, peer: Peer, store: HyperpodStore) -> None:
        """A lease of a segment that was replaced is a miss, though the new file has the same bytes in it."""
        one = Object()
        one.put(store)
        found = there(store, one.key)

        def replaced(said: dict[str, Any]) -> dict[str, Any]:
            data = peer.path.read_bytes()
            peer.path.unlink()
            peer.path.write_bytes(data)
            return said

        peer.twist = replaced
        assert not one.get(store, found)
        assert store.refused["segment"] == 1

    def test_a_restarted_daemon(self, peer: Peer, store: HyperpodStore) -> None:
        """After a restart everything is a miss, and put and read anew without a new store."""
        one = Object()
        one.put(store)
        found = there(store, one.key)
        peer.restart()
        assert found_in(store, one.key) is None
        assert not one.get(store, found)
        assert one.put(store) and one.get(store, there(store, one.key))

    @pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
    def test_a_truncated_segment(self, peer: Peer, store: HyperpodStore, size: int) -> None:
        """A segment cut short under a lease is a miss, and no signal ends the process."""
        one = Object(size=1 << 20)
        one.put(store)
        found = there(store, one.key)
        os.truncate(peer.path, size)
        missed(lambda: one.get(store, found))
        missed(lambda: found_in(store, one.key))
        os.truncate(peer.path, 16 << 20)

    def test_a_segment_that_shrinks_during_the_copy(self, peer: Peer, store: HyperpodStore, monkeypatch: Any) -> None:
        """Cut between the look at its size and the copy, the copy ends where the file does: a miss."""
        one = Object(size=1 << 20)
        one.put(store)
        found = there(store, one.key)
        real = os.preadv

        def shrinking(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if len(buffers[0]) != 256:
                os.truncate(peer.path, 0)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", shrinking)
        assert not one.get(store, found)
        monkeypatch.undo()
        os.truncate(peer.path, 16 << 20)

    @pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "link"])
    def test_what_is_no_segment(self, peer: Peer, store: HyperpodStore, kind: str) -> None:
        """Where the segment should be there is nothing, a directory, a pipe, a link: a miss or an OSError, at once."""
        one = Object()
        one.put(store)
        found = there(store, one.key)
        aside = peer.path.with_name(peer.path.name + "-aside")
        peer.path.rename(aside)
        if kind == "directory":
            peer.path.mkdir()
        elif kind == "fifo":
            os.mkfifo(peer.path)
        elif kind == "link":
            peer.path.symlink_to(aside)
        try:
            missed(lambda: one.get(store, found))
            missed(lambda: found_in(store, one.key))
            if kind == "missing":
                with pytest.raises(FileNotFoundError, match="shared_memory_name"):
                    store.find([one.key])
        finally:
            if kind == "directory":
                peer.path.rmdir()
            elif kind != "missing":
                peer.path.unlink()
            aside.rename(peer.path)
        assert one.get(store, there(store, one.key))
