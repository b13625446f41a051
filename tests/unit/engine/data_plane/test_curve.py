"""Keys of TransferQueue's sockets; that strangers are not heard is shown in tests/integration/data_plane."""

from asyncrl.engine.data_plane.curve import beyond_loopback, own_keys


def test_addresses_that_other_machines_reach_are_told_from_loopback() -> None:
    assert beyond_loopback(["127.0.0.1", "::1", "127.0.1.1"]) == []
    assert beyond_loopback(["10.0.0.7", "127.0.0.1", "0.0.0.0", "10.0.0.7"]) == ["0.0.0.0", "10.0.0.7"]


def test_what_clients_know_is_not_what_servers_know() -> None:
    keys = own_keys()
    assert keys == own_keys()
    assert len({keys.of_server, keys.secret, ""}) == 3
