"""A model's packed batches against transformers' own `generate()`: the same ids, the same log-probabilities.

subject    what is compared: a folder, prompts for it, and how generate() takes them
reference  what plain transformers says
packed     many requests in packed batches through a `Model`, without an engine
compare    both, in several forms of batching; one `Result` a subject
folder     a subject from a user's own model folder
families   the tiny models of a source checkout, by family
report     the table of docs/supported-models.md
"""
