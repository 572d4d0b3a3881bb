"""``python -m kvjax.serve http``: OpenAI's protocol over FastAPI, before one ``kvjax.engine.Engine``.

``arguments`` reads the command line, ``command`` runs the process, ``app`` puts routes and middleware
together; ``service`` is what routes share. A request's way: ``bodies`` (what may be said), ``plan`` (what the
engine is asked), ``job`` (its tickets), ``writer`` (tokens to text), ``completions`` or ``chats`` (what is
answered, sent by ``answering``).
"""
