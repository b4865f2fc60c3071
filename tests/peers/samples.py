"""Members and federations for tests, made in a folder."""

from pathlib import Path

from dpps.peers import REQUEST, Federation, Identity, Key, Request, Rules, convene

PLAN = {"topology": "ring", "unit": "record", "nodes": 3, "algorithm": "partpsp", "model": "mlp", "epochs": 1}
NAMES = ("hospital-a", "hospital-b", "hospital-c")


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
