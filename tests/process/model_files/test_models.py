from __future__ import annotations

import pytest

from pyctl.model_files import split_names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("m.gguf", ["m.gguf"]),
        ("m-00001-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-00002-of-00002.GGUF", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-1-of-2.gguf", ["m-1-of-2.gguf"]),
        ("-00001-of-00002.gguf", ["-00001-of-00002.gguf"]),
    ],
)
def test_files_of_a_split_model(name: str, names: list[str]) -> None:
    assert split_names(name) == names
