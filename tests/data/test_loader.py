"""Worker processes of the loader."""

import multiprocessing

from torch.utils.data import Dataset

from trainapp.data.loader import loader_of


class Squares(Dataset):
    """Cannot be pickled, as a data set of a notebook often cannot."""

    def __init__(self):
        self.function = lambda index: index * index

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.function(index)


def test_a_data_set_need_not_pickle_unless_the_program_has_another_start_method(monkeypatch):
    assert [*loader_of(Squares(), 1)] == [0, 1, 4]
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert loader_of(Squares(), 1).multiprocessing_context is None  # that of the program
