"""Runs between organisations: one node each, no server, no barrier. Members may come and go.

Where to look, from what people do down to what travels:

- `identity`, `contract`: who is a member, and what was agreed
- `join`, `member`, `status`: one member's part in a run, and what it shows
- `gossip`: rounds that nobody has to wait for, the average at the end, leaving; `links`: every part of a row counted once, who is
  here, and what an honest member can send
- `store`: what is on disk before anything leaves
- `messages`: what members tell each other, as bytes; `connections`: gRPC and TLS, which carry it
"""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.peers.connections import Channel
    from dpps.peers.contract import Federation, Membership, Rules, convene, expel, read_plan, renew
    from dpps.peers.gossip import Peers, averaging_rounds
    from dpps.peers.identity import (
        REQUEST,
        Identity,
        Key,
        Request,
        fingerprint,
        read_out,
        server_name,
        verify,
    )
    from dpps.peers.links import DONE, Terms
    from dpps.peers.member import Member, Participation, join
    from dpps.peers.messages import AVERAGING, FINAL, LEARNING, Frame, FrameError, Post, Share, decode
    from dpps.peers.status import (
        FINISHED,
        LEAVE,
        OVER,
        STOPPED,
        LivePage,
        Peer,
        Status,
        bytes_in_words,
        now,
        read_status,
        write_status,
    )
    from dpps.peers.store import Outbox, OutboxLedger, read_whole
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
