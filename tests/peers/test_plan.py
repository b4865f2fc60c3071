from dataclasses import replace
from pathlib import Path

import pytest

from dpps.data import read_schema
from dpps.errors import UsageError
from dpps.peers import config_for, read_plan
from dpps.runs import OWN_DATA, Options
from tests.support.peers import Organisations

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
        ({"mixes": 2}, "--mixes"),
        ({"algorithm": "gradient-tracking"}, "--algorithm gradient-tracking"),
        ({"algorithm": "nothing"}, "algorithm 'nothing'"),
        ({"trust": "pairs"}, "--trust pairs"),
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
