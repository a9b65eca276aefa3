"""What the text after a flag may be, where that is more than a number, a word or a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pyctl.chat.schema import schema_grammar
from pyctl.cli.flags import FALSE_WORDS, TRUE_WORDS, file_text, integer, number, words
from pyctl.engine.llama.model_settings import experts_on_cpu
from pyctl.engine.sampling import RANDOM_SEED, SAMPLER_LETTERS, sampler_named
from pyctl.errors import RequestError

__all__ = [
    "KV_TYPES",
    "LOAD_MODES",
    "adapters",
    "address",
    "bias",
    "breaker",
    "cpu_experts",
    "cpu_ffn",
    "directory",
    "disk_policy",
    "hub_name",
    "key_lines",
    "letters",
    "metadata",
    "numbers",
    "on_off",
    "placements",
    "prefix",
    "proportions",
    "samplers",
    "scaled_adapters",
    "schema",
    "schema_file",
    "seed",
    "sendable",
    "sleep",
    "temperature",
    "template",
    "url",
]

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")


def samplers(text: str) -> tuple[str, ...]:
    """Names of samplers in order, separated by semicolons, in any of llama-server's spellings."""
    given = (part.strip().lower() for part in text.split(";") if part.strip())
    return tuple(sampler_named(name) or name for name in given)


