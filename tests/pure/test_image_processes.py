"""Images with hidden costs are refused beforehand or given up.

The next image is decoded all the same.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import types
import zlib
from contextlib import suppress
from pathlib import Path

import PIL.Image
import PIL.ImageFile
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import ContextTooLong, InvalidRequest
from preheat.frontend.grid_config import GridConfig
from preheat.frontend.image_config import CLIP_MEAN, CLIP_STD, PixelConfig
from preheat.frontend.image_decoder import (
    FORMATS,
    MAX_SCANS,
    Decoder,
    TooManyPixels,
    TooManyPositions,
    samples,
    scans_of,
)
from preheat.frontend.image_processes import ImageProcesses, decode, make_work
from preheat.frontend.images import Images
from preheat.frontend.media import MediaReader
from preheat.frontend.room import Room
from preheat.frontend.video import Frames, VideoConfig

SOS = 0xDA
MOST = 4_000_000

CONFIG = PixelConfig(
    shortest_edge=28, height=None, width=None, resample=3, crop=(28, 28), rescale=1 / 255, mean=CLIP_MEAN, std=CLIP_STD
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(CONFIG, MOST)


@pytest.fixture(scope="module")
def processes(decoder) -> ImageProcesses:
    made = ImageProcesses(decoder)
    made.warm_up()
    return made


def photograph(width: int, height: int, form: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    PIL.Image.effect_noise((width, height), 40).convert("RGB").save(file, form, **options)
    return file.getvalue()


def segments(jpeg: bytes) -> list[tuple[int, bytes]]:
    """Return the markers of a JPEG, each with its data, up to the end of the image."""
    at, found = 2, []
    while jpeg[at + 1] != 0xD9:
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4])
        if jpeg[at + 1] == SOS:
            while jpeg[end] != 0xFF or jpeg[end + 1] in (0, *range(0xD0, 0xD8)):
                end += 1
        found.append((jpeg[at + 1], jpeg[at:end]))
        at = end
    return found


def with_scans(width: int, height: int, more: int, last: bytes = b"\xff\xd9") -> bytes:
    """Return a progressive JPEG that repeats its last scan ``more`` times."""
    file = io.BytesIO()
    PIL.Image.new("L", (width, height), 90).save(file, "JPEG", progressive=True)
    parts = segments(file.getvalue())
    return b"\xff\xd8" + b"".join(part for _, part in parts) + parts[-1][1] * more + last


def test_scans_are_counted_as_the_file_has_them():
    plain, progressive = photograph(60, 40), photograph(60, 40, progressive=True)
    assert scans_of(plain) == 1
    assert scans_of(progressive) == sum(kind == SOS for kind, _ in segments(progressive)) == 10
    assert scans_of(with_scans(30, 30, 20)) == scans_of(with_scans(30, 30, 0)) + 20


def test_scan_marks_outside_the_image_do_not_count():
    """Scans outside of the image do not count: a preview in the metadata, or data behind the image.

    Some photographs have a film behind the image.
    """
    picture = photograph(60, 40, comment=b"\xff\xda" * 500)
    assert scans_of(picture) == 1
    assert scans_of(picture + b"\xff\xda\x00\x02" * 500) == 1


@given(st.binary(max_size=300))
def test_any_bytes_have_a_count(data):
    assert 0 <= scans_of(b"\xff\xd8" + data) <= MAX_SCANS + 1


@given(st.integers(0, 3), st.binary(max_size=12), st.integers(0, 20))
def test_nothing_hides_a_scan(fills, stuffing, more):
    """Neither fill bytes before a marker nor segments between scans hide a scan."""
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(stuffing)) + stuffing
    scan = b"\xff" * fills + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\x12\xff\x00"
    assert scans_of(b"\xff\xd8" + (comment + scan) * more + b"\xff\xd9") == more


def test_ordinary_photographs_are_decoded(decoder):
    for options in ({}, {"progressive": True}, {"progressive": True, "subsampling": 0, "quality": 99}):
        assert decoder.decode(photograph(300, 200, **options)).pixels


@pytest.mark.parametrize("last", [b"\xff\xd9", b""], ids=["whole", "cut"])
def test_a_photograph_of_a_thousand_scans_is_refused_before_it_is_decoded(decoder, last, monkeypatch):
    data = with_scans(1500, 1000, 1000, last)
    assert len(data) < 60_000
    monkeypatch.setattr(PIL.Image.Image, "load", None)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_SCANS} scans"):
        decoder.decode(data)


def test_multi_picture_files_are_checked_for_scans(decoder):
    """In a file of several photographs the first one is checked too."""
    file = io.BytesIO()
    first, second = (PIL.Image.new("L", (40, 40), color) for color in (1, 200))
    first.save(file, "MPO", save_all=True, append_images=[second], progressive=True)
    parts = segments(file.getvalue())
    data = b"\xff\xd8" + b"".join(part for _, part in parts) + parts[-1][1] * 100 + b"\xff\xd9"
    with pytest.raises(InvalidRequest, match=f"more than {MAX_SCANS} scans"):
        decoder.decode(data)


def test_processes_decode_the_same(decoder, processes):
    for data in (*samples(), photograph(300, 200), photograph(64, 64, "PNG")):
        with processes.small.lend() as helper:
            assert decode(helper, data) == decoder.decode(data)


def test_large_images_go_to_the_large_processes(decoder, processes):
    data = photograph(1200, 900)
    with processes.small.lend() as helper, pytest.raises(TooManyPixels) as large:
        decode(helper, data)
    assert large.value.pixels == 1200 * 900 > processes.small_pixels
    with processes.large.lend() as helper:
        assert decode(helper, data) == decoder.decode(data)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks: bytes, width: int = 10, height: int = 10) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks)


GIF_HEAD = b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0)

BOMBS = {
    "a text that unpacks to much": lambda: png(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26)))] * 3),
    "a profile that unpacks to much": lambda: png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 28)))),
    "comments that are put together": lambda: GIF_HEAD + b"\x21\xfe" + (b"\xff" + b"c" * 255) * 78_000,
    "a million extensions": lambda: GIF_HEAD + b"\x21\xfe\x00" * 6_000_000,
    "a canvas that is larger than its image": lambda: (
        b"RIFF" + struct.pack("<I", 200) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\x3f\0" * 2
        + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    ),
    "data for many more pixels": lambda: png(
        chunk(b"IDAT", zlib.compress(bytes(1 << 28))), chunk(b"IEND", b""), width=900, height=900
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error_or_an_image_in_bounded_time_and_memory(processes, name):
    data = BOMBS[name]()
    before = os.times()
    with processes.small.lend() as helper:
        with suppress(InvalidRequest):
            assert decode(helper, data).pixels
        assert decode(helper, samples()[0]).pixels  # the next one
        pid = helper._process.pid
    after = os.times()
    assert after.children_user + after.user - before.children_user - before.user < 8
    assert int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) < 150_000


def test_every_format_has_a_sample():
    assert [PIL.Image.open(io.BytesIO(sample)).format for sample in samples()] == list(FORMATS)


PLAIN = PixelConfig(
    shortest_edge=None, height=None, width=None, resample=3, crop=None, rescale=None, mean=None, std=None
)


@pytest.mark.parametrize(
    ("sources", "least", "opened"),
    [
        ([Frames("frame", "frame", 400)] * 200, 20_000, 0),
        ([Frames("frame", "frame", 2), Frames("frame", "frame", 2)], 200, 2),
        (["frame"] * 500, 200, 1),
    ],
    ids=["a video", "two videos", "images"],
)
def test_what_cannot_fit_in_a_prompt_is_refused_before_it_is_decoded(monkeypatch, sources, least, opened):
    """The frames of a long video are not decoded one after the other, to be refused together at the end."""
    config = GridConfig(pixels=PLAIN, patch=16, merge=2, least=32 * 32, most=MOST)
    video = VideoConfig(least=32 * 32, most=400 * MOST, unit=32, frame=MOST)
    reader = MediaReader(max_bytes=1 << 20, timeout=1)
    images = Images(config, reader, size=0, tokens=1, token_id=0, max_pixels=MOST, video=video)
    frame, loads = photograph(320, 320), []
    monkeypatch.setattr(reader, "read", lambda _: frame)
    load = PIL.ImageFile.ImageFile.load
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", lambda self: loads.append(self) or load(self))
    with pytest.raises(ContextTooLong, match=f"^{least} positions"):
        images.load(sources, Room(150, lambda positions: ContextTooLong(f"{positions} positions")))
    assert len({id(each) for each in loads}) == opened
    assert decoded_alone(images.decoder, frame, 99) == 100


def decoded_alone(decoder: Decoder, data: bytes, room: int) -> int:
    """Return the positions for which a process of its own finds no ``room``."""
    work = make_work(pickle.dumps((decoder.config, decoder.max_pixels, MOST, decoder.video)))
    with pytest.raises(TooManyPositions) as refused:
        decode(types.SimpleNamespace(run=work), data, room)
    return refused.value.positions
