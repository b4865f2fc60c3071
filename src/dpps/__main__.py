"""The program: `dpps`, and `python -m dpps`, which is what torchrun starts."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from dpps.cli import main


def program() -> NoReturn:
    """Run the command line. Its end does not take apart, object by object, what the system takes back at once."""
    code = main()
    if threading.active_count() > 1:  # somebody is still at work: the long way waits for them
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    program()
