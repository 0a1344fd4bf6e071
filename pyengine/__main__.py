"""Stage 7, cli: the program: `python -m pyengine` and the `pyengine` script."""

import signal
import sys


def run() -> int:
    """The command line of this process; its exit code. Ctrl-C while modules are imported ends it without a word."""
    if sys.version_info < (3, 10):  # noqa: UP036 - pip refuses an older one, a checkout cannot
        print(
            f"pyengine: error: Python {sys.version_info[0]}.{sys.version_info[1]}; expected 3.10 or newer",
            file=sys.stderr,
        )
        return 6
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where a parent had Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pyengine.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    sys.exit(run())
