"""Stage 7, cli: `python -m pyengine` is the same program as the `pyengine` script."""

import sys

if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - pip refuses an older one, a checkout cannot
        print(
            f"pyengine: error: Python {sys.version_info[0]}.{sys.version_info[1]}; expected 3.10 or newer",
            file=sys.stderr,
        )
        sys.exit(6)
    from pyengine.cli.main import main

    sys.exit(main())
