"""Methods: one file each, made of shared blocks; importing this package registers all of them.

A method is written with what `engram.contract` offers.
"""

from engram.contract.registry import METHODS, find_method, import_all

import_all(__name__, __path__)

__all__ = ["METHODS", "find_method"]
