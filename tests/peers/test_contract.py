"""The contract: what is signed and read back, what later revisions may change, what a plan may ask for, and what a member remembers."""

import base64
import logging
import re
import tomllib
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from dpps.data import read_schema
from dpps.errors import UsageError
from dpps.peers import (
    REQUEST,
    Federation,
    Identity,
    Key,
    Membership,
    Request,
    Rules,
    convene,
    expel,
    read_out,
    read_plan,
    renew,
)
from dpps.peers import contract as contract_module
from dpps.peers.contract import LARGEST_FILE, config_for
from dpps.peers.identity import PAIRS_KEY
from dpps.peers.member import CONVENER, accept, check_run, note_run, remember
from dpps.runs import OWN_DATA, Options
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
    """Neither TOML nor a certificate; of a revision that others bring, not even where another key has signed it."""
    parsed: list[str] = []
    loads, certificate = tomllib.loads, contract_module._certificate
    monkeypatch.setattr("tomllib.loads", lambda text: (parsed.append("toml"), loads(text))[1])
    monkeypatch.setattr(
        contract_module, "_certificate", lambda text: (parsed.append("x509"), certificate(text))[1]
    )
    text = three.federation.to_toml()
    other = Key.make(tmp_path / "other.key")
    for content, convener in (
        (text.replace(" = ", "  =  "), ""),
        (text + "# a remark\n", ""),
        ("# a remark\n" + text, ""),
        (re.sub("signature ....", "signature AAAA", text), ""),
        (convene(PLAN, requests(three), other).to_toml(), three.federation.convener_fingerprint),
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
    ("what", "instead"),
    [
        (r'dpps = "[^"]*"', "dpps = 3"),
        ("epoch = 1", "epoch = true"),
        ("epoch = 1", "epoch = 0"),
        ("epoch = 1", "epoch = 1.0"),
        ("min-members = 2", 'min-members = "2"'),
        ("min-members = 2", "min-members = true"),
        ("expelled = false", "expelled = 0"),
        (r"\[plan\]\n", "[plan]\nlist = [1]\n"),
        (r"\[plan\]\n", "plan = 3\n[other]\n"),
        ('address = "127.0.0.1:7441"', 'address = "nowhere"'),
        ('name = "hospital-a"', 'name = "../a"'),
    ],
)
def test_values_of_another_kind_are_refused_whoever_signed_them(
    three: Organisations, what: str, instead: str
) -> None:
    title, signed, body = three.federation.to_toml().split("\n", 2)
    changed, count = re.subn(what, instead, body, count=1)
    assert count == 1
    signature = base64.b64encode(three.convener.sign(b"dpps federation 2\n" + changed.encode())).decode()
    text = "\n".join((title, re.sub(r"signature \S+", f"signature {signature}", signed), changed))
    with pytest.raises(UsageError, match=r"^[^\n]*$"):
        Federation.parse(text.encode(), "f.toml")


def test_any_text_is_read_back(three: Organisations) -> None:
    plan = {**PLAN, "name": 'a "b" \x7f é', "rate": 1e-5, "yes": True}
    made = replace(three.federation, plan=plan, schema="[x]\ny = '\x7f'\n").signed(three.convener)
    assert Federation.parse(made.to_toml().encode()) == made


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
    with pytest.raises(UsageError, match=r"convener \([0-9a-f]{16}"):
        three.federation.check_next(convene(PLAN, requests(three), other))


def test_expelled_in_the_next_revision(three: Organisations) -> None:
    first, second = three.federation, expel(three.federation, "hospital-c", three.convener)
    read = Federation.parse(second.to_toml().encode())
    assert (read.revision, read.active) == (2, {"hospital-a", "hospital-b"})
    assert read.names == NAMES  # rows stay
    first.check_next(read)
    with pytest.raises(UsageError, match=r"revision 1 .*revision 2"):
        read.check_next(first)
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        read.check_for(three.identities["hospital-c"])
    with pytest.raises(UsageError, match=r"'nobody'.*hospital-a, hospital-b, hospital-c"):
        expel(read, "nobody", three.convener)


def test_what_no_revision_may_change(three: Organisations) -> None:
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
    with pytest.raises(UsageError, match=r"revision 1 .*revision 1"):  # two different files of one revision
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


def requests(three: Organisations) -> list[Request]:
    return [Request.read(Path(three.folder) / name / REQUEST) for name in NAMES]


