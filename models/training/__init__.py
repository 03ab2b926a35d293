"""Makes the embedded models from nothing and measures them.

The way through: ``corpus``, ``made_up_names`` and ``drawings`` say what there is to know;
``conversations`` asks about it; ``tokenizer`` and ``architecture`` make an untrained model;
``batches`` feeds it; ``train_pydoc_chat`` teaches it; ``recital`` and ``evaluate_pydoc_chat``
examine it.
"""
