"""The path from a surface to a replica, in three rooms.

`models` knows what each model is and how it fares, `streams` lets a request outlive its replica,
and `replicas` calls replicas. Here four modules import Ray: `handles`, `model_router`,
`cluster_state` and `model_files`. Elsewhere in `serve_app`, `app` and `ingress` compose the Serve
graph, `metrics` counts through Ray, and `commands` reads Ray's own configuration schema. Surfaces
and middleware never import it.
"""
