"""The tool for animated pictures in the documentation: frames become a small animation of the right length."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.page.browser import Tab


def test_frames_become_an_animation(tab: Tab, tmp_path: Path) -> None:
    from PIL import Image

    from tools.pictures import LAST_FRAME_MS, MOST_FILM_BYTES, animate

    def frame(colour: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (320, 200), (colour, 90, 200 - colour)).save(out, "PNG")
        return out.getvalue()

    # Two that come too soon after the one before take its place.
    frames = [(10.0, frame(0)), (10.03, frame(40)), (10.5, frame(80)), (10.51, frame(120)), (11.0, frame(200))]
    path = tmp_path / "a.webp"
    animate(path, frames)
    assert path.stat().st_size < MOST_FILM_BYTES
    durations, colours = [], []
    with Image.open(path) as film:
        for number in range(getattr(film, "n_frames", 1)):
            film.seek(number)
            film.load()
            durations.append(film.info["duration"])
            pixel = film.convert("RGB").getpixel((100, 100))
            assert isinstance(pixel, tuple)
            colours.append(pixel[0])
    assert durations == [500, 500, LAST_FRAME_MS]
    assert colours == pytest.approx([40, 120, 200], abs=6)
