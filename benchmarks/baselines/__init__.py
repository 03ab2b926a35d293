"""Designs that people build by hand around a model, written anew: what the project replaces.

Each takes the model as a function from texts to results, so that all run the same model in the same
run, and a test can give them a model of its own.

The hand-made queue batcher (`queue_batcher`) is what a public write-up about serving a detector of
machine-written text ended with: a web server around RADAR-Vicuna-7B cuts each text into pieces of
at most 300 characters and classifies them together. A call of the pipeline for each piece
(`piece_per_call`) was slow; an asyncio.Queue with BATCH_SIZE_MAX and BATCH_TIMEOUT was faster, and
its author measured both, offline by batch size and online by number of users.
"""
