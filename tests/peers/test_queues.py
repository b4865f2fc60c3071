import threading

from dpps.peers.connections import FRAMES, Incoming, Outgoing


def test_what_does_not_fit_is_dropped() -> None:
    queue = Outgoing(10)
    assert [queue.put(b"1234") for _ in range(3)] == [True, True, False]
    assert next(queue) == b"1234"
    assert queue.put(b"123456")
    queue.end()
    assert not queue.put(b"")
    assert list(queue) == [b"1234", b"123456"]
    small = Outgoing(1 << 20)
    assert sum(small.put(b"x") for _ in range(2 * FRAMES)) == FRAMES
    small.end(at_once=True)
    assert list(small) == []


def test_iterating_waits_for_the_next_frame() -> None:
    queue, got = Outgoing(100), []
    reader = threading.Thread(target=lambda: got.extend(queue))
    reader.start()
    queue.put(b"one")
    queue.put(b"two")
    queue.end()
    reader.join(30)
    assert got == [b"one", b"two"]


def test_members_take_turns_and_only_the_newest_wait() -> None:
    queue = Incoming(10)
    for k in range(5):
        queue.put("loud", b"%d234" % k)
    queue.put("quiet", b"x")
    assert [queue.get(0) for _ in range(4)] == [("loud", b"3234"), ("quiet", b"x"), ("loud", b"4234"), None]
    queue.put("loud", bytes(100))  # a single one is always taken
    assert queue.get(0) == ("loud", bytes(100))
    assert queue.get(0.01) is None
