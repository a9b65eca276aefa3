"""The models of a directory and of a preset file, and one-line errors about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pyctl.cli.arguments import parse_serve
from pyctl.cli.logs import LogSettings
from pyctl.cli.presets import Preset, find_models, models_in
from pyctl.cli.serving import build_router
from pyctl.errors import ConfigError
from pyctl.mcp import ToolSettings
from pyctl.server.server_settings import Cors, ListenSettings, RouterSettings, ServerSettings
from pyctl.settings.setting import class_flags
from tests.unit.cli.given import at


def fetch(tmp_path: Path, repo: str, *names: str) -> None:
    """Write files of ``repo`` as if they had been fetched from the hub before."""
    home = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    (home / "snapshots" / "1a").mkdir(parents=True, exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text("1a")
    for name in names:
        (home / "snapshots" / "1a" / name).write_text("")


def read(
    tmp_path: Path, text: str, *argv: str, environ: Mapping[str, str] | None = None
) -> dict[str, Preset]:
    path = tmp_path / "models.ini"
    path.write_text(text)
    flags = ["--models-preset", str(path), *argv]
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub"), **(environ or {})}
    found = find_models(parse_serve(flags, {}).router, flags, environ)
    return {preset.card.name: preset for preset in found}


def test_command_line_wins_over_section_and_section_over_global(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key is read from the command line, then from its section, then from `[*]`. Keys of the
    router end on the preset, and keys without effect are named in a warning.
    """
    text = """
version = 1
; a comment
[*]
c = 8192
n-gpu-layers = 8
cache-type-k = q8_0
[one]
model = /m/one.gguf
n-gpu-layers = 123
no-mmap = true
LLAMA_ARG_CACHE_RAM = 7
jinja = true
alias = a, b
tags = x
prio = 2
load-on-startup = on
keep = true
stop-timeout = 3
[two]
m = /m/two.gguf
mmap = off
c = 4096
kv-unified = on
"""
    found = read(tmp_path, text, "-ctk", "f16")
    one = found["one"]
    two = found["two"]
    assert one.settings.model.path == "/m/one.gguf"
    assert two.settings.model.path == "/m/two.gguf"
    assert one.settings.model.n_ctx == 8192
    assert two.settings.model.n_ctx == 4096
    assert one.settings.model.n_gpu_layers == 123
    assert two.settings.model.n_gpu_layers == 8
    assert one.settings.model.load_mode == "none"
    assert two.settings.model.load_mode == "none"
    assert {each.settings.model.type_k for each in (one, two)} == {"f16"}
    assert one.settings.cache.ram_mib is None
    assert "[one]: LLAMA_ARG_CACHE_RAM has no effect: all models share --cache-ram" in caplog.text
    assert "[one]: without effect here: --prio" in caplog.text
    assert one.card.aliases == ("a", "b")
    assert one.settings.model.alias == ("one",)
    assert one.settings.model.tags == ("x",)
    assert one.on_start is True
    assert one.keeps is True
    assert one.stop_seconds == 3.0
    assert two.on_start is False
    assert two.keeps is False
    assert two.stop_seconds == 10.0
    assert two.settings.model.kv_unified


def test_a_section_of_a_known_name_is_its_settings(tmp_path: Path) -> None:
    """A section named like a model of the directory or the hub's cache adds settings to that model
    instead of a second model. Parts of a split file are one model.
    """
    fetch(tmp_path, "org/m", "m-Q8_0.gguf")
    directory = tmp_path / "d"
    (directory / "split").mkdir(parents=True)
    for name in (
        *("a.gguf", "mtp-a.gguf", "split/x-00001-of-00002.gguf"),
        *("split/x-00002-of-00002.gguf", "split/mmproj-f16.gguf"),
    ):
        (directory / name).write_bytes(b"GGUF")
    (directory / "notes.txt").write_text("")
    (directory / "empty").mkdir()
    split = directory / "split"
    assert models_in(directory) == {
        "a": ["-m", str(directory / "a.gguf")],
        "split": [
            "-m",
            str(split / "x-00001-of-00002.gguf"),
            "--mmproj",
            str(split / "mmproj-f16.gguf"),
        ],
    }
    text = "[a]\nc = 4096\n[org/m:Q8_0]\nc = 512\n"
    found = read(tmp_path, text, "--models-dir", str(directory))
    assert sorted(found) == ["a", "org/m:Q8_0", "split"]
    assert found["a"].settings.model.n_ctx == 4096
    assert found["a"].card.origin == "models_dir"
    of_hub = found["org/m:Q8_0"]
    assert of_hub.settings.hub.hf_repo == "org/m:Q8_0"
    assert of_hub.settings.hub.offline is True
    assert of_hub.card.origin == "cache"


