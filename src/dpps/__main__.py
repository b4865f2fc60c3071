"""The program: `dpps`, and `python -m dpps`, which is what torchrun starts."""

import gc
import os
import sys
from typing import NoReturn

from dpps.cli import main

# torch's OpenMP threads wait for each other in a busy loop without an end. Where other programs share the processor, that made
# training five to nine times slower on two threads than on one; a bounded wait costs nothing where they do not.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")


def program() -> NoReturn:
    """Run the command line."""
    code = main()
    gc.freeze()  # the last collection would visit torch's million objects, a fifth of the time of a short command
    sys.exit(code)


if __name__ == "__main__":
    program()
