"""One self-contained HTML page per run, or per comparison of runs: opens from disk, loads nothing; and a model card per run.

A run's folder or a `Run` is `read`; its `Summary` and its `charts` fill the `page`. What is said about privacy is in `words`.
"""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.report.charts import KEPT_POINTS, SIZE, Axis, Chart, Line, thinned
    from dpps.report.page import fill, from_run, model_card, render, write, write_card
    from dpps.report.read import Reported, command, data_name, options_shown, read_folder, read_run
    from dpps.report.words import badges, detection, meaning, number, statement
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
