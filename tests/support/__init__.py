"""What tests share. Imported in one way: `from tests.support.processes import Trainers`."""
