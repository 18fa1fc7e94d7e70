"""Command `python -m loadtest.calibrate`, the same as `gateway calibrate`."""

import sys

from loadtest.calibrate.command import main

if __name__ == "__main__":  # not in a worker process, which imports this module under another name
    sys.exit(main())
