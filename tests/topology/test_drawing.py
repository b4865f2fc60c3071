"""Pictures of topologies: the right panels in the right format."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dpps.errors import UsageError
from dpps.topology import FORMATS, Base, DOut, Exponential, OnePeerRandom, Topology, draw


def titles(svg: Path) -> list[str]:
    root = ET.parse(svg).getroot()
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    return [text for text in texts if text.startswith(("phase", "round"))]


@pytest.mark.parametrize("topology", [Exponential(10), Base(5, 1), DOut(3, 1)], ids=repr)
def test_one_panel_per_phase_and_always_the_same_file(topology: Topology, tmp_path: Path) -> None:
    draw(topology, tmp_path / "graph.svg")
    assert titles(tmp_path / "graph.svg") == [f"phase {t}" for t in range(topology.period or 0)]
    draw(topology, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "graph.svg").read_bytes()


def test_a_topology_that_never_repeats_shows_its_first_rounds(tmp_path: Path) -> None:
    draw(OnePeerRandom(6).with_dropouts(0.3), tmp_path / "graph.svg")
    assert titles(tmp_path / "graph.svg") == ["round 0", "round 1", "round 2", "round 3"]


def test_every_link_is_an_arrow(tmp_path: Path) -> None:
    def patches(d: int) -> int:
        draw(DOut(6, d), tmp_path / "graph.svg")
        # networkx draws an arrow as one FancyArrowPatch: a line and a head
        return (tmp_path / "graph.svg").read_text().count('id="patch_')

    assert patches(3) - patches(2) == patches(2) - patches(1) > 0


def test_png_has_the_signature_of_one(tmp_path: Path) -> None:
    draw(Exponential(4), str(tmp_path / "graph.PNG"))
    assert (tmp_path / "graph.PNG").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_large_networks_are_drawn_without_numbers(tmp_path: Path) -> None:
    draw(DOut(300, 3), tmp_path / "graph.svg")
    assert ">299<" not in (tmp_path / "graph.svg").read_text()
    draw(DOut(30, 3), tmp_path / "graph.svg")
    assert ">29<" in (tmp_path / "graph.svg").read_text()


@pytest.mark.parametrize("name", ["graph.pdf", "graph.sgv", "graph"])
def test_unknown_endings_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"picture format .*{', '.join(FORMATS)}"):
        draw(Exponential(4), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        draw(Exponential(4), tmp_path / "nowhere" / "graph.svg")
