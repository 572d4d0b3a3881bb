"""What a model under a policy needs on chips that are not here: ``python -m kvjax.plan --help``.

The programs that would run are compiled ahead of time, sharded as they would be, and asked what they hold and
send. Everything is shapes: no weight and no cache is ever allocated.
"""
