"""Finds the model that a request names."""

from serve_app.backends.catalog import ModelCatalog, ServedClassifier, ServedModel
from serve_app.http.access_record import note_model


class ModelLookup:
    """Finds models by the name in a request, and notes them in the request's access record."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog

    async def find(self, model_id: str | None) -> ServedModel:
        """Return the generating model of this name, or the first one if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model classifies.
            RaystreamError: The model can't be reached.
        """
        model = await self._catalog.get(model_id)
        note_model(model.description.id)
        return model

    async def find_classifier(self, model_id: str | None) -> ServedClassifier:
        """Return the classifying model of this name, or the first one if there is no name.

        Raises:
            ModelNotFoundError: No model has this name.
            WrongTaskError: The model generates.
            RaystreamError: The model can't be reached.
        """
        model = await self._catalog.get_classifier(model_id)
        note_model(model.description.id)
        return model
