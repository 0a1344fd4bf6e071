"""transformers itself on a model folder: eager attention, float32, one thread. torch is imported only when called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def versions() -> str:
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}, eager attention, float32"


def run_transformers(folder: Path, ids: Sequence[int], *, one_by_one: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """float32 logits [T, vocab] and states [layers, T, hidden]: the state after each layer, before the final norm.

    one_by_one: feed a token at a time through a KV cache instead of the whole prompt at once.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    unloaded = {key: sorted(map(str, value)) for key, value in report.items() if value}
    if unloaded:  # random numbers in place of a tensor would make a golden of nothing
        raise RuntimeError(f"transformers did not load every tensor: {unloaded}")
    model.eval()
    states: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: object) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    body = model.model.layers if hasattr(model, "model") else model.transformer.h
    for layer in body:
        layer.register_forward_hook(keep)
    steps = [[token] for token in ids] if one_by_one else [list(ids)]
    cache, logits = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for step in steps:
            logits.append(model(torch.tensor([step]), cache=cache, use_cache=True).logits[0])
    layers = len(body)
    by_layer = [torch.cat([s.reshape(-1, s.shape[-1]) for s in states[layer::layers]]) for layer in range(layers)]
    return torch.cat(logits).numpy(), torch.stack(by_layer).numpy()
