"""Construction of the vision encoder from settings."""

from __future__ import annotations

from pathlib import Path

from pyctl.errors import ModelError
from pyctl.llama.images.image_encoder import ImageEncoder
from pyctl.llama.images.image_grid import ImageGrid
from pyctl.llama.library.devices import Device, check_gguf, devices
from pyctl.llama.library.file_digest import file_digest
from pyctl.llama.settings.model_settings import FLASH_MODES
from pyctl.llama.settings.resolved import Resolved
from pyctl.llama.settings.vision_settings import VisionSettings

__all__ = ["make_encoder"]


def make_encoder(resolved: Resolved, vision: VisionSettings) -> ImageEncoder:
    """Return the encoder of ``vision`` for the model of ``resolved``; it opens with the model.

    ModelError if the file or the device does not exist, or the file has no encoder.
    """
    path = Path(vision.mmproj_path)
    check_gguf(path, "vision encoder")
    grid = ImageGrid.read(path, vision.image_min_tokens, vision.image_max_tokens)
    device = _choose_device(resolved, vision)
    return ImageEncoder(
        path,
        grid,
        file_digest(path),
        device,
        n_threads=resolved.n_threads_batch,
        flash_attn=FLASH_MODES[resolved.model.flash_attn],
    )


def _choose_device(resolved: Resolved, vision: VisionSettings) -> Device | None:
    """Return the GPU of the encoder, one of this machine, None for the CPU."""
    name = vision.mmproj_device
    if not vision.mmproj_offload or name == "none":
        return None
    if not name:
        return next((gpu for gpu in resolved.gpus if not gpu.is_remote), None)
    local = (device for device in devices() if device.is_gpu and not device.is_remote)
    device = next((device for device in local if device.name == name), None)
    if device is None:
        raise ModelError(f"--mmproj-device: no device {name}")
    return device
