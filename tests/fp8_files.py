"""float8 checkpoints for tests: matrices of layers as codes of E4M3 with a scale for each block, or for the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from builders import safetensors_bytes

from pyengine.checkpoint import E4M3
from pyengine.fp8 import WHOLE, scale_shape

Stored = dict[str, tuple[str, np.ndarray]]


def nearest(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest values of E4M3."""
    codes = np.argsort(E4M3[:127])
    at = np.clip(np.searchsorted(E4M3[codes], np.abs(values)), 1, 126)
    below = np.abs(values) - E4M3[at - 1] < E4M3[at] - np.abs(values)
    return ((at - below) | np.where(values < 0, 128, 0)).astype(np.uint8)


def fp8_tensors(tensors: dict[str, np.ndarray], block: tuple[int, int]) -> tuple[Stored, dict[str, np.ndarray]]:
    """The matrices of layers as codes with scales, the rest as it is; and what all of it means."""
    out: Stored = {}
    meant = dict(tensors)
    for name, value in tensors.items():
        if value.ndim == 3:  # experts in one tensor, each with its own scales
            each, real = zip(*(fp8_tensors({f".layers.{e}": w}, block) for e, w in enumerate(value)), strict=True)
            for end in ("", "_scale_inv"):
                parts = [one[f".layers.{e}{end}"] for e, one in enumerate(each)]
                out[name + end] = (parts[0][0], np.stack([part for _, part in parts]))
            meant[name] = np.stack([one[f".layers.{e}"] for e, one in enumerate(real)])
            continue
        if value.ndim != 2 or ".layers." not in name:
            out[name] = ("F32", value)
            continue
        rows, columns = value.shape if block == WHOLE else block
        scales = np.empty(scale_shape(value.shape, (rows, columns)), np.float32)
        codes, real = np.empty(value.shape, np.uint8), np.empty_like(value)
        for i, k in np.ndindex(scales.shape):
            at = np.s_[i * rows : (i + 1) * rows, k * columns : (k + 1) * columns]
            scales[i, k] = np.abs(value[at]).max() / 448
            codes[at] = nearest(value[at] / scales[i, k])
            real[at] = E4M3[codes[at]] * scales[i, k]
        out[name] = ("F8_E4M3", codes)
        out[name + "_scale_inv"] = ("F32", scales.reshape(()) if block == WHOLE else scales)
        meant[name] = real
    return out, meant


def write_fp8(folder: Path, config: dict[str, Any], tensors: Stored) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        raw = value.tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    return folder


def fp8(block: tuple[int, int], config: dict[str, Any], **more: Any) -> dict[str, Any]:
    size = None if block == WHOLE else list(block)
    return {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": size, **more}}
