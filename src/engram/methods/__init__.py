"""Methods: one file each, or per group of close ones, made of shared blocks. Importing this package registers all.

Methods are written with the names of `engram.contract`.
"""

from engram.contract.method_registry import METHODS, find_method, import_all

import_all(__name__, __path__)

__all__ = ["METHODS", "find_method"]
