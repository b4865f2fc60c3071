"""The simulated network: time, faults, ends and restarts are what a schedule says."""

import pytest

from tests.support.simulated import Network, SimulatedPost


def test_frames_arrive_after_their_delay_and_time_passes_only_by_waiting() -> None:
    seen: list[tuple[float, tuple[str, bytes] | None]] = []

    def a(post: SimulatedPost) -> None:
        post.send("b", b"one")
        assert post.clock() == 0

    def b(post: SimulatedPost) -> None:
        for seconds in (0.01, 10.0, 5.0):
            found = post.receive(seconds)
            seen.append((post.clock(), found))

    Network({"a": a, "b": b}, delay=(0.5, 0.5)).run()
    assert seen == [(0.01, None), (0.5, ("a", b"one")), (5.5, None)]


def test_the_same_seed_gives_the_same_losses() -> None:
    def once(seed: int) -> list[bytes]:
        arrived: list[bytes] = []

        def a(post: SimulatedPost) -> None:
            for k in range(200):
                post.send("b", bytes([k]))

        def b(post: SimulatedPost) -> None:
            while (found := post.receive(1.0)) is not None:
                arrived.append(found[1])

        Network({"a": a, "b": b}, seed, loss=0.3, duplicate=0.2, delay=(0.0, 0.1)).run()
        return arrived

    assert once(1) == once(1) != once(2)
    assert 100 < len(set(once(1))) < 180
    assert len(once(1)) > len(set(once(1)))
    assert once(1) != sorted(once(1))


def test_cuts_kills_and_restarts() -> None:
    heard: list[tuple[float, bytes]] = []
    starts: list[float] = []

    def a(post: SimulatedPost) -> None:
        starts.append(post.clock())
        for k in range(10):
            post.send("b", bytes([k]))
            post.receive(1.0)

    def b(post: SimulatedPost) -> None:
        while post.clock() < 20:
            if (found := post.receive(1.0)) is not None:
                heard.append((post.clock(), found[1]))

    network = Network({"a": a, "b": b}, delay=(0.0, 0.0))
    network.at(1.5, lambda: network.cut("a", "b"))
    network.at(3.5, lambda: network.mend("a", "b"))
    network.at(5.5, lambda: network.kill("a"))
    network.at(7.0, lambda: network.restart("a"))
    network.run()
    assert starts == [0.0, 7.0]
    assert [k[0] for _, k in heard] == [0, 1, 4, 5, *range(10)]


def test_an_error_of_a_member_is_raised() -> None:
    def a(post: SimulatedPost) -> None:
        post.receive(1.0)
        raise ValueError("of a")

    def b(post: SimulatedPost) -> None:
        post.receive(1e9)

    with pytest.raises(ValueError, match="of a"):
        Network({"a": a, "b": b}).run()
