"""Command `python -m loadtest.lab.residency`: the figures of residency."""

import sys

from loadtest.lab.residency.command import main

if __name__ == "__main__":  # not in a worker process, which imports this module under another name
    sys.exit(main())
