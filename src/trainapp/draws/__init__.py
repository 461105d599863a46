"""Random numbers of a forward that belong to its samples, however these are split into micro-batches or over ranks.

torch draws a tensor from one stream: a sample's numbers depend on how many samples precede it in the micro-batch. Here
each element is a hash of (key of the step, number of the draw in the forward, position of the sample, coordinates in
the sample), so neither the other samples nor padding behind it matter. A draw inside a `SampleDraws` takes four steps:

1. `random_operations`: every random function of torch ends in a few operations of ATen, which are replaced. A replaced
   one looks for the active `SampleDraws`; without one it is torch's own.
2. `sample_draws`: the number of the draw is the seed of torch's generator, which each draw advances by one. So what
   saves and restores the generator, such as activation checkpointing, repeats the draws, too.
3. `layout` and `record`: which dimension of the tensor has the samples, as learnt from two forwards before the first
   step (`trials.learned_draws`). A draw without such a dimension is the same for all samples.
4. `filling` and `counter_based`: the tensor is filled with hashes (`splitmix64`), made into the distribution's numbers.
   For rare distributions torch's own kernel draws one sample after the other, from a generator seeded for each.

On CUDA the fourth step is one launch: `fused` calls a kernel of Triton's (`kernels`) that computes the same numbers.
"""
