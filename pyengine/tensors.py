"""Stage 2, tensors: which tensors a model needs, where a family's files keep them, and what else is in the files.

Everything later asks for canonical names, which are Llama's. A family's `Names` say what they are called on disk, which
are joined with others there and which are stored transposed; errors and notes give the names on disk.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import gguf_config, rope
from pyengine.checkpoint import Checkpoint, TensorInfo, as_float32
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.families import FAMILIES
from pyengine.family import Names
from pyengine.fp8 import SCALE, WHOLE, Fp8Checkpoint, scale_shape
from pyengine.gguf_file import BLOCKS, is_gguf
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, MLASpec, ModelSpec, MoESpec
from pyengine.strict_json import shown

LISTED = 10  # tensors that an error names
INERT = (".inv_freq", ".masked_bias", ".attn.bias")  # endings of buffers that older files carry
FLOATS = ("F32", "F16", "BF16")
# Endings of tensors that only quantized checkpoints have.
QUANTIZED = (
    ".qweight", ".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax",
    ".biases", ".input_scale", ".weight_zero_point", ".quant_map",
)  # fmt: skip

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_WEIGHTS = 4 << 20  # at once
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
DOWN = re.compile(r"mlp\.experts\.\d+\.down_proj\.weight")

Shape = tuple[int, ...]


# ---- canonical names ------------------------------------------------------------------------------------------------


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor the model needs."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), **_norm(spec, "model.norm")}
    if spec.learned_positions:
        shapes["model.embed_positions.weight"] = (spec.learned_positions, hidden)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in spec.layers:
        p = f"model.layers.{layer.index}."
        shapes |= {p + name: shape for name, shape in layer_tensors(spec, layer).items()}
    return shapes


def _norm(spec: ModelSpec, name: str) -> dict[str, Shape]:
    """The tensors of a norm over the hidden state."""
    return {f"{name}.{part}": (spec.hidden_size,) for part in ("weight", "bias")[: 1 + spec.norm.bias]}


def layer_tensors(spec: ModelSpec, layer: LayerSpec) -> dict[str, Shape]:
    """The same of one layer, by the name behind `model.layers.<n>.`."""
    a, f, hidden = layer.attention, layer.ffn, spec.hidden_size
    shapes: dict[str, Shape] = {}
    if layer.norm_before:
        shapes |= _norm(spec, "input_layernorm") | _norm(spec, "post_attention_layernorm")
    if layer.norm_after:
        shapes |= _norm(spec, "post_self_attn_layernorm") | _norm(spec, "post_mlp_layernorm")
    for name, rows, cols, bias in (
        *_attention_matrices(a, hidden),
        ("self_attn.o_proj", hidden, a.width, a.o_bias),
        *_ffn("mlp", f, hidden),
    ):
        shapes[f"{name}.weight"] = (rows, cols)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if isinstance(f, MoESpec) and f.router.selection_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (f.router.num_experts,)
    if isinstance(a, MLASpec):
        shapes["self_attn.kv_a_layernorm.weight"] = (a.kv_lora_rank,)
        if a.q_lora_rank is not None:
            shapes["self_attn.q_a_layernorm.weight"] = (a.q_lora_rank,)
    elif a.qk_norm:
        for name, heads in (("q_norm", a.num_heads), ("k_norm", a.num_kv_heads)):
            shapes[f"self_attn.{name}.weight"] = (a.head_dim * (heads if a.qk_norm == "whole" else 1),)
    return shapes


def _attention_matrices(a: AttentionSpec | MLASpec, hidden: int) -> list[tuple[str, int, int, bool]]:
    """(name, rows, columns, whether it has a bias) of what q, k and v come from."""
    q = a.num_heads * a.head_dim
    if isinstance(a, AttentionSpec):
        kv = a.num_kv_heads * a.head_dim
        sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        return [(f"self_attn.{name}", rows, hidden, a.qkv_bias) for name, rows in sizes.items()]
    expanded = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    latent = [
        ("self_attn.kv_a_proj_with_mqa", a.k_dim, hidden, a.bias),
        ("self_attn.kv_b_proj", expanded, a.kv_lora_rank, False),
    ]
    if a.q_lora_rank is None:
        return [("self_attn.q_proj", q, hidden, False), *latent]
    down = ("self_attn.q_a_proj", a.q_lora_rank, hidden, a.bias)
    return [down, ("self_attn.q_b_proj", q, a.q_lora_rank, False), *latent]


def _ffn(name: str, f: FFNSpec | MoESpec, hidden: int) -> list[tuple[str, int, int, bool]]:
    """(module, rows, columns, bias) of the matrices of an FFN `name`."""
    if isinstance(f, FFNSpec):
        inter = f.intermediate_size
        sides = [(f"{name}.{side}_proj", inter, hidden, f.bias) for side in (("gate", "up") if f.gated else ("up",))]
        return [*sides, (f"{name}.down_proj", hidden, inter, f.bias)]
    out = [(f"{name}.gate", f.router.num_experts, hidden, False)]
    if f.shared is not None:
        out += _ffn(f"{name}.shared_expert", f.shared, hidden)
    if f.shared_gate:
        out.append((f"{name}.shared_expert_gate", 1, hidden, False))
    for index in range(f.router.num_experts):
        out += _ffn(f"{name}.experts.{index}", f.expert, hidden)
    return out


def row_orders(layer: LayerSpec) -> dict[str, npt.NDArray[np.int64]]:
    """Rows of a layer's tensors that are in another order on disk: [N], where each canonical row is among them.

    By the name behind `model.layers.<n>.`; interleaved rotary pairs are read as half-split ones (rope.half_split).
    """
    a = layer.attention
    if a.rope is None or not a.rope.interleaved:
        return {}
    if isinstance(a, MLASpec):  # the rotary part stands behind the others
        last = rope.half_split(a.rope, a.qk_rope_head_dim)
        head = np.concatenate([np.arange(a.qk_nope_head_dim), a.qk_nope_head_dim + last])
        q = np.concatenate([head + a.head_dim * h for h in range(a.num_heads)])
        key = np.concatenate([np.arange(a.kv_lora_rank), a.kv_lora_rank + last])
        return {
            f"self_attn.{a.q_name}.weight": q,
            "self_attn.kv_a_proj_with_mqa.weight": key,
            "self_attn.kv_a_proj_with_mqa.bias": key,
        }
    head = rope.half_split(a.rope, a.head_dim)
    heads = {"q": a.num_heads, "k": a.num_kv_heads}
    rows = {key: np.concatenate([head + a.head_dim * h for h in range(count)]) for key, count in heads.items()}
    orders = {f"self_attn.{key}_proj.{leaf}": rows[key] for key in heads for leaf in ("weight", "bias")}
    return orders | {f"self_attn.{key}_norm.weight": rows[key] if a.qk_norm == "whole" else head for key in heads}


# ---- names on disk --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where a canonical tensor is: rows begin .. end - 1 of a tensor on disk, or all of it."""

    name: str  # on disk
    shape: Shape  # of the whole tensor on disk
    rows: tuple[int, int] | None = None  # None: all; counted after transposing
    transposed: bool = False  # stored [in, out]


