"""Images in results: told by their first bytes, and bounded in pixels."""

import base64
import struct
import zlib

import pytest

from schemas.images import MAX_SIDE, ImageMember, NoImageError, apart
from tests.fakes.guide import jpeg, png

PNG = ImageMember("picture", "image/png")
JPEG = ImageMember("picture", "image/jpeg")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@pytest.mark.parametrize(("member", "data"), [(PNG, png(640, 480)), (JPEG, jpeg(640, 480))])
def test_an_image_leaves_the_result_for_a_block_of_its_own(member: ImageMember, data: bytes) -> None:
    rest, blocks = apart({"node_id": "n", "picture": encoded(data)}, [member])
    assert rest == {"node_id": "n"}
    assert blocks == ({"type": "image", "data": encoded(data), "mimeType": member.media_type},)


def test_a_result_without_its_image_stays_as_it_is() -> None:
    assert apart({"node_id": "n"}, [PNG]) == ({"node_id": "n"}, ())


def test_a_jpeg_may_have_segments_before_its_frame_header() -> None:
    comment = b"\xff\xfe" + struct.pack(">H", 7) + b"hello"
    data = jpeg(8, 8)
    _, blocks = apart({"picture": encoded(data[:2] + comment + data[2:])}, [JPEG])
    assert len(blocks) == 1


@pytest.mark.parametrize(
    ("member", "text"),
    [
        pytest.param(PNG, encoded(jpeg(8, 8)), id="another type"),
        pytest.param(JPEG, encoded(png(8, 8)), id="the other type"),
        pytest.param(PNG, encoded(b"<svg onload='x'/>"), id="a document"),
        pytest.param(PNG, "=" + encoded(png(8, 8)), id="no base64"),
        pytest.param(PNG, encoded(png(8, 8))[:-1], id="base64 that is cut"),
        pytest.param(PNG, encoded(png(8, 8)[:20]), id="a header that is cut"),
        pytest.param(PNG, encoded(png(MAX_SIDE + 1, 8)), id="too wide"),
        pytest.param(PNG, encoded(png(8, 2**31)), id="too high"),
        pytest.param(PNG, encoded(png(0, 8)), id="without a pixel"),
        pytest.param(JPEG, encoded(jpeg(MAX_SIDE + 1, 8)), id="a JPEG that is too wide"),
        pytest.param(JPEG, encoded(b"\xff\xd8" + b"\xff\xfe\x00\x00" * 50_000), id="segments of no length"),
        pytest.param(JPEG, encoded(b"\xff\xd8\xff"), id="a JPEG of three bytes"),
        pytest.param(PNG, 7, id="no text"),
    ],
)
def test_what_is_no_image_of_its_type_is_refused(member: ImageMember, text: object) -> None:
    with pytest.raises(NoImageError, match=f"^/picture must be base64 of an {member.media_type} "):
        apart({"picture": text}, [member])


def test_the_fake_png_is_one() -> None:
    data = png(8, 8)
    assert zlib.crc32(data[12:29]) == int.from_bytes(data[29:33], "big")
