"""The OpenAI-compatible server: what it is asked (protocol), by whom it is answered (backend), and the rest of HTTP.

protocol.py    requests, checked; what is not supported is refused by name
chat.py        messages to tokens by the model's template; the reasoning part split out
answers.py     an answer's choices, whole or as a stream
backend.py     who computes: the ranks of the runtime
app.py         routes, errors, health
metrics.py     what Prometheus reads
logs.py        a line a request
run.py         from a model directory to an endpoint, and down again
"""
