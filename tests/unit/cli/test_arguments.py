from __future__ import annotations

import dataclasses
import shlex
from operator import attrgetter
from pathlib import Path

import pytest

from pyctl.cache.cache_settings import CacheSettings, DiskSettings
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.chat import FormatSettings, keep_reasoning
from pyctl.chat.template import Template
from pyctl.cli.arguments import FLAGS, OWNERS, parse_chat, parse_serve
from pyctl.cli.flag_aliases import IGNORED, NO_OP, REJECTED
from pyctl.cli.logs import LogSettings
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ConfigError, RequestError
from pyctl.llama.settings.draft_settings import AUTOMATIC, PRIVATE, DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.model_files import HubSettings
from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.server_settings import ListenSettings, ServerSettings
from pyctl.settings.setting import GENERAL
from pyctl.terminal import TerminalSettings
from tests.unit.cli.given import PRESERVED, SERVE_FLAGS, WITHOUT_USE, chat, refused, serve


def test_defaults_are_those_of_llama_server() -> None:
    """But for snapshots every 4,096 tokens instead of 8,192 (001-batch-ends.md in
    docs/internals/decisions), and for RAM, disk and drafts, which depend on the machine
    (006-defaults.md).
    """
    settings = parse_serve(["-m", "model.gguf"], {"XDG_CACHE_HOME": "/c"})
    assert settings.model == ModelSettings(path="model.gguf", n_seqs=4)
    assert settings.cache == CacheSettings(n_slots=0, ram_mib=None)
    assert settings.drafts == DraftSettings(AUTOMATIC, n_draft=2)
    assert settings.engine == EngineSettings(min_step=4096, exact=False, sleep_seconds=-1)
    assert settings.disk == DiskSettings(
        "/c/pyctl/kv",
        True,
        16384,
        512,
        10240,
        5.0,
        "auto:30,spill",
        32_768,
        is_default=True,
        free_part=10,
    )
    assert settings.server == ServerSettings()
    assert settings.replies == ReplySettings(sampling=Sampling(), n_predict=-1, cache_prompt=True)
    assert settings.request_fields == {}
    assert settings.format == FormatSettings(template_kwargs=PRESERVED)
    assert settings.listen == ListenSettings(hosts=("127.0.0.1",), port=8080)
    assert settings.log == LogSettings(3)
    assert settings.hub == HubSettings()
    assert settings.action == "run"
    assert settings.warnings == ()


def test_chatml_can_be_named() -> None:
    template = Template(serve("--chat-template", "chatml").format.chat_template)
    said = [{"role": "user", "content": "Hi"}]
    assert template.render(said) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_every_field_has_a_flag() -> None:
    """Each field of the settings has a flag, but for the listed ones, and no two fields share a
    name. A field without a flag could not be set by a user.
    """
    flagless = {
        *(
            ("Sampling", name)
            for name in (
                "min_keep",
                "grammar_kind",
                "grammar_lazy",
                "grammar_triggers",
                "grammar_hidden",
                "grammar_prefill",
            )
        ),
        *(("Sampling", name) for name in ("min_keep", "post_sampling_probs")),  # requests say these
        *(
            ("DiskSettings", name) for name in ("is_default", "free_part")
        ),  # where no flag names a directory
        ("VisionSettings", "is_optional"),  # -hf brings an encoder that no flag names
        *(
            ("ReplySettings", name) for name in ("disk_policy", "n_batch", "embeddings")
        ),  # as their owners have them
        *(("ReplySettings", name) for name in ("sampling", "chosen")),
        *(("EngineSettings", name) for name in ("canary", "device", "prewarm")),  # limits
        *(("ServerSettings", name) for name in ("cors", "slots_debug", "is_verbose")),
    }
    fields = [(owner.__name__, item) for owner in OWNERS for item in dataclasses.fields(owner)]
    assert {
        (owner, item.name) for owner, item in fields if "flags" not in item.metadata
    } == flagless
    names = [item.name for _, item in fields if "flags" in item.metadata]
    assert len(names) == len(set(names)), "values are handed on by the name of the field"
    assert {flag.dest for flags in FLAGS.values() for flag in flags} == set(names)


