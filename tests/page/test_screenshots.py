"""The pictures in docs/ are taken by a command, from the page as it is."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from tools.screenshots import DOCS, PHONE, SCENES, write_webp

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser


def test_every_picture_of_the_documentation_has_a_scene() -> None:
    names = {f"page-{name}.webp" for scene in SCENES.values() for name in scene.pictures}
    assert {path.name for path in DOCS.glob("*.webp")} == names


def test_a_scene_is_taken_by_day_and_by_night(browser: Browser) -> None:
    """Both show a phone, and differ in their background."""
    by_day, by_night = (Image.open(BytesIO(png)) for png in SCENES["phone"].take(browser))
    scale = PHONE["device_scale_factor"]
    size = tuple(int(side * scale) for side in PHONE["viewport"].values())
    assert by_day.size == by_night.size == size
    corner = (2, size[1] - 2)
    assert min(by_day.convert("RGB").getpixel(corner)) > 200
    assert max(by_night.convert("RGB").getpixel(corner)) < 60


def test_a_picture_is_written_as_webp(tmp_path: Path) -> None:
    png = BytesIO()
    Image.new("RGBA", (8, 4), "red").save(png, "PNG")
    path = tmp_path / "page.webp"
    write_webp(png.getvalue(), path)
    with Image.open(path) as written:
        assert written.format == "WEBP"
        assert written.size == (8, 4)
