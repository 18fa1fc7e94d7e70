"""`python -m loadtest.lab.failover`."""

from __future__ import annotations

import sys

from loadtest.lab.failover.command import main

if __name__ == "__main__":
    sys.exit(main())
