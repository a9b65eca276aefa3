"""The parts of bench/gpu that need no server: conversations, tables, the plan, files on a drive,
what gets built.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import images, soak, speculative_report
from bench.gpu.machine import cached_share, direct_rate, settle
from bench.gpu.models import flatness
from bench.gpu.pool import HEAD, arguments, one
from bench.gpu.prepare import environment_of
from bench.gpu.run import Clock, Results, Visit
from bench.gpu.servers import Completion, pyctl, window_rate
from bench.gpu.speculative import CHANCE_DRAFTS, Findings, counts, planned
from bench.gpu.speculative_report import WITHOUT, acceptance_rates, at_wanted
from bench.gpu.workloads import EDITED, Conversation, cut, edited, grow
from pyctl.llama.images.image_encoder import ImageEncoder

HEAD_OF_PAGE = {
    "commit": "abcdef01",
    "date": "2026-01-01",
    "machine": "a CPU",
    "command": "`a`",
    "weights": "random",
}


def follow(steps: Any) -> list[Any]:
    """Answer every request of a workload with its number."""
    found = []
    step = next(steps)
    while True:
        found.append(step)
        try:
            step = steps.send(f"reply {len(found)}")
        except StopIteration:
            return found


def found() -> list[dict[str, Any]]:
    """Return the records of two returns to a conversation on each server; llama-server takes four
    times as long.
    """
    record = {
        "section": "base",
        "kind": "first token",
        "size": 32768,
        "way": "return after another",
        "evaluated": 10,
    }
    servers = (("pyctl", 1.0), ("llama-server", 4.0))
    return [
        {**record, "server": name, "first_ms": ms * by}
        for name, by in servers
        for ms in (10.0, 30.0)
    ]


def test_a_conversation_has_its_size_and_repeats_itself() -> None:
    for size in (1000, 8192, 32768):
        for one_message in (False, True):
            messages = Conversation("a", size, one_message=one_message).messages
            assert messages == Conversation("a", size, one_message=one_message).messages
            assert messages != Conversation("b", size, one_message=one_message).messages
            assert 0.95 * size < sum(len(m["content"]) + 18 for m in messages) <= 1.02 * size
            assert [m["role"] for m in messages[1::2]] == ["user"] * (len(messages) // 2)
            assert messages[-1]["role"] == "user"


def test_a_conversation_grows_by_its_replies_and_survives_cuts() -> None:
    """Each step of a workload has exactly the messages that its name promises: a measured cache hit
    means nothing if two prompts share less, or more, than the table claims.
    """
    talk = Conversation("a", 8192)
    steps = follow(grow(talk))
    assert [step.way for step in steps] == ["cold", "append", "append", "regenerate", "branch"]
    cold, first, second, again, branch = (step.messages for step in steps)
    assert first[: len(cold) + 1] == [*cold, {"role": "assistant", "content": "reply 1"}]
    assert second[: len(first) + 1] == [*first, {"role": "assistant", "content": "reply 2"}]
    assert again == second
    assert branch[:-1] == second[:-1]
    assert branch[-1] != second[-1]
    asked, other = follow(edited(Conversation("a", 8192)))
    assert other.way == EDITED
    assert other.messages[:-1] == asked.messages[:-1]
    assert other.messages[-1] != asked.messages[-1]
    before = list(talk.messages)
    shortened, half = (step.messages for step in follow(cut(talk)))
    assert talk.messages == before
    assert shortened[:-1] == cold[:-1]
    assert half[:-1] == cold[: len(half) - 1]
    assert 0.3 < len(half) / len(cold) < 0.7


def test_results_are_on_disk_after_each_finding_and_sections_are_replaced(tmp_path: Path) -> None:
    """A run that is broken off keeps its measurements, a section that is measured again replaces
    only itself, and the records of another commit are dropped.
    """
    results = Results(tmp_path, "tiny", HEAD_OF_PAGE)
    results.begin("base")
    for record in found():
        results.add(record.pop("section"), record.pop("kind"), **record)
    results.skip("long", "cold, 5000", "no time left")
    text = (tmp_path / "gpu-side-by-side-tiny.md").read_text()
    assert "| 32,768 | return after another | 10 | 20 | 10 | 80 | 4.00x |" in text
    assert "- long: cold, 5000 (no time left)" in text
    again = Results(tmp_path, "tiny", {**HEAD_OF_PAGE, "command": "`b`"})
    again.begin("base")
    again.skip("base", "all", "no time left")
    assert len(again.records) == len(found()) + 2
    assert "\n- command: `a`, `b`\n" in (tmp_path / "gpu-side-by-side-tiny.md").read_text()
    again.add("base", "decode", server="pyctl", size=1, tokens_per_second=2.0)
    kept = json.loads((tmp_path / "gpu-side-by-side-tiny.json").read_text())["records"]
    kinds = [(record["section"], record["kind"]) for record in kept]
    assert kinds == [("long", "skipped"), ("base", "skipped"), ("base", "decode")]
    assert Results(tmp_path, "tiny", {**HEAD_OF_PAGE, "commit": "abcdef02"}).records == []


def test_the_clock_learns_and_refuses_what_does_not_fit() -> None:
    clock = Clock(time.monotonic() + 100, 1000.0)
    assert clock.fits(clock.prefill(50_000))
    clock.learn(10_000, 100.0)
    assert not clock.fits(clock.prefill(50_000))


def test_a_step_that_does_not_fit_is_skipped_and_told(tmp_path: Path) -> None:
    results = Results(tmp_path, "tiny-hybrid", HEAD_OF_PAGE)
    run = SimpleNamespace(
        shape="tiny-hybrid", results=results, clock=Clock(time.monotonic() + 1, 10.0)
    )
    server = SimpleNamespace(name="pyctl", request=lambda *_: pytest.fail("asked all the same"))
    assert not Visit(run, "base", server).follow(grow(Conversation("a", 1000)))
    assert results.records_of("skipped")[0]["what"] == "pyctl: cold, 1000"


def test_files_are_settled_and_in_the_page_cache(tmp_path: Path) -> None:
    (path := tmp_path / "block").write_bytes(bytes(8 * 2**20))
    assert settle(tmp_path, quiet=0.2) == 8 * 2**20
    assert cached_share([path]) == 1
    assert (direct_rate([path], 2) or 1.0) > 0  # some file systems refuse it


def test_the_environment_puts_the_prepared_folders_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{tmp_path / 'site'}")
    variables = environment_of(tmp_path, None)
    parts = variables["PYTHONPATH"].split(":")
    assert parts[0] == str(tmp_path / "site")
    assert parts.count(parts[0]) == 1
    assert "/elsewhere" in parts
    assert variables["LLAMA_CPP_LIB_PATH"] == str(tmp_path / "lib")


# -- speculative decoding
# ----------------------------------------------------------------------------------


def completion(arrivals: list[tuple[float, int]], drafted: int = 0, accepted: int = 0) -> Any:
    n = sum(count for _, count in arrivals)
    return Completion(
        1.0, arrivals, n, {"draft_n": drafted, "draft_n_accepted": accepted, "prompt_n": 1}
    )


BOTH = ("pyctl", "llama-server")


def speed(
    server: str, rate: float, *, wanted: float = 2.0, accepted: int = 50, **more: Any
) -> dict[str, Any]:
    """50 steps with drafts of 3."""
    counts = {"steps": 50, "drafts": 50, "drafted": 150, "accepted": accepted}
    record = {
        "part": "lengths",
        "kind": "speed",
        "case": f"length {wanted:g}",
        "n_max": 3,
        "prompt": 2048,
        "reply": 128,
    }
    sizes = {"prompt": 2048, "reply": 128, "vram_mib": 20_000.0, "resident_mib": 900.0}
    return {**record, "server": server, "rate": rate, "wanted": wanted, **counts, **sizes, **more}


def test_replies_side_by_side_count_while_all_are_written() -> None:
    slow = completion([(1.0, 1), (2.0, 2), (3.0, 2)])
    fast = completion([(0.0, 1), (0.5, 9), (1.5, 3), (2.5, 3), (9.0, 5)])
    assert window_rate([slow]) == 4 / 2
    assert window_rate([slow, fast]) == (4 + 6) / 2
    assert (
        window_rate([completion([(3.0, 1), (4.0, 1)]), fast, completion([(0.0, 1), (2.0, 1)])]) == 0
    )


def test_a_step_yields_what_was_accepted_and_one_more() -> None:
    reply = completion([(0.0, 1), (1.0, 12)], drafted=12, accepted=8)
    assert counts(reply) == {"drafted": 12, "accepted": 8, "steps": 4}


def test_speeds_are_compared_at_the_length_that_was_asked_for() -> None:
    lucky = speed("pyctl", 150.0, accepted=100)
    unlucky = speed("llama-server", 80.0, accepted=30)
    assert (
        "| length 2 | 2,048 | 128 | 100.0 | 100.0 | 1.00 | 3.00 | 1.60 | 20.00 | 20.00 | 100% | "
        "100% | 3.0 | 3.0 |"
    ) in speculative_report.document({"shape": "tiny", "machine": {}, "records": [lucky, unlucky]})


@pytest.mark.parametrize(("length", "n_max"), [(1.0, 3), (1.5, 3), (3.0, 3), (4.0, 3), (2.0, 1)])
def test_rates_have_the_mean_length_that_was_asked_for(length: float, n_max: int) -> None:
    rates = acceptance_rates(length, n_max)
    assert len(rates) == n_max
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-6)
    assert list(rates) == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("length", "minimum", "maximum"), [(1.0, 0.0, 0.0), (2.5, 0.35, 0.65), (4.0, 0.999, 1.0)]
)
def test_drafts_are_accepted_by_chance(
    length: float, minimum: float, maximum: float, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The server accepts drafts at the rate that yields the requested mean length, so speeds are
    compared at equal lengths although the weights are random.
    """
    flags = [
        "-m",
        str(model_path("tiny-hybrid-nextn")),
        *shlex.split("-c 1024 -t 1 --spec-type draft-mtp --exact"),
    ]
    with pyctl(flags, None, tmp_path / "log", (*CHANCE_DRAFTS, f"{length:g}", "3")) as server:
        reply = server.complete("one two three", 300)
    assert reply.n_predicted == 300, "no reply ends by itself"
    n_whole = reply.n_drafted - 3  # the reply's end cuts the last draft
    assert minimum * n_whole <= reply.n_accepted <= maximum * reply.n_drafted


