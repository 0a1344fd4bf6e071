"""Make tests/golden/real_<name>.json: what transformers says about a real checkpoint, in float32.

    python tools/goldens/real.py FOLDER --name smollm2

Needs torch and transformers (versions are stored); pyengine itself is not imported. Ten fixed prompts are tokenized
raw (no chat template), continued greedily for 32 tokens (no sampling, no penalty, EOS ignored), and the whole sequence
is then run once more, teacher forced, to store the five best ids of every position. tools/checks/real_models.py holds
pyengine against this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from pathlib import Path

NEW_TOKENS = 32
TOP = 5
ROOT = Path(__file__).resolve().parents[2]

LONG_PROMPT = """\
The harbour town had grown up around a single stone quay. In the early years only fishing boats came in,
and the people who lived there knew every sail by its patches. Later a railway was laid along the cliff, and with it
came summer visitors, a bank, two hotels and a newspaper that printed the hours of the tides on its front page. The
quay was widened twice. The first time the work took three years and the stone came from the hill behind the church;
the second time it took nine months, and the concrete came by ship from a place that nobody in the town could find on
a map. When the fish moved north the boats followed them, and the quay stood empty except in August, when children
dived from its steps. Then a marine biologist rented the old ice house for a season. She measured the temperature of
the water every morning at six, wrote the figures in a blue book, and pinned a copy to the door so that anybody could
read them. By autumn there were always a few people waiting for her to come out with the page. They compared it with
the week before and argued about what it meant. After ten years the blue books filled a shelf, and the line that could
be drawn through them was plain enough for a child to follow. The mayor asked her to explain it at a public meeting.
She began by saying that"""

PROMPTS = {
    "prose": "The old lighthouse keeper climbed the stairs one last time and",
    "fact": "Water boils at a lower temperature on a high mountain because",
    "code_python": 'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "list": "Things to pack for a week in the mountains:\n1. A warm jacket\n2. Good boots\n3.",
    "table": "| city | country | population |\n|---|---|---|\n| Paris | France | 2.1 million |\n| Rome |",
    "dialogue": '"Where did you put the keys?" she asked.\n"I thought you had them," he said.\n"',
    "non_ascii": "Der Fluß fließt über die Brücke — 春天来了, и снег тает. 🙂 Voilà: l'été",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "long": LONG_PROMPT,
}


def identity(folder: Path) -> str:
    """sha256 over config.json, the safetensors header and sixteen 64 KiB samples of the data of every weight file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{folder}: no .safetensors file")
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (header_bytes,) = struct.unpack("<Q", prefix)
            digest.update(prefix + file.read(header_bytes))
            start = 8 + header_bytes
            for part in range(16):
                file.seek(start + (size - start) * part // 16)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def run_prompt(model, ids: list[int]) -> dict[str, list]:
    """Greedy continuation with a KV cache, then the teacher-forced top ids of the whole sequence."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True)
        generated = [int(out.logits[0, -1].argmax())]
        while len(generated) < NEW_TOKENS:
            out = model(torch.tensor([generated[-1:]]), cache=out.cache, use_cache=True)
            generated.append(int(out.logits[0, -1].argmax()))
        logits = model(torch.tensor([ids + generated]), use_cache=False).logits[0]
    values, best = logits.topk(TOP, dim=-1)
    gaps = (values[:, 0] - values[:, 1])[len(ids) - 1 : -1]  # row p predicts token p + 1
    for step, (token, gap) in enumerate(zip(generated, gaps.tolist(), strict=True)):
        if token != int(best[len(ids) - 1 + step, 0]) and gap > 1e-3:
            raise SystemExit(f"step {step}: cached and one-shot argmax differ although the gap is {gap}")
    return {
        "prompt_ids": ids,
        "generated_ids": generated,
        "top5": best.tolist(),
        "gaps": [round(gap, 5) for gap in gaps.tolist()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True, help="file name part: tests/golden/real_<name>.json")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    tokenizer = tokenizers.Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    prompts = []
    for name, text in PROMPTS.items():
        record = run_prompt(model, tokenizer.encode(text).ids)
        prompts.append({"name": name, "text": text, **record})
        print(f"{name}: {len(record['prompt_ids'])} tokens ->", repr(tokenizer.decode(record["generated_ids"])))
    golden = {
        "model": args.name,
        "identity_sha256": identity(args.folder),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention",
        "prompts": prompts,
    }
    path = ROOT / "tests" / "golden" / f"real_{args.name}.json"
    lines = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    path.write_text(lines.replace('{"name":', '\n{"name":') + "\n", encoding="ascii")
    print(f"{path.name}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
