"""A small run in several processes, and how two such runs compare."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

NODES = 4
COMMON = ["--nodes", "4", "--batch-size", "100", "--seed", "3", "--quiet"]
PRIVATE = ["--unit", "contribution", "--budget", "1", "--noise-rate", "0.01"]
SEEDED = [*COMMON, *PRIVATE, "--seeded-noise", "--topology", "3-out", "--sync-every", "4"]


def models(out: Path, nodes: int = NODES) -> list[dict[str, np.ndarray]]:
    """The models of all nodes, wherever in the folder they are."""
    found = {path.name: path for path in out.rglob("node-*.safetensors")}
    return [load_file(found[f"node-{n}.safetensors"]) for n in range(nodes)]


def furthest(one: Path, other: Path) -> float:
    """The largest difference between two parameters."""
    pairs = zip(models(one), models(other), strict=True)
    return max(float(np.abs(a[name] - b[name]).max()) for a, b in pairs for name in a)


def summary_in(folder: Path) -> dict[str, object]:
    """What summary.json says."""
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return summary


def write_node_data(folder: Path, examples: int) -> None:
    """Five numbers an example, two classes; half of the nodes have npz, half csv."""
    rng = np.random.default_rng(0)
    for node in range(NODES):
        own = folder / f"node-{node}"
        own.mkdir()
        x = rng.normal(size=(examples, 5)).astype(np.float32)
        y = (x[:, 0] > 0).astype(int)
        if node % 2:
            np.savez(own / "train.npz", x=x, y=y)
            np.savez(own / "test.npz", x=x[:9], y=y[:9])
        else:
            rows = "\n".join(",".join(map(str, [*a, b])) for a, b in zip(x, y, strict=True))
            (own / "train.csv").write_text("a,b,c,d,e,label\n" + rows)
            (own / "test.csv").write_text(rows.split("\n")[0])