@pytest.mark.parametrize("days", [0, 3651])
def test_certificates_hold_a_day_to_ten_years(three: Organisations, days: int) -> None:
    with pytest.raises(UsageError, match=f"--days is {days}"):
        convene(PLAN, requests(three), three.convener, days=days)
    with pytest.raises(UsageError, match=f"--days is {days}"):
        renew(three.federation, three.convener, days)


def test_two_members_of_one_name_or_key_are_refused(three: Organisations) -> None:
    a, b, c = requests(three)
    with pytest.raises(UsageError, match="name hospital-a"):
        convene(PLAN, [a, replace(b, name=a.name), c], three.convener)
    with pytest.raises(UsageError, match=r"key [0-9a-f]{64}"):
        convene(PLAN, [a, replace(b, key=a.key), c], three.convener)


def test_of_two_neighbours_one_must_listen(three: Organisations) -> None:
    a, b, c = requests(three)
    with pytest.raises(UsageError, match=r"hospital-b and hospital-c .*--listen"):
        convene(PLAN, [a, replace(b, address=""), c], three.convener)


def test_nobody_is_expelled_twice_or_below_the_least_number(three: Organisations) -> None:
    without = expel(three.federation, "hospital-c", three.convener)
    assert without.revision == three.federation.revision + 1
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        expel(without, "hospital-c", three.convener)
    with pytest.raises(UsageError, match=r"hospital-b .*\b1\b.*\b2\b"):
        expel(without, "hospital-b", three.convener)


SCHEMA = """label = "ill"
classes = ["no", "yes"]

[[columns]]
name = "age"
kind = "number"
range = [0, 120]
"""


def written(folder: Path, **options: object) -> Path:
    chosen = {"nodes": 3, "declared_sizes": "200", "topology": "ring", **options}
    path = folder / "plan.toml"
    path.write_text(Options(**chosen).to_toml())
    return path


def test_a_plan_is_the_options_without_paths(tmp_path: Path) -> None:
    path = written(tmp_path, out=Path("runs/x"), data_dir=Path("data"), timeout=7.0)
    plan, schema = read_plan(path, 3)
    assert schema == ""
    assert not {"out", "data-dir", "timeout", "node-data", "schema", "resume"} & set(plan)
    # nothing is left to be filled in later: of 200 examples batches of 100, and 120 rounds
    assert (plan["epsilon"], plan["epochs"], plan["secure-noise"]) == (3.0, 60, True)


def test_one_member_gets_the_same_options_back(tmp_path: Path) -> None:
    plan, _ = read_plan(written(tmp_path), 3)
    three = Organisations(tmp_path, (7441, 7442), plan)
    config = config_for(three.federation, out=tmp_path / "run")
    assert config.out == tmp_path / "run"
    assert config.common() == config.resolve().common()
    assert {k: v for k, v in config.common().items() if v is not None} == plan


