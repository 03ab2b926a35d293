"""Classification and embedding of many texts at once on stock transformers models: no Ray, no HTTP.

A request enters the queue, is encoded, and waits there for the device's worker. Whenever the device
is free, the worker takes everything in the queue and divides it among its lanes, in micro-batches
that are bounded by tokens. It answers each request as soon as the last of its texts is done.
"""
