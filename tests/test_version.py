"""What a bug report needs."""

import torch

from dpps.version import __version__, versions


def test_versions_of_all_that_numbers_depend_on():
    found = versions()
    assert found["dpps"] == __version__
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert set(found) == {"dpps", "python", "torch", "numpy", "dp-accounting", "platform"}
    found["dpps"] = "changed"
    assert versions()["dpps"] == __version__
