"""A model as requests and endpoints reach it."""

from __future__ import annotations

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.engine.engine_stats import EngineMemory
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.service import SharedState
from tests.unit.server.fake import Bench


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"model_alias": "mine", "model_name": "Toy"}, "mine"),
        ({"model_alias": "", "model_name": "Toy"}, "Toy"),
    ],
)
def test_a_model_has_its_alias_or_its_own_name(info: dict[str, str], name: str) -> None:
    assert Bench(**info).service.model == name


@pytest.mark.parametrize("policy", ["auto", "off", "full", "600"])
def test_the_disk_policy_of_requests_is_the_servers(policy: str) -> None:
    service = Bench(replies=ReplySettings(disk_policy=policy)).service
    assert service.disk_policy == DiskPolicy.from_flag(policy)


def test_tokens_are_shown_as_text() -> None:
    assert Bench().service.readable(tuple(b"at noon")) == "at noon"


def test_each_use_of_memory_has_a_number() -> None:
    service = Bench().service
    engine = service.admin.memory().result()
    assert isinstance(engine, EngineMemory)
    counted = service.counted_bytes(engine)
    assert counted["snapshots"] == engine.snapshots
    assert counted["arena"] == engine.blocks.held
    assert counted.keys() > service.chat.n_bytes.keys()
    assert min(counted.values()) >= 0


def test_work_after_replies_ends_with_the_worker() -> None:
    bench = Bench()
    queue = bench.service.post_reply
    assert bench.service.post_reply is queue, "one queue"
    bench.worker.close()
    done: list[int] = []
    queue.add(lambda: done.append(1))
    assert done == []


def test_a_process_without_a_directory_of_images_names_none() -> None:
    assert SharedState().media_path == ""
