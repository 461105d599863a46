"""Former names, while planning/ uses them."""

from trainapp.techniques.technique import RESULTS, Situation, overrides_of, result_of
from trainapp.techniques.technique import Technique as Lever
from trainapp.techniques.technique import with_techniques as with_levers

__all__ = ["RESULTS", "Lever", "Situation", "overrides_of", "result_of", "with_levers"]
