"""Drawings of one plain shape on a plain ground, and the right answers about them."""

import math
import random
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]

SHAPES: Final = ("circle", "square", "triangle", "star", "cross")
COLOURS: Final[dict[str, tuple[Rgb, ...]]] = {
    "red": ((255, 0, 0), (220, 20, 60), (200, 16, 16)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 32)),
    "yellow": ((255, 255, 0), (250, 225, 30), (240, 230, 60)),
    "green": ((0, 128, 0), (0, 200, 0), (34, 160, 60)),
    "blue": ((0, 0, 255), (30, 80, 220), (20, 40, 160)),
    "purple": ((128, 0, 128), (140, 50, 190), (150, 30, 160)),
    "black": ((0, 0, 0), (16, 16, 16)),
    "white": ((255, 255, 255), (245, 245, 245)),
}
_GREYS: Final[tuple[Rgb, ...]] = ((128, 128, 128), (200, 200, 200), (90, 90, 90), (225, 225, 225))
_PASTELS: Final[tuple[Rgb, ...]] = (
    (210, 230, 255),
    (255, 225, 230),
    (220, 250, 220),
    (250, 245, 220),
    (60, 50, 45),
)
_MIN_CONTRAST: Final = 120.0
_JITTER: Final = 12
_MIN_SIDE, _MAX_SIDE = 40, 400
_MAX_ASPECT: Final = 1.5
_SUPERSAMPLING: Final = 3
_SQUARE_REACH: Final = 0.87
"""Half the width of a square turned by 15 degrees, for a radius of 1; the other shapes reach 1."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One drawing in vector form.

    Attributes:
        shape: One of SHAPES.
        colour: One of COLOURS.
        fill: The shape's colour.
        ground: The ground's colour.
        size: Width and height in pixels.
        centre: The shape's centre in pixels.
        radius: Radius of the circle around the shape, in pixels.
        turn: Rotation in degrees.
        smooth: Whether edges are anti-aliased.
    """

    shape: str
    colour: str
    fill: Rgb
    ground: Rgb
    size: tuple[int, int]
    centre: tuple[float, float]
    radius: float
    turn: float
    smooth: bool

    @property
    def description(self) -> str:
        """The noun phrase for the drawing: "a red circle"."""
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.shape}"

    def render(self) -> Image.Image:
        """Return the drawing as an RGB image."""
        scale = _SUPERSAMPLING if self.smooth else 1
        width, height = self.size
        image = Image.new("RGB", (width * scale, height * scale), self.ground)
        outline = [(x * scale, y * scale) for x, y in self._outline()]
        ImageDraw.Draw(image).polygon(outline, fill=self.fill)
        return image.resize(self.size, Image.Resampling.BOX) if self.smooth else image

    def _outline(self) -> list[tuple[float, float]]:
        x, y = self.centre
        return [
            (x + self.radius * length * math.sin(angle), y - self.radius * length * math.cos(angle))
            for length, angle in _polar_outline(self.shape, math.radians(self.turn))
        ]


def answer_about(*drawings: Drawing) -> str:
    """Return the sentence that names the shapes of one or two drawings."""
    sentence = " and ".join(drawing.description for drawing in drawings)
    return f"{sentence[0].upper()}{sentence[1:]}."


def random_drawing(rng: random.Random) -> Drawing:
    """Return a random drawing: any shape, colour, ground and size, with the whole shape visible."""
    width, height = _random_size(rng)
    short_side = min(width, height)
    shape = rng.choice(SHAPES)
    reach = short_side * rng.uniform(max(0.2, 9 / short_side), 0.48)
    colour = rng.choice(tuple(COLOURS))
    fill = _jittered(rng.choice(COLOURS[colour]), rng)
    return Drawing(
        shape=shape,
        colour=colour,
        fill=fill,
        ground=_random_ground(colour, fill, rng),
        size=(width, height),
        centre=(rng.uniform(reach, width - reach), rng.uniform(reach, height - reach)),
        radius=reach / _SQUARE_REACH if shape == "square" else reach,
        turn=0.0 if rng.random() < 0.5 else rng.uniform(-15, 15),
        smooth=rng.random() < 0.75,
    )


def _random_size(rng: random.Random) -> tuple[int, int]:
    width = round(math.exp(rng.uniform(math.log(_MIN_SIDE), math.log(_MAX_SIDE))))
    if rng.random() < 0.4:
        return width, width
    height = round(width * rng.uniform(1 / _MAX_ASPECT, _MAX_ASPECT))
    return width, max(_MIN_SIDE, min(_MAX_SIDE, height))


def _random_ground(colour: str, fill: Rgb, rng: random.Random) -> Rgb:
    others = [rgb for name, anchors in COLOURS.items() if name != colour for rgb in anchors]
    choices = (COLOURS["white"], COLOURS["black"], _GREYS, _PASTELS, tuple(others))
    while True:
        ground = _jittered(rng.choice(rng.choice(choices)), rng)
        if math.dist(ground, fill) >= _MIN_CONTRAST:
            return ground


def _jittered(rgb: Rgb, rng: random.Random) -> Rgb:
    if rng.random() < 0.4:
        return rgb
    red, green, blue = (max(0, min(255, value + rng.randint(-_JITTER, _JITTER))) for value in rgb)
    return red, green, blue


def _polar_outline(shape: str, turn: float) -> list[tuple[float, float]]:
    """Return the corners as (distance from the centre, angle from twelve o'clock)."""
    match shape:
        case "circle":
            return _regular(72, turn)
        case "square":
            return _regular(4, turn + math.pi / 4)
        case "triangle":
            return _regular(3, turn)
        case "star":
            inner = [(0.42, angle) for _, angle in _regular(5, turn + math.pi / 5)]
            return [
                corner for pair in zip(_regular(5, turn), inner, strict=True) for corner in pair
            ]
        case "cross":
            return [corner for arm in range(4) for corner in _cross_arm(turn + arm * math.pi / 2)]
        case _:
            raise ValueError(f"unknown shape {shape!r}")


def _regular(corners: int, turn: float) -> list[tuple[float, float]]:
    return [(1.0, turn + 2 * math.pi * corner / corners) for corner in range(corners)]


def _cross_arm(angle: float) -> list[tuple[float, float]]:
    """Return two outer corners of a cross's arm, then the inner corner before the next arm."""
    half_width = 0.3
    spread = math.asin(half_width)
    return [
        (1.0, angle - spread),
        (1.0, angle + spread),
        (half_width * math.sqrt(2), angle + math.pi / 4),
    ]
