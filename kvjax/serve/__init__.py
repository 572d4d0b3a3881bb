"""``python -m kvjax.serve``: prompts in, text and honest bytes out.

``arguments`` reads the command line, ``answer`` does the work, ``chat`` repeats it with a history,
``facts`` says what it cost.
"""
