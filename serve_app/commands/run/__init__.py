"""Commands that run Ray, Serve and HAProxy, and operate a server that runs."""