def test_every_name_has_one_meaning() -> None:
    spellings = [name for flag in (*SERVE_FLAGS, *FLAGS[GENERAL]) for name in flag.spellings()]
    assert len(spellings) == len(set(spellings))
    assert not set(spellings) & WITHOUT_USE.keys()
    assert sum(map(len, (NO_OP, IGNORED, REJECTED))) == len(WITHOUT_USE)


THREE = ("top_k", "top_p", "temperature")


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--samplers top_k;top_p;temperature", "replies.sampling.samplers", THREE),
        ("--samplers top-k;nucleus;temp", "replies.sampling.samplers", THREE),
        ("--samplers 'TopK; topp ;temperature;'", "replies.sampling.samplers", THREE),
        ("--sampling-seq kpt", "replies.sampling.samplers", THREE),
        ("--sampler-seq edskypmxt", "replies.sampling", Sampling()),
        ("--sampling-seq kia", "replies.sampling.samplers", ("top_k", "infill", "adaptive_p")),
        ("--samplers adaptive-p", "replies.sampling.samplers", ("adaptive_p",)),
        *(
            (f"-ngl {text}", "model.n_gpu_layers", n)
            for text, n in (("auto", -1), ("99", 99), ("0", 0), ("-1", -1))
        ),
        ("--no-mmap --mlock", "model.load_mode", "mlock"),  # older flags
        ("LLAMA_ARG_LOAD_MODE=dio --no-mmap", "model.load_mode", "none"),
        ("LLAMA_ARG_MLOCK=1 -lm dio", "model.load_mode", "dio"),
        ("LLAMA_ARG_MLOCK=1", "model.load_mode", "mmap+mlock"),
        ("LLAMA_ARG_NO_MMAP=", "model.load_mode", "none"),
        ("-s -1", "replies.sampling.seed", RANDOM_SEED),
        ("--temp -1", "replies.sampling.temperature", 0.0),  # greedy
        ("-v", "log.verbosity", 10),
        ("-v", "server.is_verbose", True),
        ("-lv 5", "server.is_verbose", False),
        ("--log-disable", "log.verbosity", -1),
        ("-lv 1", "log.verbosity", 1),
        ("LLAMA_ARG_LOG_VERBOSITY=2", "log.verbosity", 2),
        ("LLAMA_ARG_LOG_VERBOSITY=2 -v", "log.verbosity", 10),
        ("--ssl-key-file k --ssl-cert-file c", "listen.ssl_key_file", "k"),
        ("--ssl-key-file k --ssl-cert-file c", "listen.ssl_cert_file", "c"),
        ("-np 3 --kv-unified-per-slot 1024", "model.n_ctx", 3072),
        ("-np 3 --kv-unified-per-slot 1024 -c 512", "model.n_ctx", 512),
    ],
)
def test_a_command_line_gives_a_setting(line: str, path: str, value: object) -> None:
    words = shlex.split(line)
    environ = dict(word.split("=") for word in words if word.startswith("LLAMA_ARG_"))
    settings = serve(*(word for word in words if not word.startswith("LLAMA_ARG_")), **environ)
    assert attrgetter(path)(settings) == value


def test_four_replies_side_by_side_unless_told_otherwise() -> None:
    assert [serve(*words).model.n_seqs for words in ((), ("-np", "-1"), ("-np", "2"))] == [4, 4, 2]
    assert [chat(*words).model.n_seqs for words in ((), ("-np", "3"))] == [1, 3]


