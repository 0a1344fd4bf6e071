"""Stage 5, template_sandbox: jinja2's immutable sandbox with limits of time, output and memory.

A chat template is code that came with a model. jinja2's sandbox keeps it from the process's objects and files, but not
from running or growing for ever. Here:

- Time. Every round of a loop and every call passes `tick`, which looks at the clock. jinja has no other way to run long
  (no while, no goto), so this stops a template on any thread, without signals (main thread only), without a second
  thread (which could not be killed) and without a trace function (slow, and a debugger's). The ticks are put into the
  template's syntax tree before it is compiled.
- Output and memory. What can make a long text out of short ones (+ * % ~, join, replace, padding, blocks ...) says how
  long it will be before it is made: 16 MiB for one, 1 GiB in all. Filters and methods that would need the same care and
  that no chat template uses are left out.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 2.0
MAX_RENDERED_BYTES = 16 << 20
MAX_MADE_CHARACTERS = 1 << 30
MAX_INTEGER_BITS = 1 << 16
MAX_PADDING = 9999  # widths of formats have at most four digits

LEFT_OUT_FILTERS = (
    "batch",
    "filesizeformat",
    "forceescape",
    "pprint",
    "random",
    "slice",
    "striptags",
    "truncate",
    "urlize",
    "wordwrap",
    "xmlattr",
)
LEFT_OUT_METHODS = frozenset({"encode", "to_bytes", "from_bytes", "hex", "fromhex"})


class LimitError(Exception):
    """A template went over a limit; the message says which."""


class RefusedError(Exception):
    """The template called raise_exception: it refuses these messages, in its own words."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.end = time.monotonic() + MAX_SECONDS
        self.made = 0
        self.now = datetime.now()

    def tick(self) -> None:
        if time.monotonic() > self.end:
            raise LimitError(f"ran for more than {MAX_SECONDS:g} s")

    def make(self, characters: int) -> None:
        """Called before a text (or list) of this length is made."""
        if characters > MAX_RENDERED_BYTES:
            raise LimitError(f"would make a text of {characters} characters; expected at most {MAX_RENDERED_BYTES}")
        self.made += max(characters, 0)
        if self.made > MAX_MADE_CHARACTERS:
            raise LimitError(f"made over {MAX_MADE_CHARACTERS} characters in all")


# A rendering's budget; outside of one (constants folded by the compiler) a fresh one applies.
BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)


def budget() -> Budget:
    return BUDGET.get() or Budget()


def weigh(value: Any) -> int:
    """About how long str(value) or its JSON is; a list that holds the same list twice counts it twice."""
    if isinstance(value, str):
        return len(value)
    total, stack, current = 0, [value], budget()
    while stack:
        item = stack.pop()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += item
        if total > MAX_RENDERED_BYTES or len(stack) > MAX_RENDERED_BYTES:
            raise LimitError(f"would make a text of over {MAX_RENDERED_BYTES} characters")
        current.tick()
    return total


def check_format(template: str, values: Iterable[Any]) -> None:
    """Bound what `template % values` or template.format(*values) makes."""
    if re.search(r"\d{5}|\*|\{[^}]*\{", template):
        raise LimitError(f"formats with a width; expected at most {MAX_PADDING}, written as a number")
    longest = max(map(weigh, values), default=0)
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
        make(len(text) * max(map(weigh, args[0].values()), default=0))
    return args


