"""Tensors that leave their device stay the same objects, of the same values and layout."""

import torch

from asyncrl.engine.model.off_load import OffLoad

CPU = torch.device("cpu")


def test_tensors_move_and_come_back_as_they_were() -> None:
    """The numbers lie elsewhere each time; strides, shared storage of tied weights and gradients stay."""
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    turned = torch.arange(6.0).reshape(2, 3).t()
    before = [(value.clone(), value.stride(), value.data_ptr()) for value in (weight.data, turned)]
    away = OffLoad(CPU)
    assert away.leave([weight, turned, weight]) == weight.nbytes + turned.nbytes
    assert away.is_away
    left = [value.data_ptr() for value in (weight, turned)]
    away.come_back()
    assert not away.is_away
    for value, (was, stride, address), host in zip((weight, turned), before, left, strict=True):
        assert torch.equal(value, was)
        assert (value.stride(), value.data_ptr() == host, host == address) == (stride, False, False)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad


def test_what_changed_meanwhile_comes_back_changed_and_buffers_serve_again() -> None:
    weight, other = torch.zeros(4), torch.zeros(2)
    away = OffLoad(CPU)
    away.leave([weight, other])
    host = weight.data_ptr()
    weight.data = torch.ones(4)
    other.add_(2.0)
    away.come_back()
    assert (weight.tolist(), other.tolist()) == ([1.0] * 4, [2.0] * 2)
    away.leave([weight, other])
    assert weight.data_ptr() == host
    away.come_back()
    assert (weight.tolist(), other.tolist()) == ([1.0] * 4, [2.0] * 2)


def test_tensors_of_another_device_stay_where_they_are() -> None:
    """Such as masters that the host's memory holds all the time."""
    here = torch.zeros(4)
    address, away = here.data_ptr(), OffLoad(torch.device("meta"))
    assert away.leave([here]) == 0
    away.come_back()
    assert here.data_ptr() == address
