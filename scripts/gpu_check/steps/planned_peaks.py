"""The plan's peaks against those of real runs, for two dozen configurations; on the CPU for every fourth of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu import on_gpu

from .. import jobs, planned
from ..table import Table

PATIENCE = 240.0  # seconds for all plans, which are made while the runs go on


def check(table: Table, device: str, folder: Path) -> None:
    """One row per configuration, and one for all of them. Those with convolutions are shown, and not counted."""
    cases = planned.CASES if device == "cuda" else planned.CASES[::4]
    settings = [planned.overrides(device, model, chosen) for model, chosen in cases]
    told = planned.spelled(device)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(planned.plans, [(*own, *told) for own in settings], PATIENCE)
        results = [measured(device, folder / str(number), own) for number, own in enumerate(settings)]
        plans = future.result()
    counted = []
    for (model, chosen), facts, result in zip(cases, plans, results, strict=True):
        name = f"{model} {' '.join(chosen)}"
        with table.attempt(name, "a plan and a run"):
            if isinstance(result, Exception):
                raise result
            both = planned.compared(name, facts, result)
            table.measured(name, both.text)
            if model != planned.LABELLED or device == "cpu":
                counted.append(both)
    expected = f"median at most {100 * planned.MEDIAN:.0f}%, worst at most {100 * planned.WORST:.0f}%"
    table.expect("the plan's peaks against those measured", expected, *planned.summary([own.error for own in counted]))


def measured(device: str, folder: Path, settings: tuple[str, ...]) -> object:
    """The result of a run, or its error. Of convolutions twice: see `jobs.unlimited`."""
    try:
        if "model=resnet" in settings:
            return jobs.unlimited(folder, *settings)
        return on_gpu.launched(folder, *settings)
    except Exception as error:
        return error
    finally:
        if device == "cuda":
            on_gpu.forget()
