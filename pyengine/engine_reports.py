"""Stage 5, engine_reports: the reports that an engine gives of itself; each is made in stage 6, on demand."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


class EngineReports:
    """Methods of Engine. Stage 5 imports nothing of stage 6: a report's module is looked up when it is asked for."""

    def profile(self, *, context: int | None = None, steps: int = 32, contexts: Sequence[int] = ()) -> Any:
        """Where decode and prefill time goes: a profile_result.Profile (to_json, to_html, to_png, to_trace).

        A prompt of `context` tokens (default 512, or the model's maximum) and the `steps` decode steps that end there;
        decode at each of `contexts` too. Errors: RequestError for what does not fit the model's context.
        """
        return importlib.import_module("pyengine.reports.profile").profile(
            self, context=context, steps=steps, contexts=contexts
        )
