"""What a model under a policy needs on chips that are not here: ``python -m kvjax.plan --help``.

The sharded programs of a decode step and of prefill are compiled ahead of time; the compiler tells what they
hold and send. Only shapes are needed: no weights and no caches are allocated.
"""
