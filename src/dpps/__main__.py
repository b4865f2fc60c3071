"""The program: `dpps`, and `python -m dpps`, which is what torchrun starts."""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from dpps.cli import main

# torch's OpenMP threads wait for each other in a busy loop without an end. Where other programs share the processor, that made
# training five to nine times slower on two threads than on one; a bounded wait costs nothing where they do not.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")


def program() -> NoReturn:
    """Run the command line. Its end does not take apart, object by object, what the system takes back at once."""
    code = main(alone=True)
    watched = sys.getprofile() or sys.gettrace() or sys.flags.interactive
    if watched or threading.active_count() > 1:
        sys.exit(code)  # somebody waits for the end, or is still at work: the long way
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever listened has left
            if stream is not None:
                stream.flush()
    os._exit(code)


if __name__ == "__main__":
    program()
