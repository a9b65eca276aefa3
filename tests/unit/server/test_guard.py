"""The connection of a stream: the bytes that it sends are those of h11's own."""

from __future__ import annotations

import h11
import pytest

from pyctl.server.guard import StreamConnection

CHUNKED = [(b"transfer-encoding", b"chunked")]


def sent(
    connection: h11.Connection, headers: list[tuple[bytes, bytes]], version: bytes = b"1.1"
) -> bytes:
    """Return the bytes of a response in two parts, one of them empty, to a request of
    ``version``.
    """
    connection.receive_data(b"GET / HTTP/" + version + b"\r\nhost: server\r\n\r\n")
    connection.next_event()
    connection.next_event()
    events: list[h11.Event] = [
        h11.Response(status_code=200, headers=headers),
        h11.Data(data=b"data: one\n\n"),
        h11.Data(data=b""),
        h11.Data(data=b"data: two\n\n"),
        h11.EndOfMessage(),
    ]
    return b"".join(connection.send(event) or b"" for event in events)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("headers", [CHUNKED, [], [(b"content-length", b"22")]])
def test_a_stream_has_the_bytes_of_h11(headers: list[tuple[bytes, bytes]], version: bytes) -> None:
    ours = StreamConnection(h11.SERVER)
    theirs = h11.Connection(h11.SERVER)
    assert sent(ours, headers, version) == sent(theirs, headers, version)
    assert ours.states == theirs.states


def test_a_body_that_is_too_long_for_its_length_is_an_error() -> None:
    connection = StreamConnection(h11.SERVER)
    with pytest.raises(h11.LocalProtocolError):
        sent(connection, [(b"content-length", b"12")])
    assert connection.our_state is h11.ERROR
