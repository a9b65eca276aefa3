"""Converters of the values of flags."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.settings.convert import (
    INT32_MAX,
    Convert,
    choice,
    directory,
    file_text,
    integer,
    integers,
    json_object,
    number,
    on_off,
    on_off_auto,
    printable,
    server_address,
    tokens,
    web_address,
    words,
)


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (integer(), "-7", -7),
        (integer(0), "+7", 7),
        (integer(0, 9, all=9), "all", 9),
        (integer(), str(INT32_MAX), INT32_MAX),
        (tokens(), "16k", 16_384),
        (tokens(), "1M", 2**20),
        (tokens(-1), "-1", -1),
        (tokens(0, all=3), "all", 3),
        (number(), "1e-3", 0.001),
        (number(0.0, 1.0), "1", 1.0),
        (choice("a", "b"), "b", "b"),
        (words, " a, ,b ,", ("a", "b")),
        (words, "", ()),
        (on_off, "ON", True),
        (on_off, "disabled", False),
        (on_off_auto, "1", "on"),
        (on_off_auto, "false", "off"),
        (on_off_auto, "-1", "auto"),
        (integers, "1,2,0", (1, 2, 0)),
        (printable, "k-1 ~", "k-1 ~"),
        (json_object, '{"a": [1, 2.5]}', {"a": [1, 2.5]}),
        (web_address, "box:8080/", "http://box:8080"),
        (web_address, "https://a.b/v1", "https://a.b/v1"),
        (server_address, "unix:///run/a.sock", "unix:///run/a.sock"),
        (server_address, "box", "http://box"),
    ],
)
def test_a_text_becomes_its_value(convert: Convert, text: str, value: Any) -> None:
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text", "error"),
    [
        (integer(), "1.5", "'1.5' is not a whole number"),
        (integer(), "\u0661", "is not a whole number"),
        (integer(all=9), "some", "'some' is not a whole number or all"),
        (integer(0), "-1", "-1 is below the minimum of 0"),
        (integer(), str(INT32_MAX + 1), "is above the maximum of 2147483647"),
        (tokens(), "1g", "'1g' is not a whole number"),
        (tokens(), "16k\n", "is not a whole number"),
        (tokens(), "9" * 10 + "k", "is not a whole number"),
        (tokens(), "999999999m", "is above the maximum"),
        (number(), "nan", "'nan' is not a finite number"),
        (number(), "1e999", "'1e999' is not a finite number"),
        (number(), "many", "'many' is not a number"),
        (number(0.5), "0.4", "0.4 is below the minimum of 0.5"),
        (choice("a", "b"), "c", "'c' is not one of a, b"),
        (on_off, "auto", "'auto' is neither on nor off"),
        (on_off_auto, "maybe", "'maybe' is not one of on, off, auto"),
        (integers, "1,,2", "'' is not a whole number"),
        (integers, "1,-2", "-2 is below the minimum of 0"),
        (printable, "k\n", "printable ASCII"),
        (printable, "k\u00e9", "printable ASCII"),
        (json_object, "[1]", "not a JSON object"),
        (json_object, '{"a": NaN}', "'NaN' is not a finite number"),
        (json_object, "{" * 100_000, "not JSON"),
        (json_object, "[" * 100_000, "not JSON"),
        (web_address, "ftp://a", "'ftp://a' is not an http or https address"),
        (web_address, "a b", "'a b' is not an http or https address"),
        (server_address, "unix://relative", "nor unix:///PATH"),
        (server_address, "unix:///a\0b", "nor unix:///PATH"),
        (directory, "~no-such-user/a", "names a home that does not exist"),
        (file_text, "~no-such-user/a", "no such user"),
        (file_text, "/nowhere/a", "cannot read '/nowhere/a': No such file or directory"),
    ],
)
def test_another_text_is_an_error_that_names_the_form(
    convert: Convert, text: str, error: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        convert(text)


def test_a_directory_may_be_new_and_is_no_file(tmp_path: Path) -> None:
    assert directory(str(tmp_path / "new")) == str(tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a directory"):
        directory(str(tmp_path / "file"))


def test_a_file_is_text_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("\ufeffé\r\n".encode())
    assert file_text(str(path)) == "é\n"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        file_text(str(path))


@given(st.integers(-INT32_MAX, INT32_MAX))
def test_each_whole_number_is_read_as_it_is_written(value: int) -> None:
    assert integer()(str(value)) == value
    assert tokens()(str(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_each_finite_number_is_read_as_it_is_written(value: float) -> None:
    assert number()(repr(value)) == value


@given(st.text())
def test_no_text_becomes_an_infinite_number_or_another_error(text: str) -> None:
    try:
        value = number()(text)
    except ValueError:
        return
    assert math.isfinite(value)
