"""Forwards of a few samples before the first step, which leave no trace.

Read in this order:

1. `modes`, `samples`: what is called: the tasks, in evaluation and in training, with the first samples.
2. `probe`, `operations`, `precisions`: how: a call without a trace, its operations watched, in fp64 where possible.
3. `learned_draws`: which dimension of each random tensor in a forward has the samples.
4. `loss_check`, `parts`, `comparison`, `gradients`: whether loss, count, metrics and gradients are sums over samples.
   `obstacles` and `messages` say why nothing could be compared, and what was found.
5. `metrics_trial`: an update of the stateful metrics, which would otherwise fail only at the first evaluation.
6. `later_steps`: the comparison of the loss once more, in a few later steps.
"""
