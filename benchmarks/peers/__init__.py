"""raystream beside other servers, under one load client."""