def test_a_pool_is_for_one_reply_at_a_time() -> None:
    """A pool sets one sequence by default, and is refused with several sequences, without flash
    attention, or with the KV cache in RAM: it works with none of them.
    """
    assert serve().pool.n_pooled == 0
    for text, n in (("auto", -1), ("off", 0), ("65536", 65_536)):
        settings = serve("--kv-pool", text)
        assert settings.pool.n_pooled == n
        assert settings.model.n_seqs == (1 if n else 4)
    assert serve(PYCTL_KV_POOL="auto").model.n_seqs == 1
    assert serve("--kv-pool", "auto", "-np", "1").pool.n_pooled == -1
    assert (
        refused("--kv-pool", "auto", "-np", "2")
        == "--kv-pool needs one reply at a time, not --parallel 2"
    )
    assert refused("--kv-pool", "9", "-fa", "off").endswith(
        "needs flash attention, which --flash-attn off forbids"
    )
    assert refused("--kv-pool", "9", "-nkvo").endswith(
        "needs the KV cache on the GPU, which --no-kv-offload forbids"
    )
    assert "0 is below the minimum" in refused("--kv-pool", "0")


def test_an_empty_key_variable_starts_no_open_server() -> None:
    with pytest.raises(ConfigError, match="LLAMA_API_KEY is set but empty"):
        serve(LLAMA_API_KEY="")
    with pytest.raises(ConfigError, match="no key given"):
        serve(LLAMA_API_KEY=" ")
    assert serve("--api-key", "k", LLAMA_API_KEY="").server.api_keys == ("k",)
    assert parse_chat(["--url", "h"], {"LLAMA_API_KEY": ""}).terminal.api_key == ""


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--chat-template-file", "{{ 1 }}"),
        ("--api-key-file", "key"),
        ("--grammar-file", 'root ::= "a"'),
        ("-jf", '{"type": "boolean"}'),
        ("--mcp-servers-config", '{"mcpServers": {"one": {"command": "x"}}}'),
    ],
)
def test_a_byte_order_mark_of_a_file_is_no_part_of_it(tmp_path: Path, flag: str, text: str) -> None:
    plain = tmp_path / "plain"
    marked = tmp_path / "marked"
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    assert serve(flag, str(marked)) == serve(flag, str(plain))


def test_values_from_files(tmp_path: Path) -> None:
    """Templates, keys, grammars and schemas are read from files as from flags, and a flag wins over
    a variable that names a file. A bad schema is an error at the start, not of each request.
    """
    (tmp_path / "template").write_text("{{ ü }}", encoding="utf-8")
    (tmp_path / "keys").write_text("# comment\nkey1  \r\n \t\n\n\t key 2\n  # another\n")
    (tmp_path / "grammar").write_text('root ::= "a"')
    assert (
        serve("--chat-template-file", str(tmp_path / "template")).format.chat_template == "{{ ü }}"
    )
    assert serve("--api-key", "k", "--api-key-file", str(tmp_path / "keys")).server.api_keys == (
        "k",
        "key1",
        "key 2",
    )
    assert (
        serve("--grammar-file", str(tmp_path / "grammar")).replies.sampling.grammar
        == 'root ::= "a"'
    )
    (tmp_path / "schema").write_text('{"type": "boolean"}')
    for flags in (["-jf", str(tmp_path / "schema")], ["--json-schema", '{"type": "boolean"}']):
        sampling = serve(*flags).replies.sampling
        assert sampling.grammar_kind == "llguidance"
        assert "boolean" in sampling.grammar
    assert parse_chat(["-j", '{"type": "boolean"}'], {}).request_fields == {
        "json_schema": {"type": "boolean"}
    }
    assert "unknown type" in refused("-j", '{"type": "wizard"}')
    assert "not a JSON schema" in refused("-j", "{")
    assert serve("--grammar", "root ::= [a-z]").replies.sampling.grammar == "root ::= [a-z]"
    settings = serve(
        "--chat-template", "{{ x }}", LLAMA_ARG_CHAT_TEMPLATE_FILE=str(tmp_path / "template")
    )
    assert settings.format.chat_template == "{{ x }}"


