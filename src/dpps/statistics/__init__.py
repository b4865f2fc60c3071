"""Statistics over the records of all nodes: questions, and answers with intervals that account for the noise."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.statistics.options import SurveyOptions
    from dpps.statistics.questions import Answer, Category, Number, Question, ask
    from dpps.statistics.release import Found, OneRecord, Release, Survey, WholeNode, stats
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
