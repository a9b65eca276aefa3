"""Write ngram_drafts.json and synthetic.json: what llama-server drafts from n-grams, and what it takes by chance.

    python -m tests.engine.draft.record_ngrams /path/to/llama-server

Replies are forced by grammars, so that they repeat the prompt and themselves with changes. Each case is asked of a
fresh server. A step is [tokens before the sampled one, drafts, accepted, source, where the key stood or -1].
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

RECORDED = Path(__file__).with_name("ngram_drafts.json")
SYNTHETIC = Path(__file__).with_name("synthetic.json")
PORT = 18472
LEN = "--spec-synth-len"
N_PREDICT = 700

CASES = [
    ("--spec-type ngram-simple", "blocks"),
    ("--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5", "words"),
    ("--spec-type ngram-simple --spec-ngram-simple-size-n 1 --spec-ngram-simple-size-m 2", "words"),
    ("--spec-type ngram-map-k", "blocks"),
    ("--spec-type ngram-map-k --spec-ngram-map-k-size-n 3 --spec-ngram-map-k-size-m 6", "words"),
    ("--spec-type ngram-map-k --spec-ngram-map-k-size-n 6 --spec-ngram-map-k-size-m 20", "short"),
    ("--spec-type ngram-map-k4v", "blocks"),
    ("--spec-type ngram-map-k4v --spec-ngram-map-k4v-size-n 3 --spec-ngram-map-k4v-size-m 4", "words"),
    (
        "--spec-type ngram-map-k4v --spec-ngram-map-k4v-size-n 4 --spec-ngram-map-k4v-size-m 12"
        " --spec-ngram-map-k4v-min-hits 3",
        "words",
    ),
    ("--spec-type ngram-map-k4v --spec-ngram-map-k4v-size-n 5 --spec-ngram-map-k4v-size-m 16", "short"),
    ("--spec-default", "blocks"),
    ("--spec-type ngram-mod --spec-ngram-mod-n-match 16 --spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max 9", "words"),
    ("--spec-type ngram-mod --spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 2 --spec-ngram-mod-n-max 12", "words"),
    ("--spec-type ngram-mod --spec-ngram-mod-n-match 40 --spec-ngram-mod-n-min 0", "short"),
    ("--spec-type ngram-mod,ngram-map-k4v,ngram-simple --spec-ngram-simple-size-n 6", "blocks"),
]


def texts(kind: str, seed: int) -> tuple[str, str]:
    """A prompt and a reply."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(400)]

    def line(few: int) -> str:
        return " ".join(rng.choices(words[:few], k=8)) + ". "

    if kind == "words":  # few words in any order: many keys that are followed by different things
        return "".join(line(6) for _ in range(8)), "".join(line(6) for _ in range(30))
    blocks = ["".join(line(400) for _ in range(3)) for _ in range(4)]
    parts = [rng.choice(blocks) for _ in range(10)]
    for i in range(1, len(parts), 2):  # with a change in every other one
        at = rng.randrange(len(parts[i]))
        parts[i] = parts[i][:at] + rng.choice(words) + parts[i][at + 5 :]
    return ("Hi. " if kind == "short" else "".join(blocks)), "".join(parts)


def ask(server: str, model: Path, flags: str, prompt: str, **fields: Any) -> tuple[dict[str, Any], list[list[Any]]]:
    """The body and the reply of a request to a fresh server, and the steps that it logs."""
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
    assert counts.get("draft_n", 0) == sum(step[1] for step in steps)
    assert counts.get("draft_n_accepted", 0) == sum(step[2] for step in steps)
    return {"prompt": tokens, "reply": answer["tokens"], "n": N_PREDICT}, steps


def record(server: str, model: Path, flags: str, kind: str, seed: int) -> dict[str, Any]:
    """What is drafted with ``flags``."""
    prompt, reply = texts(kind, seed)
    said, steps = ask(server, model, flags, prompt, temperature=0, grammar=f'root ::= "{reply}"')
    return {"flags": flags, **said, "steps": steps}


def record_chances(server: str, model: Path, length: float, seed: int) -> dict[str, Any]:
    """How many drafts are taken with a mean length."""
    flags = f"--spec-type ngram-mod --spec-ngram-mod-n-match 1 --spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max 4 {LEN}"
    prompt = texts("words", 0)[0]
    _, steps = ask(server, model, f"{flags} {length}", prompt, seed=seed, temperature=0.5, ignore_eos=True)
    return {"length": length, "n_max": 4, "seed": seed, "steps": [step[1:3] for step in steps]}


def read_steps(log: str) -> list[list[Any]]:
    """The steps with drafts."""
    steps: list[list[Any]] = []
    source, place = "", -1
    for text in log.splitlines():
        if "max possible draft" in text:
            source, place = "", -1
        elif found := re.search(r"(?:match_pos = |matching pattern at pos )(\d+)", text):
            place = int(found[1])
        elif found := re.search(r"called impl (\S+),", text):
            source = found[1]
        elif found := re.search(r"generate_draft: .*#tokens=(\d+), #draft=(\d+)", text):
            steps.append([int(found[1]), int(found[2]), -1, source, -1 if source == "ngram-mod" else place])
        elif found := re.search(r"add accepted tokens: .*ids.size=(\d+)", text):
            steps[-1][2] = int(found[1]) - 1
    return steps


def main() -> None:
    model = cached_model(SHAPES["tiny-dense"], Path(tempfile.mkdtemp()))
    cases = []
    for i, (flags, kind) in enumerate(CASES):
        cases.append(record(sys.argv[1], model, flags, kind, i))
        steps = cases[-1]["steps"]
        print(flags, len(cases[-1]["reply"]), len(steps), sum(s[1] for s in steps), sum(s[2] for s in steps))
    chances = [record_chances(sys.argv[1], model, length, seed) for length, seed in ((2.5, 1), (4.2, 77), (1.3, 5))]
    SYNTHETIC.write_text(json.dumps(chances, separators=(",", ":")) + "\n", encoding="utf-8")
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    RECORDED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
