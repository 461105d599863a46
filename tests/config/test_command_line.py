"""Overrides that the program writes are read back by Hydra as they were meant."""

import random

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from trainapp.config import command_line

NAMES = [
    *("/runs/a", "runs", "1", "null", "true", "1e3", "/größe/é/日本", "/a b", "/a,b", "/a=[{(:", "/\t\n"),
    *(
        "/it's",
        "/a\\'b",
        "/a\\\\'",
        "/a\\",
        "/a\\\\",
        '/"',
        "/${oc.env:HOME}",
        "/\\${x}",
        "/${",
        "/$",
        "/a\\\\${x}\\\\",
    ),
]


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf")
    (folder / "own.yaml").write_text("place: null\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield lambda text: OmegaConf.to_container(compose("own", [text]), resolve=True)["place"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_back(read_back, name):
    assert read_back(command_line.override("place", name)) == name


@pytest.mark.slow
def test_any_name_is_read_back(read_back):
    drawn = random.Random(0)
    parts = ["\\", "'", '"', "$", "{", "}", "${", "a", " ", ",", "[", "=", ":", "ü", "("]
    for _ in range(100):
        name = "/" + "".join(drawn.choices(parts, k=drawn.randrange(8)))
        assert read_back(command_line.override("place", name)) == name


def test_a_plain_path_stays_as_it_is():
    assert command_line.override("hydra.run.dir", "/runs/a-1_b.c") == "hydra.run.dir=/runs/a-1_b.c"
