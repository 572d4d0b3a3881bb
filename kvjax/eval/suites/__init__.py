"""Public benchmarks, read from the hub and scored by their own rules: ``python -m kvjax.eval run --suite``.

suite      the suites by name: data set, columns, scores
rows       the data set's rows, from the hub or a file, with their columns checked
prompt     one row as token ids, in the order in which kvpress's pipeline feeds them
cost       how many rows fit the device, how long a run takes and what it costs, before it starts
measure    cells of a suite, measured by ``kvjax.eval.measure``
kvpress    finished cells in the layout of kvpress's results
ruler, longbench, mathematics, helmet, rouge
           from an output and its references to a score
"""