@pytest.mark.parametrize(
    ("fields", "is_luck"),
    [
        (
            {"wanted": 3.0, "drafts": 25, "drafted": 75},
            False,
        ),  # every second step has a draft, two tokens are right
        ({"wanted": 4.0, "drafted": 50}, False),  # of one token each, all of them right
        (
            {"wanted": 2.0, "drafted": 100},
            True,
        ),  # of two tokens each, which are right less than once on average
    ],
)
def test_only_what_chance_gave_beyond_the_drafts_made_is_luck(
    fields: dict[str, Any], is_luck: bool
) -> None:
    rate = at_wanted(speed("pyctl", 90.0, **fields))
    assert rate < 90.0 if is_luck else rate == pytest.approx(90.0)


def test_prompts_and_replies_have_rows_of_their_own() -> None:
    """Records that differ in the length of the prompt or of the reply make separate rows; averaged
    together they would hide the effect of the length.
    """
    sizes = [
        {"prompt": prompt, "reply": reply} for prompt in (2048, 51200) for reply in (128, 1000)
    ]
    records = [
        *(
            speed(server, 90.0, case=WITHOUT, n_max=0, prefill=1000.0, **size)
            for size in sizes
            for server in BOTH
        ),
        *(speed(server, 120.0, prefill=990.0, **size) for size in sizes for server in BOTH),
    ]
    lines = speculative_report.document(
        {"shape": "tiny", "machine": {}, "records": records}
    ).splitlines()
    assert len([line for line in lines if line.startswith("| length 2 | 51,200 | 1,000 |")]) == 1
    assert (
        len([line for line in lines if line.startswith("| length 2 | 51,200 | 990 | 0.990 |")]) == 1
    )


