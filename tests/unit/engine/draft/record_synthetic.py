"""Write synthetic.json: how many drafts llama-server takes by chance.

    python -m tests.unit.engine.draft.record_synthetic /path/to/llama-server

Each case is asked of a fresh server. A step is [drafts, accepted].
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tools.generator import SHAPES, cached_model

SYNTHETIC = Path(__file__).with_name("synthetic.json")
PORT = 18472
LEN = "--spec-synth-len"
N_PREDICT = 700


def text(seed: int) -> str:
    """A few words in any order."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(400)]
    return "".join(" ".join(rng.choices(words[:6], k=8)) + ". " for _ in range(8))


def ask(server: str, model: Path, flags: str, prompt: str, **fields: Any) -> list[list[int]]:
    """The steps that a fresh server logs for a request: how many drafts, and how many of them it took."""
    url = f"http://127.0.0.1:{PORT}"
    command = [server, "-m", str(model), "-c", "8192", "-np", "1", "-t", "1", "--port", str(PORT), "-lv", "9"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--no-webui", *flags.split()], stdout=log, stderr=log)
        try:
            while True:
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.1)
            tokens = httpx.post(f"{url}/tokenize", json={"content": prompt}).json()["tokens"]
            body = {"prompt": tokens, "n_predict": N_PREDICT, "return_tokens": True, **fields}
            answer = httpx.post(f"{url}/completion", json=body, timeout=300).json()
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        steps = read_steps(log.read().decode(errors="replace"))
    counts = answer["timings"]
    assert counts.get("draft_n", 0) == sum(step[0] for step in steps)
    assert counts.get("draft_n_accepted", 0) == sum(step[1] for step in steps)
    return steps


def record_chances(server: str, model: Path, length: float, seed: int) -> dict[str, Any]:
    """How many drafts are taken with a mean length."""
    flags = f"--spec-type ngram-mod --spec-ngram-mod-n-match 1 --spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max 4 {LEN}"
    steps = ask(server, model, f"{flags} {length}", text(0), seed=seed, temperature=0.5, ignore_eos=True)
    return {"length": length, "n_max": 4, "seed": seed, "steps": steps}


def read_steps(log: str) -> list[list[int]]:
    """The steps with drafts."""
    steps: list[list[int]] = []
    for line in log.splitlines():
        if found := re.search(r"generate_draft: .*#draft=(\d+)", line):
            steps.append([int(found[1]), -1])
        elif found := re.search(r"add accepted tokens: .*ids.size=(\d+)", line):
            steps[-1][1] = int(found[1]) - 1
    return steps


def main() -> None:
    model = cached_model(SHAPES["tiny-dense"], Path(tempfile.mkdtemp()))
    chances = [record_chances(sys.argv[1], model, length, seed) for length, seed in ((2.5, 1), (4.2, 77), (1.3, 5))]
    SYNTHETIC.write_text(json.dumps(chances, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
