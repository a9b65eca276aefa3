"""The vision encoder of llama.cpp's libmtmd, and a cache of encoded images."""

from __future__ import annotations

import ctypes
import hashlib
import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.errors import EngineError, ModelError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.llama.images.image_grid import ImageGrid
from pyctl.llama.library.bindings import api, mtmd
from pyctl.llama.library.devices import Device, tensor_bytes
from pyctl.llama.library.extension import build_version
from pyctl.llama.library.library_log import forget_log_errors, last_log_error, log_callback
from pyctl.prompt import ImageSpan, Tokens, as_tokens
from pyctl.settings.limit import limit

__all__ = ["MAX_ROWS_BYTES", "ImageEncoder", "ImageRows"]

MAX_ROWS_BYTES = limit(
    256 * 2**20,
    "encoded images, within --cache-ram",
    "the oldest are encoded again",
    "memory",
    "bytes",
)


class ImageRows:
    """An LRU cache of image rows with at most ``limit`` bytes; the latest entry always stays."""

    def __init__(self, limit: int = MAX_ROWS_BYTES) -> None:
        self.limit = limit
        self.n_bytes = 0
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def get(self, key: bytes) -> NDArray[np.float32]:
        """Return the rows of one image, shape (n, width). Raises KeyError."""
        self._rows.move_to_end(key)
        return self._rows[key]

    def put(self, key: bytes, rows: NDArray[np.float32]) -> None:
        """Add ``rows``, shape (n, n_embd), and evict others beyond the limit."""
        self.n_bytes += rows.nbytes - (self._rows[key].nbytes if key in self._rows else 0)
        self._rows[key] = rows
        self._rows.move_to_end(key)
        while len(self._rows) > 1 and self.n_bytes > self.limit:
            self.n_bytes -= self._rows.popitem(last=False)[1].nbytes


MAX_READY_BYTES = limit(
    256 * 2**20,
    "decoded images that wait for the encoder",
    "the oldest are decoded again",
    "memory",
    "bytes",
)

MAX_KNOWN = limit(4096, "image files known to be valid", "the oldest are decoded again", "memory")

CUBLAS_BYTES = 32 * 2**20
"""Largest cuBLAS workspace of llama.cpp."""

MARKER = b"<__media__>"

PROBES = (
    (1, 1),
    (32, 32),
    (33, 47),
    (640, 480),
    (1023, 767),
    (1920, 1080),
    (4000, 3000),
    (8000, 20),
    (31, 9000),
)
"""Test sizes to compare libmtmd's grid of images with `ImageGrid`."""


class _Ready:
    """A decoded and resized image in libmtmd's form, which it owns."""

    def __init__(self, chunks: Any, chunk: Any, n_bytes: int) -> None:
        self._chunks = chunks
        self.chunk = chunk
        self.n_bytes = n_bytes

    def chunks(self) -> list[Any]:
        """Return the chunks: the image, and the texts around it."""
        return [
            mtmd.mtmd_input_chunks_get(self._chunks, i)
            for i in range(mtmd.mtmd_input_chunks_size(self._chunks))
        ]

    def __del__(self) -> None:
        mtmd.mtmd_input_chunks_free(self._chunks)


SMALL = ((1, 1), (1, 400), (400, 1))
"""Image sizes with few tokens."""

Grid = tuple[int, int]


class _Graphs:
    """A prediction of when llama.cpp would update the encoder's CUDA graph for another image size.

    llama.cpp captures a computation that repeats, launches the graph until the size changes, and
    updates the graph in place with the next capture. With cuBLAS 13.1 the updated graph aborts the
    process ("an illegal instruction").
    """

    def __init__(self) -> None:
        self._last: Grid = (0, 0)
        self._is_captured = self._is_launched = False

    def would_replace(self, grid: Grid) -> bool:
        """Return whether encoding an image of ``grid`` now would update the graph."""
        return self._is_captured and not self._is_launched and grid == self._last

    def encoded(self, grid: Grid) -> None:
        """Record the encoding of an image of ``grid``."""
        self._is_launched = grid == self._last
        self._is_captured = self._is_captured or self._is_launched
        self._last = grid


