"""Trains the embedded models from scratch and evaluates them.

The way through: ``corpus``, ``made_up_names`` and ``drawings`` hold what there is to know;
``conversations`` asks about it; ``tokenizer`` and ``architecture`` build an untrained model;
``batches`` feeds it; ``train_pydoc_chat`` trains it by ``recipe``; ``evaluate_pydoc_chat`` compares
its ``generated_answers`` with the right ones.
"""