class NamesOnDisk:
    """A family's `Names` for the files at hand: of several prefixes, the one that they use."""

    def __init__(self, names: Names, tensors: Mapping[str, TensorInfo]) -> None:
        self.names = names
        self.tensors = tensors
        embed = names.renames.get("embed_tokens", "embed_tokens") + ".weight"
        found = [prefix for prefix in names.prefixes if prefix + embed in tensors]
        self.prefix = found[0] if found else names.prefixes[0]
        # what wraps the whole language model wraps its head too
        self.head = (self.prefix[: -len("model.")] if self.prefix.endswith(".model.") else "") + names.head + "."
        self.layers = self.prefix + names.renames.get("layers", "layers") + "."

    def of(self, name: str) -> str:
        """The name on disk of a canonical one, fused tensors left out."""
        if name.startswith("lm_head."):
            return self.head + name[len("lm_head.") :]
        layer, inner = _split_layer(name)
        module, _, leaf = inner.rpartition(".")
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", module)
        renamed = self.names.renames.get(re.sub(r"(?<=\.)\d+(?=\.)", "{}", module))
        module = module if renamed is None else renamed.format(*numbers)
        return f"{self.prefix if layer is None else f'{self.layers}{layer}.'}{module}.{leaf}"

    def sources(self, expected: Mapping[str, Shape]) -> dict[str, Source]:
        """Where each canonical tensor is, or would be expected, on disk. A fused one counts where its parts are not."""
        parts = {part: (fused, of) for fused, of in self.names.fused.items() for part in of}
        experts = Counter(name[: match.start()] for name in expected if (match := DOWN.search(name)))
        out: dict[str, Source] = {}
        for name, shape in expected.items():
            on_disk = self.of(name)
            if name == EMBEDDING and on_disk not in self.tensors and HEAD not in expected:
                on_disk = self.of(HEAD) if self.of(HEAD) in self.tensors else on_disk  # tied, and stored as the head
            layer, inner = _split_layer(name)
            module, _, leaf = inner.rpartition(".")
            transposed = self.names.transposed and layer is not None and len(shape) == 2
            stacked = None if on_disk in self.tensors else self._stacked(layer, module, shape, experts)
            if stacked is not None:
                out[name] = stacked
                continue
            if on_disk in self.tensors or module not in parts or layer is None:
                out[name] = Source(on_disk, shape[::-1] if transposed else shape, None, transposed)
                continue
            fused, together = parts[module]
            sizes = [expected[f"model.layers.{layer}.{part}.{leaf}"][0] for part in together]
            begin = sum(sizes[: together.index(module)])
            whole = (sum(sizes), *shape[1:])
            rows = (begin, begin + shape[0])
            out[name] = Source(
                f"{self.layers}{layer}.{fused}.{leaf}", whole[::-1] if transposed else whole, rows, transposed
            )
        return out

    def _stacked(self, layer: int | None, module: str, shape: Shape, experts: Mapping[str, int]) -> Source | None:
        """An expert's matrix in a tensor of all experts: gate_up_proj [E, 2 F, K] or down_proj [E, K, F]."""
        match = EXPERT.fullmatch(module)
        if match is None:
            return None
        index, side = int(match.group(1)), match.group(2)
        name = f"{self.layers}{layer}.mlp.experts.{'down_proj' if side == 'down' else 'gate_up_proj'}"
        if name not in self.tensors:
            return None
        rows = shape[0] if side == "down" else 2 * shape[0]
        begin = index * rows + (shape[0] if side == "up" else 0)
        return Source(name, (experts[f"model.layers.{layer}."], rows, shape[1]), (begin, begin + shape[0]))

    def layer_of(self, name: str) -> int:
        """The n of a name on disk inside layer n, else -1."""
        match = re.match(re.escape(self.layers) + r"(\d{1,9})\.", name)
        return int(match.group(1)) if match else -1