def test_tables_of_the_members_own(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    plan, schema = read_plan(written(tmp_path, schema=Path("schema.toml")), 3)
    assert plan["data"] == OWN_DATA
    again = tmp_path / "again.toml"
    again.write_text(schema)
    assert read_schema(again).checksum() == read_schema(tmp_path / "schema.toml").checksum()
    three = Organisations(tmp_path, (7441, 7442), plan)
    config_for(three.federation, again, node_data=tmp_path).resolve()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 4}, "nodes = 4 .*3 requests"),
        ({"declared_sizes": None}, "declared-sizes"),
        ({"unit": "node-swap"}, "--unit node-swap"),
        ({"sync_every": 5}, "--sync-every"),
        ({"algorithm": "gradient-tracking"}, "--algorithm gradient-tracking"),
        ({"algorithm": "nothing"}, "algorithm 'nothing'"),
        ({"trust": "pairs", "unit": "contribution"}, "--mechanism laplace"),
        ({"trust": "pairs", "unit": "node-swap"}, "node-swap"),
        ({"trust": "pairs", "unit": "record", "colluders": 2}, "colluders is 2"),
        ({"trust": "pairs", "unit": "record", "absentees": 1}, "colluders is 1 and absentees 1"),
        ({"absentees": 1}, "--absentees"),
        ({"dropouts": 0.1}, "--dropouts"),
        ({"seeded_noise": True}, "--seeded-noise"),
        ({"weights": Path("w.pt")}, "--weights"),
        ({"topology": "5-out"}, "5"),
    ],
)
def test_what_members_who_come_and_go_cannot_do(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        read_plan(written(tmp_path, **options), 3)


def pairs_plan(folder: Path, members: int, **more: object) -> dict[str, object]:
    options = {"trust": "pairs", "unit": "record", "nodes": members} | more
    return read_plan(written(folder, **options), members)[0]


def test_members_that_share_noise_and_may_be_lost(tmp_path: Path) -> None:
    """By default one of them where there are enough; what they need to hide from each other and to know what a lost one has sent."""
    assert [pairs_plan(tmp_path, n)["absentees"] for n in (3, 4, 8)] == [0, 1, 1]
    assert pairs_plan(tmp_path, 8, absentees=2)["absentees"] == 2
    assert pairs_plan(tmp_path, 8, absentees=0)["absentees"] == 0
    with pytest.raises(UsageError, match=r"C \+ 2 A must be 5 or less"):
        pairs_plan(tmp_path, 6, colluders=2, absentees=2)
    with pytest.raises(UsageError, match="2 members"):
        pairs_plan(tmp_path, 2, colluders=0, absentees=0)


def test_keys_with_which_noise_is_shared_are_in_the_contract(tmp_path: Path) -> None:
    three = Organisations(tmp_path, (7441, 7442), pairs_plan(tmp_path, 3))
    made = three.federation
    assert Federation.parse(made.to_toml().encode()) == made
    keys = [three.identities[name].pair_key() for name in NAMES]
    assert [member.pair_key for member in made.members] == [key.public for key in keys]
    memberships = [Membership.of(made, three.identities[name]) for name in NAMES]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        one, other = (memberships[k].pair_keys for k in (i, j))
        assert one.key(i, j) == other.key(i, j)
    other_key = replace(made.members[0], pair_key=keys[1].public)
    changed = replace(made, revision=2, members=(other_key, *made.members[1:])).signed(three.convener)
    with pytest.raises(UsageError, match="changes more"):
        made.check_next(changed)
    renewed = renew(made, three.convener)
    made.check_next(renewed)
    assert [m.pair_key for m in renewed.members] == [m.pair_key for m in made.members]


def test_a_revision_says_when_a_member_was_expelled_that_shared_noise(tmp_path: Path) -> None:
    three = Organisations(tmp_path, (7441, 7442), pairs_plan(tmp_path, 3, colluders=0, absentees=1))
    second = expel(three.federation, NAMES[1], three.convener)
    assert Membership.of(second, three.identities[NAMES[0]]).expelled_in == {1: 2}
    assert Federation.parse(second.to_toml().encode()) == second
    later = tuple(replace(m, expelled_in=3) if m.expelled else m for m in second.members)
    with pytest.raises(UsageError, match="in which revision"):
        second.check_next(replace(second, revision=3, members=later).signed(three.convener))


def test_requests_without_a_pair_key_and_a_folder_that_lost_its_key(tmp_path: Path) -> None:
    plan = pairs_plan(tmp_path, 3)
    three = Organisations(tmp_path, (7441, 7442), plan)
    a, b, c = requests(three)
    for wrong in (replace(b, pair_key=b""), replace(b, pair_key=a.pair_key)):
        with pytest.raises(UsageError, match="pair key"):
            convene(plan, [a, wrong, c], three.convener)
    (three.folder / NAMES[0] / PAIRS_KEY).unlink()
    with pytest.raises(UsageError, match=PAIRS_KEY):
        Membership.of(three.federation, three.identities[NAMES[0]])


def test_other_versions_of_the_plan(tmp_path: Path) -> None:
    three = Organisations(tmp_path, (7441, 7442))
    with pytest.raises(UsageError, match="plan"):
        config_for(replace(three.federation, plan={"unheard": 1}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 4}, "nodes = 4"),
        ({"unit": "node-swap"}, "--unit node-swap"),
        ({"trust": "pairs"}, "--trust pairs"),
        ({"trust": "pairs", "colluders": 2}, "colluders is 2"),
        ({"seeded-noise": True}, "--seeded-noise"),
        ({"weights": "/home/me/w.pt"}, "--weights"),
        ({"algorithm": "nothing"}, "algorithm 'nothing'"),
        ({"secure-noise": False}, "secure-noise"),
        ({"data-dir": "/home/me"}, "data-dir"),
        ({"node-data": "/home/me"}, "node-data"),
    ],
)
def test_a_member_refuses_what_no_convener_should_sign(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    plan, _ = read_plan(written(tmp_path), 3)
    three = Organisations(tmp_path, (7441, 7442), plan)
    config_for(three.federation)
    with pytest.raises(UsageError, match=words):
        config_for(replace(three.federation, plan=plan | options))


A, _, C = NAMES


@pytest.fixture
def fresh(tmp_path: Path) -> Organisations:
    """Whose folders a test changes."""
    return Organisations(tmp_path, (7441, 7442))


def placed(fresh: Organisations, federation: Federation) -> Path:
    path = fresh.folder / "f" / "federation.toml"
    path.write_text(federation.to_toml())
    return path


def taken(own: Identity, path: Path, convener: str = "") -> Federation:
    """As a member that connects after it has accepted the contract."""
    found = accept(own, path, convener)
    remember(own, found, compared=bool(convener))
    return found


def test_a_contract_that_is_only_looked_at_leaves_no_trace(fresh: Organisations) -> None:
    own = fresh.identities[A]
    before = sorted(own.folder.rglob("*"))
    assert accept(own, placed(fresh, fresh.federation)) == fresh.federation
    assert sorted(own.folder.rglob("*")) == before


def test_the_newest_revision_is_remembered(fresh: Organisations, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    own = fresh.identities[A]
    first, second = fresh.federation, expel(fresh.federation, C, fresh.convener)
    assert taken(own, placed(fresh, first)) == first
    assert "fingerprint" in caplog.text
    assert taken(own, placed(fresh, second)) == second
    caplog.clear()
    assert taken(own, placed(fresh, first)) == second  # the same command after a crash
    assert "revision 1; revision 2 " in caplog.text
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        taken(fresh.identities[C], placed(fresh, second))


def test_two_files_of_one_revision(fresh: Organisations) -> None:
    taken(fresh.identities[A], placed(fresh, fresh.federation))
    moved = (replace(fresh.federation.members[0], address="127.0.0.1:9"), *fresh.federation.members[1:])
    with pytest.raises(UsageError, match=r"revision 1 .*revision 1"):
        taken(
            fresh.identities[A],
            placed(fresh, replace(fresh.federation, members=moved).signed(fresh.convener)),
        )


def test_another_convener_needs_a_word_on_the_telephone(fresh: Organisations, tmp_path: Path) -> None:
    own = fresh.identities[A]
    taken(own, placed(fresh, fresh.federation))
    other = Key.make(tmp_path / "other.key")
    path = placed(fresh, convene(PLAN, requests(fresh), other))
    with pytest.raises(UsageError, match=r"convener .*hospital-a"):
        taken(own, path)
    with pytest.raises(UsageError, match="--convener is 0000"):
        taken(own, path, "0" * 64)
    assert taken(own, path, read_out(other.fingerprint).upper()).convener_fingerprint == other.fingerprint
    assert taken(own, path).revision == 1  # it is known now


def test_strangers_are_told_at_home_before_the_file_is_trusted(fresh: Organisations, tmp_path: Path) -> None:
    stranger = Identity.make(tmp_path / "x", "hospital-x")
    with pytest.raises(UsageError, match=r"hospital-x .*member\.csr"):
        taken(stranger, placed(fresh, fresh.federation))
    assert not (tmp_path / "x" / CONVENER).exists(), "whose contract is not taken is not trusted"


def test_a_run_is_begun_once(fresh: Organisations) -> None:
    own, run, other = fresh.identities[A], fresh.folder / "run", fresh.folder / "run2"
    check_run(own, fresh.federation, run)
    taken(own, placed(fresh, fresh.federation))
    (run / "outbox").mkdir(parents=True)
    note_run(own, fresh.federation, run)
    check_run(own, fresh.federation, run)
    with pytest.raises(UsageError, match=rf"--out is {run}2.*--out {run}"):
        check_run(own, fresh.federation, other)
    (other / "outbox").mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"--out is {run}2.*--out {run}"):
        note_run(own, fresh.federation, other)
    (run / "outbox").rmdir()
    with pytest.raises(UsageError, match=rf"\.run.*{run}"):
        check_run(own, fresh.federation, run)
    run.rmdir()
    with pytest.raises(UsageError, match=rf"\.run.*{run}"):
        check_run(own, fresh.federation, run)
    note_run(own, fresh.federation, other)  # it was moved
    check_run(own, fresh.federation, other)


def test_a_convener_makes_a_second_contract_with_the_same_key(tmp_path: Path) -> None:
    """Members see no other convener."""
    made = Organisations(tmp_path, (7441, 7442))
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text(made.federation.to_toml())
    second.write_text(convene(PLAN, requests(made), made.convener).to_toml())
    own = made.identities[A]
    assert taken(own, first).id != taken(own, second).id