def test_reasoning_joins_the_template_values() -> None:
    settings = serve("--reasoning", "on", "--chat-template-kwargs", '{"effort": "low"}')
    assert settings.format.template_kwargs == {
        **PRESERVED,
        "effort": "low",
        "enable_thinking": True,
    }
    assert serve("--reasoning", "auto").format.template_kwargs == PRESERVED
    forgetting = keep_reasoning(False)
    assert (
        serve("--chat-template-kwargs", '{"preserve_reasoning": false}').format.template_kwargs
        == forgetting
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "off",
            "None",
            "disabled",
            "FULL",
            "full-prefix",
            "auto",
            "auto:1",
            "auto:1000000",
            "1",
            "1000000",
            "0900",
        ),
        *(
            "",
            "core",
            "task",
            "auto:0",
            "auto:-1",
            "auto:",
            "auto:x",
            "auto: 3",
            "auto:1000001",
            "auto:auto:3",
        ),
        *(
            "0",
            "-5",
            "+5",
            "1.5",
            "1000001",
            "99999999999",
            "off:3",
            "full:1",
            " off",
            "٣",
            "auto:٣",
        ),
        *(
            "spill",
            "auto:8,spill",
            "FULL,Spill",
            "600,spill",
            "off,spill",
            "auto, spill",
            "spill,auto",
        ),
    ],
)
def test_the_flag_takes_the_policies_that_a_request_takes_and_the_spill(text: str) -> None:
    try:
        policy = DiskPolicy.from_flag(text)
    except RequestError:
        assert refused("--disk-prefix-cache", text, "--kv-cache-min-tokens", "0")
    else:
        settings = serve("--disk-prefix-cache", text, "--kv-cache-min-tokens", "0")
        assert DiskPolicy.from_flag(settings.disk.disk_policy) == policy


def test_flags_of_the_disk_without_a_directory() -> None:
    flags = ("--disk-prefix-cache", "full", "--kv-cache-budget", "9")
    for more, why in (
        (["--no-kv-cache"], "with --no-kv-cache"),
        (["--cache-ram", "0"], "with --cache-ram 0"),
    ):
        warnings = [
            f"{name} has no effect {why}" for name in ("--disk-prefix-cache", "--kv-cache-budget")
        ]
        assert serve(*flags, *more, PYCTL_KV_CACHE_COLD_MAX="5").warnings == tuple(warnings)
    assert parse_serve(["--kv-cache-budget", "9"], {}).warnings == (
        "--kv-cache-budget has no effect without --kv-cache-dir",
    )
    assert serve("--disk-prefix-cache", "full", "--kv-cache-dir", "kv").warnings == ()
    assert serve("--kv-cache-dir", "~/kv").disk.cache_dir == str(Path.home() / "kv")


@pytest.mark.parametrize(
    ("flags", "environ", "found"),
    [
        ([], {"HOME": "/h"}, "/h/.cache/pyctl/kv"),
        ([], {"HOME": "/h", "XDG_CACHE_HOME": "here"}, "/h/.cache/pyctl/kv"),
        ([], {"XDG_CACHE_HOME": "/c", "PYCTL_KV_CACHE": "off"}, ""),
        (["--kv-cache"], {"XDG_CACHE_HOME": "/c", "PYCTL_KV_CACHE": "off"}, "/c/pyctl/kv"),
        (["--no-kv-cache"], {"PYCTL_KV_CACHE_DIR": "/d"}, ""),
        ([], {"PYCTL_KV_CACHE_DIR": "/d", "PYCTL_KV_CACHE": "off"}, ""),
        (["--kv-cache-dir", "/d"], {"PYCTL_KV_CACHE": "off"}, "/d"),
        (["--cache-ram", "0"], {}, ""),
        (["--embeddings"], {}, ""),
    ],
)
def test_where_the_disk_cache_is(flags: list[str], environ: dict[str, str], found: str) -> None:
    settings = serve(*flags, **environ)
    assert settings.disk.cache_dir == found
    assert settings.disk.is_default == found.endswith("pyctl/kv")
    assert settings.warnings == ()


def test_the_built_in_model_and_a_server_elsewhere_need_no_disk_cache() -> None:
    assert parse_serve([], {}).disk.cache_dir == ""
    assert parse_chat(["--url", "h"], {}).disk.cache_dir == ""
    assert parse_chat(["-hf", "org/m"], {"XDG_CACHE_HOME": "/c"}).disk.cache_dir == "/c/pyctl/kv"


