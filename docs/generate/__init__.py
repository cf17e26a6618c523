"""What the documentation takes from the code: tables and references, made when they are asked for.

Not installed with the package. mkdocs calls `hook.py`; `tables.py` rewrites the tables that are committed.
"""
