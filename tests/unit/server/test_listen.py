from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.server.listen import bind


def test_the_error_of_a_socket_names_no_port(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with bind([path]), pytest.raises(ConfigError) as raised, bind([path]):
        pass
    assert str(raised.value) == f"cannot listen on {path}: the address is in use"
    cause = raised.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EADDRINUSE
    assert cause.filename == path