class ImageEncoder:
    """The vision encoder in the file ``path``, on ``device``, None for the CPU. ModelError for an
    unusable file.

    ``grid`` computes sizes, ``identity`` is the file's digest, ``around`` are the tokens before and
    after images. Call `close` before the model is freed. `picture` is thread-safe; all other
    methods belong to the model's thread.
    """

    def __init__(
        self,
        path: Path,
        grid: ImageGrid,
        identity: str,
        device: Device | None = None,
        *,
        n_threads: int = 1,
        flash_attn: int = -1,
    ) -> None:
        """Prepare the encoder, which `open` loads."""
        self.grid = grid
        self.rows = ImageRows()
        self.n_encoded = 0
        self._path = path
        self._device = device
        self._n_threads = n_threads
        self._flash_attn = flash_attn
        # Rows from another kind of device round differently and must not be mixed with these.
        device_name = device.description if device is not None else "CPU"
        self._prefix = "\0".join(
            [identity, build_version(), device_name, *map(str, grid.limits)]
        ).encode()
        self._ctx: Any = None
        self._graphs = _Graphs()
        self.around: tuple[Tokens, Tokens] = as_tokens([]), as_tokens([])
        self._books = threading.Lock()  # guards `_known` and `_ready`; held briefly
        self._decoding = threading.Lock()  # keeps the encoder open while other threads decode
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._ready: OrderedDict[bytes, _Ready] = OrderedDict()

    @property
    def usage(self) -> tuple[str, int]:
        """The name of its device, empty for the CPU, and the approximate bytes there."""
        n_bytes = sum(tensor_bytes(self._path).values()) + self.grid.compute_bytes(
            flash_attn=self._flash_attn != 0
        )
        if self._device is None:
            return "", n_bytes
        return self._device.name, n_bytes + (CUBLAS_BYTES if self._device.is_gpu else 0)

    @property
    def n_bytes(self) -> int:
        """Bytes of cached rows and of decoded pixels."""
        with self._books:
            return self.rows.n_bytes + sum(ready.n_bytes for ready in self._ready.values())

    # -- opening and closing
    # ----------------------------------------------------------------------------------

    def open(self, model: Any) -> None:
        """Load the encoder; on a GPU, encode the largest image to allocate all its memory. Raises
        ModelError.
        """
        mtmd.mtmd_log_set(log_callback, ctypes.c_void_p(0))
        mtmd.mtmd_helper_log_set(log_callback, ctypes.c_void_p(0))
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = self._device is not None
        params.print_timings = False
        params.n_threads = self._n_threads
        params.flash_attn_type = self._flash_attn
        params.image_min_tokens, params.image_max_tokens = self.grid.given_limits
        params.media_marker = MARKER
        params.warmup = True
        if self._device is not None:
            params.device = self._device.handle
        forget_log_errors()
        ctx = mtmd.mtmd_init_from_file(str(self._path).encode(), model, params)
        if not ctx:
            raise ModelError(
                f"cannot load the vision encoder {self._path}: {last_log_error('it does not fit')}"
            )
        self._ctx = ctx
        self._width = int(api.llama_model_n_embd_inp(model))
        self._graphs = _Graphs()
        before, after = self._texts_around()
        self.around = as_tokens(before), as_tokens(after)
        try:
            self._check()
            if self._device is not None:
                self._encode_largest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the encoder; cached rows stay."""
        with self._decoding, self._books:
            self._ready.clear()
            if self._ctx is not None:
                mtmd.mtmd_free(self._ctx)
            self._ctx = None

    def _check(self) -> None:
        """Raise ModelError if pyctl cannot use the library or the encoder."""
        if not hasattr(mtmd, "mtmd_helper_init_opt_default"):
            raise ModelError(
                "images need llama-cpp-python 0.3.36 or newer: older ones open other files by "
                "ffmpeg"
            )
        if not mtmd.mtmd_support_vision(self._ctx):
            raise ModelError(f"{self._path} is not a vision encoder")
        if not mtmd.mtmd_decode_use_mrope(self._ctx) or mtmd.mtmd_decode_use_non_causal(
            self._ctx, None
        ):
            raise ModelError(
                f"{self._path} is not supported: only vision encoders of Qwen models are"
            )
        for width, height in PROBES:
            if self._chunk_grid(self._tokenized(width, height, None)) != self.grid.grid_size(
                width, height
            ):
                raise ModelError(f"{self._path} splits images in an unknown way")

    def _encode_largest(self) -> None:
        side = self.grid.largest
        forget_log_errors()
        try:
            self._encode(
                self._tokenized(*side, np.zeros((side[1], side[0], 3), np.uint8)),
                *self.grid.grid_size(*side),
            )
        except EngineError as error:
            why = last_log_error(str(error))
            problem = f"an image of {self.grid.limits[1]} tokens does not fit with the model: {why}"
            raise ModelError(
                f"{problem}; try a smaller --image-max-tokens or --no-mmproj-offload"
            ) from error

    def _texts_around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that libmtmd puts before and after an image."""
        ready = self._tokenized(64, 64, None)
        n_images = 0
        texts: tuple[list[int], list[int]] = ([], [])
        for chunk in ready.chunks():
            if _is_image(chunk):
                n_images += 1
                continue
            n = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
            texts[n_images].extend(tokens[: n.value])
        return texts

    # -- a file becomes a picture
    # ----------------------------------------------------------------------------------

    def n_tokens(self, file: ImageFile) -> int:
        """Return the number of tokens of ``file`` in a prompt, by the size in its header."""
        columns, lines = self.grid.grid_size(file.width, file.height)
        return columns * lines

    def picture(self, file: ImageFile) -> ImageSpan:
        """Return the picture of ``file``, for position 0.

        Decodes a new file, and raises RequestError if that fails; skips this while the model is
        unloaded.
        """
        columns, lines = self.grid.grid_size(file.width, file.height)
        key = hashlib.blake2b(self._prefix + b"\0" + file.digest, digest_size=32).digest()
        picture = ImageSpan(key, columns, lines, file)
        with self._books:
            if key in self._known:
                self._known.move_to_end(key)
                return picture
        with self._decoding:  # one at a time, to limit memory
            if self._ctx is not None:
                ready = self._decoded(picture)
                with self._books:
                    self._remember(key, ready)
        return picture

    def _remember(self, key: bytes, ready: _Ready) -> None:
        self._known[key] = None
        self._ready[key] = ready
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        while (
            len(self._ready) > 1
            and sum(each.n_bytes for each in self._ready.values()) > MAX_READY_BYTES
        ):
            self._ready.popitem(last=False)

    def _decoded(self, picture: ImageSpan) -> _Ready:
        """Decode and resize the file of ``picture``. RequestError if it is invalid."""
        file = picture.source
        file.check_inflated()
        if file.kind == "webp":
            ready = self._tokenized(file.width, file.height, _webp_pixels(file), picture.n_tokens)
        else:
            ready = self._opened(file, picture.n_tokens)
        if self._chunk_grid(ready) != (picture.columns, picture.lines):
            raise EngineError("the image was split in an unknown way")
        return ready

    def _opened(self, file: ImageFile, n_tokens: int) -> _Ready:
        """Decode ``file`` with libmtmd, which supports its format."""
        options = mtmd.mtmd_helper_init_opt_default()
        # libmtmd would pass other files to ffmpeg.
        options.video_params.ffmpeg_bin_dir = b"/nonexistent"
        data = (ctypes.c_uint8 * len(file.data)).from_buffer_copy(file.data)
        wrapper = mtmd.mtmd_helper_bitmap_init_from_buf_wrapper(
            self._ctx, data, len(file.data), False, options
        )
        if not wrapper.bitmap or wrapper.video_ctx:
            if wrapper.video_ctx:
                mtmd.mtmd_helper_video_free(wrapper.video_ctx)
            forget_log_errors()
            raise RequestError(f"the {file.kind.upper()} image is broken")
        try:
            size = mtmd.mtmd_bitmap_get_nx(wrapper.bitmap), mtmd.mtmd_bitmap_get_ny(wrapper.bitmap)
            if size != (file.width, file.height):
                raise RequestError(
                    f"the {file.kind.upper()} image does not have the size in its header"
                )
            return self._make_chunk(wrapper.bitmap, n_tokens)
        finally:
            mtmd.mtmd_bitmap_free(wrapper.bitmap)

    def _tokenized(
        self, width: int, height: int, pixels: NDArray[np.uint8] | None, n_tokens: int = 0
    ) -> _Ready:
        pointer = None if pixels is None else pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, pointer)
        try:
            return self._make_chunk(bitmap, n_tokens)
        finally:
            mtmd.mtmd_bitmap_free(bitmap)

    def _make_chunk(self, bitmap: Any, n_tokens: int) -> _Ready:
        chunks = mtmd.mtmd_input_chunks_init()
        text = mtmd.mtmd_input_text(MARKER, len(MARKER), False, True)
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        code = mtmd.mtmd_tokenize(self._ctx, chunks, ctypes.byref(text), bitmaps, 1)
        ready = _Ready(chunks, None, n_tokens * self.grid.token_bytes)
        if code != 0:
            raise EngineError(f"cannot split the image: mtmd_tokenize returned {code}")
        images = [chunk for chunk in ready.chunks() if _is_image(chunk)]
        if len(images) != 1:
            raise EngineError(f"the image was split into {len(images)} parts instead of one")
        ready.chunk = images[0]
        return ready

    @staticmethod
    def _chunk_grid(ready: _Ready) -> tuple[int, int]:
        image = mtmd.mtmd_input_chunk_get_tokens_image(ready.chunk)
        return mtmd.mtmd_image_tokens_get_nx(image), mtmd.mtmd_image_tokens_get_ny(image)

    # -- a picture becomes rows
    # ----------------------------------------------------------------------------------

    def encode(self, picture: ImageSpan) -> bool:
        """Encode ``picture``; return False if its rows are cached. Raises RequestError or
        EngineError.
        """
        if picture.key in self.rows:
            return False
        with self._books:
            ready = self._ready.pop(picture.key, None)
        if ready is None:
            ready = self._decoded(picture)
        self.rows.put(picture.key, self._encode(ready, picture.columns, picture.lines))
        self.n_encoded += 1
        return True

    def encoded_rows(self, picture: ImageSpan, first: int, last: int) -> NDArray[np.float32]:
        """Return rows [first, last) of ``picture``, shape (last - first, n_embd)."""
        self.encode(picture)
        return self.rows.get(picture.key)[first:last]

    def _encode(self, ready: _Ready, columns: int, lines: int) -> NDArray[np.float32]:
        """Return the rows of an image of ``columns`` x ``lines`` rows, shape (columns * lines,
        width). Raises EngineError if llama.cpp cannot encode it.

        A small image of another size is encoded first if the graph would be updated (`_Graphs`).
        """
        grid = columns, lines
        if self._device is not None and self._graphs.would_replace(grid):
            # After an image of another size, llama.cpp neither launches nor updates the graph.
            small = next((size for size in SMALL if self.grid.grid_size(*size) != grid), SMALL[0])
            other = self._tokenized(*small, np.zeros((small[1], small[0], 3), np.uint8))
            self._graphs.encoded(self.grid.grid_size(*small))
            if (code := mtmd.mtmd_encode_chunk(self._ctx, other.chunk)) != 0:
                raise EngineError(f"cannot encode a small image: mtmd_encode_chunk returned {code}")
        self._graphs.encoded(grid)
        code = mtmd.mtmd_encode_chunk(self._ctx, ready.chunk)
        pointer = mtmd.mtmd_get_output_embd(self._ctx) if code == 0 else None
        if not pointer:
            raise EngineError(f"cannot encode the image: mtmd_encode_chunk returned {code}")
        n_floats = columns * lines * self._width
        values = np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (n_floats,)
        )
        return np.array(values.reshape(columns * lines, self._width), np.float32)


def _is_image(chunk: Any) -> bool:
    return bool(mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)


def _webp_pixels(file: ImageFile) -> NDArray[np.uint8]:
    """Return the first frame of a WebP file, shape (height, width, 3). libmtmd does not support
    WebP.
    """
    from PIL import Image  # only now: few requests need it

    try:
        with Image.open(io.BytesIO(file.data), formats=("WEBP",)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, RuntimeError, SyntaxError, EOFError, KeyError):
        raise RequestError("the WEBP image is broken") from None
    if pixels.shape != (file.height, file.width, 3):
        raise RequestError("the WEBP image does not have the size in its header")
    return np.ascontiguousarray(pixels)
