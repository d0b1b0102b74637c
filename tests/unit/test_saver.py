"""Host memory that grows with every save is reported once."""

import numpy as np
import pytest

from jaxtrain.train.saver import HostMemory, read_resident_gib


@pytest.mark.parametrize(
    ("gib", "reported"),
    [
        ([20, 24, 26, 28, 30, 32, 34], [6]),
        ([8, 30, 30.1, 30.2, 30.3, 30.4, 30.5, 30.6], [6]),
        ([20, 24, 26, 26, 30, 32, 34], []),  # one save without growth
        ([20, 20.2, 20.4, 20.6, 20.8, 21.0, 21.2], []),  # too little, in GiB
        ([200, 202, 204, 206, 208, 210, 212], []),  # too small a share
        ([30, 20, 22, 24, 26, 28, 30], [7]),
    ],
)
def test_growth_with_every_save_is_reported_once(gib: list[float], reported: list[int]) -> None:
    memory = HostMemory()
    assert [i for i, value in enumerate(gib, 1) if memory.note(100 * i, value)] == reported


def test_resident_memory_is_in_gib() -> None:
    before = read_resident_gib()
    held = np.ones(2**25)  # 256 MiB
    assert 0.2 < read_resident_gib() - before < 0.4
    assert held[-1] == 1 and 0.05 < before < 24
