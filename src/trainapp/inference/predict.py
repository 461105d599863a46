"""`mode=predict`: what the model says of each sample of a data set, as JSON lines in the order of the data."""

import logging

from trainapp.data.source import EvalBatches
from trainapp.errors import UserError
from trainapp.inference.batches import begin, facts_of, output_path, write_in_batches
from trainapp.inference.data_facts import data_facts
from trainapp.inference.lines import opened, require_replaceable
from trainapp.inference.outputs import Predictor, class_names
from trainapp.inference.shares import publish_shares, share_path
from trainapp.train.phase import Phase
from trainapp.train.run import Run
from trainapp.train.task_attributes import unchecked

log = logging.getLogger(__name__)


def predict(run: Run) -> None:
    """Write the predictions for a data set, of which each rank has a share, from where an error or an earlier process
    has left them. Collective.

    Raises UserError for a data set that does not exist, and for outputs that are not of single samples.
    """
    begin(run)
    batches, settings = _chosen(run), run.config.predict
    path = output_path(run, settings.output, "predictions.jsonl")
    facts = facts_of(run.config) | {"split": settings.split, "samples": batches.samples}
    facts["eval"] = run.config.to_dict()["eval"].get(settings.split)
    facts |= data_facts([facts["data"], facts["eval"]])
    predictor = Predictor(unchecked(run.task), run.config.task, class_names(getattr(batches, "dataset", None)))
    own, ranks = share_path(path, run.ranks.rank, run.ranks.world), run.ranks
    if ranks.world > 1:
        facts["share"] = [ranks.rank, ranks.world]
    require_replaceable(path, "predict.output")  # by each rank: one that recovers alone comes here again
    ranks.enable_votes(False)  # each rank recovers alone, as its forwards are its own
    with opened(own, facts, "predict.output") as lines:
        if lines.done:
            log.info("predictions: %d samples are in %s.partial; continuing there", lines.done, own)
        fetched = batches.from_sample(lines.done, run.sizes.evaluation.size, run.ranks)
        write_in_batches(run, fetched, lines, lambda micro: predictor.rows(run.strategy.model, micro))
        run.attempt.phase = Phase.SAVE  # what follows is collective: no rank may repeat it alone
        (run.stop.agreed,) = ranks.all_reduce_max(run.stop.agreed)
        if not run.stop.agreed:
            total = publish_shares(path, lines, ranks, batches.is_stream, "predict.output")
            log.info("predictions of %d samples: %s", total, path)


def _chosen(run: Run) -> EvalBatches:
    name = "" if run.config.predict.split == "val" else run.config.predict.split
    if name in run.eval_sets:
        return run.eval_sets[name]
    known = [name or "val" for name in run.eval_sets] + ["train"]
    raise UserError(
        f"predict.split={run.config.predict.split}: there is no such data; choose {', '.join(dict.fromkeys(known))}, "
        "or name other data by data=... or eval.NAME"
    )
