"""Stage 5, template_file: which chat template a model folder has, as text; nothing is compiled here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from pyengine import strict_json
from pyengine.errors import ChatTemplateError, ModelFormatError, TokenizerError
from pyengine.strict_json import shown
from pyengine.tokenizer_file import config_path, read_config

MAX_TEMPLATE_BYTES = 1 << 20


class TemplateSource(NamedTuple):
    """The jinja text of a template, and the file (and key) it comes from."""

    text: str
    where: str


def find_template(folder: Path) -> TemplateSource | None:
    """The template of a folder (chat_template.jinja, else tokenizer_config.json's) or a GGUF file; None without one.

    Of a list of templates the one named "default". Errors: ChatTemplateError naming file, key and what is wrong.
    """
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):  # a link to nothing is a damaged folder, not one without a template
        return read_template(file)
    path = config_path(folder)
    try:
        source = read_config(folder).get("chat_template")
    except TokenizerError as error:
        raise ChatTemplateError(str(error)) from None
    if source is None:
        return None
    if isinstance(source, list):
        source = _default_of(path, source)
    if not isinstance(source, str):
        raise ChatTemplateError(f"{path}: chat_template is {shown(source)}; expected text or a list of templates")
    return TemplateSource(source, f"{path}: chat_template")


def _default_of(path: Path, templates: list[Any]) -> Any:
    names = []
    for index, item in enumerate(templates):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise ChatTemplateError(
                f"{path}: chat_template[{index}] is {shown(item)}; expected an object with name and template"
            )
        names.append(item["name"])
    if names.count("default") != 1:
        found = ", ".join(map(shown, names)) or "nothing"
        raise ChatTemplateError(f"{path}: chat templates named {found}; expected one named 'default'")
    return templates[names.index("default")].get("template")


def read_template(path: Path) -> TemplateSource:
    """A jinja file: UTF-8, at most 1 MiB. Errors: ChatTemplateError naming the file."""
    try:
        data = strict_json.read_bytes(path, MAX_TEMPLATE_BYTES)
        return TemplateSource(data.decode("utf-8"), str(path))
    except ModelFormatError as error:
        raise ChatTemplateError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path}: byte {error.start} is not UTF-8; expected UTF-8 text") from None