def test_fetched_models_that_a_section_names_are_hidden_and_stay_there(tmp_path: Path) -> None:
    """A downloaded model that a section uses, and its draft, are marked as hidden with
    `dedup-cache-models`, but stay among the models.
    """
    fetch(
        tmp_path,
        "org/m",
        "m-Q8_0.gguf",
        "m-BF16.gguf",
        "mmproj-m-F16.gguf",
        "x-F16-00002-of-00002.gguf",
    )
    fetch(tmp_path, "org/draft", "draft-F16.gguf")
    section = "[mine]\nhf-repo = org/m\nspec-draft-hf = org/draft\n"
    for text, hidden in (
        (section, set()),
        (f"{section}dedup-cache-models = on\n", {"org/m:Q8_0", "org/draft:F16"}),
        (f"[*]\ndedup-cache-models = 1\n{section}", {"org/m:Q8_0", "org/draft:F16"}),
        (
            f"[*]\ndedup-cache-models = 1\n{section}hf-file = m-BF16.gguf\n",
            {"org/m:BF16", "org/draft:F16"},
        ),
    ):
        found = read(tmp_path, text)
        assert sorted(found) == ["mine", "org/draft:F16", "org/m:BF16", "org/m:Q8_0"]
        assert {name for name, preset in found.items() if preset.card.is_hidden} == hidden


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[a]\nmodel = x\nn-gpu-layer = 1\n",
            "[a]: unknown flag --n-gpu-layer; did you mean --n-gpu-layers?",
        ),
        ("[a]\nmodel = x\nc = many\n", "[a]: -c: 'many' is not a whole number"),
        ("[a]\nmodel = x\nmlock = maybe\n", "[a]: mlock: 'maybe' is neither on nor off"),
        ("[a]\nmodel = x\nkeep = maybe\n", "[a]: keep: 'maybe' is neither on nor off"),
        ("[a]\nmodel = x\nstop-timeout = soon\n", "[a]: stop-timeout: 'soon' is not a number"),
        ("[a]\nmodel = x\nstop-timeout = nan\n", "[a]: stop-timeout: 'nan' is not a finite number"),
        ("[a]\nmodel = x\nstop-timeout = inf\n", "[a]: stop-timeout: 'inf' is not a finite number"),
        (
            "[a]\nmodel = x\nstop-timeout = 1e300\n",
            "[a]: stop-timeout: 1e+300 is above the maximum",
        ),
        (
            '[a]\nmodel = x\nchat-template-kwargs = {"a": NaN}\n',
            "[a]: --chat-template-kwargs: not JSON: 'NaN' is not a finite number",
        ),
        ("[a]\nmodel = x\nj = NaN\n", "[a]: -j: not a JSON schema: 'NaN' is not a finite number"),
        (f"[a]\nmodel = x\nlogit-bias = 1+{'9' * 400}\n", "is not a finite number"),
        (f"[a]\nmodel = x\nlogit-bias = {'9' * 40}+1\n", "is above the maximum of 2147483647"),
        (
            "[a]\nmodel = x\nfa = --metrics\n",
            "[a]: --flash-attn: '--metrics' is not one of on, off, auto",
        ),
        ("[a]\nmodel = x\n[a]\nmodel = y\n", "two models are called 'a'"),
        ("[a]\nmodel = x\nrpc = b:1\n", "[a]: --rpc serves one model: use -m"),
        ("[a]\nmodle = x\n", "[a]: unknown key modle; did you mean model?"),
        ("[a]\nc = 512\n", "[a] needs the key model or hf-repo: no such model is installed"),
        ("[a\nmodel = x\n", "is not an INI file: line 1 is neither [NAME] nor KEY = VALUE"),
        ("[a]\nmodel = x\nmore\n", "is not an INI file: line 3 is neither [NAME] nor KEY = VALUE"),
        (
            "",
            "no models: --models-dir has no GGUF file, and no section of --models-preset names one",
        ),
        ("[a]\nmodel = x\nalias = b\n[b]\nmodel = y\n", "two models are called 'b': a and b"),
        (
            "[*]\nload-on-startup = on\n" + "".join(f"[{name}]\nmodel = x\n" for name in "abcde"),
            "5 models have load-on-startup, --models-max is 4",
        ),
    ],
)
def test_what_is_wrong_is_said_at_the_start(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "models.ini"
    path.write_text(text)
    flags = ["--models-preset", str(path)]
    with pytest.raises(ConfigError) as caught:
        build_router(parse_serve(flags, {}), flags, {"HF_HUB_CACHE": str(tmp_path / "hub")})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def of_process() -> set[str]:
    """Return keys for settings that a server has once, under each of their names."""
    owners = (ServerSettings, Cors, ListenSettings, RouterSettings, ToolSettings, LogSettings)
    flags = [flag for owner in owners for _, flag in class_flags(owner)]
    names = {name.lstrip("-") for flag in flags for name in flag.spellings()}
    return (
        names
        | {name.replace("-", "_") for name in names}
        | {flag.env for flag in flags if flag.env}
    )


@pytest.mark.parametrize(
    "place", ["{}[a]\nmodel = x\n", "[*]\n{}[a]\nmodel = x\n", "[a]\nmodel = x\n{}"]
)
def test_keys_that_set_no_model_are_refused(tmp_path: Path, place: str) -> None:
    """A key that belongs to the whole process is an error in a section, and not ignored: a user who
    writes `api-key` there would believe that it protects the server.
    """
    keys = of_process() | {
        *(
            "api-key-file",
            "LLAMA_ARG_API_KEY_FILE",
            "kv-cache-dir",
            "kv-cache-budget",
            "no-kv-cache",
        ),
        *("help", "list-devices"),
    }
    assert {"api-key", "api_key", "LLAMA_API_KEY", "metrics", "v", "log-file"} < keys
    for key in sorted(keys):
        with pytest.raises(
            ConfigError,
            match=f"{key} has no effect here: it belongs on the command line, for all models",
        ):
            read(tmp_path, place.format(f"{key} = 1\n"))


@pytest.mark.parametrize(
    ("lines", "where", "value"),
    [
        ("temp = 0.3 ; warm", "replies.sampling.temperature", 0.3),
        ("temp = 0.3\t# warm", "replies.sampling.temperature", 0.3),
        ("model = /m/x.gguf ; mine", "model.path", "/m/x.gguf"),
        ("tags = a;b, c#d ;e", "model.tags", ("a;b", "c#d")),
        ("samplers = top_k;top_p", "replies.sampling.samplers", ("top_k", "top_p")),
        ("c = 1\nc = 2", "model.n_ctx", 2),
        ("c = 1\nctx-size = 2\nc = 3", "model.n_ctx", 3),
        ("version = 2\nc = 1024", "model.n_ctx", 1024),
        ("  c = 5\r\n\tb=7", "model.n_batch", 7),
    ],
)
def test_lines_are_read_as_llama_server_reads_them(
    tmp_path: Path, lines: str, where: str, value: object
) -> None:
    text = (
        "version = 1 ; of the file\n[*] # all\nctx-size = 9\n[a] ; one\nmodel = "
        f"/m\n{lines}\n[b#2]\nmodel = /n\n"
    )
    found = read(tmp_path, text)
    assert at(found["a"].settings, where) == value
    assert found["b#2"].settings.model.path == "/n"


def test_a_key_above_all_sections_hides_none_of_a_section(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(tmp_path, "c = 1024\n[a]\nmodel = x\nc = 1024\n[b]\nmodel = y\n")
    assert [found[name].settings.model.n_ctx for name in "ab"] == [1024, 0]
    assert "models.ini: without effect above the sections: c; use [*]" in caplog.text


def test_warnings_of_sections_are_shown_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "[*]\nprio = 2\n[a]\nmodel = x\n[b]\nmodel = y\nub = 4096\n[c]\nmodel = z\n"
    read(tmp_path, text, "--no-kv-cache", "--kv-cache-min-tokens", "64")
    shown = sorted(record.getMessage().partition("models.ini: ")[2] for record in caplog.records)
    assert shown == [
        "[a] and 2 more: without effect here: --prio",
        "[b]: --ubatch-size 4096 is cut to --batch-size 2048",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "hf-token = SECRET",
        "HF_TOKEN = SECRET",
        "hft = SECRET",
        "mmproj-url = https://u:SECRET@h/m.gguf",
    ],
)
@pytest.mark.parametrize("place", ["[*]\n{}\n[a]\nmodel = x\n", "[a]\nmodel = x\n{}\n"])
def test_secrets_are_in_no_list_and_count_as_settings(
    tmp_path: Path, place: str, line: str
) -> None:
    path = tmp_path / "models.ini"
    flags = ["--models-preset", str(path), "--no-kv-cache"]
    sources = []
    for secret in ("SECRET", "other"):
        path.write_text(place.format(line.replace("SECRET", secret)) + "c = 512\n")
        models = build_router(
            parse_serve(flags, {}), flags, {"HF_HUB_CACHE": str(tmp_path / "hub")}
        )
        assert models is not None
        sources.append(models.get("a").source)
    assert sources[0].card.args == ("pyctl", "serve", "--model", "x", "-c", "512")
    assert sources[0].card.preset == "model = x\nc = 512\n"
    assert sources[0] != sources[1], "a reload takes the new one"


def test_the_preset_files_of_the_documentation_of_llama_server_are_read(tmp_path: Path) -> None:
    """Both examples of llama-server's documentation are read to the settings they describe. The
    last of two equal keys wins.
    """
    fetch(tmp_path, "org/m", "m-Q8_0.gguf")
    router = """version = 1

; notes
[*]
c = 8192
n-gpu-layers = 8

[org/m:Q8_0]
chat-template = chatml
n-gpu-layers = 123
jinja = true
c = 4096
LLAMA_ARG_CACHE_RAM = 0
model-draft = ./draft.gguf
model-draft = /m/draft.gguf

[custom_model]
model = /m/custom.gguf
"""
    found = read(tmp_path, router, "--kv-cache-dir", str(tmp_path))
    assert found["org/m:Q8_0"].settings.drafts.draft_path == "/m/draft.gguf"
    assert found["custom_model"].settings.model.n_ctx == 8192
    shared = """[*]
ctx-size             = 0
mmap                 = 1
kv-unified           = 1
parallel             = 4
spec-default         = 1

[gpt-oss-120b-hf]
hf                   = org/m
top-p                = 1.0
chat-template-kwargs = {"reasoning_effort": "high"}
"""
    settings = read(tmp_path, shared)["gpt-oss-120b-hf"].settings
    assert settings.model.n_seqs == 4
    assert settings.format.template_kwargs["reasoning_effort"] == "high"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    assert [*read(tmp_path, "\ufeff[one]\nmodel = x.gguf\n")] == ["one"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for flags in (
        ["--models-preset", str(tmp_path / "no.ini")],
        ["--models-dir", str(tmp_path / "no")],
    ):
        with pytest.raises(ConfigError, match=r"cannot read --models-\w+ .*no.*: No such file"):
            build_router(parse_serve(flags, {}), flags, {})


def test_a_model_that_is_named_is_alone(tmp_path: Path) -> None:
    flags = ["-m", "x.gguf", "--models-dir", str(tmp_path)]
    assert build_router(parse_serve(flags, {}), flags, {}) is None
    assert build_router(parse_serve(["-m", "x.gguf"], {}), ["-m", "x.gguf"], {}) is None
