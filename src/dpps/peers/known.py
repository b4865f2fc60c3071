"""What a member remembers of a federation: who its convener is, the newest epoch it has seen, and where its run is."""

import logging
import re
from pathlib import Path

from dpps.disk import private_folder, write_private, writing
from dpps.errors import UsageError
from dpps.peers.federation import Federation
from dpps.peers.identity import Identity, read_out
from dpps.peers.ledger import OUTBOX

log = logging.getLogger(__name__)

CONVENER, KNOWN, RUN = "convener", "federations", ".run"


def accept(identity: Identity, path: Path, convener: str = "") -> Federation:
    """The contract to run by: that in the file, or a later epoch of it that is known already. It is remembered.

    Args:
        identity: this member.
        path: federation.toml.
        convener: fingerprint of the convener, as read out on the telephone; without it the one seen first is trusted.

    Raises:
        UsageError: it is not what the convener signed, is of another convener, or not for this member.
    """
    given = Federation.read(path)
    _check_convener(identity, given, convener)
    found = _newest(identity, given, path)
    found.check_for(identity)
    _trust(identity, found, told=bool(convener))
    remember(identity, found)
    return found


def remember(identity: Identity, federation: Federation) -> None:
    """Keep a contract, so that older epochs of it are not taken any more."""
    folder = identity.folder / KNOWN
    with writing(folder):
        private_folder(folder)
    write_private(_place(identity, federation), federation.to_toml().encode())


def check_run(identity: Identity, federation: Federation, out: Path) -> None:
    """Refuse to begin a run of this federation a second time: its ledger would begin at nothing, and what was spent would be spent again.

    Raises:
        UsageError: the run was begun in another folder, or the folder holds it no more.
    """
    place = _place(identity, federation).with_suffix(RUN)
    if not place.exists():
        return
    here, begun = out.resolve(), Path(place.read_text().strip())
    if (here / OUTBOX).is_dir() and (here == begun or not begun.exists()):  # the same, or moved
        return
    if here == begun or not begun.exists():
        raise UsageError(
            f"{place} says that this member's run of federation {federation.id} was begun in {begun}, and its outbox is not in "
            f"{here}: what was spent is in its ledger; restore that folder, or take no further part"
        )
    raise UsageError(
        f"--out is {here}, and this member's run of federation {federation.id} is in {begun}: another folder would begin with an "
        f"empty ledger; give --out {begun}"
    )


def note_run(identity: Identity, federation: Federation, out: Path) -> None:
    """Where the run is, whose outbox is on disk: written before anybody is connected to."""
    check_run(identity, federation, out)
    write_private(_place(identity, federation).with_suffix(RUN), f"{out.resolve()}\n".encode())


def _place(identity: Identity, federation: Federation) -> Path:
    if not re.fullmatch(r"[0-9a-f]{16}", federation.id):
        raise UsageError(f"the federation's id is {federation.id!r}: it must be 16 hexadecimal digits")
    return identity.folder / KNOWN / f"{federation.id}.toml"


def _newest(identity: Identity, given: Federation, path: Path) -> Federation:
    place = _place(identity, given)
    if not place.exists():
        return given
    known = Federation.read(place)
    if given.epoch < known.epoch:
        given.check_next(known, str(place))
        log.warning("%s has epoch %d; epoch %d is known already and is used", path, given.epoch, known.epoch)
        return known
    known.check_next(given, str(path))
    return given


def _check_convener(identity: Identity, given: Federation, convener: str) -> None:
    said = re.sub(r"[\s:]", "", convener).lower()
    place, found = identity.folder / CONVENER, given.convener_fingerprint
    if said and said != found:
        raise UsageError(
            f"--convener is {read_out(said)} and the file is signed by {read_out(found)}: ask the convener on the telephone"
        )
    trusted = place.read_text().strip() if place.exists() else ""
    if trusted and trusted != found and not said:
        raise UsageError(
            f"the file is signed by another convener ({read_out(found)}) than the one known to {identity.folder} "
            f"({read_out(trusted)}): ask on the telephone, and give --convener if it is right"
        )


def _trust(identity: Identity, found: Federation, told: bool) -> None:
    """Remember the convener of a contract that is for this member."""
    place = identity.folder / CONVENER
    if not place.exists() and not told:
        log.warning(
            "this convener is trusted from now on; compare its fingerprint on the telephone: %s",
            read_out(found.convener_fingerprint),
        )
    if not place.exists() or place.read_text().strip() != found.convener_fingerprint:
        write_private(place, f"{found.convener_fingerprint}\n".encode())
