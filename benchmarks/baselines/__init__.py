"""Rewritten versions of the designs that people build by hand and that this project replaces.

Each takes the model as a function from texts to results, so that all run the same model in the same
run, and tests can pass their own.

The queue batcher (`queue_batcher`) is the final design of a public write-up about serving a
detector of machine-written text: a web server around RADAR-Vicuna-7B cuts each text into pieces of
at most 300 characters and classifies them together. A call of the pipeline for each piece
(`piece_per_call`) was slow; an asyncio.Queue with BATCH_SIZE_MAX and BATCH_TIMEOUT was faster. Its
author measured both, offline by batch size and online by number of users.
"""
