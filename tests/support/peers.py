"""Members and federations for tests, made in a folder."""

from pathlib import Path

from dpps.peers import REQUEST, Federation, Identity, Key, Peer, Request, Rules, Status, convene, now

PLAN = {"topology": "ring", "unit": "record", "nodes": 3, "algorithm": "partpsp", "model": "mlp", "epochs": 1}
NAMES = ("hospital-a", "hospital-b", "hospital-c")
STATES = ("here", "here", "away", "left", "expelled", "refused", "finished", "here")


class Organisations:
    """Three members, of which the last only dials out, and their convener."""

    def __init__(
        self,
        folder: Path,
        ports: tuple[int, ...],
        plan: dict[str, object] | None = None,
        *,
        soft: float = 1.0,
        hard: float = 3.0,
    ) -> None:
        self.folder = folder
        listen = [f"127.0.0.1:{port}" for port in ports] + [""] * (len(NAMES) - len(ports))
        self.identities = {
            name: Identity.make(folder / name, name, where) for name, where in zip(NAMES, listen, strict=True)
        }
        self.convener = Key.make(folder / "f" / "convener.key")
        requests = [Request.read(folder / name / REQUEST) for name in NAMES]
        rules = Rules(min_members=2, soft_deadline=soft, hard_deadline=hard)
        self.federation: Federation = convene(plan or PLAN, requests, self.convener, rules=rules)


def status() -> Status:
    """A run of eight members, one in every state there is."""
    members = [
        Peer(
            f"hospital-{'abcdefgh'[k]}",
            state,
            10 + k,
            None if k == 4 else 3.0 * k,
            state == "here",
            1000 * k,
            10**k,
        )
        for k, state in enumerate(STATES)
    ]
    return Status(
        "hospital-a",
        "0123456789abcdef",
        2,
        "running",
        17,
        100,
        "record",
        1.2341,
        17,
        3.0,
        1e-5,
        123_456_789,
        0.5,
        91.0,
        members,
        [(0, 1), (0, 2), (0, 4), (1, 2)],
        ["refused <b>somebody</b> (10.0.0.1): stranger"],
        updated=now(),
    )
