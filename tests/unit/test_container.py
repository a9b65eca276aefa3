"""Containerfile and compose files: what they name exists, and flags are understood."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pyctl.cli.arguments import parse_serve
from tools.container import CONTAINERFILE, Instruction, stages, words_of

yaml = pytest.importorskip("yaml")
ROOT = CONTAINERFILE.parent
HEAD, BUILD, IMAGE = stages(CONTAINERFILE.read_text(encoding="utf-8"))


def named(stage: list[Instruction], name: str) -> list[Instruction]:
    return [instruction for instruction in stage if instruction.name == name]


def one(stage: list[Instruction], name: str) -> list[str]:
    (found,) = named(stage, name)
    return words_of(found)


@pytest.fixture
def service() -> dict[str, Any]:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text.replace("${MODEL:?the name of a file in MODELS}", "x.gguf"))[
        "services"
    ]["pyctl"]


def test_the_build_gets_what_it_copies() -> None:
    assert [words_of(copy) for copy in named(BUILD, "COPY")] == [["dist", "/dist"]]
    assert (ROOT / ".dockerignore").read_text(encoding="utf-8").split() == ["*", "!dist"]


def test_both_stages_have_the_same_python(service: dict[str, Any]) -> None:
    assert [named(stage, "FROM")[0].text.split()[0] for stage in (BUILD, IMAGE)] == [
        "$BASE",
        "$BASE",
    ]
    (base,) = one(HEAD, "ARG")
    assert service["build"]["args"]["BASE"] == f"${{BASE:-{base.removeprefix('BASE=')}}}"


def test_the_image_gets_what_the_build_makes() -> None:
    commands = " ".join(run.text for run in named(BUILD, "RUN"))
    for copy in named(IMAGE, "COPY"):
        assert copy.flags["from"] == ("build",)
        source, target = words_of(copy)
        assert source == target  # scripts of a virtual environment name their own place
        assert re.search(rf"(venv|mkdir|mkdir -p \S+) {source}\b", commands)
    variables = dict(word.split("=", 1) for word in one(IMAGE, "ENV"))
    assert variables["PYCTL_LIBS"] == "package"
    assert variables["PATH"].split(":")[0] == "/opt/pyctl/bin"


def test_the_entry_point_serves_on_the_published_port(service: dict[str, Any]) -> None:
    program, command, *flags = one(IMAGE, "ENTRYPOINT")
    assert program == "pyctl"
    assert command == "serve"
    settings = parse_serve([*flags, *service["command"]], {})
    assert settings.warnings == ()
    assert settings.listen.hosts == ("0.0.0.0",)
    assert one(IMAGE, "EXPOSE") == [str(settings.listen.port)]
    assert service["ports"] == [f"127.0.0.1:{settings.listen.port}:{settings.listen.port}"]
    (health,) = named(IMAGE, "HEALTHCHECK")
    assert f"//127.0.0.1:{settings.listen.port}/health" in health.text
    places = [
        volume.split(":")[-1 if volume.count(":") == 1 else -2] for volume in service["volumes"]
    ]
    assert places == one(IMAGE, "VOLUME")
    assert Path(settings.disk.cache_dir).is_relative_to("/cache")


def test_the_image_runs_with_few_rights_and_time_to_write(service: dict[str, Any]) -> None:
    assert one(IMAGE, "USER") == ["pyctl"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["stop_grace_period"] == "70s"
    assert one(IMAGE, "STOPSIGNAL") == ["SIGTERM"]
    assert "deploy" not in service  # a machine without a card starts it, too
    (own,) = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))[
        "services"
    ].values()
    (device,) = own.pop("deploy")["resources"]["reservations"]["devices"]
    assert own.pop("image") != service["image"]
    assert own == {
        "build": {"args": {"BASE": "${BASE:-docker.io/nvidia/cuda:13.0.2-runtime-ubuntu24.04}"}}
    }
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


@pytest.mark.parametrize("router", ["haproxy.yaml", "sglang-router.yaml"])
def test_two_servers_are_those_of_one_and_a_router_is_in_front(
    service: dict[str, Any], router: str
) -> None:
    """The services of two servers differ from the documented single one by card, image and port
    only, and the router takes over the port. A file that drifts apart would be found by a user.
    """
    deploy = ROOT / "deploy"
    files = [(deploy / name).read_text(encoding="utf-8") for name in ("servers.yaml", router)]
    servers, front = (yaml.safe_load(text) for text in files)
    assert servers["services"].keys() == {"a", "b"}
    for name, card in (("a", "0"), ("b", "1")):
        one = servers["services"][name]
        (device,) = one.pop("deploy")["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": [card], "capabilities": ["gpu"]}
        one["command"][1] = "x.gguf"
        one["volumes"][0] = one["volumes"][0].replace("../models", "./models")
        assert one == {
            name: service[name] for name in service if name not in ("build", "ports")
        } | {"image": "pyctl-cuda"}
    (program,) = front["services"].values()
    assert program["ports"] == service["ports"]
    assert program["depends_on"] == ["a", "b"]
    (volume,) = program["volumes"]
    assert (deploy / volume.split(":")[0]).is_file()


def test_instructions_are_read() -> None:
    _, stage = stages(
        '# c\nFROM a AS b\nRUN --mount=x --mount=y one && \\\n    two\nCMD ["a b", "c"]\n'
    )
    assert [instruction.name for instruction in stage] == ["FROM", "RUN", "CMD"]
    assert stage[1].flags == {"mount": ("x", "y")}
    assert re.sub(" +", " ", stage[1].text) == "one && two"
    assert words_of(stage[2]) == json.loads('["a b", "c"]')
