"""Classification of many texts at once on stock transformers models: no Ray, no HTTP.

A request enters the waiting line, is encoded, and waits there for the device's worker. Whenever the
device is free, the worker takes all that waits, shares it among its lanes in micro-batches that are
bounded by tokens, and answers each request as soon as its last text is done.
"""
