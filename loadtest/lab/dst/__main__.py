"""`python -m loadtest.lab.dst`: deterministic simulation tests of the whole gateway."""

import sys

from loadtest.lab.dst.command import main

if __name__ == "__main__":  # not in a worker process, which imports this module under another name
    sys.exit(main())
