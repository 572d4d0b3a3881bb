"""``python -m kvjax.serve http``: OpenAI's protocol in front of one ``kvjax.engine.Engine``.

A request's way through these files and across threads:

    event loop      middleware     id and log line, API key, requests of a client, the whole body
        |           service        ``JsonRoute`` bounds what is in the body
        |           completions    the route; ``schemas`` has checked the body
        |           streaming      ``respond``
        |
    worker thread   generation     tokenizes, checks, makes one engine request a text; ``service`` says which
        |                          policies and weights are allowed
        |           streaming      ``RunningCompletion`` submits them: ``Engine.submit_all`` returns tickets
        |
    engine thread   kvjax.engine   reads prompts, decodes all running texts, puts events into the tickets
        |
    event loop      streaming      takes the events from the tickets (``call_soon_threadsafe`` wakes the loop)
                    detokenizer    tokens to text, stop strings
                    completions    the JSON of an answer or of a chunk
                    streaming      sends it; cancels the tickets if the client leaves

``errors`` turns exceptions into responses on every part of the way. ``app`` puts routes and middleware
together, ``command`` runs the process, ``log`` writes lines in a thread of its own. Other routes:
``contexts`` (prompts held by name), ``info`` (models, health, tokenization), ``metrics`` (Prometheus, the
cache of one request).
"""
