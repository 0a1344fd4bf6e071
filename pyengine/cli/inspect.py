"""Stage 7, cli inspect: the tensor table and the config of a model; no weights are read."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output

if TYPE_CHECKING:
    from pyengine.checkpoint import TensorInfo
    from pyengine.spec import AttentionSpec, FFNSpec, MLASpec, ModelSpec, MoESpec


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="tensor table and config",
        description="The tensor table and the config of a model; no weights are read.",
    )
    _options.add_model(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def tensor_row(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "bytes": info.end - info.begin,
        "file": info.file.name,
    }


def describe(folder: Path, *, strict: bool) -> tuple[ModelSpec, dict[str, Any]]:
    """The spec, and the `inspect --json` object: folder, config (the spec's fields), tensors, totals and notes."""
    from pyengine.config import load_model_spec
    from pyengine.gguf_checkpoint import open_checkpoint
    from pyengine.tensors import check_tensors, settle_head

    spec = load_model_spec(folder, strict=strict)
    with open_checkpoint(folder) as checkpoint:
        spec = settle_head(spec, checkpoint)
        notes = check_tensors(spec, checkpoint.tensors, folder)
        infos = sorted(checkpoint.tensors.values(), key=lambda info: natural_key(info.name))
        rows = [tensor_row(info) for info in infos]
    config = dataclasses.asdict(spec)
    return spec, {
        "model": str(folder),
        "family": spec.family,
        "architecture": spec.architecture,
        "parameters": sum(math.prod(row["shape"]) for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "warnings": list(config.pop("warnings")),
        "notes": notes,
        "config": config,
        "tensors": rows,
    }


def ffn_text(ffn: FFNSpec | MoESpec) -> str:
    from pyengine.spec import FFNSpec

    if isinstance(ffn, FFNSpec):
        return f"FFN {ffn.intermediate_size} {ffn.activation}"
    router, shared = ffn.router, "" if ffn.shared is None else f", shared expert {ffn.shared.intermediate_size}"
    return (
        f"{router.num_experts} experts of {ffn.expert.intermediate_size} {ffn.expert.activation}, "
        f"{router.top_k} a token by {router.scoring}{shared}"
    )


def layer_lines(spec: ModelSpec) -> list[str]:
    """One line for each run of equal layers, such as '0-29: attention 9 heads, 3 KV heads, ...'."""
    from pyengine.spec import AttentionSpec, MLASpec

    lines: list[str] = []
    first = 0
    for index, layer in enumerate(spec.layers):
        following = spec.layers[index + 1] if index + 1 < len(spec.layers) else None
        if following is not None and (following.attention, following.ffn) == (layer.attention, layer.ffn):
            continue
        attention, ffn = layer.attention, layer.ffn
        qk_norm = attention.qk_norm if isinstance(attention, AttentionSpec) else None
        extras = [
            text
            for text, present in (
                ("q/k/v bias", isinstance(attention, AttentionSpec) and attention.qkv_bias),
                ("latent bias", isinstance(attention, MLASpec) and attention.bias),
                ("o bias", attention.o_bias),
                (f"q/k norm ({qk_norm})", qk_norm),
                (f"window {attention.window}", attention.window is not None),
                (f"softcap {attention.softcap}", attention.softcap is not None),
                ("FFN of two matrices", not getattr(ffn, "gated", True)),
                ("FFN bias", getattr(ffn, "bias", False)),
                ("no norm before branches", not layer.norm_before),
                ("norm after branches", layer.norm_after),
            )
            if present
        ]
        which = str(index) if first == index else f"{first}-{index}"
        text = f"{which}: {attention_text(attention)}; {ffn_text(ffn)}"
        lines.append(", ".join([text, *extras]))
        first = index + 1
    return lines


def attention_text(a: AttentionSpec | MLASpec) -> str:
    """Heads and their sizes, and the rotary embedding."""
    from pyengine.spec import AttentionSpec

    if isinstance(a, AttentionSpec):
        heads = f"attention {a.num_heads} heads, {a.num_kv_heads} KV heads, head_dim {a.head_dim}"
    else:
        q_latent = "" if a.q_lora_rank is None else f", q latent {a.q_lora_rank}"
        dims = f"{a.qk_nope_head_dim} + {a.qk_rope_head_dim}, v {a.v_head_dim}"
        heads = f"latent attention {a.num_heads} heads of {dims}{q_latent}, KV latent {a.kv_lora_rank}"
    return f"{heads}, {rope_text(a)}"


def rope_text(attention: AttentionSpec | MLASpec) -> str:
    """As in "rope yarn theta 10000 over 64"."""
    rope = attention.rope
    if rope is None:
        return "no rope"
    whole = rope.rotary_dim == attention.head_dim
    partial = "" if whole else f" over {rope.rotary_dim}"
    return f"rope {rope.rope_type} theta {rope.theta:g}{partial}"


def print_table(spec: ModelSpec, record: dict[str, Any]) -> None:
    config = record["config"]
    print(f"model         {record['model']}")
    print(f"family        {record['family']} ({record['architecture']})")
    print(f"parameters    {record['parameters']:,}")
    print(f"stored        {_output.format_bytes(record['bytes'])} in {len(record['tensors'])} tensors")
    for key in ("hidden_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        print(f"{key:<24}{config[key]}")
    norm = spec.norm
    weight = "1 + weight" * norm.plus_one or "weight"
    print(f"{'norm':<24}{norm.kind}, eps {norm.eps:g}, {weight}{', bias' * norm.bias}")
    for line in layer_lines(spec):
        print(f"layers {line}")
    width = max((len(row["name"]) for row in record["tensors"]), default=0)
    for row in record["tensors"]:
        shape = "x".join(str(n) for n in row["shape"])
        print(f"{row['name']:<{width}}  {row['dtype']:<5} {shape:>15} {row['bytes']:>13,}  {row['file']}")


def run(args: argparse.Namespace) -> int:
    spec, record = describe(_options.model_folder(args), strict=args.strict)
    if not args.quiet:
        for text in record["warnings"]:
            _output.warning(text)
    if args.verbose:
        for text in record["notes"]:
            _output.message(text)
    if args.json:
        _output.print_json(record)
    else:
        print_table(spec, record)
    return 0
