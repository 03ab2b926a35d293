import pytest

from models.training.recipe import STAGES, Recipe, StepKind


def test_the_tower_is_trained_before_the_whole_model() -> None:
    recipe = Recipe(tower_steps=2, joint_steps=6, image_every=3)
    kinds = [recipe.kind(step) for step in range(recipe.num_steps)]
    tower, image, text = StepKind.TOWER, StepKind.IMAGE, StepKind.TEXT
    assert kinds == [tower, tower, image, text, text, image, text, text]


@pytest.mark.parametrize("recipe", STAGES)
@pytest.mark.parametrize("is_tower", [True, False])
def test_learning_rates_rise_to_the_peak_and_fall_to_zero(recipe: Recipe, is_tower: bool) -> None:
    shares = [recipe.rate_share(step, is_tower=is_tower) for step in range(recipe.num_steps)]
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[-1] == pytest.approx(0.0, abs=1e-4)


def test_the_text_models_rate_is_zero_until_the_tower_is_trained() -> None:
    recipe = Recipe()
    assert recipe.rate_share(recipe.tower_steps - 1, is_tower=False) == 0.0
    assert recipe.rate_share(recipe.tower_steps, is_tower=False) > 0.0
