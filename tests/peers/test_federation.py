import re
import tomllib
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from dpps.errors import UsageError
from dpps.peers import Federation, Identity, Key, Request, Rules, convene, expel, renew
from dpps.peers import contract as contract_module
from dpps.peers.contract import LARGEST_FILE
from tests.support.peers import NAMES, PLAN, Organisations


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return Organisations(tmp_path_factory.mktemp("organisations"), (7441, 7442))


def test_the_file_says_what_was_agreed(three: Organisations) -> None:
    text = three.federation.to_toml()
    found = Federation.parse(text.encode())
    assert found == three.federation
    assert found.digest == three.federation.digest
    assert found.names == NAMES
    assert [m.address for m in found.members] == ["127.0.0.1:7441", "127.0.0.1:7442", ""]
    assert [found.row(name) for name in NAMES] == [0, 1, 2]
    assert found.neighbours("hospital-a") == {"hospital-b", "hospital-c"}
    for name, identity in three.identities.items():
        assert found.check_for(identity).name == name
        assert f'fingerprint = "{identity.fingerprint}"' in text


def test_nothing_is_parsed_before_the_signature_is_verified(
    three: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither TOML nor a certificate; of an epoch that others bring, not even where another key has signed it."""
    parsed: list[str] = []
    loads, certificate = tomllib.loads, contract_module._certificate
    monkeypatch.setattr("tomllib.loads", lambda text: (parsed.append("toml"), loads(text))[1])
    monkeypatch.setattr(
        contract_module, "_certificate", lambda text: (parsed.append("x509"), certificate(text))[1]
    )
    text = three.federation.to_toml()
    other = Key.make(tmp_path / "other.key")
    requests = [Request(m.name, m.address, m.key) for m in three.federation.members]
    for content, convener in (
        (text.replace(" = ", "  =  "), ""),
        (text + "# a remark\n", ""),
        ("# a remark\n" + text, ""),
        (re.sub("signature ....", "signature AAAA", text), ""),
        (convene(PLAN, requests, other).to_toml(), three.federation.convener_fingerprint),
    ):
        with pytest.raises(UsageError, match=r"^f\.toml[^\n]*$"):
            Federation.parse(content.encode(), "f.toml", convener)
    assert parsed == []
    assert (
        Federation.parse(text.encode(), "f.toml", three.federation.convener_fingerprint) == three.federation
    )
    assert parsed == ["toml"] + ["x509"] * 4


def test_a_contract_of_version_0_2_is_told_from_a_damaged_file() -> None:
    with pytest.raises(UsageError, match=r"0\.2"):
        Federation.parse(b'# The contract\nformat = 1\nid = "x"\n', "f.toml")


CHANGES = [
    (r"epoch = 1", "epoch = 2"),
    (r'topology = "ring"', 'topology = "exp"'),
    (r"min-members = 2", "min-members = 3"),
    (r'address = "127.0.0.1:7441"', 'address = "127.0.0.1:7449"'),
    (r"expelled = false", "expelled = true"),
    (r'name = "hospital-a"', 'name = "hospital-x"'),
    (r'fingerprint = "\w{4}', 'fingerprint = "0000'),
    (r"hard-deadline = 3.0", "hard-deadline = 3"),
    (r"format = 2", 'format = 2\nfurther = "word"'),
    (r'id = "\w{4}', 'id = "0000'),
]


@pytest.mark.parametrize(("what", "instead"), CHANGES)
def test_any_change_is_noticed(three: Organisations, what: str, instead: str) -> None:
    changed, count = re.subn(what, instead, three.federation.to_toml(), count=1)
    assert count == 1
    with pytest.raises(UsageError, match=r"^f\.toml[^\n]*$"):
        Federation.parse(changed.encode(), "f.toml")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"format = 1",
        b"format = 2",
        b"format = [[[[",
        b'format = 1\nid = 7\nmembers = "x"',
        b"x" * (LARGEST_FILE + 1),
    ],
)
def test_what_is_no_federation_file_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"^f\.toml[^\n]*"):
        Federation.parse(content, "f.toml")


def test_another_convener_can_sign_only_its_own(three: Organisations, tmp_path: Path) -> None:
    other = Key.make(tmp_path / "other.key")
    with pytest.raises(UsageError, match="key"):
        three.federation.signed(other)
    forged = replace(three.federation, convener=other.certify_itself("dpps convener", 365))
    with pytest.raises(UsageError, match="certificate of hospital-a"):
        Federation.parse(forged.signed(other).to_toml().encode())
    requests = [Request(m.name, m.address, m.key) for m in three.federation.members]
    with pytest.raises(UsageError, match=r"convener \([0-9a-f]{16}"):
        three.federation.check_next(convene(PLAN, requests, other))


def test_expelled_in_the_next_epoch(three: Organisations) -> None:
    first, second = three.federation, expel(three.federation, "hospital-c", three.convener)
    read = Federation.parse(second.to_toml().encode())
    assert (read.revision, read.active) == (2, {"hospital-a", "hospital-b"})
    assert read.names == NAMES  # rows stay
    first.check_next(read)
    with pytest.raises(UsageError, match=r"revision 1 .*revision 2"):
        read.check_next(first)
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        read.check_for(three.identities["hospital-c"])
    with pytest.raises(UsageError, match=r"hospital-b .*\b1 members.*\b2\b"):
        expel(read, "hospital-b", three.convener)
    with pytest.raises(UsageError, match=r"'nobody'.*hospital-a, hospital-b, hospital-c"):
        expel(read, "nobody", three.convener)


def test_what_no_epoch_may_change(three: Organisations) -> None:
    first = three.federation
    for changed in (
        replace(first, revision=2, plan={**PLAN, "epochs": 100}),
        replace(first, revision=2, rules=Rules(3, 1.0, 3.0)),
        replace(first, revision=2, schema="other"),
        replace(first, revision=2, members=first.members[::-1]),
    ):
        with pytest.raises(UsageError, match="revision 2"):
            first.check_next(changed.signed(three.convener))
    with pytest.raises(UsageError, match="0000000000000000"):
        first.check_next(replace(first, revision=2, id="0" * 16).signed(three.convener))
    with pytest.raises(UsageError, match=r"revision 1 .*revision 1"):  # two different files of one epoch
        first.check_next(replace(renew(first, three.convener), revision=1).signed(three.convener))
    without = expel(first, "hospital-c", three.convener)
    with pytest.raises(UsageError, match="takes hospital-c back"):
        without.check_next(replace(first, revision=3).signed(three.convener))


def test_renewed_certificates_have_the_same_keys(three: Organisations) -> None:
    renewed = renew(three.federation, three.convener, days=700)
    three.federation.check_next(renewed)
    for before, after in zip(three.federation.members, renewed.members, strict=True):
        assert before.fingerprint == after.fingerprint
        assert before.certificate.not_valid_after_utc < after.certificate.not_valid_after_utc


def test_told_at_home(three: Organisations, tmp_path: Path) -> None:
    stranger = Identity.make(tmp_path / "x", "hospital-a")
    with pytest.raises(UsageError, match=r"hospital-a .*\(hospital-a, hospital-b, hospital-c\).*member\.csr"):
        three.federation.check_for(stranger)
    own = three.identities["hospital-a"]
    with pytest.raises(UsageError, match=r"dpps 9\.9"):
        replace(three.federation, version="9.9").check_for(own)
    member = three.federation.members[0]
    old = three.convener.certify(
        Request(member.name, member.address, member.key), three.federation.convener, -1
    )
    members = (replace(member, certificate=old), *three.federation.members[1:])
    with pytest.raises(UsageError, match=r"hospital-a .*dpps federation renew"):
        replace(three.federation, members=members).check_for(own)


def test_a_clock_that_is_behind_is_told_from_an_old_certificate(
    three: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2020, 1, 2, tzinfo=tz)

    monkeypatch.setattr(contract_module, "datetime", Behind)
    with pytest.raises(UsageError, match=r"hospital-a .*2020-01-02.*clock"):
        three.federation.check_for(three.identities["hospital-a"])


def test_members_of_one_federation_differ_and_can_be_reached(three: Organisations, tmp_path: Path) -> None:
    requests = [Request(m.name, m.address, m.key) for m in three.federation.members]
    with pytest.raises(UsageError, match="name hospital-a"):
        convene(PLAN, [requests[0], replace(requests[1], name="hospital-a"), requests[2]], three.convener)
    with pytest.raises(UsageError, match=r"key [0-9a-f]{64}"):
        convene(PLAN, [requests[0], replace(requests[1], key=requests[0].key), requests[2]], three.convener)
    with pytest.raises(UsageError, match=r"hospital-b and hospital-c .*--listen"):
        convene(PLAN, [requests[0], replace(requests[1], address=""), requests[2]], three.convener)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (Rules(min_members=1), "--min-members is 1"),
        (Rules(min_members=4), "--min-members is 4"),
        (Rules(soft_deadline=0), "--soft-deadline is 0"),
        (Rules(soft_deadline=10, hard_deadline=5), "--hard-deadline 5"),
        (Rules(start_deadline=-1), "--start-deadline is -1"),
        (Rules(gossip_clip=-1), "--gossip-clip is -1"),
    ],
)
def test_rules_that_cannot_be_kept(rules: Rules, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rules.check(3)


def test_rules_that_cannot_be_kept_are_refused_whoever_signed_them(three: Organisations) -> None:
    signed = replace(three.federation, rules=Rules(soft_deadline=-1.0)).signed(three.convener)
    with pytest.raises(UsageError, match=r"--soft-deadline is -1\.0"):
        Federation.parse(signed.to_toml().encode())
