"""Models by name: what is shared exists, and what does not fit is refused."""

import pytest

from dpps.errors import UsageError
from dpps.models import MODELS, Fitting, build

SHAPES = dict.fromkeys(MODELS.names(), (1, 16, 16))


@pytest.mark.parametrize("name", MODELS.names())
def test_all_means_all_and_less_is_less(name: str) -> None:
    model, everything = build(name, "all", SHAPES[name], 3)
    parts = {parameter.split(".")[0] for parameter, _ in model.named_parameters()}
    assert set(everything) == parts
    assert set(MODELS[name].prefixes(name, "1")) <= set(MODELS[name].prefixes(name, "2")) <= parts
    with pytest.raises(UsageError, match=f"{name} 'nothing'"):
        MODELS[name].prefixes(name, "nothing")


def test_only_one_model_has_a_norm_to_choose() -> None:
    assert [name for name in MODELS.names() if MODELS[name].has_norm] == ["resnet18"]


def test_a_model_of_images_needs_images() -> None:
    to = Fitting((30,), 2, ("layer1",))
    assert to.values == 30
    for name in ("cnn", "resnet18", "vit"):
        with pytest.raises(UsageError, match=rf"{name} .*\(30,\)"):
            MODELS[name].fit(to)
    with pytest.raises(UsageError, match=r"vit .*16x20"):
        build("vit", "1", (1, 16, 20), 2)
