"""docs/configuration.md is what scripts/settings_reference.py writes, from conf/ and the schema."""

import sys

import helpers
import pytest

sys.path.insert(0, str(helpers.ROOT / "scripts"))
import settings_reference


def test_the_page_is_up_to_date():
    prose, mark, written = settings_reference.PAGE.read_text().partition(settings_reference.MARK)
    assert written.strip() == settings_reference.reference().strip(), "run python scripts/settings_reference.py"
    assert mark
    assert len(prose.split()) < 400


@pytest.mark.parametrize(
    ("row", "is_there"),
    [
        ("| `batch.global_size` | `64` | integer | samples per optimizer step, over all ranks: never changed by", True),
        ("| `data.num_workers` | `auto` | `auto`, integer | loader processes", True),
        ("| `model.tie_embeddings` | `true` |  | share weights between embedding and output layer |", True),
        ("| `hydra", False),
    ],
)
def test_a_row_has_default_values_and_meaning(row, is_there):
    assert (row in settings_reference.reference()) == is_there


def test_every_common_setting_says_what_it_means():
    unsaid = [
        row.name
        for row in settings_reference.rows(settings_reference.CONF / "train.yaml")
        if row.value and not row.comment
    ]
    assert unsaid == []


def test_only_adafactors_rate_is_relative_to_the_parameters():
    """On the old files every optimizer without a comment of its own showed Adafactor's, the first in the alphabet."""
    rows = [row for row in settings_reference.reference().splitlines() if row.startswith("| `optimizer.lr` |")]
    meanings = [row.split(" | ")[-1].removesuffix(" |") for row in rows]
    assert meanings.count("relative to the size of each parameter") == 1
    assert meanings.count("peak learning rate") == len(meanings) - 1
