"""One engine with one model for peers.py, in a process of its own: python peer_worker.py KIND MODEL OPTIONS_JSON

Runs on the interpreter that has the engine's package and imports nothing of pyengine but for the kind "pyengine". It
answers in JSON, a line at a time: first {"engine", "build"}, or {"problem"} where the package cannot be imported; then
for each line {"prompt": [ids], "steps": [ids]} of its input {"seconds": [prompt, decode]}: the prompt into an empty
context, then as many steps of one token. Between lines it waits in read(). What libraries print goes to stderr.

Options: threads, context (tokens), batch (tokens at once), and of ik-llama-cpp-python: repack (interleave the rows of
the weights while loading, `-rtr`).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[int], list[int]], tuple[float, float]]
Options = dict[str, Any]
CPU_FEATURES = ("AMX_INT8", "AVX512_BF16", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2")  # the best ones first


def build_of(system_info: bytes) -> str:
    """'AVX512_VNNI' of llama.cpp's "... AVX2 = 1 | AVX512_VNNI = 1 ...": the widest instructions it was built for."""
    says = system_info.decode("utf-8", "replace").replace(" ", "")
    return next((feature for feature in CPU_FEATURES if f"{feature}=1" in says), "")


def timed(prompt: Callable[[], object], step: Callable[[int], object], steps: list[int]) -> tuple[float, float]:
    started = time.perf_counter()
    prompt()
    middle = time.perf_counter()
    for token in steps:
        step(token)
    return middle - started, time.perf_counter() - middle


def pyengine(model: str, options: Options) -> tuple[dict[str, Any], Run]:
    import numpy as np

    import pyengine as package
    from pyengine.kv_cache import Sequence

    engine = package.load(model, quant=options["quant"], threads=options["threads"])
    zero = np.zeros(1, np.int32)

    def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
        sequence = Sequence(engine.pool)

        def evaluate_prompt() -> None:
            for at in range(0, len(prompt), options["batch"]):
                part = prompt[at : at + options["batch"]]
                engine.forward([(sequence, part)], rows=np.array([len(part) - 1], np.int32), sampling=[None])

        def evaluate(token: int) -> None:
            engine.forward([(sequence, [token])], rows=zero, sampling=[None])

        try:
            return timed(evaluate_prompt, evaluate, steps)
        finally:
            sequence.close()

    about = {"engine": f"pyengine {package.__version__}", "build": engine.isa, "bytes": engine.weights.packed_bytes}
    return {**about, "bits_per_weight": engine.bits_per_weight}, run


def llama_cpp(model: str, options: Options) -> tuple[dict[str, Any], Run]:
    import llama_cpp as package

    llama = package.Llama(
        model,
        n_ctx=options["context"],
        n_batch=options["batch"],
        n_ubatch=options["batch"],
        n_threads=options["threads"],
        n_threads_batch=options["threads"],
        flash_attn=True,
        verbose=False,
    )

    def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
        llama.reset()
        return timed(lambda: llama.eval(prompt), lambda token: llama.eval([token]), steps)

    build = build_of(package.llama_print_system_info())
    return {"engine": f"llama-cpp-python {package.__version__}", "build": build}, run


def ik_llama_cpp(model: str, options: Options) -> tuple[dict[str, Any], Run]:
    from importlib.metadata import version

    from ik_llama_cpp import _ctypes_api as api  # the class above it has neither batch sizes nor repacking

    api.llama_backend_init()
    how = api.llama_model_default_params()
    how.repack_tensors = bool(options.get("repack"))
    how.use_mmap = not how.repack_tensors  # repacking writes into the weights
    weights = api.llama_model_load_from_file(os.fsencode(model), how)
    if not weights:
        raise RuntimeError(f"{model}: ik_llama.cpp cannot load it")
    of = api.llama_context_default_params()
    of.n_ctx, of.n_batch, of.n_ubatch = options["context"], options["batch"], options["batch"]
    of.n_threads = of.n_threads_batch = options["threads"]
    of.flash_attn = True
    context = api.llama_init_from_model(weights, of)
    if not context:
        raise RuntimeError(f"{model}: ik_llama.cpp makes no context for it")
    batch = api.llama_batch_init(options["batch"], 0, 1)
    length = 0

    def evaluate(ids: list[int]) -> None:
        nonlocal length
        for at in range(0, len(ids), options["batch"]):
            part = ids[at : at + options["batch"]]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, length + i, 1, 0
                batch.logits[i] = i == len(part) - 1
            status = api.llama_decode(context, batch)
            if status:
                raise RuntimeError(f"llama_decode: status {status} after {length} tokens")
            length += len(part)

    def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
        nonlocal length
        api.llama_kv_cache_clear(context)
        length = 0
        return timed(lambda: evaluate(prompt), lambda token: evaluate([token]), steps)

    system_info = api._lib.llama_print_system_info
    system_info.restype = ctypes.c_char_p
    name = f"ik-llama-cpp-python {version('ik-llama-cpp-python')}"
    return {"engine": name, "build": build_of(system_info())}, run


def ctranslate2(model: str, options: Options) -> tuple[dict[str, Any], Run]:
    """The prompt up to the first sampled token, then greedy steps: its interface takes no tokens to decode."""
    import ctranslate2 as package

    generator = package.Generator(
        model, device="cpu", compute_type="int8", inter_threads=1, intra_threads=options["threads"]
    )
    with open(os.path.join(model, "vocabulary.json"), encoding="utf-8") as file:
        tokens = json.load(file)

    def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
        times: list[float] = []
        started = time.perf_counter()
        generator.generate_batch(
            [[tokens[i] for i in prompt]],
            include_prompt_in_result=False,
            min_length=len(steps) + 1,
            max_length=len(steps) + 1,
            callback=lambda _: times.append(time.perf_counter()),
        )
        if len(times) != len(steps) + 1:
            raise RuntimeError(f"{model}: {len(times)} tokens; expected {len(steps) + 1}")
        return times[0] - started, times[-1] - times[0]

    return {"engine": f"ctranslate2 {package.__version__}", "build": ""}, run


KINDS: dict[str, Callable[[str, Options], tuple[dict[str, Any], Run]]] = {
    "pyengine": pyengine,
    "llama-cpp-python": llama_cpp,
    "ik-llama-cpp-python": ik_llama_cpp,
    "ctranslate2": ctranslate2,
}


def main() -> None:
    kind, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:  # libraries print to 1
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        try:
            about, run = KINDS[kind](model, options)
        except ImportError as error:
            say({"problem": f"not installed: {error}"})
            return
        say(about)
        for line in sys.stdin:
            work = json.loads(line)
            say({"seconds": run(work["prompt"], work["steps"])})


if __name__ == "__main__":
    main()
