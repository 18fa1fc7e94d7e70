"""`python -m loadtest.lab.scaling`."""

from __future__ import annotations

import sys

from loadtest.lab.scaling.command import main

if __name__ == "__main__":
    sys.exit(main())
