"""`python -m shoal.cli`: the same as the `shoal` script."""

import sys

from shoal.cli import main

if __name__ == "__main__":
    sys.exit(main())
