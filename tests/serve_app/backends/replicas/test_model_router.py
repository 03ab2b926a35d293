from ray import cloudpickle
from ray._common.utils import import_attr

from serve_app.backends.replicas import model_router


def test_serve_can_copy_the_router_into_its_processes() -> None:
    router = import_attr(model_router.PATH)
    cloudpickle.register_pickle_by_value(model_router)  # type: ignore[no-untyped-call] # left untyped
    try:
        copied = cloudpickle.loads(cloudpickle.dumps(router))  # type: ignore[no-untyped-call] # left untyped
    finally:
        cloudpickle.unregister_pickle_by_value(model_router)  # type: ignore[no-untyped-call] # left untyped
    assert copied.__name__ == "ModelRouter"
