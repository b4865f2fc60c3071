"""The unit record: noise for one example's share of a batch of the expected size."""

import pytest

from dpps.errors import UsageError
from dpps.privacy import Plan, Record
from dpps.privacy import Record as Same

PLAN = Plan(((1.0, 5),), lr_shared=0.5, batch_size=10, sampling=(0.1, 0.2), declared_sizes=(100, 50))


def test_the_noise_covers_one_clipped_example_in_the_expected_batch() -> None:
    assert Same is Record
    found = Record(noise_multiplier=2.0, clip=3.0).calibrate(PLAN)
    assert found.sensitivity.distance == pytest.approx(0.5 * 3.0 / 10)
    assert found.mechanism.scale(found.sensitivity.distance) == pytest.approx(2.0 * 0.15)
    assert found.sampling == 0.2, "the node that samples most"
    assert found.example_clip == 3.0


def test_who_owns_several_records_is_protected_as_a_group() -> None:
    assert "example" in Record(epsilon=3).who()
    assert "up to 4" in Record(epsilon=3, records_per_user=4).who()
    with pytest.raises(UsageError, match="records_per_user is 0"):
        Record(epsilon=3, records_per_user=0)
    with pytest.raises(UsageError, match=r"delta.*0"):
        Record(epsilon=3, delta=0.0)
