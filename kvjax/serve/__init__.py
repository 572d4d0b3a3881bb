"""``python -m kvjax.serve``: answers prompts in the terminal, and says what each answer cost.

``arguments`` reads the command line, ``command`` finds the prompt and loads the model, ``answer`` answers it,
``chat`` repeats that with a history. ``http`` is the server.
"""
