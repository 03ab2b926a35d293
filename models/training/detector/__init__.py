"""Makes pydoc-detector: a classifier that tells pydoc-chat's text from people's documentation.

The way through: ``human_documents`` reads what people wrote and ``sampled_documents`` what
pydoc-chat says; both are ``document``s, each on one side of the split, and ``extra_documents`` are
trained on beside them; ``pieces`` cuts and balances
them; ``architecture`` makes an untrained model; ``train`` teaches it by ``recipe``; ``evaluate``
examines what ``detector`` loads, beside ``baseline``.
"""
