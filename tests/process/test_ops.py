"""Operations of a real server: sleep and wake, slot files, embeddings, warm-ups, log and metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.process.conftest import Server, source_of
from tests.waiting import until

Start = Callable[..., Server]

SYSTEM = {"role": "system", "content": "You keep the manual. " * 40}


def ask(server: Server, *questions: str) -> Any:
    messages = [SYSTEM, *({"role": "user", "content": question} for question in questions)]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    reply = response.json()
    reply["timings"]["source"] = source_of(response)
    return reply


def is_sleeping(server: Server) -> bool:
    return bool(httpx.get(f"{server.url}/props").json()["is_sleeping"])


def test_it_sleeps_keeps_its_cache_and_wakes(start: Start) -> None:
    server = start("tiny-hybrid", "--exact", "--alias", "tiny", "--sleep-idle-seconds", "3")
    ask(server, "What is in chapter one?")
    until(lambda: is_sleeping(server))
    for path in ("/health", "/models", "/props", "/slots", "/cache"):
        assert httpx.get(server.url + path).status_code == 200
    # Counting tokens and rendering need the vocabulary alone.
    assert httpx.post(f"{server.url}/tokenize", json={"content": "hi"}).json()["tokens"]
    assert is_sleeping(server)
    warm = ask(server, "What is in chapter one?", "And in two?")
    assert warm["timings"]["source"] == "ram"
    assert warm["timings"]["cache_n"] > 700
    endless = {"prompt": "x", "n_predict": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=endless) as response:
        next(response.iter_lines())
        assert not is_sleeping(server)
    fresh = start("tiny-hybrid", "--exact")
    assert ask(fresh, "What is in chapter one?", "And in two?")["choices"] == warm["choices"]
    assert "model unloaded" in server.log()
    assert server.stop() == 0
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-dense"])
def test_a_slot_survives_a_restart(start: Start, tmp_path: Path, shape: str) -> None:
    server = start(shape, "--slot-save-path", str(tmp_path))
    body = {"prompt": "Once upon a time there was a king " * 20, "n_predict": 8, "temperature": 0, "ignore_eos": True}
    first = httpx.post(f"{server.url}/completion", json={**body, "return_tokens": True}).json()
    saved = httpx.post(f"{server.url}/slots/0?action=save", json={"filename": "king.bin"}).json()
    assert saved["n_saved"] == first["timings"]["prompt_n"] + 7
    assert saved["n_written"] == (tmp_path / "king.bin").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["king.bin"]
    goes_on = {**body, "prompt": [body["prompt"], *first["tokens"][:-1], " and then"]}
    response = httpx.post(f"{server.url}/completion", json=goes_on)
    expected = response.json()
    assert source_of(response) == "live"

    other = start(shape, "--slot-save-path", str(tmp_path))
    read = httpx.post(f"{other.url}/slots/0?action=restore", json={"filename": "king.bin"}).json()
    assert (read["n_restored"], read["n_read"]) == (saved["n_saved"], saved["n_written"])
    reply = httpx.post(f"{other.url}/completion", json=goes_on).json()
    assert reply["timings"]["cache_n"] == saved["n_saved"]
    assert reply["content"] == expected["content"]

    erased = httpx.post(f"{other.url}/slots/0?action=erase").json()
    assert erased == {"id_slot": 0, "n_erased": reply["tokens_cached"]}
    response = httpx.post(f"{other.url}/slots/0?action=restore", json={"filename": "missing.bin"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("Unable to restore slot")
    assert httpx.post(f"{other.url}/completion", json=goes_on).json()["content"] == expected["content"]


def test_embeddings_beside_a_conversation(start: Start) -> None:
    server = start("tiny-hybrid", "--embeddings", "--pooling", "mean", is_f32=True)
    first = ask(server, "What is in chapter one?")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        texts = ["the cat sat", "the cat sat", "nothing of the kind"]
        made = client.embeddings.create(model="any", input=texts)
        plain = client.embeddings.create(model="any", input=texts, encoding_format="float")
    one, same, other = (item.embedding for item in made.data)
    assert one == same != other
    assert math.hypot(*one) == pytest.approx(1, rel=1e-5)
    assert plain.data[2].embedding == pytest.approx(other, rel=1e-6)
    assert made.usage.prompt_tokens > 10
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "word " * 200})
    assert response.status_code == 400
    assert "current batch size: 128" in response.json()["error"]["message"]
    again = ask(server, "What is in chapter one?")
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert again["timings"]["cache_n"] > 0


def test_embeddings_of_each_token(start: Start) -> None:
    server = start("tiny-dense", "--embeddings", "--pooling", "none")
    tokens = httpx.post(f"{server.url}/tokenize", json={"content": "a cat"}).json()["tokens"]
    (item,) = httpx.post(f"{server.url}/embeddings", json={"input": "a cat"}).json()
    assert len(item["embedding"]) == len(tokens)
    assert len(set(map(len, item["embedding"]))) == 1
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a cat"}).status_code == 400


def test_metrics_of_a_real_server(start: Start) -> None:
    server = start("tiny-hybrid", "--metrics", "--exact")
    replies = [ask(server, "What is in chapter one?"), ask(server, "What is in chapter one?", "And in two?")]
    text = httpx.get(f"{server.url}/metrics").text
    values = {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    timings = [reply["timings"] for reply in replies]
    assert values["llamacpp:prompt_tokens_total"] == sum(each["prompt_n"] for each in timings)
    assert values["llamacpp:prompt_tokens_cached_total"] == sum(each["cache_n"] for each in timings) > 0
    assert values["llamacpp:tokens_predicted_total"] == sum(each["predicted_n"] for each in timings)
    assert values["pyctl:cache_requests_total"] == 2
    assert sum(values[f"pyctl:cache_hits_total{source}"] for source in ("live", "ram", "disk")) == 1
    assert values["pyctl:cache_snapshots"] > 0


def test_prompts_are_made_ready_while_nobody_asks(start: Start) -> None:
    server = start("tiny-hybrid")
    assert httpx.post(f"{server.url}/cache/warm", json={"messages": [SYSTEM]}).status_code == 200
    assert httpx.get(f"{server.url}/cache").json()["totals"]["warm_ups"]
    first = ask(server, "What is in chapter one?")
    assert first["timings"]["warmed_n"] == first["timings"]["cache_n"] > 700
    # Shutdown does not wait for a background request.
    prompt = {"messages": [{"role": "user", "content": "word " * 1500}]}
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{server.url}/cache/warm", json=prompt, timeout=0.2)
    assert server.stop() == 0
    assert "Traceback" not in server.log()
