"""Pieces read by several threads into memory that is used again: each tensor whole, and errors passed on."""

import pytest
import torch
from safetensors.torch import save_file
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.safetensors_file import read_header
from scalegate.pipeline.model_loader import device_reader
from scalegate.pipeline.model_loader.device_reader import DeviceReader

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class NoEvent:
    def record(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def stored(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Tensors of several pieces, of one, and of nothing, with their file."""
    monkeypatch.setattr(device_reader, "PIECE_BYTES", 1 << 12)
    if DEVICE.type == "cpu":
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **rest: empty(*size, **rest))
        monkeypatch.setattr(torch.cuda, "Event", NoEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "many": torch.randn(301, 257, generator=generator),
        "half": torch.randn(70000, generator=generator).bfloat16(),
        "one": torch.arange(3, dtype=torch.int64),
        "none": torch.zeros(0, 5),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "weights.safetensors")
    return tensors, tmp_path / "weights.safetensors"


def test_tensors_arrive_whole(stored):
    tensors, path = stored
    header = read_header(path)
    with DeviceReader(DEVICE) as reader:
        for _ in range(3):
            for name, tensor in tensors.items():
                read = reader.read(header.tensors[name])
                assert read.dtype == tensor.dtype and torch.equal(read.cpu(), tensor)


def test_a_file_cut_short_after_its_header_was_read_is_named(stored):
    _, path = stored
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-100_000])
    with DeviceReader(DEVICE) as reader, pytest.raises(UserError, match=r"weights\.safetensors"):
        for info in header.tensors.values():
            reader.read(info)