def test_a_part_that_is_measured_again_replaces_what_it_found(tmp_path: Path) -> None:
    first = Findings(tmp_path, "tiny", HEAD_OF_PAGE, ["lengths", "rewriting"])
    first.add(**speed("pyctl", 90.0))
    first.add(**speed("pyctl", 95.0, part="rewriting"))
    again = Findings(tmp_path, "tiny", HEAD_OF_PAGE, ["lengths"])
    again.add(**speed("pyctl", 100.0))
    assert [record["rate"] for record in again.records] == [95.0, 100.0]
    assert "100.0" in (tmp_path / "gpu-speculative-tiny.md").read_text()


def test_each_length_is_a_case_and_nothing_accepted_comes_last() -> None:
    cases = planned(argparse.Namespace(lengths=[1.0, 16.0, 2.0], n_max=15))
    assert [(case.n_max, case.length) for case in cases] == [
        (0, 0.0),
        (15, 2.0),
        (15, 16.0),
        (15, 1.0),
    ]
    assert [case.name for case in cases[2:]] == ["n_max 15, all accepted", "n_max 15, length 1"]


def test_a_pool_is_measured_at_depth_and_restored_from_ram_and_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "--models tiny-hybrid --modes pool:1400 --depths 512 2048 --ubatch 128 --parts depth "
        "restore cold --work"
    )
    one(arguments([str(tmp_path), *given.split(), str(tmp_path)]))
    first, second, ram, disk, file, part, cold = capsys.readouterr().out.splitlines()
    assert first.count("|") == second.count("|") == HEAD.count("|")
    assert "| 0 of 2 |" in first
    assert "2,048 tokens, RAM (from ram): 2,048 restored" in ram
    assert "2,048 tokens, disk (from disk): 1,9" in disk
    assert "2,048 tokens, files in memory (from disk): 1,9" in file
    assert "512 tokens cold: " in part
    assert "2,048 tokens cold: " in cold


