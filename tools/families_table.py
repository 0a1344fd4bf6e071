"""README's table of families, made from the registry.

    python tools/families_table.py [--write]

Without --write it prints the table; with it, the lines between README's two markers are replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pyengine.families import FAMILIES  # noqa: E402
from pyengine.family import Family  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- families: tools/families_table.py --write -->\n", "<!-- end of families -->\n"


def differences(family: Family) -> list[str]:
    """How a family differs from Llama, from its fields."""
    if family.texts:
        texts = ", ".join(FAMILIES[name].model_type for name in family.texts)
        return [f"the text part, under text_config ({texts}); other parts are skipped"]
    norm, rope = family.norm, family.rope
    q_k_norm = {"head": "q/k norm per head", "whole": "q/k norm over all heads", None: ""}[family.qk_norm]
    experts = family.experts
    windows = {
        "none": "",
        "off": "",
        "key": "sliding window",
        "switched": "sliding window where use_sliding_window says so",
        "pattern": f"window in all layers but every {family.full_every}th" if family.full_every > 2 else "",
    }
    facts = (
        ("LayerNorm with bias", norm.kind == "layer"),
        ("norms multiply by 1 + weight", norm.plus_one),
        ("norms after the branches too", family.norm_before and family.norm_after),
        ("norms after the branches only", not family.norm_before),
        (q_k_norm, family.qk_norm),
        ("q/k/v bias", family.qkv_bias or family.defaults.get("attention_bias")),
        (windows[family.window], windows[family.window]),
        ("window in every other layer", family.window == "pattern" and family.full_every == 2),
        ("softcaps", family.defaults.get("attn_logit_softcapping")),
        ("learned positions", family.learned_positions),
        ("FFN of two matrices with biases", not family.gated),
        ("latent attention", family.latent),
        ("mixture of experts", experts),
        ("dense first layers", experts and experts.first_dense_key),
        ("shared expert", experts and (experts.shared_size_key or experts.shared_count_key)),
        ("experts chosen by groups", experts and {"group_limited_greedy", "noaux_tc"} & set(experts.methods)),
        (f"RoPE over {rope.partial} of a head", rope.partial not in (None, 1.0)),
        ("interleaved RoPE", rope.interleaved),
        ("layers without RoPE", rope.skips_layers),
        ("RoPE by layer type", rope.local_theta is not None),
        ("q scaled by position", rope.q_scaled),
        ("embeddings times sqrt(hidden_size)", family.embedding_sqrt),
        ("multipliers", "residual_multiplier" in family.keys),
        ("matrices stored [in, out]", family.names.transposed),
        ("tied unless the file says otherwise", family.defaults.get("tie_word_embeddings")),
    )
    return [text for text, holds in facts if holds]


def table() -> str:
    """The markdown table."""
    lines = ["| models | `architectures[0]` | differs from Llama by |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        lines.append(f"| {family.models} | `{name}` | {'; '.join(differences(family)) or '-'} |")
    return "\n".join(lines) + "\n"


def replaced(text: str) -> str:
    """README with the table as it is now."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    out, count = pattern.subn(lambda _: BEGIN + table() + END, text)
    if count != 1:
        raise SystemExit(f"{README}: {count} places between {BEGIN.strip()} and {END.strip()}; expected one")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace README's table")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
