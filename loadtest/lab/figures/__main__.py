"""Command `python -m loadtest.lab.figures`: the figures in virtual time."""

import sys

from loadtest.lab.figures.command import main

if __name__ == "__main__":  # not in a worker process, which imports this module under another name
    sys.exit(main())