def test_logits_behind_images_are_compared_with_a_cold_run(
    model_path: Callable[[str], Path],
    tiny_mmproj: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits behind restored images equal those of a cold run, and the comparison counts a
    difference: an encoder that changes its output when it runs again is reported.
    """
    sizes = ((64, 64), (320, 256))
    images.bits(model_path("tiny-hybrid"), tiny_mmproj, "q8_0", sizes)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "| q8_0 | 64 x 64 | 9 | 5 of 5 | True |"
    assert second == "| q8_0 | 320 x 256 | 80 | 5 of 5 | True |"

    encode = ImageEncoder._encode
    calls = iter(range(100))

    def another(self: ImageEncoder, *args: Any) -> Any:
        return encode(self, *args) + (
            0.25 if next(calls) % 3 == 1 else 0
        )  # when it is encoded again

    monkeypatch.setattr(ImageEncoder, "_encode", another)
    images.bits(model_path("tiny-hybrid"), tiny_mmproj, "f16", sizes)
    assert capsys.readouterr().out.count("| 3 of 5 | True |") == 2


# -- several models
# ----------------------------------------------------------------------------------


def test_memory_over_switches_is_compared_at_the_same_model() -> None:
    def switches(*sizes: float) -> list[dict[str, Any]]:
        return [{"seconds": 1.0, "vram_mib": size, "resident_mib": 2 * size} for size in sizes]

    text = "100 to 200 MiB of the GPU, +0 in all; 200 to 400 MiB resident, +0 in all; 1.00 s each"
    assert flatness(switches(1, 2, 3, 100, 200, 100, 200, 100)) == text
    assert "100 to 220 MiB of the GPU, +20 in all" in flatness(
        switches(1, 2, 3, 100, 200, 110, 210, 120, 220)
    )
    assert flatness(switches()) == "none"


def test_a_soak_of_two_models_finds_nothing_wrong(
    model_path: Callable[[str], Path],
    tiny_mmproj: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = {name: str(model_path(name)) for name in ("tiny-hybrid-nextn", "tiny-dense")}
    prepared = {"models": {**models, "tiny-vision": str(tiny_mmproj)}}
    (tmp_path / "prepared.json").write_text(json.dumps(prepared))
    soak.main([str(tmp_path), "--no-card", "--flags", "-t 1", "--quick", "--minutes", "0.2"])
    text = capsys.readouterr().out
    assert "no images" not in text
    assert {"lives", "switches", "replies compared", "violations"} <= set(
        re.findall(r"│ +([a-z ]+) │", text)
    )
