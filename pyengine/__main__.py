"""Stage 7, cli: `python -m pyengine` is the same program as the `pyengine` script."""

import sys

from pyengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
