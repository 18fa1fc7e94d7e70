"""Command `python -m loadtest.bench`, the same as `gateway bench`."""

import sys

from loadtest.bench.command import main

if __name__ == "__main__":  # not in a worker process, which imports this module under another name
    sys.exit(main())
