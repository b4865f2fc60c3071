"""One self-contained HTML page per run, or per comparison of runs: opens from disk, loads nothing; and a model card per run.

A run's folder or a `Run` becomes a `RunRecord` (`read`); records become `charts`, charts the `page`.
"""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.report.charts import KEPT_POINTS, SIZE, Axis, Chart, Mark, by_round, number, thinned
    from dpps.report.page import (
        badges,
        fill,
        from_run,
        model_card,
        render,
        small,
        statement,
        write,
        write_card,
    )
    from dpps.report.read import Accuracy, RunRecord, command, data_name, options_shown, read_folder, read_run
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
