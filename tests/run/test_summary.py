"""The table that ends a run: rows that say something about it."""

import runs

WITHOUT_STEPS = ("throughput", "peak memory", "micro-batch")


def rows_of(capsys) -> dict[str, str]:
    """The rows of the summary, by name."""
    lines = capsys.readouterr().out.splitlines()
    return {name.strip(): value for name, _, value in (line.partition("  ") for line in lines)}


def test_a_finished_run_that_is_started_again_has_no_rows_about_steps_it_did_not_make(tmp_path, capsys):
    runs.run(tmp_path, *runs.MODELS["mlp"])
    first = rows_of(capsys)
    assert first.keys() >= {*WITHOUT_STEPS, "steps", "time", "checkpoint"}
    assert first["micro-batch"].strip() == "16 x 1 accumulated"
    ended = runs.run(tmp_path, *runs.MODELS["mlp"])
    again = rows_of(capsys)
    assert (ended.steps, again.keys()) == (4, first.keys() - set(WITHOUT_STEPS))
    assert all(again[name] == first[name] for name in ("steps", "checkpoint", "outputs"))
