"""Organisations as peers: one node each, no centre, no barrier; members come and go and the run goes on.

Where to look, from what people do down to what travels:

- who is a member, and what was agreed: `identity`, `convener`, `federation` (its values: `values`), `plan`, `known`
- one member's part in a run, and what it shows: `join`, `member`, `status`, `live`
- rounds that nobody has to wait for, every part of a row counted once: `fabric`, `correspondence`, `links`, `rows`, `view`, `membership`
- what is on disk before anything leaves: `outbox`, `ledger`
- bytes between two members: `frames`, and how they get there: `post`, which is `channel` (gRPC and TLS: `dialling`, `listening`, `hello`,
  `queues`, `grpc_options`) or, for rehearsals, the simulated one of `tests/peers`
"""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.peers.channel import Channel
    from dpps.peers.convener import convene, expel, renew
    from dpps.peers.dialling import TURN, Dialler
    from dpps.peers.fabric import TOLERANCE, Peers, averaging_rounds
    from dpps.peers.federation import LARGEST_FILE, Federation, Rules
    from dpps.peers.frames import LEARNING, Claim, Frame, FrameError, Presence, Share, decode, largest
    from dpps.peers.grpc_options import METHOD, SERVICE, load_grpc, options
    from dpps.peers.hello import LARGEST_HELLO, Hello, newer_file, refuse_other, refuse_replayed, verdict
    from dpps.peers.identity import (
        KEY,
        REQUEST,
        Identity,
        Key,
        Request,
        fingerprint,
        read_out,
        server_name,
        verify,
    )
    from dpps.peers.join import Participation
    from dpps.peers.known import CONVENER, KNOWN, accept, check_run, note_run
    from dpps.peers.ledger import OutboxLedger, read_whole
    from dpps.peers.links import Inlet, Outlet
    from dpps.peers.listening import PATIENCE, Handshakes
    from dpps.peers.live import LivePage, check_page
    from dpps.peers.member import Heart, Member
    from dpps.peers.membership import Membership
    from dpps.peers.outbox import Outbox
    from dpps.peers.plan import config_for, read_plan
    from dpps.peers.post import Post
    from dpps.peers.queues import FRAMES, Incoming, Outgoing
    from dpps.peers.rows import Rows
    from dpps.peers.status import (
        FILE,
        FINISHED,
        LEAVE,
        OVER,
        RUNNING,
        STOPPED,
        Peer,
        Status,
        bytes_in_words,
        now,
        read_status,
        write_status,
    )
    from dpps.peers.values import number_in, plain_table, text_in, toml_lines, whole_in
    from dpps.peers.view import DONE, HERE, View

__getattr__, __dir__, __all__ = lazy_imports(__name__)
