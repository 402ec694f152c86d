"""Methods: one file each, made of shared blocks. Importing this package registers all of them.

Methods are written with the names of `engram.contract`.
"""

from engram.contract.registry import METHODS, find_method, import_all

import_all(__name__, __path__)

__all__ = ["METHODS", "find_method"]
