"""`python -m dpps`, which is what torchrun starts."""

import sys

from dpps.cli import main

if __name__ == "__main__":
    sys.exit(main())