def letters(text: str) -> tuple[str, ...]:
    """The same by one letter each."""
    unknown = [letter for letter in text if letter not in SAMPLER_LETTERS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of the letters {''.join(SAMPLER_LETTERS)}")
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def seed(text: str) -> int:
    """A seed; -1 stands for a random one."""
    value = int(integer(-1, RANDOM_SEED)(text))
    return RANDOM_SEED if value == -1 else value


def temperature(text: str) -> float:
    """A number; below 0 means 0."""
    return max(float(number()(text)), 0.0)


def bias(text: str) -> tuple[tuple[int, float], ...]:
    """``ID+BIAS`` or ``ID-BIAS``, as one pair."""
    match = re.fullmatch(r"([0-9]+)([+-][0-9]*\.?[0-9]+|-inf)", text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form TOKEN_ID+BIAS or TOKEN_ID-BIAS")
    return ((int(match[1]), float(match[2])),)


def breaker(text: str) -> tuple[str, ...]:
    """One sequence breaker with its escapes resolved; ``none`` is no breaker."""
    escapes = {"n": "\n", "r": "\r", "t": "\t"}
    return () if text == "none" else (re.sub(r"\\([nrt'\"\\])", lambda m: escapes.get(m[1], m[1]), text),)


def proportions(text: str) -> tuple[float, ...]:
    """Shares, separated by commas or slashes; one at least above 0."""
    values = tuple(float(number(0.0)(part)) for part in re.split("[,/]+", text))
    if not any(values):
        raise ValueError("at least one proportion must be above 0")
    return values


def directory(text: str) -> str:
    """A directory, or a place where one can be made."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r} names a home that does not exist") from None
    if path.exists() and not path.is_dir():
        raise ValueError(f"{text!r} is not a directory")
    return str(path)


def disk_policy(text: str) -> str:
    """In lower case, if it is a form that pyctl.cache.persist takes; flags come before the cache and cannot ask it."""
    match = re.fullmatch("off|none|disabled|full|full-prefix|auto|(?:auto:)?([0-9]{1,9})", text.lower())
    if match is None or (match[1] and not 1 <= int(match[1]) <= 1_000_000):
        raise ValueError(f"{text!r} is none of off, full, auto, auto:N, N, with N from 1 to 1000000")
    return text.lower()


def key_lines(text: str) -> tuple[str, ...]:
    """The lines of a file that are neither empty nor comments."""
    keys = tuple(line for line in file_text(text).splitlines() if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"no key in {text!r}")
    return keys


def sendable(text: str) -> str:
    """Text that fits into a header."""
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key can only hold printable ASCII characters")
    return text


def schema(text: str) -> str:
    """The grammar of a JSON schema."""
    try:
        return schema_grammar(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON schema: {error}") from error
    except RequestError as error:
        raise ValueError(str(error)) from error


def schema_file(text: str) -> str:
    """The same of a file."""
    return schema(file_text(text))


def template(text: str) -> str:
    """Jinja text."""
    if "{" not in text:
        raise ValueError(f"{text!r} is not a Jinja template; llama.cpp's built-in templates cannot be named here")
    return text


def address(text: str) -> str:
    """One address."""
    if len(addresses := words(text)) != 1:
        raise ValueError(f"{text!r} is not one address")
    return addresses[0]


def url(text: str) -> str:
    """An http or https address; http where it does not say."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError(f"{text!r} is not an http or https address")
    return url


def on_off(text: str) -> bool:
    """``on`` or ``off``, also by llama-server's other words for them."""
    if text in TRUE_WORDS:
        return True
    if text in FALSE_WORDS:
        return False
    raise ValueError(f"{text!r} is none of on, off")


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 0 up, separated by commas."""
    return tuple(int(integer(0)(part)) for part in text.split(","))


DENSE_FFN = r"\.ffn_(up|down|gate)\."


def placements(text: str) -> tuple[tuple[str, str], ...]:
    """``PATTERN=BUFFER,...``: regular expressions over names of tensors, and the buffer type where these go."""
    found = []
    for part in words(text):
        pattern, equals, buffer = part.partition("=")
        if not (pattern and equals and buffer):
            raise ValueError(f"{part!r} is not of the form PATTERN=BUFFER")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        found.append((pattern, buffer))
    return tuple(found)


def cpu_experts(text: str) -> tuple[tuple[str, str], ...]:
    """Placements that keep the experts of the first N layers on the CPU."""
    return experts_on_cpu(integer(0, 10_000)(text))


def cpu_ffn(text: str) -> tuple[tuple[str, str], ...]:
    """Placements that keep the dense feed-forward weights of the first N layers on the CPU."""
    return tuple((rf"blk\.{layer}{DENSE_FFN}", "CPU") for layer in range(integer(0, 10_000)(text)))


def metadata(text: str) -> tuple[tuple[str, int | float | bool | str], ...]:
    """``KEY=TYPE:VALUE,...`` with the types int, float, bool and str, in llama.cpp's limits of 127 bytes."""
    found: list[tuple[str, int | float | bool | str]] = []
    for part in words(text):
        match = re.fullmatch(r"([^=]{1,127})=(int|float|bool|str):(.{0,127})", part)
        if match is None or not part.isascii():
            raise ValueError(f"{part!r} is not of the form KEY=TYPE:VALUE with a type of int, float, bool or str")
        key, kind, value = match.groups()
        made: Any = value
        if kind == "int":
            made = integer(-(2**63), 2**63 - 1)(value)
        elif kind == "float":
            made = float(number()(value))
        elif kind == "bool":
            if value not in ("true", "false"):
                raise ValueError(f"{value!r} is none of true, false")
            made = value == "true"
        found.append((key, made))
    return tuple(found)


def adapters(text: str) -> tuple[tuple[str, float], ...]:
    """Adapter files, separated by commas, each at full scale."""
    return tuple((name, 1.0) for name in words(text))


def scaled_adapters(text: str) -> tuple[tuple[str, float], ...]:
    """``FILE:SCALE,...``."""
    found = []
    for part in words(text):
        name, colon, scale = part.rpartition(":")
        if not (name and colon):
            raise ValueError(f"{part!r} is not of the form FILE:SCALE")
        found.append((name, float(number()(scale))))
    return tuple(found)


def hub_name(text: str) -> str:
    """``USER/MODEL``, with ``:QUANT`` behind it or not."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", text, re.ASCII):
        raise ValueError(f"{text!r} is not of the form USER/MODEL or USER/MODEL:QUANT")
    return text


def prefix(text: str) -> str:
    """A path to serve below, without a slash at its end."""
    if text and not re.fullmatch(r"(/[\w.~-]+)+", text):
        raise ValueError(f"{text!r} is not a path such as /llm")
    return text


def sleep(text: str) -> int:
    """Seconds from 1 up, or -1."""
    if (value := int(integer(-1)(text))) == 0:
        raise ValueError("0 is neither a time nor -1")
    return value
