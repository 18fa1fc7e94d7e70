"""`python -m gateway.cli`: the same as the command `gateway`."""

import sys

from gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
