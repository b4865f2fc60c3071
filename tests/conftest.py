import os

# Several torch threads on few cores slow small tests down; bit-identity needs one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("dpps", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("dpps")
