"""Stage 5, template_sandbox: jinja2's immutable sandbox with limits of time, output and memory.

A chat template is code that came with a model. jinja2's sandbox keeps it from the process's objects and files, but not
from running or growing for ever. Here what a template does is counted (template_limits.py):

- Every round of a loop and every call looks at the clock. jinja has no other way to run long (no while, no goto), so
  this stops a template on any thread, without signals (main thread only), without a second thread (which could not be
  killed) and without a trace function (slow, and a debugger's). The calls that look are put into the template's syntax
  tree before it is compiled, and so are those that count slices, lists, tuples and dicts.
- Filters and operators are wrapped. Those that would need more care and that no chat template uses are left out.
- A template has at most 50,000 words and signs: one of a mebibyte of them would take the compiler ten seconds and 2 GB.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pyengine.template_limits import (
    CONTAINERS,
    ITEM,
    MAX_INTEGER_BITS,
    LimitError,
    budget,
    check_format,
    check_method,
)

MAX_TOKENS = 50_000  # the longest published templates have some 5,000

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
PASSED_BY_JINJA = ("_loop_vars", "_block_vars")  # keyword arguments of every call inside a loop or block
ITEM_BY_ITEM = frozenset(
    {
        "dictsort",
        "groupby",
        "items",
        "join",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "sort",
        "sum",
        "title",
        "unique",
        "urlencode",
        "wordcount",
    }
)
LEFT_OUT_METHODS = frozenset({"encode", "to_bytes", "from_bytes", "hex", "fromhex", "fromkeys"})


class RefusedError(Exception):
    """The template called raise_exception: it refuses these messages, in its own words."""


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
    budget().make(budget().weigh(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = list(value)
    budget().make(sum(map(budget().weigh, items)) + len(str(d)) * len(items))
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
    budget().make(budget().weigh(value))
    return str(value)


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
    """jinja's namespace without private names, which would reach the object itself, and without its contents printed:
    namespaces in namespaces are no lists, so they are not weighed."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} is private")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks the model's own words for training; nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TokenLimit(Extension):
    """Ends the reading of a template that is too much for the compiler."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for number, token in enumerate(stream):
            if number >= MAX_TOKENS:
                raise jinja2.TemplateSyntaxError(f"more than {MAX_TOKENS} words and signs", token.lineno)
            yield token


def metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is counted. Keeps the marks jinja has put on `function` (wants the context first, and so on)."""
    position = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        current = budget()
        current.tick()
        if name in ITEM_BY_ITEM and len(args) > position and isinstance(args[position], Sized):
            current.make(ITEM * len(args[position]))
        return current.taken(function(*args, **kwargs))

    return run


# ---- the environment -------------------------------------------------------------------------------------------------


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in: transformers' settings, and the limits above."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, TokenLimit, "jinja2.ext.loopcontrols"],
            finalize=self._printed,
        )
        setattr(self, "concat", self.joined)  # noqa: B010 - what compiled templates join the texts of blocks with
        own = {
            "tojson": tojson,
            "join": jinja2.pass_eval_context(_join),
            "replace": jinja2.pass_eval_context(_replace),
            "center": _center,
            "indent": _indent,
            "format": _format,
            "string": _string,
            "sum": jinja2.pass_environment(_sum),
            "round": _round,
        }
        self.filters = {
            name: metered(name, own.get(name, function))
            for name, function in {**self.filters, **own}.items()
            if name not in LEFT_OUT_FILTERS
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

    # ---- what compiled templates call: see _meter -------------------------------------------------------------------

    def tick(self) -> bool:
        budget().tick()
        return True

    def joined(self, parts: Iterable[Any]) -> str:
        """The texts of a block, a macro or a ~ expression as one."""
        texts, current = list(parts), budget()
        current.make(sum(map(current.weigh, texts)))
        return "".join(map(str, texts))

    def concatenate(self, *values: Any) -> str:
        """left ~ right."""
        return self.joined(values)

    def built(self, value: Any) -> Any:
        """A list, tuple or dict written in the template."""
        budget().weigh(value)
        return value

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """value[start:stop:step]."""
        return budget().taken(value[start:stop:step])

    # ---- what jinja calls -------------------------------------------------------------------------------------------

    @staticmethod
    def _printed(value: Any) -> Any:
        if isinstance(value, CONTAINERS):
            budget().make(budget().weigh(value))
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in LEFT_OUT_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if owner is self:  # the functions above
            return obj(*args)
        current = budget()
        current.tick()
        given = [*args, *(value for name, value in kwargs.items() if name not in PASSED_BY_JINJA)]
        # a macro makes a tuple and a dict of them
        current.check(sum(current.weigh(value) for value in given if isinstance(value, CONTAINERS)))
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ in ("format", "format_map"):
                check_format(text, args[0].values() if method.__name__ == "format_map" else given)
            else:
                args = check_method(method.__name__, text, args)
        return current.taken(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        current = budget()
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            current.chain(left, right)
            return current.chained(left, right, super().call_binop(context, operator, left, right))
        if operator == "%" and isinstance(left, str):
            values = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else [right]
            check_format(left, values)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    current.repeat(sequence, count)
            if integers and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
                raise LimitError(f"makes an integer of over {MAX_INTEGER_BITS} bits")
        elif operator == "**" and integers and left.bit_length() * right > MAX_INTEGER_BITS:
            raise LimitError(f"makes an integer of over {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)


# ---- the syntax tree -------------------------------------------------------------------------------------------------


def _meter(tree: nodes.Node) -> None:
    """Put a tick into every round of a loop, and send ~, slices and written-out lists and dicts through Sandbox."""
    _rewrite(tree)
    for loop in tree.find_all(nodes.For):
        line = loop.lineno
        loop.body.insert(0, nodes.ExprStmt(_call("tick", [], line), lineno=line))
        if loop.test is not None:  # looked at in rounds that the body does not see
            loop.test = nodes.And(_call("tick", [], line), loop.test, lineno=line)


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of a method of Sandbox."""
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, args, [], None, None, lineno=line)


def _rewrite(node: nodes.Node) -> None:
    """Change what is below `node`, innermost first."""
    for field in node.fields:
        value = getattr(node, field)
        if isinstance(value, nodes.Node):
            _rewrite(value)
            setattr(node, field, _changed(value))
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, nodes.Node):
                    _rewrite(item)
            setattr(node, field, [_changed(item) if isinstance(item, nodes.Node) else item for item in value])


def _changed(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _call("concatenate", node.nodes, node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _call("cut", [node.node, *(none if part is None else part for part in parts)], node.lineno)
    if isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return node  # as long as it is written
        return _call("built", [node], node.lineno)
    return node
