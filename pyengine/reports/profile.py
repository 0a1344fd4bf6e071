"""Stage 6, profile: where decode and prefill time goes, by stage and layer, beside bytes, operations and limits.

A decode step at context c is the one of the token that sees c tokens, itself included; `steps` steps end there. Every
step runs twice, by the engine's own program and by one without timers, in turns which is first: their ratio is what
measuring costs. The machine's limits are sampled before, in between and after. Times are wall time around the engine's
step, Python included; `other` is wall minus all stages. Shown is the mean over the quicker half of the steps, since the
system and other processes can only make a step longer; percentiles over all of them show what that leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from pyengine._core import Format
from pyengine.errors import RequestError, ResourceError
from pyengine.reports.account_read import of_spec
from pyengine.reports.machine import Gauge, median
from pyengine.reports.profile_meter import PARTS, Meter, Sample, phase, timer_cost
from pyengine.reports.profile_result import Phase, Profile
from pyengine.reports.profile_trace import events
from pyengine.reports.profile_work import Model, Rates
from pyengine.sampling import is_integer
from pyengine.steps import MAX_BATCH_TOKENS
from pyengine.system import available_memory

if TYPE_CHECKING:
    from pyengine.engine import Engine

DEFAULT_CONTEXT, DEFAULT_STEPS = 512, 32
MAX_STEPS = 1 << 16
Progress = Callable[[int, int, str], None]


def check(engine: Engine, context: Any, steps: Any, contexts: Sequence[Any]) -> list[int]:
    """All contexts, ascending. RequestError for what does not fit, ResourceError for more KV cache than memory."""
    if not is_integer(steps) or not 1 <= steps <= MAX_STEPS:
        raise RequestError(f"steps {steps!r}; expected 1 to {MAX_STEPS}")
    for value in (context, *contexts):
        if not is_integer(value) or not steps < value <= engine.ctx_size:
            raise RequestError(
                f"context {value!r} with {steps} steps; expected {steps + 1} (all steps and a token before them) to "
                f"{engine.ctx_size}, the model's"
            )
    longest = max(context, *contexts) if contexts else context
    wanted, available = int(longest * engine.pool.bytes_per_token), available_memory()
    if available is not None and wanted > available:
        raise ResourceError(
            f"a KV cache of {longest} tokens takes {wanted} bytes, {available} are available; expected a shorter one"
        )
    return sorted({int(context), *map(int, contexts)})


def profile(
    engine: Engine,
    *,
    context: int | None = None,
    steps: int = DEFAULT_STEPS,
    contexts: Sequence[int] = (),
    progress: Progress | None = None,
) -> Profile:
    """Profile an engine: a prompt of `context` tokens and the `steps` decode steps that end there (default context 512,
    or the model's maximum), and decode at each of `contexts`.

    Errors: RequestError for a bad argument, ResourceError for more KV cache than there is memory.
    """
    context = min(DEFAULT_CONTEXT, engine.ctx_size) if context is None else context
    wanted = check(engine, context, steps, contexts)
    stored = "bfloat16" if engine.weights.tensors[engine.weights.embed][0] == int(Format.ROWS_BF16) else None
    model = Model(of_spec(engine.spec, stored), engine.quantization, engine.kv_dtype, engine.spec.vocab_size)
    gauge = Gauge.of(engine.backend)
    done, total = 0, (len(wanted) + 1) * (PARTS + 1)

    def rates(since: int) -> Rates:
        return Rates.of(median(gauge.samples[since:]), engine.quantization, engine.kv_dtype)

    def between(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(min(done, total), total, what)
        done += 1
        gauge.sample()

    with closing(Meter(engine)) as meter:
        between("prompt")
        prompt = meter.prompt(context)
        between("prompt")
        ends = [min(at + MAX_BATCH_TOKENS, context) for at in range(0, context, MAX_BATCH_TOKENS)]
        chunks = [(end - (ends[i - 1] if i else 0), end, int(end == context)) for i, end in enumerate(ends)]
        program, layers = meter.timed, engine.spec.num_layers
        prefill = phase(
            program,
            layers,
            prompt,
            mean=False,
            context=context,
            tokens=context,
            work=model.whole(chunks),
            rates=rates(0),
        )
        sweep: list[Phase] = []
        every: list[Sample] = []
        pairs: tuple[list[Sample], list[Sample]] = ([], [])
        for one in wanted:
            since = len(gauge.samples)
            timed, untimed = meter.decode(one, steps, partial(between, f"decode at {one}"))
            work = model.mean((1, end, 1) for end in range(one - steps + 1, one + 1))
            sweep.append(phase(program, layers, timed, mean=True, context=one, tokens=1, work=work, rates=rates(since)))
            pairs[0].extend(timed)
            pairs[1].extend(untimed)
            if one == context:
                every = timed
    return Profile(
        model=str(engine.folder),
        quant=engine.quant,
        group_size=engine.group_size,
        bits_per_weight=engine.bits_per_weight,
        kv_dtype=engine.kv_dtype,
        decode=next(p for p in sweep if p.context == context),
        prefill=prefill,
        sweep=tuple(sweep),
        cost=timer_cost(*pairs),
        machine=gauge.to_json(isa=engine.isa, threads=engine.threads, device=engine.device),
        trace=tuple(events(program, [("prompt", prompt), ("decode", every)])),
    )