def test_a_user_without_a_home_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    settings = serve()
    assert settings.disk.cache_dir == ""
    (warning,) = settings.warnings
    assert warning == "no disk cache: the user has no home directory; --kv-cache-dir names another"


def test_bounds_of_the_default_directory_give_way_to_flags() -> None:
    disk = serve("--kv-cache-budget", "9", "--kv-cache-daily-writes", "8").disk
    assert disk.disk_mib == 9
    assert disk.daily_mib == 8
    assert disk.free_part == 0
    disk = serve("--kv-cache-dir", "/d").disk
    assert disk.disk_mib == 16384
    assert disk.daily_mib == 131_072
    assert disk.free_part == 0
    assert disk.is_default is False


@pytest.mark.parametrize(
    "flags",
    [
        *(
            ["--spec-type", "none"],
            ["--spec-type", "cache"],
            ["-md", "d.gguf"],
            ["-hfd", "o/d"],
            ["--exact"],
        ),
        *(["--fit", "off"], ["--embeddings"], ["--kv-pool", "auto", "-np", "1"]),
    ],
    ids=" ".join,
)
def test_what_turns_off_drafts_by_default(flags: list[str]) -> None:
    drafts = serve("--spec-draft-n-max", "5", "-ctkd", "q8_0").drafts
    assert drafts.is_automatic is True
    assert drafts.n_draft == 5
    drafts = serve(*flags).drafts
    assert drafts.is_automatic is False
    assert drafts.n_draft == 3


@pytest.mark.parametrize(("keys", "types"), [("a", AUTOMATIC), ("a,b", PRIVATE)])
def test_clients_with_keys_of_their_own_share_no_texts_by_default(
    keys: str, types: tuple[str, ...]
) -> None:
    assert serve("--api-key", keys).drafts.draft_types == types


def test_placements_keep_their_order_and_their_variables_add_up() -> None:
    """Rules of placement stay in the order of their flags, since the first that matches a tensor
    counts. Variables add theirs, and layers are counted from zero.
    """
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    argv = ["-ot", r"blk\.0\.=CUDA0,attn=CPU", "-cmoe", "--n-cpu-moe", "2", "-ncffn", "1"]
    assert serve(*argv).model.placements == (
        (r"blk\.0\.", "CUDA0"),
        ("attn", "CPU"),
        (experts, "CPU"),
        (r"blk\.0" + experts, "CPU"),
        (r"blk\.1" + experts, "CPU"),
        (r"blk\.0\.ffn_(up|down|gate)\.", "CPU"),
    )
    environ = {
        "LLAMA_ARG_OVERRIDE_TENSOR": "attn=CPU",
        "LLAMA_ARG_CPU_MOE": "1",
        "LLAMA_ARG_N_CPU_MOE": "1",
    }
    made = parse_serve(["-m", "m"], environ).model.placements
    assert made == (("attn", "CPU"), (experts, "CPU"), (r"blk\.0" + experts, "CPU"))


def test_metadata_of_every_type() -> None:
    text = "a=int:-5,b=float:0.5,c=bool:true,d=str:x:y=z"
    assert serve("--override-kv", text, "--override-kv", "e=bool:false").model.metadata == (
        ("a", -5),
        ("b", 0.5),
        ("c", True),
        ("d", "x:y=z"),
        ("e", False),
    )


def test_adapters() -> None:
    argv = ["--lora", "a.gguf,b.gguf", "--lora-scaled", "c.gguf:0.5"]
    assert serve(*argv).model.lora == (("a.gguf", 1.0), ("b.gguf", 1.0), ("c.gguf", 0.5))
    assert [scale for _, scale in serve(*argv, "--lora-init-without-apply").model.lora] == [0.0] * 3


def test_models_from_the_network() -> None:
    settings = parse_serve(["-hf", "a/b", "-hff", "x.gguf", "--offline"], {"HF_TOKEN": "t"})
    assert settings.hub == HubSettings("a/b", "x.gguf", "t", "", True)
    assert settings.model.path == ""
    assert settings.warnings == ()


