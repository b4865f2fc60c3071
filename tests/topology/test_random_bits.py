"""Random bits that every machine draws alike."""

from dpps.topology.base import random_bits


def test_bits_are_those_of_their_key_on_every_machine() -> None:
    assert random_bits("dropouts", 0, 0, 2).tolist() == [8946749878732634909, 12672053358009148234]
    assert random_bits("dropouts", 0, 0, 3)[:2].tolist() == random_bits("dropouts", 0, 0, 2).tolist()


def test_every_part_of_the_key_counts() -> None:
    keys = [("dropouts", 0, 0), ("matching", 0, 0), ("dropouts", 1, 0), ("dropouts", 0, 1)]
    assert len({int(random_bits(*key, 1)[0]) for key in keys}) == len(keys)
