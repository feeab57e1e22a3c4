"""The objective: pure functions of tensors. No models, no files, no config objects.

    rewards -advantage-> (G,) -broadcast, whiten-> (N, T) -ratio, surrogate, reduce-> loss

There is one file for each axis; ``algorithms`` composes them under the names of the papers, and ``loss``
evaluates a composition. Shapes everywhere: G completions of one group, N completions of a micro-batch
padded to T tokens, ``mask`` (N, T) true on the tokens that are trained. Padding may hold anything.
"""
