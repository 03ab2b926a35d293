"""The path from a surface to a replica: handles, deadlines, the catalog of models.

Inside this package only `handles` imports Ray. Elsewhere in `serve_app`, four parts do: `app` and
`ingress` compose the Serve graph, `metrics` counts through Ray, and `commands` reads Ray's own
configuration schema. Surfaces and middleware never do.
"""