# ---- filters and globals ---------------------------------------------------------------------------------------------


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: other letters and < > & as they are, no HTML escapes."""
    if isinstance(value, jinja2.Undefined):
        raise jinja2.UndefinedError("tojson of an undefined value")
    if indent is not None and not 0 <= int(indent) <= 16:
        raise LimitError(f"tojson with indent {indent}; expected at most 16")
    budget().make(weigh(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = list(value)
    budget().make(sum(map(weigh, items)) + len(str(d)) * len(items))
    return str(filters.do_join(eval_ctx, items, d, attribute))


def _replace(eval_ctx: Any, s: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(s)
    check_method("replace", text, (str(old), str(new)))
    return str(filters.do_replace(eval_ctx, text, old, new, count))


def _center(value: Any, width: int = 80) -> str:
    return str(value).center(*check_method("center", str(value), (width,)))


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    size = len(width) if isinstance(width, str) else int(width)
    budget().make(len(text) + (text.count("\n") + 1) * size)
    return str(filters.do_indent(text, width, first, blank))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_format(str(value), [*args, *kwargs.values()])
    return str(filters.do_format(str(value), *args, **kwargs))


def _string(value: Any) -> str:
    budget().make(weigh(value))
    return str(value)


def _list(value: Iterable[Any]) -> list[Any]:
    if isinstance(value, Sized):
        budget().make(8 * len(value))
    return list(value)


def _sum(environment: Any, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise LimitError("sum of other things than numbers")
    return filters.do_sum(environment, iterable, attribute, start)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not -300 <= precision <= 300:
        raise LimitError(f"round to {precision} digits")
    return filters.do_round(value, precision, method)


def raise_exception(message: object) -> None:
    raise RefusedError(str(message))


def strftime_now(form: str) -> str:
    """The time now; the same all through one rendering."""
    check_format(form, ["the longest of month names"])
    return budget().now.strftime(form)


class TemplateNamespace(Namespace):
    """jinja's namespace without private names, which would reach the object itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} is private")
        super().__setitem__(name, value)


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks the model's own words for training; nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# ---- the environment -------------------------------------------------------------------------------------------------


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in: transformers' settings, and the limits above."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self._printed,
        )
        setattr(self, "concat", self.joined)  # noqa: B010 - what compiled templates join the texts of blocks with
        for name in LEFT_OUT_FILTERS:
            del self.filters[name]
        self.filters |= {
            "tojson": tojson,
            "join": jinja2.pass_eval_context(_join),
            "replace": jinja2.pass_eval_context(_replace),
            "center": _center,
            "indent": _indent,
            "format": _format,
            "string": _string,
            "list": _list,
            "sum": jinja2.pass_environment(_sum),
            "round": _round,
        }
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "namespace": TemplateNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _meter(tree)
        tree.set_environment(self)
        return tree

    @staticmethod
    def tick() -> str:
        budget().tick()
        return ""

    @staticmethod
    def joined(parts: Iterable[Any]) -> str:
        """The texts of a block, a macro or a ~ expression as one."""
        texts = list(parts)
        budget().make(sum(map(weigh, texts)))
        return "".join(map(str, texts))

    @staticmethod
    def concatenate(*values: Any) -> str:
        """left ~ right."""
        return Sandbox.joined(values)

    @staticmethod
    def _printed(value: Any) -> Any:
        if isinstance(value, (Mapping, list, tuple)):
            budget().make(weigh(value))
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in LEFT_OUT_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget().tick()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ in ("format", "format_map"):
                given = args[0].values() if method.__name__ == "format_map" else [*args, *kwargs.values()]
                check_format(text, given)
            else:
                args = check_method(method.__name__, text, args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget().make(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            values = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else [right]
            check_format(left, values)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    budget().make(len(sequence) * count)
            if integers and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
                raise LimitError(f"makes an integer of over {MAX_INTEGER_BITS} bits")
        elif operator == "**" and integers and left.bit_length() * right > MAX_INTEGER_BITS:
            raise LimitError(f"makes an integer of over {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)


def _meter(tree: nodes.Node) -> None:
    """Put a tick into every loop and send every ~ through `concatenate`."""

    def call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=line)
        return nodes.Call(function, args, [], None, None, lineno=line)

    for loop in tree.find_all(nodes.For):
        loop.body.insert(0, nodes.ExprStmt(call("tick", [], loop.lineno), lineno=loop.lineno))
    _replace_nodes(tree, lambda node: call("concatenate", node.nodes, node.lineno))


def _replace_nodes(node: nodes.Node, change: Callable[[nodes.Concat], nodes.Node]) -> None:
    """Replace every Concat below `node`."""
    for field in node.fields:
        value = getattr(node, field)
        if isinstance(value, nodes.Concat):
            value = change(value)
            setattr(node, field, value)
        elif isinstance(value, list):
            value = [change(item) if isinstance(item, nodes.Concat) else item for item in value]
            setattr(node, field, value)
    for child in node.iter_child_nodes():
        _replace_nodes(child, change)
