# SPDX-License-Identifier: Apache-2.0
"""Does a model's greedy answer depend on the whole prompt, by more than rounding?

    python sensitivity.py MODEL OUT.json [LENGTH ...]

For each length and a few prompts: the logits after the prompt as it is served (the model's own type), after the same
prompt with another first token, and in float32; distances are in standard deviations of the logits. A model that is fit
for checking KV transfer changes its answer with the first token, and keeps it when only the rounding changes.
Needs torch and transformers; takes the GPU where there is one.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPTS = 4
ANSWER_TOKENS = 16


@torch.inference_mode()
def last_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt], device=model.device)
    return model(ids, logits_to_keep=1).logits[0, -1].float().cpu()


@torch.inference_mode()
def answer(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    return made[0, len(prompt) :].tolist()


def main() -> None:
    path, out = sys.argv[1], Path(sys.argv[2])
    lengths = [int(text) for text in sys.argv[3:]] or [1024, 8192]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"] - 2
    draw = random.Random(7)
    prompts = {n: [[draw.randrange(vocabulary) for _ in range(n)] for _ in range(PROMPTS)] for n in lengths}
    changed = {n: [[(p[0] + 1) % vocabulary, *p[1:]] for p in some] for n, some in prompts.items()}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for kind in ("served", "float32"):
        dtype = "auto" if kind == "served" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        for n, some in prompts.items():
            for index, prompt in enumerate(some):
                entry = found.setdefault((n, index), {"tokens": n, "prompt": index})
                entry[kind] = last_logits(model, prompt)
                if kind == "served":
                    entry["moved"] = last_logits(model, changed[n][index])
                    entry["answer"] = answer(model, prompt)
                    entry["changed_answer"] = answer(model, changed[n][index])
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    lines = []
    for entry in found.values():
        served, exact, moved = entry.pop("served"), entry.pop("float32"), entry.pop("moved")
        scale = exact.std()
        top = exact.topk(2).values
        lines.append(
            entry
            | {
                "first_token_moves": round(float((moved - served).std() / scale), 4),
                "rounding_moves": round(float((served - exact).std() / scale), 4),
                "lead_of_the_best": round(float((top[0] - top[1]) / scale), 4),
                "same_best_in_float32": bool(served.argmax() == exact.argmax()),
                "answer_changes": entry["answer"] != entry["changed_answer"],
            }
        )
        print({key: value for key, value in lines[-1].items() if not key.endswith("answer")}, flush=True)
    out.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
