"""pyengine runs Llama- and Qwen-style Hugging Face checkpoints on the CPU, straight from their safetensors folder.

    import pyengine
    with pyengine.load("path/to/model") as engine:
        print(engine.generate("The capital of France is", max_tokens=8))

This is the package's door and belongs to no stage. Everything behind it is imported on first use, so that
`import pyengine` stays far below 0.3 s.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyengine import errors as errors
    from pyengine import kernels as kernels
    from pyengine.engine import Engine as Engine
    from pyengine.engine import load as load
    from pyengine.errors import BatchError as BatchError
    from pyengine.errors import ChatTemplateError as ChatTemplateError
    from pyengine.errors import ComputeError as ComputeError
    from pyengine.errors import ContextFullError as ContextFullError
    from pyengine.errors import ModelFormatError as ModelFormatError
    from pyengine.errors import ModelNotFoundError as ModelNotFoundError
    from pyengine.errors import PyEngineError as PyEngineError
    from pyengine.errors import RequestError as RequestError
    from pyengine.errors import ResourceError as ResourceError
    from pyengine.errors import TokenizerError as TokenizerError
    from pyengine.errors import UnsupportedModelError as UnsupportedModelError
    from pyengine.reports.account import Account as Account
    from pyengine.reports.account import account as account
    from pyengine.reports.compare_models import compare as compare
    from pyengine.reports.compare_result import CompareResult as CompareResult
    from pyengine.results import GenerationResult as GenerationResult

__version__ = "0.1.0"

# `python -m pyengine` in a checkout finds the sources first, without the core that `pip install .` built: it is taken
# from the installed package then.
if not any(Path(__file__).parent.glob("_core.*.so")):
    __path__ = pkgutil.extend_path(__path__, __name__)

_ERRORS = (
    "BatchError",
    "ChatTemplateError",
    "ComputeError",
    "ContextFullError",
    "ModelFormatError",
    "ModelNotFoundError",
    "PyEngineError",
    "RequestError",
    "ResourceError",
    "TokenizerError",
    "UnsupportedModelError",
)
_ENGINE = ("Engine", "load")
_RESULTS = ("GenerationResult",)
_ACCOUNT = ("Account", "account")
_REPORTS = {"compare": "compare_models", "CompareResult": "compare_result"}
_MODULES = ("errors", "kernels")

__all__ = [*_ENGINE, *_RESULTS, *_ACCOUNT, *_REPORTS, *_ERRORS, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import what was asked for on first use, and keep it as an ordinary attribute."""
    if name in _MODULES:
        value: Any = importlib.import_module(f"pyengine.{name}")
    elif name in _ERRORS:
        value = getattr(importlib.import_module("pyengine.errors"), name)
    elif name in _ENGINE:
        value = getattr(importlib.import_module("pyengine.engine"), name)
    elif name in _RESULTS:
        value = getattr(importlib.import_module("pyengine.results"), name)
    elif name in _ACCOUNT:
        value = getattr(importlib.import_module("pyengine.reports.account"), name)
    elif name in _REPORTS:
        value = getattr(importlib.import_module(f"pyengine.reports.{_REPORTS[name]}"), name)
    else:
        raise AttributeError(f"module 'pyengine' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
