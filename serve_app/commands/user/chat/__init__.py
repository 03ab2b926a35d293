"""`raystream chat`: a conversation with a model of a running server."""
