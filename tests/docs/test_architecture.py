"""The code tour of docs/architecture.md: its files exist, and one round passes through those it names."""

import re
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import dpps

SOURCE = Path(dpps.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
FILE = re.compile(r"`((?:\w+/)+\w+\.py)`")


def test_every_file_of_the_tour_exists():
    named = [name for name in FILE.findall(PAGE) if not name.startswith("tests/")]
    assert len(named) > 15
    assert not [name for name in named if not (SOURCE / name).is_file()]


def test_a_round_passes_through_the_files_of_the_tour(tmp_path):
    steps = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    named = {name for line in steps for name in FILE.findall(line)}
    generator = torch.Generator().manual_seed(0)
    data = [
        TensorDataset(torch.rand(30, 784, generator=generator), torch.zeros(30, dtype=torch.int64))
        for _ in range(4)
    ]
    algorithm = dpps.PartPSP(dpps.models.MLP(), ["layer1"], batch_size=10)
    run = dpps.Run(
        algorithm, data, topology="exp", privacy=dpps.Record(epsilon=3), folder=tmp_path / "run", seed=0
    )
    seen = set()

    def look(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            seen.add(file.relative_to(SOURCE).as_posix())

    for _ in run.rounds(1):
        sys.setprofile(look if not seen else None)
    sys.setprofile(None)
    run.close()
    assert named <= seen, "files of the tour that a round does not touch"
