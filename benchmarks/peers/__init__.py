"""raystream compared with other servers, under one load client."""
