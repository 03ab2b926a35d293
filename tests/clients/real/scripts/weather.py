"""A schema of answers that a small model can follow, by the pydantic of a client's environment."""

from typing import Literal

from pydantic import BaseModel


class Weather(BaseModel):
    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20, 30]
