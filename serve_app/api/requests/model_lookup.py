"""Finds the model that a request names."""

from serve_app.backends.models.catalog import ModelCatalog, ServedModel, ServedPooler
from serve_app.http.request_record import note_model


class ModelLookup:
    """Finds models by the name in a request, and notes them in the request's record."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog

    async def find(self, model_id: str | None) -> ServedModel:
        """Return the generating model of this name, or the first one if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model does something else.
            RaystreamError: The model can't be reached.
        """
        model = await self._catalog.get(model_id)
        note_model(model.description.id)
        return model

    async def find_classifier(self, model_id: str | None) -> ServedPooler:
        """Return the classifying model of this name, or the first one if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model does something else.
            RaystreamError: The model can't be reached.
        """
        return _noted(await self._catalog.get_classifier(model_id))

    async def find_embedder(self, model_id: str | None) -> ServedPooler:
        """Return the embedding model of this name, or the first one if there is no name.

        Raises:
            RaystreamError: See `find_classifier`.
        """
        return _noted(await self._catalog.get_embedder(model_id))

    async def find_comparer(self, model_id: str | None) -> ServedPooler:
        """Return the model of this name that compares texts; see `ModelCatalog.get_comparer`.

        Raises:
            RaystreamError: See `find_classifier`.
        """
        return _noted(await self._catalog.get_comparer(model_id))


def _noted(model: ServedPooler) -> ServedPooler:
    note_model(model.description.id)
    return model
