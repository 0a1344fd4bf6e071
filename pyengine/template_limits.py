"""Stage 5, template_limits: what one rendering of a chat template may use, and how that is counted.

Three things hold together:

- Time is looked at in `tick`, which every round of a loop, every call and every item of a generator passes; single
  operations in between work on at most 16 MiB of text or 1 million items, so they take about a second at most.
- Text and lists are counted (`make`) before they are made where something short makes something long (* % join,
  replace, padding ...), else once they are there.
- Lists, tuples and dicts that a template builds may hold the same list many times over: a tree of 2^40 leaves in 40
  small objects. Comparing, hashing or printing one would never end, inside Python's own code where no tick is. So each
  is weighed as a tree when it is made; none over the limit comes to be.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

MAX_SECONDS = 2.0
MAX_RENDERED_BYTES = 16 << 20
MAX_MADE_CHARACTERS = 1 << 30
MAX_ITEMS = 1 << 20
MAX_INTEGER_BITS = 1 << 16
MAX_PADDING = 9999  # widths of formats have at most four digits
ITEM = MAX_RENDERED_BYTES // MAX_ITEMS  # an item of a list counts like so many characters
KEPT_WEIGHTS = 16

_EMPTY: dict[str, Any] = {}
CONTAINERS = (list, tuple, dict, set, frozenset, type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))


class LimitError(Exception):
    """A template went over a limit; the message says which."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.end = time.thread_time() + MAX_SECONDS
        self.made = 0
        self.now = datetime.now()
        self._known: dict[int, int] = {}  # id of a container -> its weight
        self._kept: dict[int, Any] = {}  # the last few of them, kept alive: an id must not become another's

    def tick(self) -> None:
        if time.thread_time() > self.end:
            raise LimitError(f"ran for more than {MAX_SECONDS:g} s")

    def make(self, characters: int) -> None:
        """Called for a text (or list) of this length that is made, or will be."""
        self.check(characters)
        self.made += max(characters, 0)
        if self.made > MAX_MADE_CHARACTERS:
            raise LimitError(f"made over {MAX_MADE_CHARACTERS} characters in all")

    def check(self, characters: int) -> None:
        if characters > MAX_RENDERED_BYTES:
            raise LimitError(f"would make a text of {characters} characters; expected at most {MAX_RENDERED_BYTES}")

    # ---- weights ------------------------------------------------------------------------------------------------

    def begin(self, variables: Mapping[str, Any]) -> None:
        """Weigh what a rendering is given (trees of JSON values, which live as long as it)."""
        self._known.clear()
        self._kept.clear()
        for value in variables.values():
            self._weigh_given(value)

    def _weigh_given(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (list, dict)):
            return 8
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        self._known[id(value)] = weight = 8 + sum(map(self._weigh_given, parts))
        return weight

    def weigh(self, value: Any) -> int:
        """About how long str(value) or its JSON is; a list that holds the same list twice counts it twice.

        LimitError from MAX_RENDERED_BYTES on. Nothing in the sandbox changes a list or dict, so the weights of what the
        rendering was given are kept, and those of the last few made: a list that grows item by item, say.
        """
        total, items, stack = 0, 0, [value]
        while stack:
            item = stack.pop()
            items += 1
            if isinstance(item, str):
                total += len(item)
            elif not isinstance(item, CONTAINERS):
                total += 8
            elif (known := self._known.get(id(item))) is not None:
                total += known
            else:
                total += 8
                stack += [*item.keys(), *item.values()] if isinstance(item, dict) else item
            if total > MAX_RENDERED_BYTES or len(stack) > MAX_RENDERED_BYTES:
                raise LimitError(f"would make a text of over {MAX_RENDERED_BYTES} characters")
            if items % 256 == 0:
                self.tick()
        if isinstance(value, CONTAINERS):
            self._keep(value, total)
        return total

    def _keep(self, value: Any, weight: int) -> None:
        if id(value) in self._known:
            return
        while len(self._kept) >= KEPT_WEIGHTS:
            oldest = next(iter(self._kept))
            del self._kept[oldest], self._known[oldest]
        self._kept[id(value)] = value
        self._known[id(value)] = weight

    # ---- what operations make ---------------------------------------------------------------------------------------

    def taken(self, value: Any) -> Any:
        """`value`, counted: a text or container an operation has made, or a generator, whose items are ticks then."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, CONTAINERS):
            self.make(ITEM * len(value))
            self.weigh(value)
        elif isinstance(value, Iterator):
            return self._ticking(value)
        return value

    def _ticking(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            self.tick()
            yield item

    def repeat(self, value: Any, times: int) -> None:
        """Called before value * times."""
        if isinstance(value, str):
            self.make(len(value) * times)
        elif isinstance(value, CONTAINERS):
            self.make(ITEM * len(value) * times)
            self.check(self.weigh(value) * times)

    def chain(self, left: Any, right: Any) -> None:
        """Called before left + right."""
        if isinstance(left, str) and isinstance(right, str):
            self.make(len(left) + len(right))
        elif isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
            self.make(ITEM * (len(left) + len(right)))
            self.check(self.weigh(left) + self.weigh(right))

    def chained(self, left: Any, right: Any, result: Any) -> Any:
        """`result` of left + right, its weight known from theirs."""
        if isinstance(result, CONTAINERS):
            self._keep(result, self.weigh(left) + self.weigh(right))
        return result


# A rendering's budget; outside of one a fresh one applies.
BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)


def budget() -> Budget:
    return BUDGET.get() or Budget()


def check_format(template: str, values: Iterable[Any]) -> None:
    """Bound what `template % values` or template.format(*values) makes."""
    if re.search(r"\d{5}|\*|\{[^}]*\{", template):
        raise LimitError(f"formats with a width; expected at most {MAX_PADDING}, written as a number")
    longest = max(map(budget().weigh, values), default=0)
    fields = template.count("%") + template.count("{")
    budget().make(len(template) + fields * (longest + MAX_PADDING if re.search(r"\d", template) else longest + 32))


def check_method(name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bound what the string method makes; returns its arguments (a generator made a list)."""
    make = budget().make
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        count = text.count(args[0])
        if len(args) > 2 and isinstance(args[2], int) and args[2] >= 0:
            count = min(count, args[2])
        make(len(text) + count * len(args[1]))
    elif name == "join" and args:
        items = list(args[0])
        make(sum(len(item) for item in items if isinstance(item, str)) + len(text) * len(items))
        return (items, *args[1:])
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        make(max(len(text), args[0]))
    elif name == "expandtabs":
        make(len(text) * max(1, *(arg for arg in args if isinstance(arg, int))) if args else 8 * len(text))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        make(len(text) * max(map(budget().weigh, args[0].values()), default=0))
    elif name in ("split", "rsplit", "splitlines"):
        cuts = text.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(text) // 2
        make(ITEM * cuts)
    return args
