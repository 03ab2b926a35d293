import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.drawings import COLOURS, SHAPES, Drawing, Rgb, answer_about, random_drawing


def drawing(shape: str, colour: str, *, fill: Rgb = (255, 0, 0), smooth: bool = False) -> Drawing:
    return Drawing(
        shape=shape,
        colour=colour,
        fill=fill,
        ground=(255, 255, 255),
        size=(100, 80),
        centre=(50.0, 40.0),
        radius=30.0,
        turn=0.0,
        smooth=smooth,
    )


def test_one_drawing_is_named_in_one_sentence() -> None:
    assert answer_about(drawing("circle", "red")) == "A red circle."
    assert answer_about(drawing("star", "orange")) == "An orange star."


def test_two_drawings_are_named_in_their_order() -> None:
    pair = drawing("circle", "red"), drawing("square", "blue")
    assert answer_about(*pair) == "A red circle and a blue square."
    assert answer_about(*reversed(pair)) == "A blue square and a red circle."


@given(seed=st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_drawing(seed: int) -> None:
    first, second = (random_drawing(random.Random(seed)) for _ in range(2))
    assert first == second
    assert first.render().tobytes() == second.render().tobytes()


@given(seed=st.integers(0, 2**32))
def test_a_random_drawing_shows_its_colour_on_its_ground(seed: int) -> None:
    drawn = random_drawing(random.Random(seed))
    image = drawn.render()
    assert image.size == drawn.size
    assert image.getpixel((0, 0)) == drawn.ground
    assert image.getpixel((round(drawn.centre[0]), round(drawn.centre[1]))) == drawn.fill
    assert drawn.colour in COLOURS


@pytest.mark.parametrize("shape", SHAPES)
def test_smooth_edges_mix_the_two_colours_and_sharp_ones_do_not(shape: str) -> None:
    sharp = drawing(shape, "red").render().getcolors(10_000)
    smooth = drawing(shape, "red", smooth=True).render().getcolors(10_000)
    assert sharp is not None
    assert smooth is not None
    assert len(sharp) == 2 <= len(smooth)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape 'blob'"):
        drawing("blob", "red").render()
