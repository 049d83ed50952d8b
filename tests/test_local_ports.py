"""Free ports, with real sockets."""

from __future__ import annotations

import socket

import pytest

from tf_largebatch.supervisor import local_ports
from tf_largebatch.validation import InputError


def test_free_ports_are_all_different_and_free():
    addresses = local_ports.free_addresses(20)
    ports = [int(address.removeprefix("127.0.0.1:")) for address in addresses]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as server:
            server.bind(("0.0.0.0", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_busy_port_is_passed_over_and_named(host, caplog):
    first, second, third = _three_free_ports_in_a_row()
    with socket.socket() as busy:
        busy.bind((host, second))
        busy.listen()
        addresses = local_ports.free_addresses(2, first)
    assert addresses == [f"127.0.0.1:{first}", f"127.0.0.1:{third}"]
    assert f"Port {second} " in caplog.text


def test_too_few_ports_are_a_mistake_of_the_user():
    with pytest.raises(InputError, match="--port is 65534"):
        local_ports.free_addresses(3, 65534)


def _three_free_ports_in_a_row() -> tuple[int, int, int]:
    for first in range(20011, 30000, 7):
        ports = (first, first + 1, first + 2)
        try:
            for port in ports:
                with socket.socket() as server:
                    server.bind(("0.0.0.0", port))
        except OSError:
            continue
        return ports
    raise AssertionError("no three free ports in a row")