def names_on_disk(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> NamesOnDisk:
    """The names of a model's files: those of its family, or of GGUF."""
    in_gguf = any(is_gguf(info.file) for info in itertools.islice(tensors.values(), 1))
    return NamesOnDisk(gguf_config.NAMES if in_gguf else FAMILIES[spec.architecture].names, tensors)


def _split_layer(name: str) -> tuple[int | None, str]:
    """A canonical name as (layer or None, what is behind `model.` or `model.layers.<n>.`)."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match is None:
        return None, name.removeprefix("model.")
    return int(match.group(1)), name[match.end() :]


class CanonicalTensors:
    """The tensors of a checkpoint by canonical name; reads like a `Checkpoint`.

    `tensors`: canonical name -> TensorInfo with the canonical shape and the name on disk, of those the model needs. All
    of them must be there (`check_tensors`).
    """

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self.checkpoint = checkpoint if spec.fp8_block is None else Fp8Checkpoint(checkpoint, spec.fp8_block)
        self.spec = spec
        expected = expected_tensors(spec)
        on_disk = names_on_disk(spec, checkpoint.tensors)
        self.sources = on_disk.sources(expected)
        self.orders = {
            f"model.layers.{layer.index}.{name}": rows
            for layer in spec.layers
            for name, rows in row_orders(layer).items()
        }
        self.tensors = {
            name: replace(checkpoint.tensors[self.sources[name].name], shape=shape) for name, shape in expected.items()
        }

    def read(self, name: str) -> npt.NDArray[Any]:
        """As `Checkpoint.read`, in the canonical shape and order of rows."""
        raw = self._read(name)
        return raw[self.orders[name]] if name in self.orders else raw

    def _read(self, name: str) -> npt.NDArray[Any]:
        source = self.sources[name]
        if source.rows is not None and not source.transposed and len(source.shape) > 1:
            return self.checkpoint.read_range(source.name, *source.rows)
        raw = self.checkpoint.read(source.name)
        if source.transposed:
            raw = raw.T
        return raw if source.rows is None and not source.transposed else np.ascontiguousarray(_rows(raw, source.rows))

    def read_range(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """As `Checkpoint.read_range`, rows counted in the canonical tensor."""
        source = self.sources[name]
        if source.transposed or name in self.orders:
            return self.read(name)[begin:end]
        first = 0 if source.rows is None else source.rows[0]
        return self.checkpoint.read_range(source.name, first + begin, first + end)

    def read_float32(self, name: str) -> npt.NDArray[np.float32]:
        """As `Checkpoint.read_float32`."""
        return as_float32(self.read(name))

    def read_rows(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """As `Checkpoint.read_rows`, rows counted in the canonical tensor."""
        source = self.sources[name]
        if source.transposed or name in self.orders:
            return as_float32(self.read(name)[rows])
        return self.checkpoint.read_rows(source.name, rows if source.rows is None else rows + source.rows[0])

    def flat_on_disk(self, name: str, flat: int) -> int:
        """Where element `flat` of a canonical tensor is in the tensor on disk, for an error."""
        source, shape = self.sources[name], self.tensors[name].shape
        columns = shape[1] if len(shape) > 1 else 1
        row, column = divmod(flat, columns)
        row = int(self.orders[name][row]) if name in self.orders else row
        row += 0 if source.rows is None else source.rows[0]
        return column * source.shape[1] + row if source.transposed else row * columns + column


def _rows(raw: npt.NDArray[Any], rows: tuple[int, int] | None) -> npt.NDArray[Any]:
    return raw if rows is None else raw[rows[0] : rows[1]]


def settle_head(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The spec with a head of its own where a tied model's files hold one that differs from the embedding.

    What is stored counts more than tie_word_embeddings, as in transformers 5; it is a warning. Only such files are
    read. Errors: as reading them.
    """
    on_disk = names_on_disk(spec, checkpoint.tensors)
    embed, head = (checkpoint.tensors.get(on_disk.of(name)) for name in (EMBEDDING, HEAD))
    if not spec.tie_word_embeddings or embed is None or head is None:
        return spec
    rows, columns = spec.vocab_size, spec.hidden_size
    if not embed.shape == head.shape == (rows, columns) or not {embed.dtype, head.dtype} <= {*FLOATS}:
        return spec  # refused where every tensor is accounted for
    step = max(1, COMPARED_WEIGHTS // columns)
    for begin in range(0, rows, step):
        ours, theirs = (
            as_float32(checkpoint.read_range(info.name, begin, min(begin + step, rows))) for info in (embed, head)
        )
        if not np.array_equal(ours, theirs):
            text = f"{head.file}: tensor {shown(head.name)} is not the embedding, though tie_word_embeddings is true"
            return replace(
                spec, tie_word_embeddings=False, warnings=(*spec.warnings, f"{text}; it is used as it is stored")
            )
    return spec


# ---- accounting -----------------------------------------------------------------------------------------------------


def check_tensors(spec: ModelSpec, tensors: Mapping[str, TensorInfo], where: Path) -> list[str]:
    """Account for every tensor of the files, `tensors`; returns notes on extra ones that are not used.

    A stored lm_head.weight of a tied model is not used: it equals the embedding (settle_head).
    Errors, each listing the first ten: ModelFormatError for missing tensors, wrong shapes or layers past the config's;
    UnsupportedModelError for quantized checkpoints, dtypes not read here and extra tensors that would change the
    numbers.
    """
    on_disk = names_on_disk(spec, tensors)
    expected: dict[str, Shape] = {}
    more_dtypes: dict[str, str] = {}  # beside FLOATS
    for name, source in on_disk.sources(expected_tensors(spec)).items():
        expected[source.name] = source.shape
        if name.endswith(("norm.weight", "norm.bias")):
            more_dtypes[source.name] = "F64"
        dims, block = len(source.shape), spec.fp8_block
        if block is not None and (dims == 2 or (dims == 3 and block != WHOLE)):
            more_dtypes[source.name] = "F8_E4M3"
            if source.name in tensors and tensors[source.name].dtype == "F8_E4M3":
                expected[source.name + SCALE] = scale_shape(source.shape, block)
    unread = _unread(spec, on_disk, tensors)
    extra = [name for name in tensors if name not in expected and name not in unread]
    quantized = [name for name in extra if name.endswith(QUANTIZED)]
    if quantized:
        raise UnsupportedModelError(
            f"{where}: {len(quantized)} tensors of a quantized checkpoint: {_listed(quantized)}; expected none"
        )
    missing = [name for name in expected if name not in tensors]
    if missing:
        others = f" (and {len(extra)} not known: {_listed(extra)})" if extra else ""
        raise ModelFormatError(
            f"{where}: {len(missing)} tensors are missing: {_listed(missing)}{others}; expected all of config.json's"
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape, more_dtypes.get(name))
    skipped = {start: [name for name in extra if name.startswith(start)] for start in on_disk.names.skipped}
    known = {name for group in skipped.values() for name in group}
    harmless = {name for name in extra if name in known or _is_inert(tensors[name], spec, on_disk)}
    layers = [name for name in extra if name not in harmless and on_disk.layer_of(name) >= spec.num_layers]
    if layers:
        raise ModelFormatError(
            f"{where}: {len(layers)} tensors of layers past num_hidden_layers {spec.num_layers}: {_listed(layers)}; "
            "expected none"
        )
    unknown = [name for name in extra if name not in harmless]
    if unknown:
        raise UnsupportedModelError(
            f"{where}: {len(unknown)} tensors that a {spec.family} model does not have: {_listed(unknown)}; "
            "expected none, they would change the numbers"
        )
    notes = [f"{len(group)} tensors {shown(start + '*')} are not used" for start, group in skipped.items() if group]
    for what in dict.fromkeys(unread.values()):
        notes.append(f"{sum(other == what for other in unread.values())} tensors of {what} are not used")
    return notes + [f"tensor {shown(name)} is not used" for name in extra if name not in known]


def _unread(spec: ModelSpec, on_disk: NamesOnDisk, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Tensors that are known and not read -> what they are of."""
    unread = {}
    for name in tensors:
        if spec.num_layers <= (layer := on_disk.layer_of(name)) < spec.num_layers + spec.mtp_layers:
            unread[name] = f"layer {layer}, which predicts further tokens,"
        elif spec.fp8_block is not None and name.endswith(".activation_scale"):
            unread[name] = "scales of activations"
    return unread


def _is_inert(info: TensorInfo, spec: ModelSpec, on_disk: NamesOnDisk) -> bool:
    """Extra tensors that change no number: buffers, a head beside a tied embedding, multi-token prediction layers."""
    if info.name == on_disk.of("lm_head.weight") and spec.tie_word_embeddings:
        return info.shape == (spec.vocab_size, spec.hidden_size) and info.dtype in (*FLOATS, *BLOCKS)
    return info.name.startswith("mtp.") or info.name.endswith(INERT) or info.dtype in ("BOOL", "I64")


def _check_tensor(info: TensorInfo, shape: Shape, more_dtype: str | None) -> None:
    if info.shape != shape and not (shape == () and info.shape == (1,)):
        raise ModelFormatError(
            f"{info.file}: tensor {shown(info.name)}: shape {list(info.shape)}; "
            f"expected {list(shape)} (from the config)"
        )
    dtypes = FLOATS if more_dtype is None else (*FLOATS, more_dtype)
    if info.dtype not in dtypes and info.dtype not in BLOCKS:
        raise UnsupportedModelError(
            f"{info.file}: tensor {shown(info.name)}: dtype {info.dtype}; expected {', '.join(dtypes)}"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(shown(name) for name in names[:LISTED]) + (" ..." if len(names) > LISTED else "")