def test_questions() -> None:
    assert parse_serve(["--list-devices"], {}).action == "devices"
    assert parse_serve(["-cl"], {}).action == "models"


def test_two_templates_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{{ x }}")
    text = refused("--chat-template", "{{ x }}", "--chat-template-file", str(tmp_path / "t"))
    assert text == "--chat-template and --chat-template-file exclude each other"


def test_ubatch_is_cut_to_batch() -> None:
    settings = serve("-b", "256")
    assert Resolved.from_settings(settings.model).model.n_ubatch == 256
    assert settings.warnings == ()
    settings = serve("-ub", "4096")
    assert settings.model.n_ubatch == 2048
    assert settings.warnings == ("--ubatch-size 4096 is cut to --batch-size 2048",)


def test_without_a_model_the_built_in_one_is_meant() -> None:
    for parse in (parse_serve, parse_chat):
        assert parse([], {}).model.path == ""


def test_chat_settings() -> None:
    settings = chat("-p", "-hello", "-sys", "Be brief.", "--no-stats", "--temp", "0", "-c", "512")
    assert settings.terminal == TerminalSettings(
        prompt="-hello", system_prompt="Be brief.", stats=False
    )
    assert settings.replies.sampling.temperature == 0.0
    assert settings.model.n_ctx == 512
    assert chat(PYCTL_STATS="off", PYCTL_SYSTEM_PROMPT="s").terminal == TerminalSettings(
        system_prompt="s", stats=False
    )


def test_chat_takes_server_flags_without_effect() -> None:
    settings = chat("--host", "0.0.0.0", "--port", "9", "--metrics", LLAMA_ARG_PORT="8081")
    assert settings.warnings == ("without effect here: --host, --port, --metrics",)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:8080/", "http://localhost:8080"),
        ("localhost:8080", "http://localhost:8080"),
        ("https://example.org/v1", "https://example.org/v1"),
        ("unix:///run/p.sock", "unix:///run/p.sock"),
    ],
)
def test_chat_with_a_server(text: str, url: str) -> None:
    terminal = parse_chat(["--url", text, "--api-key", "k"], {"LLAMA_ARG_MODEL": "m.gguf"}).terminal
    assert terminal.url == url
    assert terminal.api_key == "k"
    assert parse_chat([], {"PYCTL_URL": text}).terminal.url == url


def test_chat_with_a_server_has_no_model_of_its_own() -> None:
    with pytest.raises(ConfigError, match="--url and -m exclude each other"):
        parse_chat(["--url", "localhost", "-m", "m.gguf"], {})
    settings = parse_chat(["--url", "localhost", "-c", "8", "--exact"], {})
    assert settings.warnings == ("-c has no effect with --url", "--exact has no effect with --url")
    warned = parse_chat(["--url", "h", "--spec-type", "draft-mtp"], {}).warnings
    assert warned == ("--spec-type has no effect with --url",)


def test_chat_refuses_bad_addresses_and_empty_prompts() -> None:
    for argv in (
        ["--url", "ftp://x"],
        ["--url", "http://"],
        ["--url", "h", "--api-key", "ü"],
        ["-m", "m", "-p", ""],
    ):
        with pytest.raises(ConfigError):
            parse_chat(argv, {})


def test_only_what_was_asked_for_is_sent_to_a_server() -> None:
    """`pyctl chat --url` sends only the options that a flag or variable sets, so that the server's
    own defaults hold for the others.
    """
    argv = [
        "--url",
        "h",
        "--temp",
        "0.5",
        "-s",
        "-1",
        "-n",
        "9",
        "-l",
        "1-inf",
        "-l",
        "2+1",
        "--samplers",
        "top_k",
    ]
    assert parse_chat(argv, {"LLAMA_ARG_TOP_K": "3"}).request_fields == {
        "temperature": 0.5,
        "seed": -1,
        "max_tokens": 9,
        "logit_bias": [[1, False], [2, 1.0]],
        "samplers": ("top_k",),
        "top_k": 3,
    }
    assert parse_chat(["--url", "h"], {}).request_fields == {}
