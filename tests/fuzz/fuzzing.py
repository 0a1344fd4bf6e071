"""What the fuzz targets share: cases from a seed and a number, a time or a count, and how a failure is shown.

A target is a function of a random.Random that raises for a defect and for nothing else. Case n of seed s is the same
on every machine: `--seed s --case n` runs it again, and `CORPUS` of a target holds the numbers of cases that once
failed (seed 0), which every run begins with.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

CASE_SECONDS = 120  # no case may take longer, on a busy machine too
Case = Callable[[random.Random], None]


class CaseError(Exception):
    """A defect: which case, and what it raised."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"over {CASE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(CASE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_message(error: Exception, *parts: str) -> None:
    """The message of an error of ours: one line, without control characters, with these parts."""
    message = str(error)
    assert message.isprintable(), repr(message)
    for part in parts:
        assert part in message, message


def run_case(case: Case, seed: int, number: int) -> None:
    """Errors: CaseError."""
    try:
        with time_limit():
            case(random.Random(f"{seed} {number}"))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a Rust package is no Exception
        raise CaseError(f"--seed {seed} --case {number}: {type(error).__name__}: {error}") from error


def run_many(
    case: Case, *, seconds: float | None = None, count: int | None = None, seed: int = 0, corpus: Sequence[int] = ()
) -> int:
    """Cases of the corpus, then 0, 1, 2 ... of `seed` until the time or the count is over; returns how many."""
    end, number = time.monotonic() + (float("inf") if seconds is None else seconds), 0
    for old in corpus:
        run_case(case, 0, old)
    while (count is None or number < count) and time.monotonic() < end:
        run_case(case, seed, number)
        number += 1
    return len(corpus) + number


def main(name: str, case: Case, corpus: Sequence[int] = ()) -> None:
    """The command line of a target."""
    parser = argparse.ArgumentParser(description=f"Fuzz {name}.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--case", type=int, help="this one alone, with its traceback")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        if args.case is not None:
            run_case(case, args.seed, args.case)
            print(f"{name}: --seed {args.seed} --case {args.case} is good")
            return
        done = run_many(case, seconds=args.seconds, seed=args.seed, corpus=corpus)
    except CaseError as error:
        traceback.print_exception(error.__cause__)
        raise SystemExit(f"{name}: {error}") from None
    passed = time.monotonic() - started
    print(f"{name}: {done} executions in {passed:.0f} s, {done / passed:.0f} a second, seed {args.seed}")
