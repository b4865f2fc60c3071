"""What every post promises: nobody waits for the absent, and looking once returns at once."""

from pathlib import Path

from dpps.peers import Channel, Post
from tests.support.peers import NAMES, Organisations
from tests.support.processes import free_port
from tests.support.simulated import Network


def drops_what_nobody_takes(post: Post) -> None:
    """One whose neighbours are not there."""
    assert isinstance(post, Post)
    assert NAMES[1] not in post.connected()
    post.send(NAMES[1], b"frame")
    assert post.receive(0) is None


def test_on_a_simulated_network() -> None:
    looked = []

    def main(post: Post) -> None:
        drops_what_nobody_takes(post)
        looked.append(True)

    network = Network({NAMES[0]: main, NAMES[1]: lambda post: looked.append(post.receive(1.0))})
    network.isolate(NAMES[0])
    network.run()
    assert looked == [True, None]


def test_over_grpc(tmp_path: Path) -> None:
    three = Organisations(tmp_path, (free_port(), free_port()))
    channel = Channel(three.federation, three.identities[NAMES[0]]).start()
    try:
        drops_what_nobody_takes(channel)
    finally:
        channel.close()
