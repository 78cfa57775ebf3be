"""The old name of moxie.convert_parameter, kept so that modules pickled with it still load."""

from moxie.convert_parameter import ViewCache, _after_load, _before_forward, _rebuild, stacked
from moxie.convert_parameter import transposed as turned

__all__ = ["ViewCache", "_after_load", "_before_forward", "_rebuild", "stacked", "turned"]
