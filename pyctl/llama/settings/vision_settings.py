"""Settings of the vision encoder and of image sizes."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.errors import ConfigError
from pyctl.settings.convert import integer
from pyctl.settings.setting import MODEL

__all__ = ["VisionSettings"]


def one_device(text: str) -> str:
    """Parse the name of one device. Raises ValueError for several."""
    if "," in text:
        raise ValueError("only one device may be specified for the mmproj")
    return text


@dataclass(frozen=True)
class VisionSettings:
    """The vision encoder and its settings.

    ``mmproj_path`` is the GGUF file of the encoder, empty for none. With ``mmproj_offload`` it runs
    on ``mmproj_device``, empty for the model's first GPU, "none" for the CPU. Images are resized to
    ``image_min_tokens`` .. ``image_max_tokens``; -1 is the encoder's own limit. ``is_optional``: no
    flag requested the encoder. Raises ConfigError if the minimum is above the maximum.
    """

    mmproj_path: str = MODEL.flag(
        "",
        "-mm --mmproj",
        "GGUF file of the vision encoder; -hf fetches the repository's own",
        str,
        "LLAMA_ARG_MMPROJ",
        "FILE",
    )
    mmproj_offload: bool = MODEL.flag(
        True,
        "--mmproj-offload",
        "run the vision encoder on the GPU",
        None,
        "LLAMA_ARG_MMPROJ_OFFLOAD",
        off="--no-mmproj-offload",
    )
    mmproj_device: str = MODEL.flag(
        "",
        "-mmdev --mmproj-device",
        "device of the vision encoder, none = CPU",
        one_device,
        "MTMD_BACKEND_DEVICE",
        "NAME",
        shown="the model's",
    )
    image_min_tokens: int = MODEL.flag(
        -1,
        "--image-min-tokens",
        "minimum tokens per image",
        integer(-1),
        "LLAMA_ARG_IMAGE_MIN_TOKENS",
        shown="the encoder's own",
    )
    image_max_tokens: int = MODEL.flag(
        -1,
        "--image-max-tokens",
        "maximum tokens per image; fewer are faster and show less detail",
        integer(-1),
        "LLAMA_ARG_IMAGE_MAX_TOKENS",
        shown="the encoder's own",
    )
    is_optional: bool = False

    def __post_init__(self) -> None:
        if 0 < self.image_max_tokens < self.image_min_tokens:
            raise ConfigError("--image-min-tokens must not be above --image-max-tokens")
